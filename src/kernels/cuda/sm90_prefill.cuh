/* sm90_prefill.cuh - the block-scaled product for many tokens on SM90's FP8 tensor cores.
 *
 *   activations e4m3 [groups, tokens, cols]  x  weights e4m3 [rows, cols]  ->  [tokens, rows]
 *
 * Grid: as many blocks as the device holds, which take tiles of 128 tokens by PARTS * 128 rows in
 * turn; with PAIRED two neighbours form a cluster and share every copy of weights.  In a block
 *
 *   warps 0 to 7  two warpgroups of 64 tokens each: multiply a slot part by part, scale the sums,
 *                 add them in f32; one warpgroup adds while the other multiplies
 *   warp 8        copies codes, weights and the codes' scales into a ring of slots, each one 128
 *                 values of K, a ring ahead and on into the next tile
 *   warp 9        loads the weights' scales of whole tiles, one tile ahead
 *
 * The tensor core adds with few bits; sums leave it after every quantisation block.
 * Bound: 64 x 128 x 32 values take about 90 clocks (blocks of 128) or 180 (blocks of 32) on an
 * H200, of which the tensor cores need 64.  What fits these figures is the traffic of registers: a
 * product reads and writes its sums there, an addition reads three and writes one.  Long calls are
 * bound by power. */
#ifndef OPROJ_KERNELS_CUDA_SM90_PREFILL_CUH
#define OPROJ_KERNELS_CUDA_SM90_PREFILL_CUH

#include "kernels/cuda/sm90_prefill.h"
#include "kernels/cuda/sm90_ptx.cuh"
#include "kernels/cuda/sm90_write.cuh"

namespace sm90::prefill {

constexpr int TILE_TOKENS = SM90_PREFILL_TOKENS, PART_ROWS = SM90_PREFILL_ROWS;
constexpr int PART_SUMS = PART_ROWS / 2; /* of a thread, for a part */
constexpr int MATH_WARPS = 8, COPY_WARP = MATH_WARPS, SCALE_WARP = COPY_WARP + 1;
constexpr int THREADS = (MATH_WARPS + 4) * WARP; /* registers move in whole warpgroups */
constexpr int MATH_REGISTERS = 232, COPY_REGISTERS = 40;
constexpr int SLOT_COLS = 128, BOX_BYTES = 128 * SLOT_COLS; /* a box: 128 tokens or rows */
constexpr int STEP_COLS = 32;                               /* values of K of an instruction */
constexpr int W_BUFFERS = 2;                                /* tiles whose w_scales are held */

/* Where things lie in a block's shared memory; offsets in bytes. */
struct Shared {
  int slot_bytes;        /* codes, then weights */
  int a_scales;          /* f32 [stages][scales per slot][TILE_TOKENS] */
  int w_scales, w_bytes; /* f32 [W_BUFFERS][scales of K][row blocks of the tile] */
  int full, empty;       /* barriers [stages]: of the ring ... */
  int w_full, w_empty;   /* ... and [W_BUFFERS] of w_scales */
  int bytes;
};

__host__ __device__ inline Shared shared_layout(int parts, int block, int stages, int cols) {
  Shared s = {};
  int scales = SLOT_COLS / block;
  s.slot_bytes = (1 + parts) * BOX_BYTES;
  s.a_scales = stages * s.slot_bytes;
  s.w_scales = s.a_scales + stages * scales * TILE_TOKENS * 4;
  s.w_bytes = ceil_div(cols / block * parts * (PART_ROWS / block) * 4, 16) * 16;
  s.full = s.w_scales + W_BUFFERS * s.w_bytes;
  s.empty = s.full + stages * 8;
  s.w_full = s.empty + stages * 8;
  s.w_empty = s.w_full + W_BUFFERS * 8;
  s.bytes = s.w_empty + W_BUFFERS * 8 + 1024; /* room to align the ring to the swizzle's 1024 */
  return s;
}

/* Where a tile lies. */
struct Tile {
  int first_row, first_token, group;
};

/* What every role needs to know of its block. */
struct Block {
  uint32_t base;   /* of the ring */
  uint8_t *memory; /* the same, generic */
  Shared at;
  int slots;       /* of K */
  int rank;        /* in the pair */
  int first, step; /* tiles (of a pair: two at a time) that it takes: first, first + step .. */
  int count;       /* of all blocks together */

