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
 *   warps 0 to 7   two warpgroups; of a slot of WO_A each takes 64 rows, of WO_B 128 values of K
 *   warps 9 to 15  finish z, receive z into a ring of their own, empty the other epoch
 *
 * Weight rows are the instruction's rows and tokens its N columns.  The tensor core adds with few
 * bits; sums leave it after every quantisation block. */
#ifndef OPROJ_KERNELS_CUDA_SM90_DECODE_CUH
#define OPROJ_KERNELS_CUDA_SM90_DECODE_CUH

#include "kernels/cuda/input.cuh"
#include "kernels/cuda/push.cuh"
#include "kernels/cuda/sm90_exchange.cuh"
#include "kernels/cuda/sm90_ptx.cuh"

namespace sm90 {
namespace decode {

constexpr int MATH_WARPS = 8, COPY_WARP = MATH_WARPS, FIRST_HELP_WARP = COPY_WARP + 1;
constexpr int HELP_WARPS = 7; /* 16 warps leave 128 registers to each thread */
constexpr int THREADS = (FIRST_HELP_WARP + HELP_WARPS) * WARP;
constexpr int MATH_THREADS = MATH_WARPS * WARP;
constexpr int QUANTIZE_WARPS = MATH_WARPS + HELP_WARPS; /* all but the copying one */
constexpr int QUANTIZE_THREADS = QUANTIZE_WARPS * WARP;
constexpr int TILE = 128; /* rows of WO_A, values of K: of a slot */
constexpr int SLOT_BYTES = TILE * TILE, HALF_SLOT = SLOT_BYTES / 2;
constexpr int K_STEP = 32, STEPS = TILE / K_STEP;
constexpr int HEAD_DIM = 512, ROPE_DIM = 64, SLOTS_PER_HEAD = HEAD_DIM / TILE;
constexpr int SCALE_PITCH = 4; /* f32 activation scales per token and slot */
constexpr int TILE_PITCH = TILE + 4,
              OUT_PITCH = OPROJ_KERNELS_DECODE_OUT_ROWS + 4; /* floats: no bank twice */
constexpr int ALL_READY = 1, MATH_MEETS = 2;                 /* named barriers */

/* Where things lie in a block's shared memory, offsets in bytes, N being 8, 16 or 32 tokens. */
struct Shared {
  int codes;           /* input: [slots of WO_A][N][TILE], swizzled */
  int z, z_slot_bytes; /* ring: [z_stages]: codes [2][N][TILE], scales f32 [2][N][SCALE_PITCH] */
  int x_scales;        /* f32 [slots of WO_A][N][SCALE_PITCH] */
  int a_scales;        /* f32 [row blocks of the tile][slots of WO_A * scales per slot] */
  int b_scales;        /* f32 [row blocks that out_rows rows may touch][z cols / block] */
  int sums;            /* f32 [N][TILE_PITCH] or [2][N][OUT_PITCH] */
  int full, empty;     /* barriers of the weights' ring, which begins at 0 */
  int z_full, z_empty; /* ... and of z's */
  int bytes;           /* in all, with room to align the ring to the swizzle's 1024 */
};

__host__ __device__ __forceinline__ Shared shared_layout(const sm90_decode &p, int n, int block) {
  Shared s = {};
  int slots = (p.group_cols / TILE) >> p.shape.log2_split, per_slot = TILE / block;
  int row_blocks = (p.shape.out_rows + block - 8 + block - 1) / block; /* from a multiple of 8 on */
  int tile_sums = n * TILE_PITCH, out_sums = 2 * n * OUT_PITCH;
  s.codes = p.stages * SLOT_BYTES;
  s.z = s.codes + slots * n * TILE;
  s.z_slot_bytes = ceil_div(2 * n * (TILE + SCALE_PITCH * 4), 1024) * 1024;
  s.x_scales = s.z + p.z_stages * s.z_slot_bytes;
  s.a_scales = s.x_scales + slots * n * SCALE_PITCH * 4;
  s.b_scales = s.a_scales + ceil_div(per_slot * slots * per_slot * 4, 16) * 16;
  s.sums = s.b_scales + ceil_div(row_blocks * (p.z_cols / block) * 4, 16) * 16;
  s.full = s.sums + (tile_sums > out_sums ? tile_sums : out_sums) * 4;
  s.empty = s.full + p.stages * 8;
  s.z_full = s.empty + p.stages * 8;
  s.z_empty = s.z_full + p.z_stages * 8;
  s.bytes = s.z_empty + p.z_stages * 8 + 1024;
  return s;
}

/* What every role needs to know of its block. */
struct Block {
  uint32_t base;   /* of shared memory */
  uint8_t *memory; /* the same, generic */
  Shared at;
  int tile, part, first_slot; /* of WO_A; first_slot within the group */
  int a_slots, b_slots;       /* of the ring: 0 where the block takes nothing of that matrix */
  int first_row, rows;        /* of WO_B */

