/* decode.c - how the decode kernel's work shares out to a device's blocks.  Pure: the choice
 * of a path asks it where there is no GPU, the kernel's host code where there is one. */
#include "kernels/kernels.h"

enum {
  TILE = OPROJ_KERNELS_DECODE_TILE,
  BATCH = 2,      /* slots that the kernel multiplies at a time */
  ROWS_STEP = 8,  /* of WO_B: the swizzle's pattern repeats */
  ROOMY_SLOTS = 8 /* of WO_A: the input of 32 tokens takes 32 KB of codes */
};

/* What measurements on an H200 say (bench/README.md, "Why the decode kernel stops where it does"),
 * by the slots of weights that a block goes through, WO_A's and WO_B's.
 *
 * window: 32 KB on their way hide the memory's latency, and what is more delays the loads that a
 * short launch waits for; long ones gain by a deeper queue.
 * tokens: beyond, every block's receiving all of z costs more than launches do; with blocks of 32,
 * scaling its sums does so sooner. */
typedef struct measured {
  int32_t slots; /* up to so many */
  int32_t window;
  int32_t tokens_128, tokens_32; /* in blocks of 128 and of 32 */
} measured;

static const measured measurements[] = {
    {8, 2, 32, 16},       /* V4-Flash and V4.1-Flash at 8 ranks, V4-Pro at 16 */
    {16, 2, 16, 8},       /* the Flash models at 4, V4-Pro at 8 */
    {24, 3, 16, 8},       /* the Flash models at 2, V4-Pro at 4 */
    {48, 3, 8, 8},        /* the Flash models at 1, V4-Pro at 2 */
    {INT32_MAX, 4, 4, 4}, /* V4-Pro at 1 */
};

static const measured *measured_of(int32_t slots) {
  const measured *m = measurements;
  while (slots > m->slots) m++;
  return m;
}

static int32_t ceil_div(int32_t a, int32_t b) {
  return (a + b - 1) / b;
}

/* Shared memory holds the input of a block's part of WO_A beside the rings. */
static int32_t most_tokens(int32_t a_slots) {
  return a_slots <= ROOMY_SLOTS ? OPROJ_KERNELS_DECODE_TOKENS : OPROJ_KERNELS_DECODE_TOKENS / 2;
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
  int32_t a_slots = group_cols / TILE / s.split;
  const measured *m = measured_of(a_slots + z_cols / (2 * TILE));
  s.most = most_tokens(a_slots);
  s.window = m->window;
  s.tokens = dims->quant_block == 128 ? m->tokens_128 : m->tokens_32;
  *out = s;
  return NULL;
}
