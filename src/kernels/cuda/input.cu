/* input.cu - inverse RoPE and block quantisation of the input, and the quantisation of z.
 *
 *   input_quantize_kernel  attn_out bf16 [T, heads, head_dim] by strides, or a part of its tokens
 *                            -> codes e4m3 [groups, T, D], scales [groups, T, D/block] by layout
 *   input_rotate_kernel    the same input -> x bf16 [groups, T, D]
 *   z_quantize_kernel      z bf16 [T, cols] -> codes e4m3 [T, cols], scales [1, T, cols/block]
 *
 * Grid: x over tokens, y over 8 heads (a warp each) or 8 strips of 256 columns of z.  A lane holds
 * 8 consecutive values (16 bytes), so a quantisation block is 16 lanes (128) or 4 lanes (32) and
 * its maximum takes 4 or 2 shuffles.  All threads of the grid share the zeroing of the scales'
 * padding.
 * Bound: bytes, 3 per value quantised and 4 per value rotated.
 *
 * All arithmetic is num.h's, hence the reference's bits. */
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/input.cuh"

namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int STRIP = WARP * LANE_VALUES; /* values that a warp holds at once */

/* ---- one warp's head ----------------------------------------------------------------------- */

struct Head {
  int32_t token, group, column; /* token: of the part; column: of the first value in [0, D) */
  const uint16_t *values;
  const float *table;
};

/* False past the last head. */
__device__ __forceinline__ bool find_head(const cuda_input &p, Head *head) {
  int32_t h = static_cast<int32_t>(blockIdx.y) * WARPS + threadIdx.x / WARP;
  if (h >= p.heads) return false;
  head->token = static_cast<int32_t>(blockIdx.x);
  int32_t token = token_of(p, head->token);
  head->group = h / p.heads_per_group;
  head->column = h % p.heads_per_group * p.head_dim;
  head->values = p.attn_out + token * p.token_stride + h * p.head_stride;
  head->table = table_row(p, token, h == 0 && threadIdx.x % WARP == 0);
  return true;
}

template <bool VECTOR>
__device__ __forceinline__ void load_values(const uint16_t *from, uint16_t (&raw)[LANE_VALUES]) {
  if (VECTOR) {
    uint4 loaded = __ldg(reinterpret_cast<const uint4 *>(from));
    memcpy(raw, &loaded, sizeof raw);
  } else {
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) raw[i] = __ldg(from + i);
  }
}

/* A lane's values from dimension `begin` on, turned back where they are rotated.  `begin` and the
 * first rotated dimension are even, so pairs are never cut. */
template <bool VECTOR>
__device__ __forceinline__ void rotated_values(const cuda_input &p, const Head &head, int32_t begin,
                                               float (&out)[LANE_VALUES]) {
  uint16_t raw[LANE_VALUES];
  load_values<VECTOR>(head.values + begin, raw);
  int32_t rope_begin = p.head_dim - p.rope_dim, half = p.rope_dim / 2;
#pragma unroll
  for (int i = 0; i < LANE_VALUES; i += 2) {
    float x0 = oproj_num_input(raw[i]), x1 = oproj_num_input(raw[i + 1]);
    if (!head.table) {
      out[i] = out[i + 1] = oproj_num_from_bits(0x7FC00000u);
    } else if (begin + i < rope_begin) {
      out[i] = x0;
      out[i + 1] = x1;
    } else {
      int32_t pair = (begin + i - rope_begin) / 2;
      oproj_num_unrotate(x0, x1, __ldg(head.table + pair), __ldg(head.table + half + pair), &out[i],
                         &out[i + 1]);
    }
  }
}

/* ---- quantisation -------------------------------------------------------------------------- */

__device__ __forceinline__ void clear_scale(void *scales, oproj_scale_layout layout, int64_t group,
                                            int64_t token, int64_t column, int64_t tokens,
                                            int64_t columns) {
  if (layout == OPROJ_SCALE_F32)
    static_cast<float *>(scales)[oproj_layout_f32(group, token, column, tokens, columns)] = 0.0f;
  else if (layout == OPROJ_SCALE_UE8M0_PACKED)
    static_cast<uint8_t *>(scales)[oproj_layout_packed(group, token, column, tokens, columns)] = 0;
  else
    static_cast<uint8_t *>(scales)[oproj_layout_tile(group, token, column, tokens, columns)] = 0;
}