  __device__ __forceinline__ uint32_t slot(int i) const {
    return base + i * SLOT_BYTES;
  }
  __device__ __forceinline__ uint32_t full(int i) const {
    return base + at.full + i * 8;
  }
  __device__ __forceinline__ uint32_t empty(int i) const {
    return base + at.empty + i * 8;
  }
  __device__ __forceinline__ uint32_t z_full(int i) const {
    return base + at.z_full + i * 8;
  }
  __device__ __forceinline__ uint32_t z_empty(int i) const {
    return base + at.z_empty + i * 8;
  }
  __device__ __forceinline__ float *floats(int offset) const {
    return reinterpret_cast<float *>(memory + offset);
  }
};

/* ALIGNED: input, table and output take the wide loads and stores. */
template <int N, int BLOCK, bool ALIGNED>
struct Decode {
  static constexpr int SCALES = TILE / BLOCK; /* of a slot */
  static constexpr int SETS = SCALES;         /* sums that leave the tensor core apart */
  static constexpr int STEPS_PER_SET = STEPS / SETS;
  static constexpr int SUMS = N / 2; /* of a thread */
  static constexpr int CODE_BYTES = N * TILE;

  static __device__ __forceinline__ Block describe_block(const sm90_decode &p, uint8_t *memory) {
    int tile = blockIdx.x >> p.shape.log2_split, part = blockIdx.x & (p.shape.split - 1);
    int a_slots = (p.group_cols / TILE) >> p.shape.log2_split;
    int first_row = blockIdx.x * p.shape.out_rows, left = p.hidden - first_row;
    return {.base = shared_address(memory),
            .memory = memory,
            .at = shared_layout(p, N, BLOCK),
            .tile = tile,
            .part = part,
            .first_slot = part * a_slots,
            .a_slots = tile < p.shape.tiles ? a_slots : 0,
            .b_slots = left > 0 ? p.z_cols / (2 * TILE) : 0,
            .first_row = first_row,
            .rows = left < p.shape.out_rows ? left : p.shape.out_rows};
  }

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

  /* ---- the input --------------------------------------------------------------------------- */

  /* 16 lanes take 128 values of one token; `DEPTH` of those at a time are on their way. */
  static constexpr int ROW_LANES = TILE / LANE_VALUES, ROWS = QUANTIZE_WARPS * WARP / ROW_LANES;
  static constexpr int DEPTH = 2;

  struct Row {
    uint4 raw;
    float4 cos, sin;
    int slot, token; /* slot -1: none */
    bool rotated;
  };

  static __device__ __forceinline__ Row find_row(const sm90_decode &p, const Block &b, int row,
                                                 int column) {
    Row r;
    r.slot = row / p.input.tokens;
    r.token = row - r.slot * p.input.tokens;
    if (r.slot >= b.a_slots) r.slot = -1;
    int slot_of_head = (b.first_slot + r.slot) % SLOTS_PER_HEAD;
    r.rotated = r.slot >= 0 && slot_of_head * TILE + column * LANE_VALUES >= HEAD_DIM - ROPE_DIM;
    return r;
  }

  static __device__ __forceinline__ float4 load_floats(const float *from) {
    if constexpr (ALIGNED)
      return __ldg(reinterpret_cast<const float4 *>(from));
    else
      return make_float4(__ldg(from), __ldg(from + 1), __ldg(from + 2), __ldg(from + 3));
  }

