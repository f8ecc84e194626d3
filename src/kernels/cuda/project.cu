/* project.cu - both projections for many tokens: a tiled product on tensor cores.
 *
 *   a [groups, T, cols] x w [groups * rows, cols]  ->  out bf16 [T, groups * rows]
 *
 * Grid: x over tiles of 64 tokens, y over tiles of 64 rows, z over groups; tokens first, so that
 * neighbouring blocks share their weights in L2.  A block is 4 warps, each 32 tokens x 32 rows by
 * mma.m16n8k16 with f32 sums.  K goes by stages of 64 columns: global loads of the next stage are
 * in flight in registers while this one is read from shared memory.  e4m3 is widened to halves on
 * the way to shared memory: exact, and so are the products.  After each K block the block's dot is
 * scaled and added to the f32 sums; bf16 has no scales and is summed straight through.
 * Bound: flops; below about 100 tokens the weights' bytes.
 * Tokens are rows of the matrix product, so a NaN stays in its token. */
#include "kernels/cuda/device.cuh"

namespace {

constexpr int THREADS = 128;
constexpr int TILE_TOKENS = 64, TILE_ROWS = 64, TILE_K = 64;
constexpr int WARP_TOKENS = 32, WARP_ROWS = 32; /* a warp's rows share a row block of scales */
constexpr int M_TILES = WARP_TOKENS / 16, N_TILES = WARP_ROWS / 8;
constexpr int STRIDE = TILE_K + 8; /* shared memory, 16-bit values: conflict-free ldmatrix */

constexpr int BF16 = 0; /* the kernel's BLOCK where there are no scales */

static_assert(TILE_TOKENS == TILE_ROWS, "one loader serves both operands");

template <int BLOCK>
struct Format {
  static constexpr int VALUES = BLOCK == BF16 ? 8 : 16; /* in 16 bytes */
  static constexpr int PIECES = TILE_K / VALUES;        /* 16-byte pieces of a tile's row */
  static constexpr int LOADS = TILE_ROWS * PIECES / THREADS;
  static constexpr int SCALES = BLOCK == 32 ? 2 : 1; /* K blocks that a stage touches */
};

struct Shared {
  uint16_t a[TILE_TOKENS][STRIDE];
  uint16_t w[TILE_ROWS][STRIDE];
  float a_scales[2][TILE_TOKENS];
};

/* What one thread holds of a stage between global and shared memory. */
template <int BLOCK>
struct Stage {
  uint4 a[Format<BLOCK>::LOADS], w[Format<BLOCK>::LOADS];
  float a_scale;                         /* token threadIdx % 64, K block threadIdx / 64 */
  float w_scales[Format<BLOCK>::SCALES]; /* of the warp's rows */
};

struct Tile {
  const char *a, *w; /* this group's */
  const float *w_scales;
  int32_t group, first_token, first_row;
  int32_t warp_token, warp_row; /* within the tile */
};

/* ---- loading ------------------------------------------------------------------------------- */

template <int BLOCK>
__device__ __forceinline__ void load_operand(const char *from, int32_t first, int32_t end,
                                             int32_t k0, int32_t cols,
                                             uint4 (&to)[Format<BLOCK>::LOADS]) {
  using F = Format<BLOCK>;
#pragma unroll
  for (int i = 0; i < F::LOADS; i++) {
    int piece = i * THREADS + threadIdx.x;
    int32_t row = first + piece / F::PIECES, k = k0 + piece % F::PIECES * F::VALUES;
    to[i] = make_uint4(0, 0, 0, 0);
    if (row < end && k < cols) {
      int64_t at = static_cast<int64_t>(row) * cols + k;
      to[i] = __ldg(reinterpret_cast<const uint4 *>(from + at * (16 / F::VALUES)));
    }
  }
}

template <int BLOCK>
__device__ __forceinline__ void load_stage(const cuda_product &p, const Tile &tile, int32_t k0,
                                           Stage<BLOCK> &stage) {
  load_operand<BLOCK>(tile.a, tile.first_token, p.tokens, k0, p.cols, stage.a);
  load_operand<BLOCK>(tile.w, tile.first_row, p.rows, k0, p.cols, stage.w);
  if constexpr (BLOCK != BF16) {
    int32_t blocks = p.cols / BLOCK, first_block = k0 / BLOCK;
    int32_t token = tile.first_token + threadIdx.x % TILE_TOKENS;
    int32_t b = first_block + threadIdx.x / TILE_TOKENS;
    stage.a_scale = 0.0f;
    if (token < p.tokens && b < blocks)
      stage.a_scale =
          oproj_layout_load(p.a_scales, p.layout, tile.group, token, b, p.tokens, blocks);
    int32_t row = tile.first_row + tile.warp_row;
#pragma unroll
    for (int s = 0; s < Format<BLOCK>::SCALES; s++) {
      stage.w_scales[s] = 0.0f;
      if (row < p.rows && first_block + s < blocks)
        stage.w_scales[s] =
            __ldg(tile.w_scales + static_cast<int64_t>(row / BLOCK) * blocks + first_block + s);
    }
  }
}

template <int BLOCK>
__device__ __forceinline__ void store_operand(const uint4 (&from)[Format<BLOCK>::LOADS],
                                              uint16_t (*to)[STRIDE]) {
  using F = Format<BLOCK>;
#pragma unroll
  for (int i = 0; i < F::LOADS; i++) {
    int piece = i * THREADS + threadIdx.x;
    uint4 *at = reinterpret_cast<uint4 *>(&to[piece / F::PIECES][piece % F::PIECES * F::VALUES]);
    if constexpr (BLOCK == BF16)
      *at = from[i];
    else
      widen_codes(from[i], at[0], at[1]);
  }
}

/* ---- the product --------------------------------------------------------------------------- */

/* Four 8x8 tiles of 16-bit values; lane i gives the address of row i % 8 of tile i / 8. */
__device__ __forceinline__ void load_matrices(const uint16_t *row, uint32_t (&to)[4]) {
  uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

/* c += a b^T for 16 tokens x 8 rows x 16 columns. */
template <int BLOCK>
__device__ __forceinline__ void multiply_tile(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  if constexpr (BLOCK == BF16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Sums of a warp: [m][n][2*h + c] is token m*16 + h*8 + lane/4, row n*8 + lane%4*2 + c. */
typedef float Sums[M_TILES][N_TILES][4];

template <int BLOCK>
__device__ __forceinline__ void multiply_step(const Shared &shared, const Tile &tile, int k,
                                              Sums &sums) {
  int lane = threadIdx.x % WARP;
  uint32_t a[M_TILES][4], w[N_TILES / 2][4];
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
    load_matrices(&shared.a[tile.warp_token + m * 16 + lane % 16][k + lane / 16 * 8], a[m]);
#pragma unroll
  for (int n = 0; n < N_TILES / 2; n++)
    load_matrices(
        &shared.w[tile.warp_row + n * 16 + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8], w[n]);
#pragma unroll
  for (int m = 0; m < M_TILES; m++)
#pragma unroll
    for (int n = 0; n < N_TILES; n++)
      multiply_tile<BLOCK>(sums[m][n], a[m], w[n / 2][n % 2 * 2], w[n / 2][n % 2 * 2 + 1]);
}

/* Scales the dots of K block `s` of the stage, adds them to the sums and starts new dots. */
__device__ __forceinline__ void promote(const Shared &shared, const Tile &tile, int s,
                                        float w_scale, Sums &dots, Sums &sums) {
  int lane = threadIdx.x % WARP;
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float scale = shared.a_scales[s][tile.warp_token + m * 16 + h * 8 + lane / 4] * w_scale;
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; i++) {
          sums[m][n][i] += dots[m][n][i] * scale;
          dots[m][n][i] = 0.0f;
        }
      }
    }
  }
}