/* Zeroes the padding of every layout: rows from `tokens` on, then the unused bytes of the last word
 * of each live row.  Shared out over the whole grid. */
__device__ void clear_padding(void *scales, oproj_scale_layout layout, int64_t groups,
                              int64_t tokens, int64_t columns) {
  int64_t all_tokens = layout == OPROJ_SCALE_UE8M0_TILE
                           ? ceil_div<int64_t>(tokens, OPROJ_TILE_TOKENS) * OPROJ_TILE_TOKENS
                           : oproj_layout_aligned_tokens(tokens);
  int64_t all_columns = layout == OPROJ_SCALE_F32 ? columns : ceil_div<int64_t>(columns, 4) * 4;
  int64_t spare_tokens = all_tokens - tokens, spare_columns = all_columns - columns;
  int64_t blocks = static_cast<int64_t>(gridDim.x) * gridDim.y, step = blocks * THREADS;
  int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  int64_t first = block * THREADS + threadIdx.x;
  for (int64_t i = first; i < groups * all_columns * spare_tokens; i += step) {
    int64_t token = tokens + i % spare_tokens, column = i / spare_tokens % all_columns;
    clear_scale(scales, layout, i / spare_tokens / all_columns, token, column, tokens, columns);
  }
  for (int64_t i = first; i < groups * spare_columns * tokens; i += step) {
    int64_t token = i % tokens, column = columns + i / tokens % spare_columns;
    clear_scale(scales, layout, i / tokens / spare_columns, token, column, tokens, columns);
  }
}

template <bool VECTOR>
__global__ void __launch_bounds__(THREADS) input_quantize_kernel(cuda_input p) {
  int lane = threadIdx.x % WARP, lanes = p.joined ? JOINED_LANES : p.block / LANE_VALUES;
  int64_t cols = static_cast<int64_t>(p.heads_per_group) * p.head_dim;
  int64_t columns = cols / (lanes * LANE_VALUES);
  clear_padding(p.scales, p.layout, p.heads / p.heads_per_group, p.tokens, columns);
  Head head;
  if (!find_head(p, &head)) return;

  uint8_t *codes =
      p.codes + (static_cast<int64_t>(head.group) * p.tokens + head.token) * cols + head.column;
#pragma unroll 2
  for (int32_t strip = 0; strip < p.head_dim; strip += STRIP) {
    int32_t begin = strip + lane * LANE_VALUES;
    bool live = begin < p.head_dim; /* the same for all lanes of a block */
    float values[LANE_VALUES] = {};
    if (live) rotated_values<VECTOR>(p, head, begin, values);
    uint2 packed;
    uint8_t exponent =
        p.joined ? quantize_joined(values, &packed) : quantize_values(values, lanes, &packed);
    if (!live) continue;
    *reinterpret_cast<uint2 *>(codes + begin) = packed;
    if (lane % lanes == 0)
      oproj_layout_store(p.scales, p.layout, head.group, head.token,
                         (head.column + begin) / (lanes * LANE_VALUES), p.tokens, columns,
                         exponent);
  }
}

/* ---- heads of 448 + 64, scales in f32: the shape of the released models -------------------- */

constexpr int STRIPS = HEAD_DIM / STRIP; /* 16-byte loads of a lane per head */
constexpr int FIRST_ROPE_LANE = WARP - ROPE_DIM / LANE_VALUES; /* of the last strip */

/* A warp takes HEADS consecutive heads of one token, all loads in flight at once; a block takes 8
 * consecutive tokens, so that each 32-byte sector of scales is written by one block, once. */
