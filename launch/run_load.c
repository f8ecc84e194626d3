/* run_load.c - owns how many layers of a run are in memory, and what is told of their loading. */
#include "run_load.h"

#include <stdio.h>
#include <stdlib.h>

#include "report.h"
#include "run_memory.h"

static void drop(run_load *l) {
  for (int32_t i = 0; l->held && i < l->held_end - l->held_begin; i++)
    oproj_layer_destroy(l->held[i]);
  free(l->held);
  l->held = NULL;
}

/* COLLECTIVE.  How many layers from `index` on come next; the same on all ranks. */
static oproj_status choose_count(const run_load *l, int32_t index, int32_t *out) {
  const oproj_shard *shard = oproj_ctx_shard(l->ctx);
  int64_t bytes = 0, sum = 0;
  oproj_status status = OPROJ_OK;
  for (int32_t i = index; i < l->end && status == OPROJ_OK; i++) {
    status = oproj_checkpoint_layer_bytes(l->checkpoint, i, shard, &bytes);
    sum += bytes;
  }
  status = oproj_comm_agree(l->job->comm, status);
  if (status != OPROJ_OK) return status;
  int32_t left = l->end - index;
  *out = -(int32_t)job_max(l->job, -run_memory_layers(left, job_sum(l->job, sum) / left));
  return OPROJ_OK;
}

/* COLLECTIVE. */
static void summarise(run_load *l, const oproj_load_report *mine) {
  int64_t needed = job_sum(l->job, mine->needed_bytes), read = job_sum(l->job, mine->read_bytes);
  int64_t moved = job_sum(l->job, mine->received_bytes);
  double seconds = job_max(l->job, mine->seconds);
  l->needed_bytes += needed;
  l->read_bytes += read;
  l->moved_bytes += moved;
  l->seconds += seconds;
  if (l->job->rank != 0) return;
  int32_t count = l->held_end - l->held_begin;
  printf(
      "# loaded %d layer%s in %.2f s: %.2f MB needed, %.2f MB read, %.2f MB moved between ranks, "
      "%.2f GB/s\n",
      count, count == 1 ? "" : "s", seconds, (double)needed / 1e6, (double)read / 1e6,
      (double)moved / 1e6, seconds > 0.0 ? (double)needed / seconds / 1e9 : 0.0);
  job_flush(l->job);
}

/* For the sentence that others get if they lose this rank meanwhile. */
static oproj_status note_layers(const run_load *l, int32_t index, int32_t count) {
  oproj_layer_info info;
  char note[48];
  oproj_status status =
      oproj_comm_agree(l->job->comm, oproj_checkpoint_layer(l->checkpoint, index, &info));
  if (status != OPROJ_OK) return status;
  snprintf(note, sizeof note, count > 1 ? "%s and %d more" : "%s", info.name, count - 1);
  oproj_comm_note(l->job->comm, note, 0);
  return OPROJ_OK;
}

/* COLLECTIVE. */
static oproj_status load(run_load *l, int32_t index, int32_t count) {
  int32_t *layers = malloc((size_t)count * sizeof *layers);
  l->held = calloc((size_t)count, sizeof *l->held);
  l->held_begin = index;
  l->held_end = index + count;
  oproj_status status = oproj_comm_agree(
      l->job->comm,
      layers && l->held ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d layers", count));
  report_progress progress = {.what = l->job->rank == 0 ? "loading" : NULL};
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  oproj_load_report report;
  config.memory_bytes = l->memory_bytes;
  config.progress = report_bytes;
  config.user = &progress;
  for (int32_t i = 0; i < count && status == OPROJ_OK; i++) layers[i] = index + i;
  if (status == OPROJ_OK) status = note_layers(l, index, count);
  if (status == OPROJ_OK)
    status = oproj_layers_load(l->held, l->ctx, l->checkpoint, layers, count, &config, &report);
  free(layers);
  if (status == OPROJ_OK) summarise(l, &report);
  return status;
}

/* COLLECTIVE.  Fewer at a time where memory, of the device perhaps, turns out not to hold them. */
static oproj_status load_what_fits(run_load *l, int32_t index) {
  int32_t count;
  oproj_status status = choose_count(l, index, &count);
  if (status != OPROJ_OK) return status;
  do {
    drop(l);
    status = load(l, index, count);
    count /= 2;
  } while (status == OPROJ_ERR_NOMEM && count > 0);
  if (status == OPROJ_OK) return status;
  /* A load that an interrupt has stopped says only that it was stopped. */
  oproj_status why = job_agree_to_go_on(l->job);
  return why == OPROJ_OK ? status : why;
}

oproj_status run_load_layer(run_load *l, int32_t index, oproj_layer **out) {
  if (!l->held || index < l->held_begin || index >= l->held_end) {
    oproj_status status = load_what_fits(l, index);
    if (status != OPROJ_OK) return status;
  }
  *out = l->held[index - l->held_begin];
  return OPROJ_OK;
}

void run_load_free(run_load *l) {
  drop(l);
}
