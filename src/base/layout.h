/* layout.h - where the scale of (group, token, block) lies in each layout of oproj_scale_layout.
 *
 * Plain C11 that nvcc also takes as device code.  `columns` is S = ceil(K/block), the scale columns
 * of one group. */
#ifndef OPROJ_BASE_LAYOUT_H
#define OPROJ_BASE_LAYOUT_H

#include "base/num.h"
#include "oproj.h"

enum { OPROJ_TILE_TOKENS = 128, OPROJ_TILE_COLUMNS = 4, OPROJ_TILE_BYTES = 512 };

OPROJ_NUM_FN int64_t oproj_layout_aligned_tokens(int64_t tokens) {
  return (tokens + 3) / 4 * 4;
}

/* OPROJ_SCALE_F32: index of the float. */
OPROJ_NUM_FN int64_t oproj_layout_f32(int64_t group, int64_t token, int64_t column, int64_t tokens,
                                      int64_t columns) {
  return (group * columns + column) * oproj_layout_aligned_tokens(tokens) + token;
}

/* OPROJ_SCALE_UE8M0_PACKED: index of the byte; the 32-bit words are little-endian. */
OPROJ_NUM_FN int64_t oproj_layout_packed(int64_t group, int64_t token, int64_t column,
                                         int64_t tokens, int64_t columns) {
  int64_t words = (columns + 3) / 4;
  int64_t word = (group * words + column / 4) * oproj_layout_aligned_tokens(tokens) + token;
  return word * 4 + column % 4;
}

/* OPROJ_SCALE_UE8M0_TILE: index of the byte. */
OPROJ_NUM_FN int64_t oproj_layout_tile(int64_t group, int64_t token, int64_t column, int64_t tokens,
                                       int64_t columns) {
  int64_t tile_rows = (tokens + OPROJ_TILE_TOKENS - 1) / OPROJ_TILE_TOKENS;
  int64_t tile_columns = (columns + OPROJ_TILE_COLUMNS - 1) / OPROJ_TILE_COLUMNS;
  int64_t tile =
      (group * tile_rows + token / OPROJ_TILE_TOKENS) * tile_columns + column / OPROJ_TILE_COLUMNS;
  return tile * OPROJ_TILE_BYTES + token % 32 * 16 + token % OPROJ_TILE_TOKENS / 32 * 4 +
         column % OPROJ_TILE_COLUMNS;
}

/* Bytes of all scales of one activation, padding included; -1 for an unknown layout. */
OPROJ_NUM_FN int64_t oproj_layout_bytes(oproj_scale_layout layout, int64_t groups, int64_t tokens,
                                        int64_t columns) {
  int64_t words = (columns + 3) / 4;
  switch (layout) {
    case OPROJ_SCALE_F32:
      return groups * columns * oproj_layout_aligned_tokens(tokens) * 4;
    case OPROJ_SCALE_UE8M0_PACKED:
      return groups * words * oproj_layout_aligned_tokens(tokens) * 4;
    case OPROJ_SCALE_UE8M0_TILE:
      return groups * words * ((tokens + OPROJ_TILE_TOKENS - 1) / OPROJ_TILE_TOKENS) *
             OPROJ_TILE_BYTES;
  }
  return -1;
}

/* Writes one block's scale. */
OPROJ_NUM_FN void oproj_layout_store(void *scales, oproj_scale_layout layout, int64_t group,
                                     int64_t token, int64_t column, int64_t tokens, int64_t columns,
                                     uint8_t exponent) {
  switch (layout) {
    case OPROJ_SCALE_F32:
      ((float *)scales)[oproj_layout_f32(group, token, column, tokens, columns)] =
          oproj_ue8m0_to_f32(exponent);
      break;
    case OPROJ_SCALE_UE8M0_PACKED:
      ((uint8_t *)scales)[oproj_layout_packed(group, token, column, tokens, columns)] = exponent;
      break;
    case OPROJ_SCALE_UE8M0_TILE:
      ((uint8_t *)scales)[oproj_layout_tile(group, token, column, tokens, columns)] = exponent;
      break;
  }
}

/* Reads one block's scale. */
OPROJ_NUM_FN float oproj_layout_load(const void *scales, oproj_scale_layout layout, int64_t group,
                                     int64_t token, int64_t column, int64_t tokens,
                                     int64_t columns) {
  switch (layout) {
    case OPROJ_SCALE_F32:
      return ((const float *)scales)[oproj_layout_f32(group, token, column, tokens, columns)];
    case OPROJ_SCALE_UE8M0_PACKED:
      return oproj_ue8m0_to_f32(
          ((const uint8_t *)scales)[oproj_layout_packed(group, token, column, tokens, columns)]);
    case OPROJ_SCALE_UE8M0_TILE:
      return oproj_ue8m0_to_f32(
          ((const uint8_t *)scales)[oproj_layout_tile(group, token, column, tokens, columns)]);
  }
  return 0.0f;
}

#endif /* OPROJ_BASE_LAYOUT_H */
