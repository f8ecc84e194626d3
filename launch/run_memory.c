/* run_memory.c - owns the estimate of a run's memory.  It follows what cmd_run.c, run_input.c,
 * run_check.c and the reference backend's workspace allocate per token; whoever adds a buffer there
 * counts it here. */
#include "run_memory.h"

#include <stddef.h>
#include <unistd.h>

/* Widths of one token. */
typedef struct widths {
  int64_t in, z, y; /* elements: all heads, all groups, hidden */
  int64_t group;    /* of in: one group's */
  int64_t position; /* bytes: positions, rows, distinct and the device's rows */
  int64_t rope, block;
} widths;

/* The reference backend, for all heads: x bf16, its codes, z bf16, its codes, and f32 scales. */
static int64_t workspace(const widths *w) {
  return w->in * 2 + w->in + w->z * 2 + w->z + (w->in + w->z) / w->block * 4;
}

/* run_check.c: the whole input, its own context, and everything in double. */
static int64_t of_check(const widths *w) {
  int64_t codes = w->in * 2 + w->in + w->z + (w->in + w->z) / w->block * 4;
  int64_t doubles = (w->z + w->y) * 8, rounded = (w->z + w->y) * 2;
  int64_t row = (w->group > w->z ? w->group : w->z) * 8; /* the operand being multiplied */
  return w->in * 2 + w->position + workspace(w) + codes + doubles + rounded + row;
}

int64_t run_memory_per_token(const oproj_model *model, int32_t ranks, bool check) {
  const oproj_dims *d = &model->dims;
  const widths w = {.in = (int64_t)d->heads * d->head_dim,
                    .z = (int64_t)d->groups * d->lora_rank,
                    .y = d->hidden,
                    .group = (int64_t)d->heads / d->groups * d->head_dim,
                    .position = 4 * (int64_t)sizeof(int64_t),
                    .rope = d->rope_dim,
                    .block = d->quant_block};
  /* Heads and groups are dealt to the ranks; positions, tables and y are each rank's own. */
  int64_t dealt = w.in * 2 * 2 + workspace(&w);
  int64_t table = w.rope * (int64_t)sizeof(float) * 2 * 2; /* plain, compressed; host, device */
  int64_t each = w.y * 2 * 2 + w.position + table;
  return dealt + ranks * each + w.y * 2 + (check ? of_check(&w) : 0);
}

int32_t run_memory_layers(int32_t layers, int64_t layer_bytes) {
  int64_t memory = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
  int64_t fitting = layer_bytes > 0 ? memory / 2 / layer_bytes : layers;
  return fitting >= layers ? layers : fitting > 1 ? (int32_t)fitting : 1;
}