  static __device__ __forceinline__ uint32_t load_pair(const uint16_t *from) {
    return __ldg(from) | static_cast<uint32_t>(__ldg(from + 1)) << 16;
  }

  static __device__ __forceinline__ uint4 load_lane(const uint16_t *from) {
    if constexpr (ALIGNED)
      return __ldg(reinterpret_cast<const uint4 *>(from));
    else
      return make_uint4(load_pair(from), load_pair(from + 2), load_pair(from + 4),
                        load_pair(from + 6));
  }

  static __device__ __forceinline__ void load_angles(const sm90_decode &p, int column, Row *r) {
    if (!r->rotated) return;
    int pair = (column * LANE_VALUES - (TILE - ROPE_DIM)) / 2;
    const float *table = table_row(p.input, r->token, false);
    float nan = oproj_num_from_bits(0x7FC00000u);
    r->cos = r->sin = make_float4(nan, nan, nan, nan);
    if (!table) return;
    r->cos = load_floats(table + pair);
    r->sin = load_floats(table + ROPE_DIM / 2 + pair);
  }

  static __device__ __forceinline__ void load_values(const sm90_decode &p, const Block &b,
                                                     int group, int column, Row *r) {
    const cuda_input &in = p.input;
    r->raw = make_uint4(0, 0, 0, 0);
    if (r->slot < 0) return;
    int slot = b.first_slot + r->slot, head = group * in.heads_per_group + slot / SLOTS_PER_HEAD;
    r->raw = load_lane(in.attn_out + r->token * in.token_stride + head * in.head_stride +
                       slot % SLOTS_PER_HEAD * TILE + column * LANE_VALUES);
  }

  static __device__ __forceinline__ void quantize_row(const Block &b, const Row &r, int column) {
    constexpr int BLOCK_LANES = BLOCK / LANE_VALUES;
    float values[LANE_VALUES];
    uint2 packed;
    unpack_values(r.raw, values);
    if (r.rotated) unrotate_values(values, r.cos, r.sin);
    uint8_t exponent = quantize_values(values, BLOCK_LANES, &packed);
    if (r.slot < 0) return;
    /* The swizzle exchanges a row's 16-byte chunks by its number. */
    int chunk = (column / 2) ^ (r.token % 8);
    uint8_t *codes = b.memory + b.at.codes + r.slot * CODE_BYTES + r.token * TILE;
    *reinterpret_cast<uint2 *>(codes + chunk * 16 + column % 2 * 8) = packed;
    if (column % BLOCK_LANES == 0)
      b.floats(b.at.x_scales)[(r.slot * N + r.token) * SCALE_PITCH + column / BLOCK_LANES] =
          oproj_ue8m0_to_f32(exponent);
  }

  static __device__ void quantize_input(const sm90_decode &p, const Block &b, int worker,
                                        int lane) {
    int column = lane % ROW_LANES, rows = b.a_slots * p.input.tokens;
    int group = b.tile / p.tiles_per_group;
#pragma unroll 1
    for (int first = worker * (WARP / ROW_LANES); first < rows; first += DEPTH * ROWS) {
      Row r[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; d++) {
        r[d] = find_row(p, b, first + d * ROWS + lane / ROW_LANES, column);
        load_values(p, b, group, column, &r[d]);
        load_angles(p, column, &r[d]);
      }
#pragma unroll
      for (int d = 0; d < DEPTH; d++)
        if (first + d * ROWS < rows) quantize_row(b, r[d], column);
    }
    fence_for_async_proxy();
  }

  /* One block looks at all positions: reporting in the loop above would be in its way. */
  static __device__ void report_positions(const cuda_input &in, int lane) {
    if (blockIdx.x == 0 && lane < in.tokens) table_row(in, lane, true);
  }

  /* ---- warps 0 to 7: products -------------------------------------------------------------- */

  /* The operands of one slot and what scales its sums. */
  struct Operands {
    uint32_t weights, codes;
    const float *scales;         /* [N][SCALE_PITCH], shared memory */
    const float *w_low, *w_high; /* [SCALES]: of a thread's two rows */
  };