__device__ __forceinline__ void store_sums(const cuda_product &p, const Tile &tile, bool pairs,
                                           const Sums &sums) {
  int lane = threadIdx.x % WARP;
#pragma unroll
  for (int m = 0; m < M_TILES; m++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int64_t token = tile.first_token + tile.warp_token + m * 16 + h * 8 + lane / 4;
      if (token >= p.tokens) continue;
#pragma unroll
      for (int n = 0; n < N_TILES; n++) {
        int32_t row = tile.first_row + tile.warp_row + n * 8 + lane % 4 * 2;
        int64_t at = token * p.out_stride + static_cast<int64_t>(tile.group) * p.rows + row;
        uint16_t out[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float addend = p.addend && row + c < p.rows ? p.addend[at + c] : 0.0f;
          out[c] = oproj_bf16_from_f32(sums[m][n][2 * h + c] + addend);
        }
        if (pairs && row < p.rows) {
          *reinterpret_cast<uint32_t *>(p.out + at) = out[0] | static_cast<uint32_t>(out[1]) << 16;
        } else {
          if (row < p.rows) p.out[at] = out[0];
          if (row + 1 < p.rows) p.out[at + 1] = out[1];
        }
      }
    }
  }
}

template <int BLOCK>
__device__ __forceinline__ Tile find_tile(const cuda_product &p) {
  int32_t group = blockIdx.z, warp = threadIdx.x / WARP;
  int64_t value_bytes = BLOCK == BF16 ? 2 : 1;
  Tile tile = {};
  tile.group = group;
  tile.first_token = blockIdx.x * TILE_TOKENS;
  tile.first_row = blockIdx.y * TILE_ROWS;
  tile.warp_token = warp / 2 * WARP_TOKENS;
  tile.warp_row = warp % 2 * WARP_ROWS;
  tile.a = static_cast<const char *>(p.a) +
           static_cast<int64_t>(group) * p.tokens * p.cols * value_bytes;
  tile.w =
      static_cast<const char *>(p.w) + static_cast<int64_t>(group) * p.rows * p.cols * value_bytes;
  if constexpr (BLOCK != BF16)
    tile.w_scales = p.w_scales + static_cast<int64_t>(group) * (p.rows / BLOCK) * (p.cols / BLOCK);
  return tile;
}