  __device__ __forceinline__ uint32_t slot(int i) const {
    return base + i * at.slot_bytes;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return base + at.full + i * 8;
  }
  __device__ __forceinline__ uint32_t empty(int i) const {
    return base + at.empty + i * 8;
  }
  __device__ __forceinline__ uint32_t w_full(int i) const {
    return base + at.w_full + i * 8;
  }
  __device__ __forceinline__ uint32_t w_empty(int i) const {
    return base + at.w_empty + i * 8;
  }
};

/* What a warp of the products keeps from tile to tile. */
struct Worker {
  Cursor at; /* in the ring */
  int warpgroup, lane;
  int row; /* of the thread's first token in a tile */
};

/* Tokens are an instruction's rows, a part's weight rows its columns. */
template <int BLOCK, int Z_BLOCK, int PARTS, bool PAIRED>
struct Prefill {
  static constexpr int BLOCKS = PAIRED ? 2 : 1;         /* of a cluster */
  static constexpr int SCALES = SLOT_COLS / BLOCK;      /* of a token in a slot */
  static constexpr int STEPS = BLOCK / STEP_COLS;       /* instructions for one scale */
  static constexpr int PART_BLOCKS = PART_ROWS / BLOCK; /* row blocks of a part ... */
  static constexpr int WIDTH = PARTS * PART_BLOCKS;     /* ... and of a tile */
  static constexpr int UNITS = SCALES * PARTS; /* of a slot: sums that are scaled together */

  static __device__ __forceinline__ float *a_scales(const Block &b, int slot) {
    return reinterpret_cast<float *>(b.memory + b.at.a_scales) + slot * SCALES * TILE_TOKENS;
  }
  static __device__ __forceinline__ float *w_scales(const Block &b, int buffer) {
    return reinterpret_cast<float *>(b.memory + b.at.w_scales + buffer * b.at.w_bytes);
  }

  /* Bands of row tiles; in a band all tokens, at each the band's row tiles in turn: what runs at
   * the same time then shares weights and activations in the L2 cache. */
  static __device__ Tile find_tile(const sm90_prefill &p, const Block &b, int index) {
    int token_tiles = ceil_div(p.token_tiles, BLOCKS);
    int first_tile = index / (p.band * token_tiles) * p.band;
    int width = min(p.band, p.row_tiles - first_tile), rest = index - first_tile * token_tiles;
    Tile tile;
    tile.first_row = (first_tile + rest % width) * PARTS * PART_ROWS;
    tile.first_token = (rest / width * BLOCKS + b.rank) * p.step_tokens;
    tile.group = tile.first_row / p.rows_per_group;
    return tile;
  }

  /* ---- warp 8: copies ---------------------------------------------------------------------- */

  /* Tokens of this tile whose scales exist in memory: a multiple of 4. */
  static __device__ __forceinline__ int scale_tokens(const sm90_prefill &p, const Tile &tile) {
    int left = static_cast<int>(oproj_layout_aligned_tokens(p.tokens)) - tile.first_token;
    return max(0, min(left, p.step_tokens));
  }

  /* The blocks of a pair copy half the rows each, for both of them. */
  static __device__ void copy_weights(const sm90_prefill &p, const Block &b, const Tile &tile,
                                      int i, int slot) {
    constexpr int ROWS = PARTS * PART_ROWS / BLOCKS;
    uint32_t to = b.slot(slot) + BOX_BYTES + b.rank * ROWS * SLOT_COLS;
    int x = i * SLOT_COLS, y = tile.first_row + b.rank * ROWS;
    barrier_arrive_expecting(b.full(slot), PARTS * BOX_BYTES + p.step_tokens * SLOT_COLS +
                                               SCALES * scale_tokens(p, tile) * 4);
    if constexpr (PAIRED)
      multicast_box_2d(to, &p.weights, b.full(slot), x, y, 3);
    else
      copy_box_2d(to, &p.weights, b.full(slot), x, y);
  }

