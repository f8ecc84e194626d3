/* sm90_decode.cuh - a few tokens through the whole chain in one launch, on SM90.
 *
 *   attn_out -> rotated, quantised -> WO_A -> z, quantised -> WO_B -> partial
 *
 * Grid: as many blocks as the weights' rows share out to, all resident at once.  Each block takes
 *
 *   of WO_A a tile of 128 rows and a part of K (1/split), whose input it quantises itself;
 *   of WO_B out_rows rows and all of K, for which it needs all of z.
 *
 * Between the two lie the exchanges of sm90_exchange.cuh: parts of a tile's sums to the block that
 * adds, rounds and quantises a token of the tile, and quantised z from there to everyone.
 * Bound: the bytes of the weights at one and two ranks, the chain of latencies at four and eight.
 *
 * In a block
 *
 *   warp 8         copies weights into a ring of 16 KB slots, WO_A's and then WO_B's, without a
 *                  break and a few slots ahead: more on their way would delay every other load
 *   all others     quantise the input (sm90_decode_input.cuh); then
 *   warps 0 to 7   multiply (sm90_decode_products.cuh), finish z where a tile is not split, write
 *                  partial.  They are two warpgroups: of a slot of WO_A each takes 64 rows, of WO_B
 *                  128 values of K
 *   warps 9 to 15  finish z where a tile is split, receive all of z into a ring of their own, empty
 *                  the other epoch (sm90_decode_z.cuh)
 *
 * What lies where in a block, and which part of the work is its own: sm90_decode_block.cuh. */
#ifndef OPROJ_KERNELS_CUDA_SM90_DECODE_CUH
#define OPROJ_KERNELS_CUDA_SM90_DECODE_CUH

#include "kernels/cuda/push.cuh"
#include "kernels/cuda/sm90_decode_block.cuh"
#include "kernels/cuda/sm90_decode_input.cuh"
#include "kernels/cuda/sm90_decode_products.cuh"
#include "kernels/cuda/sm90_decode_z.cuh"
#include "kernels/cuda/sm90_exchange.cuh"
#include "kernels/cuda/sm90_ptx.cuh"

namespace sm90 {
namespace decode {

/* ALIGNED: input, table and output take the wide loads and stores. */
template <int N, int BLOCK, bool ALIGNED>
struct Decode {
  using Z = ZExchange<N, BLOCK>;

  /* ---- warp 8: weights --------------------------------------------------------------------- */

  struct Copies {
    Cursor issue, landed;
    int issued = 0, ahead = 0; /* `ahead` of those are not known to have landed */
  };

  static __device__ __forceinline__ void copy_slot(const sm90_decode &p, const Block &b,
                                                   Copies *c) {
    if (c->ahead == p.shape.window) {
      barrier_wait(b.full(c->landed.slot), c->landed.parity);
      c->landed.advance(p.stages);
      c->ahead--;
    }
    uint32_t to = b.slot(c->issue.slot), full = b.full(c->issue.slot);
    if (c->issued < b.a_slots) {
      barrier_arrive_expecting(full, SLOT_BYTES);
      copy_box_2d(to, &p.wo_a, full, (b.first_slot + c->issued) * TILE, b.tile * TILE);
    } else {
      int column = (c->issued - b.a_slots) * 2 * TILE;
      barrier_arrive_expecting(full, 2 * p.shape.out_rows * TILE);
      copy_box_2d(to, &p.wo_b, full, column, b.first_row);
      copy_box_2d(to + HALF_SLOT, &p.wo_b, full, column + TILE, b.first_row);
    }
    c->issue.advance(p.stages);
    c->issued++;
    c->ahead++;
  }

  /* Weights depend on no other kernel. */
  static __device__ __forceinline__ void begin_copies(const sm90_decode &p, const Block &b,
                                                      Copies *c) {
#pragma unroll 1
    for (int i = 0; i < p.stages; i++) {
      barrier_init(b.full(i), 1);
      barrier_init(b.empty(i), MATH_WARPS);
    }
#pragma unroll 1
    for (int i = 0; i < p.z_stages; i++) {
      barrier_init(b.z_full(i), 1);
      barrier_init(b.z_empty(i), MATH_WARPS);
    }
    barriers_publish();
    int slots = b.a_slots + b.b_slots;
    while (c->issued < slots && c->issued < p.shape.window) copy_slot(p, b, c);
  }

  static __device__ void run_copies(const sm90_decode &p, const Block &b, Copies *c) {
    for (int slots = b.a_slots + b.b_slots; c->issued < slots;) {
      if (c->issued >= p.stages) barrier_wait(b.empty(c->issue.slot), c->issue.parity ^ 1);
      copy_slot(p, b, c);
    }
  }

  /* ---- all other warps: their scales ------------------------------------------------------- */

  /* Weight scales of `row_blocks` blocks of rows, `count` columns each; copies_wait waits. */
  static __device__ void copy_scales(uint32_t to, const float *from, int row_blocks, int columns,
                                     int count, int worker) {
#pragma unroll 1
    for (int block = 0; block < row_blocks; block++)
#pragma unroll 1
      for (int i = worker; i < count; i += QUANTIZE_THREADS)
        copy_word(to + (block * count + i) * 4, from + static_cast<int64_t>(block) * columns + i);
  }

