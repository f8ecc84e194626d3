/* load_plan.c - who reads which bytes of the layers, and the memory that takes. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/error.h"
#include "tp/load.h"

enum {
  CHUNK_BYTES = 8 << 20,     /* from here on longer reads gain nothing on disks and networks */
  SMALL_BYTES = 1 << 20,     /* a tensor up to here is not worth dealing: one rank reads it */
  MOST_CHUNK_BYTES = 1 << 30 /* MPI counts in int */
};

static int64_t aligned(int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

static bool is_dealt(const oproj_load_part *part) {
  return part->source.tensor && !part->source.in_one;
}

/* ---- what this rank needs ------------------------------------------------------------------- */

/* The part's room is taken at *at. */
static oproj_status find_part(oproj_load_plan *plan, const oproj_shard *shard, int32_t layer,
                              int matrix, int which, int64_t *at, oproj_load_layer *out) {
  oproj_load_part *part = &out->matrix[matrix].part[which];
  oproj_weights_source *source = &part->source;
  TRY(oproj_weights_source_of(plan->checkpoint, layer, (oproj_weights_matrix)matrix,
                              (oproj_weights_part)which, shard, source));
  if (!source->tensor) return OPROJ_OK;
  part->row_bytes = source->region.cols * source->element_bytes;
  part->at = *at;
  *at += aligned(source->bytes);
  plan->needed_bytes += source->bytes;
  out->total_bytes += source->region.rows * part->row_bytes;
  if (which != OPROJ_WEIGHTS_SCALE) return OPROJ_OK;
  out->matrix[matrix].scales_at = *at;
  *at += aligned(source->bytes / source->element_bytes * (int64_t)sizeof(float));
  return OPROJ_OK;
}

static oproj_status find_layer(oproj_load_plan *plan, const oproj_shard *shard, int32_t layer,
                               oproj_load_layer *out) {
  int64_t bytes = 0;
  for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
    for (int part = 0; part < OPROJ_WEIGHTS_PARTS; part++)
      TRY(find_part(plan, shard, layer, matrix, part, &bytes, out));
  if (bytes > plan->layer_bytes) plan->layer_bytes = bytes;
  plan->total_bytes += out->total_bytes;
  return OPROJ_OK;
}

/* ---- memory --------------------------------------------------------------------------------- */

/* The longest row of what is dealt; 0: nothing is. */
static int64_t longest_row(const oproj_load_plan *plan) {
  int64_t longest = 0;
  for (int32_t k = 0; k < plan->count; k++)
    for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
      for (int which = 0; which < OPROJ_WEIGHTS_PARTS; which++) {
        const oproj_load_part *part = &plan->layers[k].matrix[matrix].part[which];
        if (is_dealt(part) && part->row_bytes > longest) longest = part->row_bytes;
      }
  return longest;
}

static oproj_status fit(oproj_load_plan *plan, int64_t memory_bytes) {
  const int64_t buffers = OPROJ_LOAD_CHUNKS + 1;
  int64_t row = longest_row(plan), chunk = row;
  REQUIRE(row <= MOST_CHUNK_BYTES, OPROJ_ERR_SHAPE,
          "a row of WO_B has %" PRId64 " bytes; at most %d are read at a time", row,
          MOST_CHUNK_BYTES);
  REQUIRE(plan->layer_bytes + buffers * row <= memory_bytes, OPROJ_ERR_INVALID,
          "loading takes at least %" PRId64 " bytes of memory on rank %d; %" PRId64 " are allowed",
          plan->layer_bytes + buffers * row, plan->rank, memory_bytes);
  if (row > 0) {
    chunk = (memory_bytes - plan->layer_bytes) / buffers;
    if (chunk > CHUNK_BYTES) chunk = row > CHUNK_BYTES ? row : CHUNK_BYTES;
  }
  plan->chunk_bytes = (int32_t)chunk;
  bool two = plan->count > 1 && 2 * plan->layer_bytes + buffers * chunk <= memory_bytes;
  plan->slots = two ? 2 : 1;
  return OPROJ_OK;
}

oproj_status oproj_load_plan_make(oproj_load_plan *plan, const oproj_checkpoint *checkpoint,
                                  const oproj_shard *shard, const int32_t *layers, int32_t count,
                                  int64_t memory_bytes) {
  *plan = (oproj_load_plan){
      .checkpoint = checkpoint, .rank = shard->rank, .size = shard->size, .count = count};
  plan->layers = calloc((size_t)count + 1, sizeof *plan->layers);
  REQUIRE(plan->layers, OPROJ_ERR_NOMEM, "no memory to load %d layers", count);
  for (int32_t k = 0; k < count; k++) TRY(find_layer(plan, shard, layers[k], &plan->layers[k]));
  return fit(plan, memory_bytes);
}

void oproj_load_plan_free(oproj_load_plan *plan) {
  free(plan->layers);
  plan->layers = NULL;
}

/* ---- rounds --------------------------------------------------------------------------------- */

static void deal(oproj_load_part *part, int32_t size, int32_t chunk_bytes) {
  int64_t rows = part->source.region.rows, bytes = rows * part->row_bytes;
  if (bytes <= SMALL_BYTES && bytes <= chunk_bytes) {
    part->rounds = 1;
    part->rows_each = rows;
    return;
  }
  int64_t most = chunk_bytes / part->row_bytes;
  part->rounds = (int32_t)oproj_base_ceil_div(rows, most * size);
  part->rows_each = oproj_base_ceil_div(rows, (int64_t)part->rounds * size);
}

void oproj_load_plan_deal(oproj_load_plan *plan, int32_t chunk_bytes) {
  plan->chunk_bytes = chunk_bytes;
  for (int32_t k = 0; k < plan->count; k++)
    for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
      for (int which = 0; which < OPROJ_WEIGHTS_PARTS; which++) {
        oproj_load_part *part = &plan->layers[k].matrix[matrix].part[which];
        if (is_dealt(part)) deal(part, plan->size, chunk_bytes);
      }
}

void oproj_load_rows(const oproj_load_part *part, int32_t size, int32_t round, int32_t rank,
                     int64_t *begin, int64_t *end) {
  int64_t rows = part->source.region.rows;
  *begin = ((int64_t)round * size + rank) * part->rows_each;
  if (*begin > rows) *begin = rows;
  *end = rows - *begin < part->rows_each ? rows : *begin + part->rows_each;
}

int32_t oproj_load_plan_mark(const oproj_load_plan *plan) {
  uint64_t mark = 14695981039346656037u; /* FNV-1a, a word at a time */
  for (int32_t k = 0; k < plan->count; k++)
    for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
      for (int which = 0; which < OPROJ_WEIGHTS_PARTS; which++) {
        const oproj_load_part *part = &plan->layers[k].matrix[matrix].part[which];
        const int64_t words[] = {part->source.region.rows, part->row_bytes, is_dealt(part)};
        const char *name = part->source.tensor ? part->source.tensor->name : "";
        for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
          mark = (mark ^ (uint64_t)words[i]) * 1099511628211u;
        for (; *name; name++) mark = (mark ^ (uint64_t)(unsigned char)*name) * 1099511628211u;
      }
  return (int32_t)((mark ^ mark >> 32) & INT32_MAX);
}
