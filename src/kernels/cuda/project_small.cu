/* project_small.cu - both projections for up to 8 tokens.
 *
 *   a [groups, T, cols] x w [groups * rows, cols]  ->  out bf16 [T, groups * rows]
 *
 * Grid: x over blocks of 32 rows of one group, y over groups.  A block is 8 warps, a warp 4 rows,
 * and its lanes split K: each takes 16 bytes of every row per step.  The activations of CHUNK
 * columns, widened to 16-bit floats, lie in shared memory for the block.  Weights of the next step
 * are in flight while this one is computed; each weight byte is read once.
 * A lane scales its own share of a K block, sums stay in f32, and a butterfly ends the row.
 * Bound: the weights' bytes; from about 6 tokens on the f32 multiply-adds come close.
 * A token has its own sums throughout, so a NaN stays in its token. */
#include "kernels/cuda/device.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROWS = 4; /* per warp; they share a row block of scales, as 4 divides 32 */
constexpr int BLOCK_ROWS = WARPS * ROWS;
constexpr int CHUNK = 2048; /* columns of activations held: 32 KB for 8 tokens */
constexpr int PART = 8;     /* products summed before they are scaled: a 16-byte read of a */
constexpr int MIN_BLOCK = 32;

static_assert(CUDA_SMALL_TOKENS * ROWS == WARP, "one output per lane");

template <bool FP8>
struct Piece { /* 16 bytes of a weight row */
  static constexpr int VALUES = FP8 ? 16 : 8;
  static constexpr int PARTS = VALUES / PART;
  static constexpr int STEP = WARP * VALUES; /* columns per warp and step */
  static constexpr int PER_CHUNK = CHUNK / VALUES;
};

/* Part p of piece i of a token lies at [p][i], so that neighbouring lanes read neighbouring 16
 * bytes. */
template <bool FP8, int TOKENS>
struct Staged {
  uint4 values[TOKENS][Piece<FP8>::PARTS][Piece<FP8>::PER_CHUNK];
  float scales[TOKENS][FP8 ? CHUNK / MIN_BLOCK : 1];
};

/* Columns [begin, begin + CHUNK); zeros past the last column and token. */
template <bool FP8, int TOKENS>
__device__ __forceinline__ void stage(const cuda_product &p, int32_t group, int32_t begin,
                                      Staged<FP8, TOKENS> &staged) {
  constexpr int PIECES = Piece<FP8>::PER_CHUNK, VALUES = Piece<FP8>::VALUES;
  for (int i = threadIdx.x; i < TOKENS * PIECES; i += THREADS) {
    int32_t token = i / PIECES, piece = i % PIECES, k = begin + piece * VALUES;
    uint4 loaded = make_uint4(0, 0, 0, 0);
    if (token < p.tokens && k < p.cols) {
      int64_t at = (static_cast<int64_t>(group) * p.tokens + token) * p.cols + k;
      loaded = __ldg(
          reinterpret_cast<const uint4 *>(static_cast<const char *>(p.a) + at * (16 / VALUES)));
    }
    if constexpr (FP8)
      widen_codes(loaded, staged.values[token][0][piece], staged.values[token][1][piece]);
    else
      staged.values[token][0][piece] = loaded;
  }
  if constexpr (FP8) {
    int32_t blocks = p.cols / p.block, first = begin / p.block, count = CHUNK / p.block;
    for (int i = threadIdx.x; i < TOKENS * count; i += THREADS) {
      int32_t token = i / count, b = i % count;
      staged.scales[token][b] =
          token < p.tokens && first + b < blocks
              ? oproj_layout_load(p.a_scales, p.layout, group, token, first + b, p.tokens, blocks)
              : 0.0f;
    }
  }
}

/* A lane's weights of one step, and the scale that they share. */
struct Weights {
  uint4 rows[ROWS];
  float scale;
};

struct WeightRows {
  const char *rows[ROWS];
  const float *scales; /* of their row block */
};

template <bool FP8>
__device__ __forceinline__ void load_weights(const cuda_product &p, const WeightRows &from,
                                             int32_t k, Weights &w) {
  w.scale = 0.0f;
#pragma unroll
  for (int r = 0; r < ROWS; r++) w.rows[r] = make_uint4(0, 0, 0, 0);
  if (k >= p.cols) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    w.rows[r] = __ldg(reinterpret_cast<const uint4 *>(from.rows[r] + k * (FP8 ? 1ll : 2ll)));
  if (FP8) w.scale = __ldg(from.scales + k / p.block);
}

/* Part `part` of 16 bytes of weights as floats. */
template <bool FP8>
__device__ __forceinline__ void weight_values(const uint4 &piece, int part, float (&out)[PART]) {
  if constexpr (FP8) {
    uint32_t words[2] = {part == 0 ? piece.x : piece.z, part == 0 ? piece.y : piece.w};
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
      float2 two = floats_of_halves(halves_of_codes(words[i / 2] >> (i % 2 * 16) & 0xFFFFu));
      out[2 * i] = two.x;
      out[2 * i + 1] = two.y;
    }
  } else {
    uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < PART / 2; i++) {
      float2 two = floats_of_bf16s(words[i]);
      out[2 * i] = two.x;
      out[2 * i + 1] = two.y;
    }
  }
}

