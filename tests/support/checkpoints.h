/* checkpoints.h - a checkpoint small enough to write by hand: three groups of one head, so that two
 * ranks share unevenly, and a width that is no multiple of the block size. */
#ifndef TESTS_SUPPORT_CHECKPOINTS_H
#define TESTS_SUPPORT_CHECKPOINTS_H

#include <stdint.h>

#include "files.h"

enum {
  SMALL_HIDDEN = 200,
  SMALL_GROUPS = 3,
  SMALL_D = 128,    /* one head of 128 per group */
  SMALL_RANK = 128, /* o_lora_rank */
  SMALL_Z = 384,
  SMALL_BLOCK = 128,
  SMALL_LAYERS = 2, /* compress ratios 0, 4 */
  SMALL_TENSORS = 4 /* WO_A, its scale, WO_B, its scale */
};

/* One layer's bytes as a file holds them; scales are ue8m0. */
typedef struct small_layer {
  uint8_t a[SMALL_Z * SMALL_D], a_scale[3 * 1];
  uint8_t b[SMALL_HIDDEN * SMALL_Z], b_scale[2 * 3];
} small_layer;

extern const char small_config[];

/* Values that differ from place to place and from layer to layer. */
void small_fill(small_layer *layer, unsigned seed);

/* The layer's tensors under names base_a + ".weight" and base_a + suffix, and so for b.  The names
 * are put into `names`. */
void small_tensors(const small_layer *layer, const char *base_a, const char *base_b,
                   const char *suffix, char names[SMALL_TENSORS][128],
                   files_tensor out[SMALL_TENSORS]);

/* config.json and model.safetensors with both layers under released names. */
void small_write(const char *dir, small_layer layers[SMALL_LAYERS]);

/* ---- for up to eight ranks ------------------------------------------------------------------ */

enum {
  WIDE_HIDDEN = 200,
  WIDE_GROUPS = 8,
  WIDE_D = 128,
  WIDE_Z = 1024,
  WIDE_LAYERS = 5 /* WO_A of layer 1 is BF16; scales of layer 2 are F32 */
};

/* config.json and WIDE_LAYERS layers in two files with an index, data beginning at odd bytes.  All
 * values depend on the seed. */
void wide_write(const char *dir, unsigned seed);

#endif /* TESTS_SUPPORT_CHECKPOINTS_H */
