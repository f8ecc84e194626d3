/* cublaslt_tiles.cu - f32 scales as the 32-block ue8m0 tiles of SM100's tensor cores.
 *
 * Four columns are what a tile is wide, a word: four scales of blocks of 32, or that of one block
 * of 128, which is four of 32, four times.  Grid: x over tiles of 128 rows, y over words, z over
 * groups; a thread a word.  Bound: launch. */
#include "base/layout.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/device.cuh"

namespace {

__global__ void __launch_bounds__(OPROJ_TILE_TOKENS) tiles_kernel(cuda_tiles p) {
  int64_t row = static_cast<int64_t>(blockIdx.x) * OPROJ_TILE_TOKENS + threadIdx.x;
  int64_t group = blockIdx.z, first = static_cast<int64_t>(blockIdx.y) * OPROJ_TILE_COLUMNS;
  int64_t columns = static_cast<int64_t>(gridDim.y) * OPROJ_TILE_COLUMNS;
  uint32_t word = 0;
  if (row < p.rows) {
    const float *scales = p.scales + group * p.group_stride + row / p.rows_per_scale * p.row_stride;
    for (int i = 0; i < OPROJ_TILE_COLUMNS; i++) {
      int64_t column = (first + i) / p.columns_per_scale;
      word |= (__float_as_uint(scales[column * p.column_stride]) >> 23 & 0xFFu) << 8 * i;
    }
  }
  p.tiles[oproj_layout_tile(group, row, first, p.rows, columns) / OPROJ_TILE_COLUMNS] = word;
}

}  // namespace

extern "C" cudaError_t cuda_launch_tiles(const cuda_tiles *p, cudaStream_t stream) {
  dim3 grid(ceil_div(p->rows, static_cast<int32_t>(OPROJ_TILE_TOKENS)), p->words, p->groups);
  return launch(tiles_kernel, grid, OPROJ_TILE_TOKENS, *p, stream);
}
