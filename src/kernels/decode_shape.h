/* decode_shape.h - who does what in the kernel that takes a few tokens through the whole chain in
 * one launch (cuda/sm90_decode.cuh). */
#ifndef OPROJ_KERNELS_DECODE_SHAPE_H
#define OPROJ_KERNELS_DECODE_SHAPE_H

#include "oproj.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  OPROJ_DECODE_TOKENS = 16,  /* most tokens of a launch */
  OPROJ_DECODE_SPLIT = 16,   /* most blocks that share a tile of WO_A */
  OPROJ_DECODE_OUT_ROWS = 64 /* most rows of WO_B of a block: an instruction's */
};

typedef struct oproj_decode_shape {
  int32_t blocks;            /* all of them must be resident at once */
  int32_t tiles;             /* WO_A: of 128 rows */
  int32_t split, log2_split; /* blocks that share a tile's K */
  int32_t out_rows;          /* WO_B: rows of a block, a multiple of 8 */
  int32_t window; /* slots of weights, 16 KB each, that a block has on their way at a time */
} oproj_decode_shape;

/* For a rank that holds `groups`, on a device that holds `resident` such blocks at once.  NULL, or
 * why the kernel cannot serve (out is then all zero); static storage. */
const char *oproj_kernels_decode_shape(const oproj_dims *dims, int32_t groups, int32_t resident,
                                       oproj_decode_shape *out);

#ifdef __cplusplus
}
#endif

#endif /* OPROJ_KERNELS_DECODE_SHAPE_H */