template <int BLOCK>
__global__ void __launch_bounds__(THREADS) project_kernel(cuda_product p) {
  __shared__ __align__(16) Shared shared;
  Tile tile = find_tile<BLOCK>(p);
  bool pairs =
      reinterpret_cast<uintptr_t>(p.out) % 4 == 0 && p.out_stride % 2 == 0 && p.rows % 2 == 0;
  Sums sums = {}, dots = {};
  Stage<BLOCK> stage;
  float w_scales[Format<BLOCK>::SCALES];
  load_stage<BLOCK>(p, tile, 0, stage);

  for (int32_t k0 = 0; k0 < p.cols; k0 += TILE_K) {
    __syncthreads();
    store_operand<BLOCK>(stage.a, shared.a);
    store_operand<BLOCK>(stage.w, shared.w);
    if constexpr (BLOCK != BF16) {
      shared.a_scales[threadIdx.x / TILE_TOKENS][threadIdx.x % TILE_TOKENS] = stage.a_scale;
#pragma unroll
      for (int s = 0; s < Format<BLOCK>::SCALES; s++) w_scales[s] = stage.w_scales[s];
    }
    __syncthreads();
    if (k0 + TILE_K < p.cols) load_stage<BLOCK>(p, tile, k0 + TILE_K, stage);

#pragma unroll
    for (int k = 0; k < TILE_K; k += 16) {
      multiply_step<BLOCK>(shared, tile, k, BLOCK == BF16 ? sums : dots);
      if constexpr (BLOCK == 32)
        if (k % 32 == 16) promote(shared, tile, k / 32, w_scales[k / 32], dots, sums);
    }
    if constexpr (BLOCK == 128)
      if (k0 % 128 == 64) promote(shared, tile, 0, w_scales[0], dots, sums);
  }
  store_sums(p, tile, pairs, sums);
}

}  // namespace

extern "C" cudaError_t cuda_launch_project(const cuda_product *product, cudaStream_t stream) {
  const cuda_product &p = *product;
  if (p.tokens == 0) return cudaSuccess;
  if (p.call_tokens <= CUDA_SMALL_TOKENS) return cuda_launch_project_small(product, stream);
  dim3 grid(ceil_div(p.tokens, TILE_TOKENS), ceil_div(p.rows, TILE_ROWS), p.groups);
  if (p.dtype == OPROJ_DTYPE_BF16) return launch(project_kernel<BF16>, grid, THREADS, p, stream);
  return p.block == 32 ? launch(project_kernel<32>, grid, THREADS, p, stream)
                       : launch(project_kernel<128>, grid, THREADS, p, stream);
}