  static __device__ void copy_activations(const sm90_prefill &p, const Block &b, const Tile &tile,
                                          int i, int slot) {
    int64_t aligned = oproj_layout_aligned_tokens(p.tokens);
    uint32_t bytes = scale_tokens(p, tile) * 4;
    copy_box_3d(b.slot(slot), &p.activations, b.full(slot), i * SLOT_COLS, tile.first_token,
                tile.group);
    if (bytes == 0) return; /* the second of a pair may have no tokens at all */
    int64_t column = (static_cast<int64_t>(tile.group) * b.slots + i) * SCALES;
    const float *from = p.a_scales + column * aligned + tile.first_token;
#pragma unroll
    for (int s = 0; s < SCALES; s++)
      copy_bytes(shared_address(a_scales(b, slot) + s * TILE_TOKENS), from + s * aligned, bytes,
                 b.full(slot));
  }

  /* Weights do not depend on the kernel before: a ring full of them sets out first. */
  static __device__ void run_copies(const sm90_prefill &p, const Block &b) {
    Tile tile = find_tile(p, b, b.first);
    int begin = min(p.stages, b.slots);
    for (int i = 0; i < begin; i++) copy_weights(p, b, tile, i, i);
    wait_for_predecessors();
    for (int i = 0; i < begin; i++) copy_activations(p, b, tile, i, i);
    Cursor at;
    for (int i = 0; i < begin; i++) at.advance(p.stages);
    for (int index = b.first; index < b.count; index += b.step) {
      tile = find_tile(p, b, index);
      for (int i = begin; i < b.slots; i++) {
        barrier_wait(b.empty(at.slot), at.parity ^ 1);
        copy_weights(p, b, tile, i, at.slot);
        copy_activations(p, b, tile, i, at.slot);
        at.advance(p.stages);
      }
      begin = 0;
    }
  }

  /* ---- warp 9: the weights' scales --------------------------------------------------------- */

  /* [scale of K][row block], so that what a unit needs lies together. */
  static __device__ void run_scales(const sm90_prefill &p, const Block &b, int lane) {
    int columns = p.cols / BLOCK, all_blocks = ceil_div(p.rows, BLOCK);
    Cursor at;
    for (int index = b.first; index < b.count; index += b.step) {
      int first_block = find_tile(p, b, index).first_row / BLOCK;
      float *to = w_scales(b, at.slot);
      barrier_wait(b.w_empty(at.slot), at.parity ^ 1);
#pragma unroll
      for (int r = 0; r < WIDTH; r++) {
        const float *from = p.w_scales + static_cast<int64_t>(first_block + r) * columns;
        bool live = first_block + r < all_blocks;
#pragma unroll 4
        for (int i = lane; i < columns; i += WARP)
          to[i * WIDTH + r] = live ? __ldg(from + i) : 0.0f;
      }
      barrier_arrive(b.w_full(at.slot));
      at.advance(W_BUFFERS);
    }
  }

  /* ---- warps 0 to 7: products -------------------------------------------------------------- */

  /* Starts the instructions of one unit: one part of the rows, one scale's share of K. */
  static __device__ __forceinline__ void begin_unit(const Block &b, const Worker &me, int unit,
                                                    float (&sums)[PART_SUMS]) {
    uint32_t address = b.slot(me.at.slot);
    int step = unit / PARTS * STEPS * 2, part = unit % PARTS;
    uint64_t codes = describe_operand(address + me.warpgroup * (BOX_BYTES / 2)) + step;
    uint64_t weights = describe_operand(address + (1 + part) * BOX_BYTES) + step;
    pin(sums);
    products_begin();
#pragma unroll
    for (int i = 0; i < STEPS; i++)
      Wgmma<PART_ROWS>::issue(sums, codes + 2 * i, weights + 2 * i, i > 0);
    products_commit();
  }

  /* What scales a unit's sums: a thread's two tokens, the part's row blocks. */
  struct Scales {
    float low, high, w[PART_BLOCKS];
  };

