/* sm90_project.cuh - the block-scaled product on SM90's FP8 tensor cores.
 *
 *   weights e4m3 [rows, cols]  x  activations e4m3 [tokens, cols]  ->  [tokens, rows]
 *
 * Grid: x over (tile of 128 rows, part of K), y over tiles of N tokens.  The `split` blocks of a
 * cluster share a tile's K and add their sums through distributed shared memory, in order of K.
 * Bound: the weights' bytes up to about 64 tokens, the tensor cores beyond.
 *
 * Up to 32 tokens operands are swapped: weight rows are the instruction's 64 rows, tokens its N
 * columns, so that few tokens waste nothing.  From 64 on tokens are its rows and 128 weight rows
 * its columns: one wide instruction costs less than two narrow ones.  In a block
 *
 *   warps 0 to 7   two warpgroups (0 to 11, three, of 192 tokens): multiply a slot, scale its
 *                  sums, add them in f32.  Of a slot each takes 64 weight rows, or 64 tokens; with
 *                  64 tokens in all they take turns
 *   warp 8 (12)    copies weights into a ring of slots, each one 128 values of K, `window` slots
 *                  ahead: more on their way would delay every other load
 *   warp 9 (13)    copies the activations' codes and scales into the same slots
 *   warps 9 to 12  (FUSED, instead) rotate and quantise attn_out straight into the slots
 *
 * At the end the parts of K meet, and z is rounded, quantised and written: up to 32 tokens, or with
 * clusters of four, from shared memory, a warp per token; else where the sums are, four threads per
 * token, which were measured to be faster.
 *
 * The tensor core adds with few bits; sums leave it after every quantisation block. */
#ifndef OPROJ_KERNELS_CUDA_SM90_PROJECT_CUH
#define OPROJ_KERNELS_CUDA_SM90_PROJECT_CUH

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/input.cuh"
#include "kernels/cuda/sm90_project_block.cuh"
#include "kernels/cuda/sm90_project_input.cuh"
#include "kernels/cuda/sm90_ptx.cuh"
#include "kernels/cuda/sm90_write.cuh"

namespace sm90 {

template <int N, int BLOCK, int Z_BLOCK, bool FUSED>
struct Project {
  static constexpr int SCALES = scales_per_slot(BLOCK);
  static constexpr int MATH_WARPS = N <= 128 ? 8 : N / 16, MATH_THREADS = MATH_WARPS * WARP;
  static constexpr int COPY_WARP = MATH_WARPS;
  static constexpr int INPUT_WARP = COPY_WARP + 1; /* the first */
  /* Three warpgroups of products need registers of a fourth, whose other warps idle. */
  static constexpr bool WIDE = MATH_WARPS > 8;
  static constexpr int MATH_REGISTERS = 152, COPY_REGISTERS = 56;
  static constexpr int COPY_THREADS = WIDE ? 4 * WARP : FUSED ? WARP + QUANTIZE_THREADS : 2 * WARP;
  static constexpr int THREADS = MATH_THREADS + COPY_THREADS;
  static constexpr int STEPS_PER_SCALE = BLOCK / K_STEP; /* 4 or 1 */
  static constexpr bool JOINED = Z_BLOCK < BLOCK;        /* the input's blocks, and the weights' */

  /* ---- warp 8 (12): weights ------------------------------------------------------------------ */

  struct Copies {
    Cursor issue, landed;
    int issued = 0;
  };

  static __device__ __forceinline__ void copy_weights(const sm90_product &p, const Block &b,
                                                      Copies *c) {
    if (c->issued >= p.window) {
      barrier_wait(b.full(c->landed.slot), c->landed.parity);
      c->landed.advance(p.stages);
    }
    barrier_arrive_expecting(b.full(c->issue.slot), WEIGHT_BYTES);
    copy_box_2d(b.slot(c->issue.slot), &p.weights, b.full(c->issue.slot),
                (b.first_slot + c->issued) * SM90_TILE_COLS, b.tile * SM90_TILE_ROWS);
    c->issue.advance(p.stages);
    c->issued++;
  }