template <int BLOCK, bool JOINED, int HEADS>
__global__ void __launch_bounds__(THREADS) input_quantize_heads_kernel(cuda_input p) {
  constexpr int BLOCK_LANES = JOINED ? JOINED_LANES : BLOCK / LANE_VALUES; /* with one scale */
  constexpr int BLOCKS = HEAD_DIM / LANE_VALUES / BLOCK_LANES, STRIP_BLOCKS = WARP / BLOCK_LANES;
  __shared__ float scales[HEADS * BLOCKS][WARPS];
  let_successors_start();
  wait_for_predecessors();
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first_head = blockIdx.x * HEADS;
  int32_t token = blockIdx.y * WARPS + warp;
  bool live = token < p.tokens, rotates = lane >= FIRST_ROPE_LANE;
  int64_t cols = static_cast<int64_t>(p.heads_per_group) * HEAD_DIM;
  int group = first_head / p.heads_per_group, head_in_group = first_head % p.heads_per_group;

  uint4 raw[HEADS][STRIPS];
  float4 cos = {}, sin = {};
  if (live) {
    int32_t source = token_of(p, token);
    const uint16_t *from = p.attn_out + source * p.token_stride + first_head * p.head_stride;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++)
        raw[h][strip] =
            __ldg(reinterpret_cast<const uint4 *>(from + h * p.head_stride + strip * STRIP) + lane);
    }
    const float *row = table_row(p, source, first_head == 0 && lane == 0);
    float nan = oproj_num_from_bits(0x7FC00000u);
    if (!row) {
      cos = sin = make_float4(nan, nan, nan, nan);
    } else if (rotates) {
      int pair = (lane - FIRST_ROPE_LANE) * LANE_VALUES / 2;
      cos = __ldg(reinterpret_cast<const float4 *>(row + pair));
      sin = __ldg(reinterpret_cast<const float4 *>(row + ROPE_DIM / 2 + pair));
    }
    uint8_t *codes = p.codes + (static_cast<int64_t>(group) * p.tokens + token) * cols +
                     head_in_group * HEAD_DIM + lane * LANE_VALUES;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
#pragma unroll
      for (int strip = 0; strip < STRIPS; strip++) {
        float values[LANE_VALUES];
        unpack_values(raw[h][strip], values);
        if (strip == STRIPS - 1 && rotates) unrotate_values(values, cos, sin);
        if (!row) values[0] = nan;
        uint2 packed;
        uint8_t exponent = JOINED ? quantize_joined(values, &packed)
                                  : quantize_values(values, BLOCK_LANES, &packed);
        *reinterpret_cast<uint2 *>(codes + h * HEAD_DIM + strip * STRIP) = packed;
        if (lane % BLOCK_LANES == 0)
          scales[h * BLOCKS + strip * STRIP_BLOCKS + lane / BLOCK_LANES][warp] =
              oproj_ue8m0_to_f32(exponent);
      }
    }
  }
  __syncthreads();

  int64_t aligned = oproj_layout_aligned_tokens(p.tokens);
  float *to = static_cast<float *>(p.scales) +
              (group * p.heads_per_group + head_in_group) * BLOCKS * aligned + blockIdx.y * WARPS;
  for (int i = threadIdx.x; i < HEADS * BLOCKS * WARPS; i += THREADS) {
    int row = i / WARPS, column = i % WARPS;
    int64_t t = static_cast<int64_t>(blockIdx.y) * WARPS + column;
    if (t < aligned) to[row * aligned + column] = t < p.tokens ? scales[row][column] : 0.0f;
  }
}

template <bool VECTOR>
__global__ void __launch_bounds__(THREADS) input_rotate_kernel(cuda_input p) {
  Head head;
  if (!find_head(p, &head)) return;
  int64_t cols = static_cast<int64_t>(p.heads_per_group) * p.head_dim;
  uint16_t *row =
      p.x + (static_cast<int64_t>(head.group) * p.tokens + head.token) * cols + head.column;
#pragma unroll 2
  for (int32_t begin = threadIdx.x % WARP * LANE_VALUES; begin < p.head_dim; begin += STRIP) {
    float values[LANE_VALUES];
    rotated_values<VECTOR>(p, head, begin, values);
    uint16_t rounded[LANE_VALUES];
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) rounded[i] = oproj_bf16_from_f32(values[i]);
    uint4 packed;
    memcpy(&packed, rounded, sizeof packed);
    *reinterpret_cast<uint4 *>(row + begin) = packed;
  }
}