  static __device__ __forceinline__ Scales load_scales(const Block &b, const float *w, int slot,
                                                       int unit, int row) {
    const float *a = a_scales(b, slot) + unit / PARTS * TILE_TOKENS + row;
    Scales s;
    s.low = a[0];
    s.high = a[8];
    memcpy(s.w, __builtin_assume_aligned(w + unit * PART_BLOCKS, sizeof s.w), sizeof s.w);
    return s;
  }

  /* total += sums * (a_scale * w_scale) */
  static __device__ __forceinline__ void add_unit(float (&total)[PART_SUMS],
                                                  float (&sums)[PART_SUMS], const Scales &s) {
    constexpr int SPAN = PART_SUMS / PART_BLOCKS;
    pin(sums);
#pragma unroll
    for (int r = 0; r < PART_BLOCKS; r++) {
      float low = s.low * s.w[r], high = s.high * s.w[r];
#pragma unroll
      for (int i = r * SPAN; i < (r + 1) * SPAN; i += 4) {
        total[i] += sums[i] * low;
        total[i + 1] += sums[i + 1] * low;
        total[i + 2] += sums[i + 2] * high;
        total[i + 3] += sums[i + 3] * high;
      }
    }
  }

  /* A slot has been read by this warp: says so to every block that copies into it. */
  static __device__ __forceinline__ void release(const Block &b, int slot, int lane) {
    __syncwarp();
    if constexpr (PAIRED) {
      if (lane < BLOCKS) barrier_arrive_peer(peer_address(b.empty(slot), lane));
    } else {
      if (lane == 0) barrier_arrive(b.empty(slot));
    }
  }

  /* Two parts leave registers for one set of sums: only the other warpgroup multiplies while this
   * one adds. */
  static __device__ __forceinline__ void multiply_singly(const sm90_prefill &p, const Block &b,
                                                         const float *w, Worker &me,
                                                         float (&total)[PARTS][PART_SUMS]) {
#pragma unroll 1
    for (int i = 0; i < b.slots; i++) {
      int slot = me.at.slot;
      barrier_wait(b.full(slot), me.at.parity);
#pragma unroll
      for (int unit = 0; unit < UNITS; unit++) {
        float sums[PART_SUMS];
        begin_unit(b, me, unit, sums);
        Scales s = load_scales(b, w, slot, unit, me.row);
        products_wait<0>();
        if (unit == UNITS - 1) release(b, slot, me.lane);
        add_unit(total[unit % PARTS], sums, s);
      }
      w += SCALES * WIDTH;
      me.at.advance(p.stages);
    }
  }

  /* With two sets a unit multiplies while the one before it is added, within a turn of as many
   * slots as hold an even number of units (the number of slots is even).  Across turns, too, would
   * keep the tensor cores busier still, but the compiler then waits for each instruction. */
  static constexpr int TURN = UNITS % 2 == 0 ? 1 : 2;

  static __device__ __forceinline__ void multiply_ahead(const sm90_prefill &p, const Block &b,
                                                        const float *w, Worker &me,
                                                        float (&total)[PARTS][PART_SUMS]) {
#pragma unroll 1
    for (int turn = 0; turn < b.slots; turn += TURN) {
      float sums[2][PART_SUMS];
      barrier_wait(b.full(me.at.slot), me.at.parity);
      begin_unit(b, me, 0, sums[0]);
#pragma unroll
      for (int i = 0; i < TURN * UNITS; i++) {
        int slot = me.at.slot, unit = i % UNITS;
        bool ends = unit == UNITS - 1, last = i == TURN * UNITS - 1;
        if (ends) me.at.advance(p.stages);
        if (ends && !last) barrier_wait(b.full(me.at.slot), me.at.parity);
        if (!last) begin_unit(b, me, (unit + 1) % UNITS, sums[(i + 1) % 2]);
        Scales s = load_scales(b, w + i / UNITS * SCALES * WIDTH, slot, unit, me.row);
        if (last)
          products_wait<0>();
        else
          products_wait<1>();
        if (ends) release(b, slot, me.lane);
        add_unit(total[unit % PARTS], sums[i % 2], s);
      }
      w += TURN * SCALES * WIDTH;
    }
  }

