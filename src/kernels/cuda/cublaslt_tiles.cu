/* cublaslt_tiles.cu - 128-block f32 scales as the 32-block ue8m0 tiles of SM100's tensor cores.
 *
 * A 128-block is four 32-blocks of one scale, and four columns are what a tile is wide: so a scale
 * becomes one word of four equal bytes.  Grid: x over tiles of 128 rows, y over columns, z over
 * groups; a thread a word.  Bound: launch. */
#include "base/layout.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/device.cuh"

namespace {

__global__ void __launch_bounds__(OPROJ_TILE_TOKENS) tiles_kernel(cuda_tiles p) {
  constexpr uint32_t FOUR_TIMES = 0x01010101u;
  int64_t row = static_cast<int64_t>(blockIdx.x) * OPROJ_TILE_TOKENS + threadIdx.x;
  int64_t column = blockIdx.y, group = blockIdx.z;
  uint32_t exponent = 0;
  if (row < p.rows) {
    int64_t at =
        group * p.group_stride + row / p.rows_per_scale * p.row_stride + column * p.column_stride;
    exponent = __float_as_uint(p.scales[at]) >> 23 & 0xFFu;
  }
  int64_t byte = oproj_layout_tile(group, row, column * OPROJ_TILE_COLUMNS, p.rows,
                                   static_cast<int64_t>(p.columns) * OPROJ_TILE_COLUMNS);
  p.tiles[byte / OPROJ_TILE_COLUMNS] = exponent * FOUR_TIMES;
}

}  // namespace

extern "C" cudaError_t cuda_launch_tiles(const cuda_tiles *p, cudaStream_t stream) {
  dim3 grid(ceil_div(p->rows, static_cast<int32_t>(OPROJ_TILE_TOKENS)), p->columns, p->groups);
  return launch(tiles_kernel, grid, OPROJ_TILE_TOKENS, *p, stream);
}