  static __device__ __forceinline__ void begin_products(const Operands &o,
                                                        float (&sums)[SETS][SUMS]) {
    uint64_t weights = describe_operand(o.weights), codes = describe_operand(o.codes);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      Wgmma<N>::issue(sums[s / STEPS_PER_SET], weights + 2 * s, codes + 2 * s,
                      s % STEPS_PER_SET > 0);
  }

  static __device__ __forceinline__ void add_scaled(const Operands &o, float (&sums)[SETS][SUMS],
                                                    int lane, float (&total)[SUMS]) {
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

  /* Slots between waits for the tensor core; their numbers are multiples of it.  The other
   * warpgroup multiplies while this one adds. */
  static constexpr int BATCH = SETS * SUMS <= 32 ? 2 : 1;

  static __device__ __forceinline__ void multiply(const Operands (&o)[BATCH], int lane,
                                                  float (&total)[SUMS]) {
    float sums[BATCH][SETS][SUMS];
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
                                                    float (&total)[SUMS]) {
    const float *w = b.floats(b.at.a_scales) + (warp * 16 / BLOCK * b.a_slots + i) * SCALES;
    Cursor first = *at;
    Operands o[BATCH];
#pragma unroll
    for (int c = 0; c < BATCH; c++) {
      barrier_wait(b.full(at->slot), at->parity);
      o[c].weights = b.slot(at->slot) + warp / 4 * HALF_SLOT;
      o[c].codes = b.base + b.at.codes + (i + c) * CODE_BYTES;
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
                                                    float (&total)[SUMS]) {
    int half = warp / 4;
    Cursor first = *at, z_first = *z_at;
    Operands o[BATCH];
#pragma unroll
    for (int c = 0; c < BATCH; c++) {
      barrier_wait(b.full(at->slot), at->parity);
      barrier_wait(b.z_full(z_at->slot), z_at->parity);
      int z = b.at.z + z_at->slot * b.at.z_slot_bytes, k = 2 * (i + c) + half;
      o[c].weights = b.slot(at->slot) + half * HALF_SLOT;
      o[c].codes = b.base + z + half * CODE_BYTES;
      o[c].scales = b.floats(z + 2 * CODE_BYTES) + half * N * SCALE_PITCH;
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
                                                  int lane, Cursor *at, float (&total)[SUMS]) {
#pragma unroll 1
    for (int i = 0; i < b.a_slots; i += BATCH) multiply_a(p, b, i, warp, lane, at, total);
  }

  static __device__ __forceinline__ void sum_wo_b(const sm90_decode &p, const Block &b, int warp,
                                                  int lane, Cursor *at, float (&total)[SUMS]) {
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

  /* ---- sums of WO_A become z --------------------------------------------------------------- */

  /* A thread's sums, whichever way they go on: row `warp * 16 + lane / 4` and the one 8 below, of
   * tokens 8j + lane % 4 * 2 (+ 1). */
  template <typename Put>
  static __device__ __forceinline__ void for_each_sum(int lane, const float (&total)[SUMS],
                                                      Put put) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        put(8 * j + lane % 4 * 2 + e, total[4 * j + e], total[4 * j + 2 + e]);
  }

  static __device__ void send_partials(const sm90_decode &p, int epoch, int warp, int lane,
                                       const float (&total)[SUMS]) {
    int tokens = p.input.tokens, row = warp * 16 + lane / 4;
    float *to = p.exchange.partials[epoch] + static_cast<int64_t>(blockIdx.x) * tokens * TILE + row;
    for_each_sum(lane, total, [&](int token, float low, float high) {
      if (token >= tokens) return;
      send_word(to + token * TILE, as_sent(low));
      send_word(to + token * TILE + 8, as_sent(high));
    });
  }

  /* Rounds and quantises a token's 128 sums of a tile, 4 to a lane, and sends them to everyone. */
  static __device__ __forceinline__ void send_z(const sm90_decode &p, const Block &b, int epoch,
                                                int token, float4 sum, int lane) {
    constexpr int BLOCK_LANES = BLOCK / 4, LANES_PER_SCALE = K_STEP / 4;
    float v[4] = {sum.x, sum.y, sum.z, sum.w}, amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      v[i] = oproj_bf16_to_f32(oproj_bf16_from_f32(v[i]));
      amax = oproj_quant_amax(amax, v[i]);
    }
#pragma unroll
    for (int offset = BLOCK_LANES / 2; offset > 0; offset /= 2)
      amax = oproj_quant_amax(amax, __shfl_xor_sync(ALL_LANES, amax, offset));
    uint8_t exponent = oproj_quant_exponent(amax);
    uint32_t *to = p.exchange.z[epoch] +
                   (static_cast<int64_t>(b.tile) * p.input.tokens + token) * DECODE_Z_WORDS;
    send_word(to + lane, codes_of_values(v[0], v[1], v[2], v[3], exponent));
    if (lane % LANES_PER_SCALE == 0)
      send_word(to + WARP + lane / LANES_PER_SCALE, oproj_num_bits(oproj_ue8m0_to_f32(exponent)));
  }

  /* Without a split the tile's sums meet in shared memory. */
  static __device__ void finish_own_tile(const sm90_decode &p, const Block &b, int epoch, int warp,
                                         int lane, const float (&total)[SUMS]) {
    float *sums = b.floats(b.at.sums);
    int row = warp * 16 + lane / 4;
    for_each_sum(lane, total, [&](int token, float low, float high) {
      sums[token * TILE_PITCH + row] = low;
      sums[token * TILE_PITCH + row + 8] = high;
    });
    named_barrier(MATH_MEETS, MATH_THREADS);
    for (int token = warp; token < p.input.tokens; token += MATH_WARPS)
      send_z(p, b, epoch, token,
             *reinterpret_cast<const float4 *>(sums + token * TILE_PITCH + lane * 4), lane);
  }

  /* With a split its blocks share out the tokens; each adds the parts in order of K. */
  static __device__ bool finish_split_tile(const sm90_decode &p, const Block &b, int epoch,
                                           int helper, int lane) {
    constexpr int PARTS = 8; /* on their way at a time */
    int tokens = p.input.tokens, split = p.shape.split, stride = tokens * TILE / 4;
    const uint4 *tile = reinterpret_cast<const uint4 *>(p.exchange.partials[epoch]) +
                        static_cast<int64_t>(b.tile) * split * stride + lane;
    for (int token = b.part + split * helper; token < tokens; token += split * HELP_WARPS) {
      float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      for (int part = 0; part < split; part += PARTS) {
        uint4 v[PARTS];
        int count = split - part < PARTS ? split - part : PARTS;
        if (!receive<PARTS>(p.exchange.control, tile + part * stride + token * (TILE / 4), stride,
                            (1u << count) - 1, v))
          return false;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          if (i >= count) break;
          sum.x += oproj_num_from_bits(v[i].x);
          sum.y += oproj_num_from_bits(v[i].y);
          sum.z += oproj_num_from_bits(v[i].z);
          sum.w += oproj_num_from_bits(v[i].w);
        }
      }
      send_z(p, b, epoch, token, sum, lane);
    }
    return true;
  }

  /* ---- warps 9 to 15 ----------------------------------------------------------------------- */

  static __device__ void empty_other_epoch(const sm90_decode &p, int epoch, const uint4 &control,
                                           int worker) {
    int other = epoch ^ 1;
    uint32_t used = tokens_left(control, other);
    if (p.shape.split > 1)
      empty_words(p.exchange.partials[other] + static_cast<int64_t>(blockIdx.x) * used * TILE,
                  blockIdx.x < p.shape.tiles * p.shape.split ? used * TILE / 4 : 0, worker,
                  HELP_WARPS * WARP);
    empty_words(p.exchange.z[other], p.z_cols / TILE * used * (DECODE_Z_WORDS / 4),
                blockIdx.x * HELP_WARPS * WARP + worker, gridDim.x * HELP_WARPS * WARP);
    if (blockIdx.x == 0 && worker == 0) send_word(&p.exchange.control->used[epoch], p.input.tokens);
  }

  /* z of a slot, 256 columns, is contiguous in the exchange: per 128 columns and token 8 pieces of
   * codes and one of scales, 16 bytes each. */
  static constexpr int PIECES = DECODE_Z_WORDS / 4;
  static constexpr int PASSES = ceil_div(2 * N * PIECES, WARP); /* 5, 9 or 18 */
  static constexpr int AT_ONCE = PASSES <= 9 ? PASSES : 6;      /* of them on their way */

  static __device__ void receive_z(const sm90_decode &p, const Block &b, int epoch, int helper,
                                   int lane, bool stalled) {
    int tokens = p.input.tokens, pieces = 2 * tokens * PIECES, to[PASSES];
    uint32_t wanted = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      int i = pass * WARP + lane, row = i / PIECES, piece = i % PIECES;
      int half = row >= tokens, token = row - half * tokens;
      to[pass] = piece < 8 ? half * CODE_BYTES + token * TILE + (piece ^ (token % 8)) * 16
                           : 2 * CODE_BYTES + (half * N + token) * SCALE_PITCH * 4;
      if (i < pieces) wanted |= 1u << pass;
    }
    const uint4 *from = reinterpret_cast<const uint4 *>(p.exchange.z[epoch]) + lane;
    uint32_t nan = 0x7FC00000u;
    for (int i = helper; i < b.b_slots; i += HELP_WARPS) {
      int slot = i % p.z_stages, round = i / p.z_stages;
      uint8_t *z = b.memory + b.at.z + slot * b.at.z_slot_bytes;
#pragma unroll
      for (int first = 0; first < PASSES; first += AT_ONCE) {
        uint32_t part = wanted >> first & ((1u << AT_ONCE) - 1);
        uint4 v[AT_ONCE];
        if (!stalled)
          stalled = !receive<AT_ONCE>(p.exchange.control, from + i * pieces + first * WARP, WARP,
                                      part, v);
        if (first == 0 && round > 0) barrier_wait(b.z_empty(slot), (round - 1) & 1);
#pragma unroll
        for (int pass = 0; pass < AT_ONCE; pass++)
          if (part >> pass & 1)
            *reinterpret_cast<uint4 *>(z + to[first + pass]) =
                stalled ? make_uint4(nan, nan, nan, nan) : v[pass];
      }
      fence_for_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(b.z_full(slot));
    }
    if (stalled && lane == 0) raise_stall(p.input);
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
                                       int warp, int lane, const float (&total)[SUMS]) {
    float *sums = b.floats(b.at.sums);
    int half = warp / 4, row = warp % 4 * 16 + lane / 4;
    named_barrier(MATH_MEETS, MATH_THREADS); /* a tile's sums may lie there */
    for_each_sum(lane, total, [&](int token, float low, float high) {
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

  static __device__ void run_products(const sm90_decode &p, const Block &b, int epoch,
                                      uint32_t number, int warp, int lane) {
    Cursor at;
    if (b.a_slots > 0) {
      float total[SUMS] = {};
      sum_wo_a(p, b, warp, lane, &at, total);
      if (p.shape.split > 1)
        send_partials(p, epoch, warp, lane, total);
      else
        finish_own_tile(p, b, epoch, warp, lane, total);
    }
    if (b.b_slots > 0) {
      float total[SUMS] = {};
      sum_wo_b(p, b, warp, lane, &at, total);
      write_partial(p, b, number, warp, lane, total);
    }
  }

  static __device__ void run_helpers(const sm90_decode &p, const Block &b, int epoch,
                                     const uint4 &control, int helper, int lane) {
    bool stalled = has_stalled(control);
    if (b.a_slots > 0 && p.shape.split > 1 && !stalled)
      stalled = !finish_split_tile(p, b, epoch, helper, lane);
    receive_z(p, b, epoch, helper, lane, stalled);
    empty_other_epoch(p, epoch, control, helper * WARP + lane);
    if (helper == 0) report_positions(p.input, lane);
  }

  static __device__ void run(const sm90_decode &p, uint8_t *unaligned) {
    uint8_t *memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const Block b = describe_block(p, memory);
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
    uint4 control = load_words(p.exchange.control);
    uint32_t number = p.sink.n > 1 ? next_sum(p.sink.control->sums) : 0; /* of the ranks' sum */
    quantize_input(p, b, worker, lane);
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