  /* The sums of the thread's tokens, `row` and the eighth after it in the tile. */
  static __device__ __forceinline__ void write_part(const sm90_prefill &p, const Tile &tile,
                                                    int row, int part, int lane,
                                                    const float (&sums)[PART_SUMS]) {
#pragma unroll
    for (int high = 0; high < 2; high++) {
      float2 values[WRITE_PAIRS];
      int in_tile = row + 8 * high; /* behind the tile's last: as behind all */
      int64_t token = in_tile < p.step_tokens ? tile.first_token + in_tile : INT32_MAX;
#pragma unroll
      for (int j = 0; j < WRITE_PAIRS; j++)
        values[j] = make_float2(sums[4 * j + 2 * high], sums[4 * j + 2 * high + 1]);
      write_token<Z_BLOCK>(p, token, tile.first_row + part * PART_ROWS, lane, values);
    }
  }

  static __device__ __forceinline__ void run_products(const sm90_prefill &p, const Block &b,
                                                      int warp, int lane) {
    Worker me;
    me.warpgroup = warp / 4;
    me.lane = lane;
    me.row = warp * 16 + lane / 4;
    Cursor scales;
    wait_for_predecessors(); /* they may still read what is written here */
    for (int index = b.first; index < b.count; index += b.step) {
      float total[PARTS][PART_SUMS] = {};
      const float *w = w_scales(b, scales.slot);
      barrier_wait(b.w_full(scales.slot), scales.parity);
      if constexpr (PARTS == 1)
        multiply_ahead(p, b, w, me, total);
      else
        multiply_singly(p, b, w, me, total);
      barrier_arrive(b.w_empty(scales.slot));
      scales.advance(W_BUFFERS);
      Tile tile = find_tile(p, b, index);
#pragma unroll
      for (int part = 0; part < PARTS; part++) write_part(p, tile, me.row, part, lane, total[part]);
    }
  }

  /* ---- the block --------------------------------------------------------------------------- */

  static __device__ void open_barriers(const sm90_prefill &p, const Block &b) {
    for (int slot = 0; slot < p.stages; slot++) {
      barrier_init(b.full(slot), 1);
      barrier_init(b.empty(slot), MATH_WARPS * BLOCKS);
    }
    for (int buffer = 0; buffer < W_BUFFERS; buffer++) {
      barrier_init(b.w_full(buffer), WARP);
      barrier_init(b.w_empty(buffer), MATH_WARPS * WARP);
    }
    barriers_publish();
    fence_for_async_proxy();
  }

  static __device__ void run(const sm90_prefill &p, uint8_t *unaligned) {
    Block b;
    b.memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    b.base = shared_address(b.memory);
    b.at = shared_layout(PARTS, BLOCK, p.stages, p.cols);
    b.slots = p.cols / SLOT_COLS;
    b.rank = PAIRED ? cluster_rank() : 0;
    b.first = blockIdx.x / BLOCKS;
    b.step = gridDim.x / BLOCKS;
    b.count = p.row_tiles * ceil_div(p.token_tiles, BLOCKS);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) open_barriers(p, b);
    if (p.early) let_successors_start();
    if constexpr (PAIRED)
      cluster_barrier();
    else
      __syncthreads();

    if (warp >= MATH_WARPS) {
      registers_shrink<COPY_REGISTERS>();
      if (warp == COPY_WARP && lane == 0) run_copies(p, b);
      if (warp == SCALE_WARP) run_scales(p, b, lane);
    } else {
      registers_grow<MATH_REGISTERS>();
      run_products(p, b, warp, lane);
    }
    if constexpr (PAIRED) {
      __syncwarp();
      cluster_barrier(); /* the peer may still copy into this block, or arrive on its barriers */
    }
  }
};

template <int BLOCK, int Z_BLOCK, int PARTS, bool PAIRED>
__global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(const __grid_constant__ sm90_prefill p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  Prefill<BLOCK, Z_BLOCK, PARTS, PAIRED>::run(p, memory);
#endif
}

}  // namespace sm90::prefill

#endif /* OPROJ_KERNELS_CUDA_SM90_PREFILL_CUH */