  /* Weights do not depend on the kernel before: they set out before anything else. */
  static __device__ void begin_copies(const sm90_product &p, const Block &b, Copies *c) {
    for (int slot = 0; slot < p.stages; slot++) {
      barrier_init(b.full(slot), 1);
      barrier_init(b.live(slot), 1);
      barrier_init(b.empty(slot), TURNS ? MATH_WARPS / 2 : MATH_WARPS);
    }
    barriers_publish();
    fence_for_async_proxy();
    while (c->issued < p.window && c->issued < b.slots) copy_weights(p, b, c);
  }

  static __device__ void run_copies(const sm90_product &p, const Block &b, Copies *c) {
    while (c->issued < b.slots) {
      if (c->issued >= p.stages) barrier_wait(b.empty(c->issue.slot), c->issue.parity ^ 1);
      copy_weights(p, b, c);
    }
  }

  /* ---- warp 9 (13): activations -------------------------------------------------------------- */

  /* Lane 0 copies codes, the next ones a row of scales each. */
  static __device__ void run_inputs(const sm90_product &p, const Block &b, int lane) {
    int64_t aligned = oproj_layout_aligned_tokens(p.tokens);
    int code_bytes = p.step_tokens * SM90_TILE_COLS, scale_bytes = b.tokens * 4, s = lane - 1;
    int64_t first = static_cast<int64_t>(b.group) * (p.cols / BLOCK) + b.first_slot * SCALES + s;
    const float *scales = p.a_scales + first * aligned + b.first_token;
    Cursor at;
    if (lane == 0) prefetch_map(&p.activations);
    wait_for_predecessors();
#pragma unroll 1
    for (int i = 0; i < b.slots; i++) {
      uint32_t arrival = b.live(at.slot);
      if (i >= p.stages) barrier_wait(b.empty(at.slot), at.parity ^ 1);
      if (lane == 0) barrier_arrive_expecting(arrival, code_bytes + SCALES * scale_bytes);
      __syncwarp();
      if (lane == 0)
        copy_box_3d(b.slot(at.slot) + WEIGHT_BYTES, &p.activations, arrival,
                    (b.first_slot + i) * SM90_TILE_COLS, b.first_token, b.group);
      else if (s < SCALES)
        copy_bytes(shared_address(a_scales<N, BLOCK>(b, at.slot) + s * N), scales, scale_bytes,
                   arrival);
      scales += SCALES * aligned;
      at.advance(p.stages);
    }
  }

  /* ---- warps 0 to 7 (11): products ----------------------------------------------------------- */

  static constexpr bool TOKENS_ARE_ROWS = N >= ROW_TOKENS;
  static constexpr bool TURNS = N == ROW_TOKENS; /* a warpgroup takes every second slot, whole */
  static constexpr int SUMS = TOKENS_ARE_ROWS ? SM90_TILE_ROWS / 2 : N / 2; /* of a thread */

  /* Starts the instructions of one quantisation block: all of a slot, or its step `step`. */
  static __device__ __forceinline__ void begin_products(const Block &b, int slot, int step,
                                                        int warpgroup, float (&sums)[SUMS]) {
    uint32_t address = b.slot(slot);
    int token_half = TOKENS_ARE_ROWS && !TURNS ? warpgroup * ROW_TOKENS * SM90_TILE_COLS : 0;
    int row_half = TOKENS_ARE_ROWS ? 0 : warpgroup * (WEIGHT_BYTES / 2);
    uint64_t codes = describe_operand(address + WEIGHT_BYTES + token_half) + 2 * step;
    uint64_t weights = describe_operand(address + row_half) + 2 * step;
    pin(sums);
    products_begin();
#pragma unroll
    for (int i = 0; i < STEPS_PER_SCALE; i++) {
      if constexpr (TOKENS_ARE_ROWS)
        Wgmma<SM90_TILE_ROWS>::issue(sums, codes + 2 * i, weights + 2 * i, i > 0);
      else
        Wgmma<N>::issue(sums, weights + 2 * i, codes + 2 * i, i > 0);
    }
    products_commit();
  }

  /* total += sums * (a_scale * w_scale) */
  static __device__ __forceinline__ void add_scaled(float (&total)[SUMS], float (&sums)[SUMS],
                                                    const float *scales, float w_scale, int lane) {
    pin(sums);
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
      float2 scale = *reinterpret_cast<const float2 *>(scales + 8 * j + lane % 4 * 2);
      scale.x *= w_scale;
      scale.y *= w_scale;
      total[4 * j] += sums[4 * j] * scale.x;
      total[4 * j + 1] += sums[4 * j + 1] * scale.y;
      total[4 * j + 2] += sums[4 * j + 2] * scale.x;
      total[4 * j + 3] += sums[4 * j + 3] * scale.y;
    }
  }

