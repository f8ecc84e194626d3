/* decode.c - how the decode kernel's work shares out to a device's blocks.  Pure: the choice
 * of a path asks it where there is no GPU, the kernel's host code where there is one. */
#include "kernels/kernels.h"

enum {
  TILE = OPROJ_KERNELS_DECODE_TILE,
  BATCH = 2,     /* slots that the kernel multiplies at a time */
  ROWS_STEP = 8, /* of WO_B: the swizzle's pattern repeats */
  /* Slots of weights per block at which measurements on an H200 change their mind
   * (bench/README.md). */
  FEW_SLOTS = 8,
  SHORT_SLOTS = 16,
  MIDDLE_SLOTS = 24,
  LONG_SLOTS = 48
};

static int32_t ceil_div(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}

/* 32 KB on their way hide the memory's latency, and what is more delays the loads that a short
 * launch waits for; long ones gain by a deeper queue. */
static int32_t window_of(int32_t slots) {
  return slots <= SHORT_SLOTS ? 2 : slots <= LONG_SLOTS ? 3 : 4;
}

/* Shared memory holds the input of a block's part of WO_A beside the rings. */
static int32_t most_tokens(int32_t a_slots) {
  return a_slots <= FEW_SLOTS ? OPROJ_KERNELS_DECODE_TOKENS : OPROJ_KERNELS_DECODE_TOKENS / 2;
}

/* Beyond, every block's receiving all of z costs more than launches do; with blocks of 32, scaling
 * its sums does so sooner. */
static int32_t fastest_tokens(int32_t slots, int32_t block) {
  int32_t most = block == 128 ? OPROJ_KERNELS_DECODE_TOKENS : OPROJ_KERNELS_DECODE_TOKENS / 2;
  if (slots <= FEW_SLOTS) return most;
  return slots <= MIDDLE_SLOTS ? most / 2 : slots <= LONG_SLOTS ? 8 : 4;
}

const char *oproj_kernels_decode_shape(const oproj_dims *dims, int32_t groups, int32_t resident,
                                       oproj_kernels_decode *out) {
  int32_t group_cols = dims->heads / dims->groups * dims->head_dim;
  int32_t z_cols = groups * dims->lora_rank;
  *out = (oproj_kernels_decode){0};
  if (dims->head_dim != OPROJ_KERNELS_HEAD_DIM || dims->rope_dim != OPROJ_KERNELS_ROPE_DIM)
    return "heads are not of 448 + 64 values";
  if (dims->lora_rank % TILE != 0) return "o_lora_rank is no multiple of 128";
  if (z_cols % (2 * BATCH * TILE) != 0 || dims->hidden % ROWS_STEP != 0)
    return "z is no multiple of 512 columns, or hidden none of 8";
  if (group_cols % (BATCH * TILE) != 0) return "a group's heads are no multiple of 256 values";
  oproj_kernels_decode s = {.tiles = z_cols / TILE, .split = 1};
  if (s.tiles > resident) return "WO_A has more rows than the device's blocks hold at once";
  while (s.split < OPROJ_KERNELS_DECODE_SPLIT && s.tiles * s.split * 2 <= resident &&
         group_cols % (BATCH * TILE * s.split * 2) == 0) {
    s.split *= 2;
    s.log2_split++;
  }
  s.out_rows = ceil_div(ceil_div(dims->hidden, resident), ROWS_STEP) * ROWS_STEP;
  if (s.out_rows > OPROJ_KERNELS_DECODE_OUT_ROWS)
    return "WO_B has more rows than the device's blocks hold at once";
  int32_t out_blocks = ceil_div(dims->hidden, s.out_rows);
  s.blocks = s.tiles * s.split > out_blocks ? s.tiles * s.split : out_blocks;
  int32_t a_slots = group_cols / TILE / s.split, slots = a_slots + z_cols / (2 * TILE);
  s.most = most_tokens(a_slots);
  s.window = window_of(slots);
  s.tokens = fastest_tokens(slots, dims->quant_block);
  *out = s;
  return NULL;
}