__global__ void __launch_bounds__(THREADS) z_quantize_kernel(cuda_z p) {
  int lane = threadIdx.x % WARP, lanes = p.joined ? JOINED_LANES : p.block / LANE_VALUES;
  int32_t columns = p.cols / (lanes * LANE_VALUES);
  clear_padding(p.scales, p.layout, 1, p.tokens, columns);
  int64_t token = blockIdx.x;
  int32_t begin = (static_cast<int32_t>(blockIdx.y) * THREADS + threadIdx.x) * LANE_VALUES;
  bool live = begin < p.cols;
  float values[LANE_VALUES] = {};
  if (live) {
    uint16_t raw[LANE_VALUES];
    load_values<true>(p.z + token * p.cols + begin, raw);
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) values[i] = oproj_bf16_to_f32(raw[i]);
  }
  uint2 packed;
  uint8_t exponent =
      p.joined ? quantize_joined(values, &packed) : quantize_values(values, lanes, &packed);
  if (!live) return;
  *reinterpret_cast<uint2 *>(p.codes + token * p.cols + begin) = packed;
  if (lane % lanes == 0)
    oproj_layout_store(p.scales, p.layout, 0, token, begin / (lanes * LANE_VALUES), p.tokens,
                       columns, exponent);
}

/* ---- launching ----------------------------------------------------------------------------- */

dim3 grid_of(int32_t tokens, int32_t warps) {
  return dim3(tokens, ceil_div(warps, WARPS));
}

/* Padded buffers of attention engines may have any stride; 16-byte loads need multiples of 8. */
bool loads_vectors(const cuda_input &p) {
  return reinterpret_cast<uintptr_t>(p.attn_out) % 16 == 0 && p.token_stride % LANE_VALUES == 0 &&
         p.head_stride % LANE_VALUES == 0;
}

bool takes_heads(const cuda_input &p) {
  constexpr int MOST_TOKENS = 65535 * WARPS; /* of a grid's second dimension */
  return p.head_dim == HEAD_DIM && p.rope_dim == ROPE_DIM && p.layout == OPROJ_SCALE_F32 &&
         p.tokens <= MOST_TOKENS && loads_vectors(p) &&
         reinterpret_cast<uintptr_t>(p.cos_sin) % 16 == 0;
}

template <int BLOCK, bool JOINED>
cudaError_t launch_heads(const cuda_input &p, cudaStream_t stream) {
  constexpr int MANY_HEADS = 4, FEW_BLOCKS = 2048; /* up to here latency counts, beyond bandwidth */
  dim3 grid(p.heads, ceil_div(p.tokens, WARPS));
  if (grid.x * grid.y <= FEW_BLOCKS || p.heads_per_group % MANY_HEADS != 0)
    return launch(input_quantize_heads_kernel<BLOCK, JOINED, 1>, grid, THREADS, p, stream,
                  p.dependent != 0);
  grid.x = p.heads / MANY_HEADS;
  return launch(input_quantize_heads_kernel<BLOCK, JOINED, MANY_HEADS>, grid, THREADS, p, stream,
                p.dependent != 0);
}

}  // namespace

extern "C" cudaError_t cuda_launch_input_quantize(const cuda_input *input, cudaStream_t stream) {
  if (input->tokens == 0) return cudaSuccess;
  if (takes_heads(*input))
    return input->block == 128 ? launch_heads<128, false>(*input, stream)
           : input->joined     ? launch_heads<32, true>(*input, stream)
                               : launch_heads<32, false>(*input, stream);
  dim3 grid = grid_of(input->tokens, input->heads);
  return loads_vectors(*input)
             ? launch(input_quantize_kernel<true>, grid, THREADS, *input, stream)
             : launch(input_quantize_kernel<false>, grid, THREADS, *input, stream);
}

extern "C" cudaError_t cuda_launch_input_rotate(const cuda_input *input, cudaStream_t stream) {
  if (input->tokens == 0) return cudaSuccess;
  dim3 grid = grid_of(input->tokens, input->heads);
  return loads_vectors(*input) ? launch(input_rotate_kernel<true>, grid, THREADS, *input, stream)
                               : launch(input_rotate_kernel<false>, grid, THREADS, *input, stream);
}

extern "C" cudaError_t cuda_launch_z_quantize(const cuda_z *z, cudaStream_t stream) {
  if (z->tokens == 0) return cudaSuccess;
  dim3 grid = grid_of(z->tokens, ceil_div(z->cols, STRIP));
  return launch(z_quantize_kernel, grid, THREADS, *z, stream);
}