template <bool FP8>
__device__ __forceinline__ void activation_values(const uint4 &part, float (&out)[PART]) {
  uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
  for (int i = 0; i < PART / 2; i++) {
    float2 two = FP8 ? floats_of_halves(words[i]) : floats_of_bf16s(words[i]);
    out[2 * i] = two.x;
    out[2 * i + 1] = two.y;
  }
}

template <bool FP8, int TOKENS>
__device__ __forceinline__ void multiply(const Weights &w, const Staged<FP8, TOKENS> &staged,
                                         int32_t piece, int32_t block,
                                         float (&sums)[TOKENS][ROWS]) {
#pragma unroll
  for (int part = 0; part < Piece<FP8>::PARTS; part++) {
    float weights[ROWS][PART];
#pragma unroll
    for (int r = 0; r < ROWS; r++) weight_values<FP8>(w.rows[r], part, weights[r]);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      float values[PART];
      activation_values<FP8>(staged.values[t][part][piece], values);
      float scale = 1.0f;
      if (FP8) scale = staged.scales[t][piece * Piece<FP8>::VALUES / block] * w.scale;
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float dot = 0.0f;
#pragma unroll
        for (int i = 0; i < PART; i++) dot += values[i] * weights[r][i];
        sums[t][r] += FP8 ? dot * scale : dot;
      }
    }
  }
}

/* Rows past the last one read the last one's weights and are not stored. */
template <bool FP8>
__device__ __forceinline__ WeightRows find_rows(const cuda_product &p, int32_t group,
                                                int32_t first_row) {
  WeightRows found = {};
  int64_t group_row = static_cast<int64_t>(group) * p.rows;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    int64_t row = group_row + min(first_row + r, p.rows - 1);
    found.rows[r] = static_cast<const char *>(p.w) + row * p.cols * (FP8 ? 1 : 2);
  }
  if (FP8)
    found.scales =
        p.w_scales + (group_row + min(first_row, p.rows - 1)) / p.block * (p.cols / p.block);
  return found;
}

template <bool FP8, int TOKENS>
__global__ void __launch_bounds__(THREADS, 2) project_small_kernel(cuda_product p) {
  __shared__ Staged<FP8, TOKENS> staged;
  constexpr int VALUES = Piece<FP8>::VALUES, STEP = Piece<FP8>::STEP;
  int lane = threadIdx.x % WARP;
  int32_t group = blockIdx.y;
  int32_t first_row = static_cast<int32_t>(blockIdx.x) * BLOCK_ROWS + threadIdx.x / WARP * ROWS;
  WeightRows rows = find_rows<FP8>(p, group, first_row);

  float sums[TOKENS][ROWS] = {};
  Weights now, next;
  load_weights<FP8>(p, rows, lane * VALUES, now);
  for (int32_t begin = 0; begin < p.cols; begin += STEP) {
    load_weights<FP8>(p, rows, begin + STEP + lane * VALUES, next);
    if (begin % CHUNK == 0) {
      __syncthreads();
      stage<FP8, TOKENS>(p, group, begin, staged);
      __syncthreads();
    }
    multiply<FP8, TOKENS>(now, staged, begin % CHUNK / VALUES + lane, p.block, sums);
    now = next;
  }

  float mine = 0.0f; /* lane t*ROWS + r keeps token t, row r */
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float sum = warp_sum(sums[t][r]);
      if (lane == t * ROWS + r) mine = sum;
    }
  }
  int32_t token = lane / ROWS, row = first_row + lane % ROWS;
  if (token >= p.tokens || row >= p.rows) return;
  int64_t at = token * p.out_stride + static_cast<int64_t>(group) * p.rows + row;
  p.out[at] = oproj_bf16_from_f32(mine + (p.addend ? p.addend[at] : 0.0f));
}

template <bool FP8>
cudaError_t launch_for_tokens(const cuda_product &p, dim3 grid, cudaStream_t stream) {
  if (p.tokens == 1) return launch(project_small_kernel<FP8, 1>, grid, THREADS, p, stream);
  if (p.tokens == 2) return launch(project_small_kernel<FP8, 2>, grid, THREADS, p, stream);
  if (p.tokens <= 4) return launch(project_small_kernel<FP8, 4>, grid, THREADS, p, stream);
  return launch(project_small_kernel<FP8, 8>, grid, THREADS, p, stream);
}

}  // namespace

extern "C" cudaError_t cuda_launch_project_small(const cuda_product *product, cudaStream_t stream) {
  dim3 grid(ceil_div(product->rows, BLOCK_ROWS), product->groups);
  return product->dtype == OPROJ_DTYPE_E4M3 ? launch_for_tokens<true>(*product, grid, stream)
                                            : launch_for_tokens<false>(*product, grid, stream);
}