  /* The same where tokens are rows: a thread's rows are `row` and row + 8, its columns all weight
   * rows 8j + lane % 4 * 2 (+ 1). */
  static __device__ __forceinline__ void add_scaled_rows(float (&total)[SUMS], float (&sums)[SUMS],
                                                         const float *scales, const float *w_scales,
                                                         int w_pitch, int row) {
    constexpr int ROW_BLOCKS = SM90_TILE_ROWS / BLOCK, SPAN = SUMS / ROW_BLOCKS;
    pin(sums);
    float low = scales[row], high = scales[row + 8];
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      float w = w_scales[r * w_pitch], low_scale = low * w, high_scale = high * w;
#pragma unroll
      for (int i = r * SPAN; i < (r + 1) * SPAN; i += 4) {
        total[i] += sums[i] * low_scale;
        total[i + 1] += sums[i + 1] * low_scale;
        total[i + 2] += sums[i + 2] * high_scale;
        total[i + 3] += sums[i + 3] * high_scale;
      }
    }
  }

  static __device__ __forceinline__ void wait_for_slot(const Block &b, const Cursor &at) {
    barrier_wait(b.full(at.slot), at.parity);
    barrier_wait(b.live(at.slot), at.parity);
  }

  static __device__ __forceinline__ void release(const Block &b, int slot, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(b.empty(slot));
  }

  /* Products run in pairs, the second while the first is added.  (A pair that overlapped the next
   * one would keep the tensor core busier still, but the compiler then waits for each instruction.)
   *
   * Here a pair is two slots; their number is even. */
  static __device__ __forceinline__ void multiply_slots(const sm90_product &p, const Block &b,
                                                        const float *w_scales, int warpgroup,
                                                        int lane, float (&total)[SUMS]) {
    Cursor at;
#pragma unroll 1
    for (int i = 0; i < b.slots; i += 2) {
      float first[SUMS], second[SUMS];
      int slot = at.slot;
      wait_for_slot(b, at);
      begin_products(b, slot, 0, warpgroup, first);
      at.advance(p.stages);
      int next = at.slot;
      wait_for_slot(b, at);
      begin_products(b, next, 0, warpgroup, second);
      at.advance(p.stages);
      products_wait<1>();
      add_scaled(total, first, a_scales<N, BLOCK>(b, slot), w_scales[i], lane);
      release(b, slot, lane);
      products_wait<0>();
      add_scaled(total, second, a_scales<N, BLOCK>(b, next), w_scales[i + 1], lane);
      release(b, next, lane);
    }
  }

  /* Here it is two steps of a slot. */
  static __device__ __forceinline__ void multiply_steps(const sm90_product &p, const Block &b,
                                                        const float *w_scales, int warpgroup,
                                                        int lane, float (&total)[SUMS]) {
    Cursor at;
#pragma unroll 1
    for (int i = 0; i < b.slots; i++) {
      const float *scales = a_scales<N, BLOCK>(b, at.slot), *w = w_scales + i * SCALES;
      wait_for_slot(b, at);
#pragma unroll
      for (int step = 0; step < SCALES; step += 2) {
        float first[SUMS], second[SUMS];
        begin_products(b, at.slot, step, warpgroup, first);
        begin_products(b, at.slot, step + 1, warpgroup, second);
        products_wait<1>();
        add_scaled(total, first, scales + step * N, w[step], lane);
        products_wait<0>();
        add_scaled(total, second, scales + (step + 1) * N, w[step + 1], lane);
      }
      release(b, at.slot, lane);
      at.advance(p.stages);
    }
  }

  /* Tokens as rows leave registers for one set of sums: another warpgroup multiplies while this
   * one adds.  In turns each takes every second slot; their number is even, so that a slot always
   * is the same warpgroup's. */
  static __device__ __forceinline__ void multiply_rows(const sm90_product &p, const Block &b,
                                                       const float *w_scales, int warp, int lane,
                                                       float (&total)[SUMS]) {
    constexpr int STRIDE = TURNS ? 2 : 1;
    int warpgroup = warp / 4, pitch = b.slots * SCALES;
    int row = (TURNS ? warp % 4 : warp) * 16 + lane / 4, first = TURNS ? warpgroup : 0;
    Cursor at;
    if (first == 1) at.advance(p.stages);
#pragma unroll 1
    for (int i = first; i < b.slots; i += STRIDE) {
      const float *scales = a_scales<N, BLOCK>(b, at.slot), *w = w_scales + i * SCALES;
      wait_for_slot(b, at);
#pragma unroll
      for (int step = 0; step < SCALES; step++) {
        float sums[SUMS];
        begin_products(b, at.slot, step, warpgroup, sums);
        products_wait<0>();
        add_scaled_rows(total, sums, scales + step * N, w + step, pitch, row);
      }
      release(b, at.slot, lane);
#pragma unroll
      for (int step = 0; step < STRIDE; step++) at.advance(p.stages);
    }
  }

  /* ---- the end ----------------------------------------------------------------------------- */

  /* The sums of this block's part of K meet in f32 [N tokens][PITCH], over the drained ring. */
  static constexpr int PITCH = sum_pitch(N), SUMS_AT = exchange_bytes(N);

  static __device__ __forceinline__ float *sums_of(const Block &b, int token) {
    return reinterpret_cast<float *>(b.memory + SUMS_AT) + token * PITCH;
  }

  static __device__ __forceinline__ void spread_columns(const Block &b, int warp, int lane,
                                                        const float (&total)[SUMS]) {
    int row = warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float *token = sums_of(b, 8 * j + lane % 4 * 2 + e);
        token[row] = total[4 * j + e];
        token[row + 8] = total[4 * j + 2 + e];
      }
    }
  }

  /* Of tokens as rows a thread holds two, a low and a high one, of each the columns 8j + lane%4*2
   * and the next. */
  static constexpr int PAIRS = SM90_TILE_ROWS / 8;
  static constexpr int ROWS = TURNS ? 1 : 2; /* that it finishes */

  static __device__ __forceinline__ void take_row(const float (&total)[SUMS], bool high,
                                                  float2 (&pairs)[PAIRS]) {
#pragma unroll
    for (int j = 0; j < PAIRS; j++)
      pairs[j] = high ? make_float2(total[4 * j + 2], total[4 * j + 3])
                      : make_float2(total[4 * j], total[4 * j + 1]);
  }

  static __device__ __forceinline__ void spread_row(const Block &b, int token, int lane,
                                                    const float2 (&pairs)[PAIRS]) {
    float *to = sums_of(b, token) + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) *reinterpret_cast<float2 *>(to + 8 * j) = pairs[j];
  }

  /* Warpgroups that took turns hold parts of the same tokens: each adds up one of a thread's two,
   * and hands the other one to its counterpart. */
  static __device__ __forceinline__ void merge_turns(const Block &b, int warp, int lane,
                                                     const float (&total)[SUMS],
                                                     float2 (&pairs)[PAIRS]) {
    constexpr int HALF_THREADS = MATH_THREADS / 2;
    bool high = warp >= MATH_WARPS / 2;
    float2 *exchange = reinterpret_cast<float2 *>(b.memory) + warp % 4 * WARP + lane;
    float2 *mine = exchange + (high ? PAIRS * HALF_THREADS : 0);
    float2 *other = exchange + (high ? 0 : PAIRS * HALF_THREADS);
    take_row(total, !high, pairs);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) other[j * HALF_THREADS] = pairs[j];
    take_row(total, high, pairs);
    named_barrier(MATH_MEETS, MATH_THREADS);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      float2 more = mine[j * HALF_THREADS];
      pairs[j] = make_float2(pairs[j].x + more.x, pairs[j].y + more.y);
    }
  }

  /* A cluster of two shares out the warps: each block hands the other one the sums of the warps
   * that it does not finish itself, thread by thread.  False: the other block finishes this one. */
  static __device__ __forceinline__ bool merge_blocks(const Block &b, int warp, int lane,
                                                      float2 (&rows)[ROWS][PAIRS]) {
    constexpr int STEP = MATH_THREADS * sizeof(float4);
    uint32_t at = b.base + SUMS_AT + (warp * WARP + lane) * static_cast<int>(sizeof(float4));
    bool mine = warp % 2 == b.part;
    if (!mine) {
#pragma unroll
      for (int i = 0; i < ROWS * PAIRS / 2; i++) {
        const float2 *two = &rows[0][0] + 2 * i;
        store_own(at + i * STEP, make_float4(two[0].x, two[0].y, two[1].x, two[1].y));
      }
    }
    cluster_barrier();
    if (!mine) return false;
    uint32_t peer = peer_address(at, 1 - b.part);
#pragma unroll
    for (int i = 0; i < ROWS * PAIRS / 2; i++) {
      float2 *two = &rows[0][0] + 2 * i;
      float4 more = load_peer(peer + i * STEP);
      two[0] = make_float2(two[0].x + more.x, two[0].y + more.y);
      two[1] = make_float2(two[1].x + more.z, two[1].y + more.w);
    }
    return true;
  }

  /* False: with more than two blocks to a cluster the sums are in shared memory instead. */
  static __device__ __forceinline__ bool finish_rows(const sm90_product &p, const Block &b,
                                                     int warp, int lane,
                                                     const float (&total)[SUMS]) {
    int64_t column = static_cast<int64_t>(b.tile) * SM90_TILE_ROWS;
    int first = (TURNS ? warp % 4 * 16 + warp / 4 * 8 : warp * 16) + lane / 4;
    float2 rows[ROWS][PAIRS];
    if constexpr (TURNS) {
      merge_turns(b, warp, lane, total, rows[0]);
    } else {
      take_row(total, false, rows[0]);
      take_row(total, true, rows[ROWS - 1]);
    }
    if (p.split == 2 && !merge_blocks(b, warp, lane, rows)) return true;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      int token = first + 8 * i; /* behind the tile's last: as behind all */
      if (p.split > 2)
        spread_row(b, token, lane, rows[i]);
      else
        write_token<Z_BLOCK>(p, token < b.tokens ? b.first_token + token : INT32_MAX, column, lane,
                             rows[i]);
    }
    return p.split <= 2;
  }

  /* The whole sums of a lane's 4 columns for one token, parts of K added in order, all of them on
   * their way together. */
  static __device__ __forceinline__ float4 gather_sums(const sm90_product &p, const Block &b,
                                                       int token, int lane) {
    const float *from = sums_of(b, token) + lane * 4;
    if (p.split == 1) return *reinterpret_cast<const float4 *>(from);
    float4 parts[SM90_MOST_SPLIT], sum = {};
#pragma unroll
    for (int part = 0; part < SM90_MOST_SPLIT; part++)
      if (part < p.split) parts[part] = load_peer(peer_address(shared_address(from), part));
#pragma unroll
    for (int part = 0; part < SM90_MOST_SPLIT; part++)
      if (part < p.split) add_to(&sum, parts[part]);
    return sum;
  }

  /* The blocks of a cluster share out the tokens, and their warps those, BATCH at a time. */
  static constexpr int BATCH = N < ROW_TOKENS ? 1 : 2;

  static __device__ __forceinline__ void write_sums(const sm90_product &p, const Block &b, int warp,
                                                    int lane) {
    int step = p.split * MATH_WARPS;
#pragma unroll 1
    for (int token = b.part + p.split * warp; token < b.tokens; token += BATCH * step) {
      float4 sums[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (token + i * step < b.tokens) sums[i] = gather_sums(p, b, token + i * step, lane);
#pragma unroll
      for (int i = 0; i < BATCH; i++)
        if (token + i * step < b.tokens)
          write_columns<Z_BLOCK>(p, b.first_token + token + i * step,
                                 static_cast<int64_t>(b.tile) * SM90_TILE_ROWS + lane * 4, lane,
                                 sums[i]);
    }
  }

  /* ---- the block --------------------------------------------------------------------------- */

  /* By the warps that multiply; they arrive at copies_wait.  Rows behind the last have none. */
  static __device__ __forceinline__ void copy_w_scales(const sm90_product &p, const Block &b) {
    constexpr int ROW_BLOCKS = SM90_TILE_ROWS / BLOCK;
    int count = b.slots * SCALES, columns = p.cols / BLOCK;
    int first = b.tile * ROW_BLOCKS, left = ceil_div(p.rows, BLOCK) - first;
    const float *from = p.w_scales + static_cast<int64_t>(first) * columns + b.first_slot * SCALES;
    uint32_t to = b.base + b.at.w_scales;
#pragma unroll 1
    for (int row_block = 0; row_block < ROW_BLOCKS && row_block < left; row_block++)
#pragma unroll 1
      for (int i = threadIdx.x; i < count; i += MATH_THREADS)
        copy_word(to + (row_block * count + i) * 4,
                  from + static_cast<int64_t>(row_block) * columns + i);
  }

  static __device__ Block describe_block(const sm90_product &p, uint8_t *memory) {
    Block b;
    b.memory = memory;
    b.base = shared_address(memory);
    b.tile = blockIdx.x / p.split;
    b.part = blockIdx.x % p.split;
    b.group = b.tile * SM90_TILE_ROWS / p.rows_per_group;
    b.slots = p.cols / SM90_TILE_COLS / p.split;
    b.first_slot = b.part * b.slots;
    b.first_token = blockIdx.y * p.step_tokens;
    b.tokens =
        min(p.step_tokens, static_cast<int>(oproj_layout_aligned_tokens(p.tokens)) - b.first_token);
    b.at = shared_layout(N, BLOCK, p.stages, b.slots, FUSED);
    return b;
  }

  /* With a split all warps of the cluster meet when its sums can be read. */
  static __device__ __forceinline__ void run_products(const sm90_product &p, const Block &b,
                                                      int warp, int lane) {
    float total[SUMS] = {};
    const float *tile_scales = reinterpret_cast<const float *>(b.memory + b.at.w_scales);
    const float *warp_scales = tile_scales + warp * 16 / BLOCK * b.slots * SCALES;
    copies_wait();
    named_barrier(MATH_MEETS, MATH_THREADS); /* the scales that the others copied */
    if constexpr (TOKENS_ARE_ROWS)
      multiply_rows(p, b, tile_scales, warp, lane, total);
    else if constexpr (BLOCK == SM90_TILE_COLS)
      multiply_slots(p, b, warp_scales, warp / 4, lane, total);
    else
      multiply_steps(p, b, warp_scales, warp / 4, lane, total);
    named_barrier(MATH_MEETS, MATH_THREADS); /* the ring is drained: sums may overwrite it */
    wait_for_predecessors();                 /* they may still read what is written now */
    if constexpr (TOKENS_ARE_ROWS) {
      if (finish_rows(p, b, warp, lane, total)) return;
    } else {
      spread_columns(b, warp, lane, total);
    }
    named_barrier(MATH_MEETS, MATH_THREADS);
    if (p.split > 1) cluster_barrier();
    write_sums(p, b, warp, lane);
  }

  static __device__ __forceinline__ void run_loads(const sm90_product &p, const Block &b, int warp,
                                                   int lane, Copies *copies) {
    if (warp == COPY_WARP) {
      if (lane == 0) run_copies(p, b, copies);
    } else if constexpr (FUSED) {
      Quantizers<N, BLOCK, JOINED>::run(p, b, warp - INPUT_WARP, lane);
    } else if (warp == INPUT_WARP) {
      run_inputs(p, b, lane);
    }
    __syncwarp();
    if (p.split > 1) cluster_barrier();
  }

  static __device__ void run(const sm90_product &p, uint8_t *unaligned) {
    uint8_t *memory = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const Block b = describe_block(p, memory);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Copies copies;
    if (warp == COPY_WARP && lane == 0) begin_copies(p, b, &copies);
    __syncwarp();
    if (p.early) let_successors_start();
    if (warp < MATH_WARPS) copy_w_scales(p, b);
    __syncthreads();

    if (warp >= MATH_WARPS) {
      if constexpr (WIDE) registers_shrink<COPY_REGISTERS>();
      run_loads(p, b, warp, lane, &copies);
    } else {
      if constexpr (WIDE) registers_grow<MATH_REGISTERS>();
      run_products(p, b, warp, lane);
    }
    if (p.split > 1) cluster_barrier(); /* peers may still read this block's sums */
  }
};

template <int N, int BLOCK, int Z_BLOCK, bool FUSED>
__global__ void __launch_bounds__(Project<N, BLOCK, Z_BLOCK, FUSED>::THREADS, 1)
    project_kernel(const __grid_constant__ sm90_product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ uint8_t memory[];
  Project<N, BLOCK, Z_BLOCK, FUSED>::run(p, memory);
#endif
}

}  // namespace sm90

#endif /* OPROJ_KERNELS_CUDA_SM90_PROJECT_CUH */