  static __device__ void copy_weight_scales(const sm90_decode &p, const Block &b, int worker) {
    constexpr int SCALES = scales_per_slot(BLOCK);
    int a_columns = p.group_cols / BLOCK, b_columns = p.z_cols / BLOCK;
    copy_scales(
        b.base + b.at.a_scales,
        p.wo_a_scales + static_cast<int64_t>(b.tile * SCALES) * a_columns + b.first_slot * SCALES,
        b.a_slots > 0 ? SCALES : 0, a_columns, b.a_slots * SCALES, worker);
    if (b.b_slots == 0) return;
    int first = b.first_row / BLOCK, last = (b.first_row + b.rows - 1) / BLOCK;
    copy_scales(b.base + b.at.b_scales, p.wo_b_scales + static_cast<int64_t>(first) * b_columns,
                last - first + 1, b_columns, b_columns, worker);
  }

  /* ---- the end ----------------------------------------------------------------------------- */

  static __device__ __forceinline__ void store_pair(uint16_t *to, uint32_t low, uint32_t high) {
    if constexpr (ALIGNED) {
      *reinterpret_cast<uint32_t *>(to) = low | high << 16;
    } else {
      to[0] = static_cast<uint16_t>(low);
      to[1] = static_cast<uint16_t>(high);
    }
  }

  /* Adds the two halves of K and writes a token per warp, two rows per lane. */
  static __device__ void write_partial(const sm90_decode &p, const Block &b, uint32_t number,
                                       int warp, int lane, const Sums<N> &total) {
    float *sums = b.floats(b.at.sums);
    int half = warp / 4, row = warp % 4 * 16 + lane / 4;
    named_barrier(MATH_MEETS, MATH_THREADS); /* a tile's sums may lie there */
    for_each_sum<N>(lane, total, [&](int token, float low, float high) {
      float *to = sums + (half * N + token) * OUT_PITCH + row;
      to[0] = low;
      to[8] = high;
    });
    named_barrier(MATH_MEETS, MATH_THREADS);
    if (2 * lane >= b.rows) return;
    for (int token = warp; token < p.input.tokens; token += MATH_WARPS) {
      float2 first = *reinterpret_cast<const float2 *>(sums + token * OUT_PITCH + 2 * lane);
      float2 second = *reinterpret_cast<const float2 *>(sums + (N + token) * OUT_PITCH + 2 * lane);
      uint32_t low = oproj_bf16_from_f32(first.x + second.x);
      uint32_t high = oproj_bf16_from_f32(first.y + second.y);
      int64_t at = static_cast<int64_t>(token) * p.hidden + b.first_row + 2 * lane;
      if (p.sink.n > 1) push_pair(p.sink, number, at / 2, low | high << 16);
      store_pair(p.partial + at, low, high);
    }
  }

  /* ---- the block --------------------------------------------------------------------------- */

  static __device__ void run_products(const sm90_decode &p, const Block &b, int epoch,
                                      uint32_t number, int warp, int lane) {
    Cursor at;
    if (b.a_slots > 0) {
      Sums<N> total = {};
      Products<N, BLOCK>::sum_wo_a(p, b, warp, lane, &at, total);
      if (p.shape.split > 1)
        Z::send_partials(p, epoch, warp, lane, total);
      else
        Z::finish_own_tile(p, b, epoch, warp, lane, total);
    }
    if (b.b_slots > 0) {
      Sums<N> total = {};
      Products<N, BLOCK>::sum_wo_b(p, b, warp, lane, &at, total);
      write_partial(p, b, number, warp, lane, total);
    }
  }

  static __device__ void run_helpers(const sm90_decode &p, const Block &b, int epoch,
                                     const uint4 &control, int helper, int lane) {
    bool stalled = has_stalled(control);
    if (b.a_slots > 0 && p.shape.split > 1 && !stalled)
      stalled = !Z::finish_split_tile(p, b, epoch, helper, lane);
    Z::receive_z(p, b, epoch, helper, lane, stalled);
    Z::empty_other_epoch(p, epoch, control, helper * WARP + lane);
    if (helper == 0) report_positions(p.input, lane);
  }

  static __device__ void run(const sm90_decode &p, uint8_t *unaligned) {
    uint8_t *memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const Block b = describe_block<N, BLOCK>(p, memory);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (p.early) let_successors_start();
    if (warp == COPY_WARP) {
      Copies copies;
      if (lane == 0) begin_copies(p, b, &copies);
      __syncwarp();
      named_barrier_arrive(ALL_READY, THREADS);
      if (lane == 0) run_copies(p, b, &copies);
      return;
    }
    int worker = warp < COPY_WARP ? warp : warp - 1;
    copy_weight_scales(p, b, worker * WARP + lane);
    wait_for_predecessors();
    uint4 control = load_words(p.exchange.control); /* arrives while the input is quantised */
    uint32_t number = p.sink.n > 1 ? next_sum(p.sink.control->sums) : 0; /* of the ranks' sum */
    Quantizers<N, BLOCK, ALIGNED>::run(p, b, worker, lane);
    int epoch = epoch_of(control);
    copies_wait();
    named_barrier(ALL_READY, THREADS);
    if (threadIdx.x == 0) count_block(p.exchange.control);
    if (warp < MATH_WARPS)
      run_products(p, b, epoch, number, warp, lane);
    else
      run_helpers(p, b, epoch, control, warp - FIRST_HELP_WARP, lane);
  }
};

template <int N, int BLOCK, bool ALIGNED>
__global__ void __launch_bounds__(THREADS, 1) decode_kernel(const __grid_constant__ sm90_decode p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  Decode<N, BLOCK, ALIGNED>::run(p, memory);
#endif
}

}  // namespace decode
}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_DECODE_CUH */
