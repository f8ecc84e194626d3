/* sm90_decode_products.cuh - the products of sm90_decode.cuh's kernel: slots of both matrices
 * become sums in the registers of warps 0 to 7, and go back to their ring.
 *
 * Weight rows are the instruction's rows and tokens its N columns.  The tensor core adds with few
 * bits; sums leave it after every quantisation block. */
#ifndef OPROJ_KERNELS_CUDA_SM90_DECODE_PRODUCTS_CUH
#define OPROJ_KERNELS_CUDA_SM90_DECODE_PRODUCTS_CUH

#include "kernels/cuda/sm90_decode_block.cuh"
#include "kernels/cuda/sm90_ptx.cuh"

namespace sm90 {
namespace decode {

template <int N, int BLOCK>
struct Products {
  static constexpr int SCALES = scales_per_slot(BLOCK);
  static constexpr int SETS = SCALES; /* sums that leave the tensor core apart */
  static constexpr int STEPS_PER_SET = STEPS / SETS;

  /* The operands of one slot and what scales its sums. */
  struct Operands {
    uint32_t weights, codes;
    const float *scales;         /* [N][SCALE_PITCH], shared memory */
    const float *w_low, *w_high; /* [SCALES]: of a thread's two rows */
  };

  static __device__ __forceinline__ void begin_products(const Operands &o, Sums<N> (&sums)[SETS]) {
    uint64_t weights = describe_operand(o.weights), codes = describe_operand(o.codes);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      Wgmma<N>::issue(sums[s / STEPS_PER_SET], weights + 2 * s, codes + 2 * s,
                      s % STEPS_PER_SET > 0);
  }

  static __device__ __forceinline__ void add_scaled(const Operands &o, Sums<N> (&sums)[SETS],
                                                    int lane, Sums<N> &total) {
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      float low = o.w_low[s], high = o.w_high[s];
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const float *scale = o.scales + (8 * j + lane % 4 * 2) * SCALE_PITCH + s;
        float x = scale[0], y = scale[SCALE_PITCH];
        total[4 * j] += sums[s][4 * j] * (x * low);
        total[4 * j + 1] += sums[s][4 * j + 1] * (y * low);
        total[4 * j + 2] += sums[s][4 * j + 2] * (x * high);
        total[4 * j + 3] += sums[s][4 * j + 3] * (y * high);
      }
    }
  }

  /* Slots between waits for the tensor core, whose sums take up to 64 registers; numbers of slots
   * are multiples of it.  The other warpgroup multiplies while this one adds. */
  static constexpr int BATCH = SETS * N / 2 <= 32 ? 2 : 1;

  static __device__ __forceinline__ void multiply(const Operands (&o)[BATCH], int lane,
                                                  Sums<N> &total) {
    Sums<N> sums[BATCH][SETS];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
#pragma unroll
      for (int s = 0; s < SETS; s++) pin(sums[i][s]);
    products_begin();
#pragma unroll
    for (int i = 0; i < BATCH; i++) begin_products(o[i], sums[i]);
    products_commit();
    products_wait<0>();
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
#pragma unroll
      for (int s = 0; s < SETS; s++) pin(sums[i][s]);
      add_scaled(o[i], sums[i], lane, total);
    }
  }

  /* Gives slots back to whoever fills them, in the order in which they were taken. */
  static __device__ __forceinline__ void release(uint32_t barriers, Cursor from, int stages,
                                                 int count, int lane) {
    __syncwarp();
    if (lane != 0) return;
    for (int i = 0; i < count; i++, from.advance(stages)) barrier_arrive(barriers + from.slot * 8);
  }

  /* A batch of slots of WO_A from slot i of the block's part on. */
  static __device__ __forceinline__ void multiply_a(const sm90_decode &p, const Block &b, int i,
                                                    int warp, int lane, Cursor *at,
                                                    Sums<N> &total) {
    const float *w = b.floats(b.at.a_scales) + (warp * 16 / BLOCK * b.a_slots + i) * SCALES;
    Cursor first = *at;
    Operands o[BATCH];
#pragma unroll
    for (int c = 0; c < BATCH; c++) {
      barrier_wait(b.full(at->slot), at->parity);
      o[c].weights = b.slot(at->slot) + warp / 4 * HALF_SLOT;
      o[c].codes = b.base + b.at.codes + (i + c) * code_bytes(N);
      o[c].scales = b.floats(b.at.x_scales) + (i + c) * N * SCALE_PITCH;
      o[c].w_low = o[c].w_high = w + c * SCALES;
      at->advance(p.stages);
    }
    multiply(o, lane, total);
    release(b.empty(0), first, p.stages, BATCH, lane);
  }

  /* A batch of slots of WO_B, of which this warpgroup takes its half of K. */
  static __device__ __forceinline__ void multiply_b(const sm90_decode &p, const Block &b, int i,
                                                    int warp, int lane, Cursor *at, Cursor *z_at,
                                                    const float *w_low, const float *w_high,
                                                    Sums<N> &total) {
    int half = warp / 4;
    Cursor first = *at, z_first = *z_at;
    Operands o[BATCH];
#pragma unroll
    for (int c = 0; c < BATCH; c++) {
      barrier_wait(b.full(at->slot), at->parity);
      barrier_wait(b.z_full(z_at->slot), z_at->parity);
      int z = b.at.z + z_at->slot * b.at.z_slot_bytes, k = 2 * (i + c) + half;
      o[c].weights = b.slot(at->slot) + half * HALF_SLOT;
      o[c].codes = b.base + z + half * code_bytes(N);
      o[c].scales = b.floats(z + 2 * code_bytes(N)) + half * N * SCALE_PITCH;
      o[c].w_low = w_low + k * SCALES;
      o[c].w_high = w_high + k * SCALES;
      at->advance(p.stages);
      z_at->advance(p.z_stages);
    }
    multiply(o, lane, total);
    release(b.empty(0), first, p.stages, BATCH, lane);
    release(b.z_empty(0), z_first, p.z_stages, BATCH, lane);
  }

  static __device__ __forceinline__ void sum_wo_a(const sm90_decode &p, const Block &b, int warp,
                                                  int lane, Cursor *at, Sums<N> &total) {
#pragma unroll 1
    for (int i = 0; i < b.a_slots; i += BATCH) multiply_a(p, b, i, warp, lane, at, total);
  }

  static __device__ __forceinline__ void sum_wo_b(const sm90_decode &p, const Block &b, int warp,
                                                  int lane, Cursor *at, Sums<N> &total) {
    /* Rows beyond out_rows multiply what lies in the slot; nobody looks at their sums. */
    int columns = p.z_cols / BLOCK, first_block = b.first_row / BLOCK;
    int row = b.first_row + warp % 4 * 16 + lane / 4, last = b.first_row + b.rows - 1;
    int low = (row < last ? row : last) / BLOCK, high = (row + 8 < last ? row + 8 : last) / BLOCK;
    const float *scales = b.floats(b.at.b_scales);
    const float *w_low = scales + (low - first_block) * columns;
    const float *w_high = scales + (high - first_block) * columns;
    Cursor z_at;
#pragma unroll 1
    for (int i = 0; i < b.b_slots; i += BATCH)
      multiply_b(p, b, i, warp, lane, at, &z_at, w_low, w_high, total);
  }
};

}  // namespace decode
}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_DECODE_PRODUCTS_CUH */
