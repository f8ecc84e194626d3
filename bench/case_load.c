/* case_load.c - all layers from a checkpoint's files to the device, and the same bytes in other
 * ways.  Before each time the page cache forgets the files, unless --warm keeps it. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cases.h"
#include "job/same_files.h"
#include "load_ways.h"
#include "oproj/checkpoint.h"
#include "table.h"

static oproj_checkpoint *checkpoint;
static int32_t layers;
static load_set set;
static double bytes; /* of all layers and ranks, as stored */

static oproj_status open_files(const char *dir) {
  oproj_status status = oproj_checkpoint_open(&checkpoint, dir);
  if (status != OPROJ_OK) return status;
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  layers = model->layers + model->draft_layers;
  return OPROJ_OK;
}

static oproj_status dims_case(job_state *job, const bench_args *args, oproj_dims *out) {
  oproj_status status = oproj_comm_agree(job->comm, open_files(args->dir));
  if (status == OPROJ_OK) status = job_compare_files(job->comm, checkpoint, args->dir, NULL);
  if (status == OPROJ_OK) *out = oproj_checkpoint_model(checkpoint)->dims;
  return status;
}

static bool is_whole(void) {
  return oproj_checkpoint_split_size(checkpoint) == 0;
}

static oproj_status open_case(bench_rig *rig) {
  const oproj_shard *shard = oproj_ctx_shard(rig->ctx);
  int64_t one, mine = 0;
  oproj_status status = OPROJ_OK;
  for (int32_t i = 0; i < layers && status == OPROJ_OK; i++) {
    status = oproj_checkpoint_layer_bytes(checkpoint, i, shard, &one);
    mine += one;
  }
  if (status == OPROJ_OK) status = load_set_open(&set, rig->job, rig->args->dir, checkpoint, shard);
  status = oproj_comm_agree(rig->job->comm, status);
  if (status == OPROJ_OK) bytes = (double)job_sum(rig->job, mine);
  return status;
}

static void close_case(bench_rig *rig) {
  (void)rig;
  load_set_close(&set);
  oproj_checkpoint_close(checkpoint);
  checkpoint = NULL;
}

/* ---- ways ----------------------------------------------------------------------------------- */

/* An oproj_progress_fn. */
static int stop_where_interrupted(void *user, int64_t done_bytes, int64_t total_bytes) {
  (void)user, (void)done_bytes, (void)total_bytes;
  return job_interrupted();
}

/* In passes of `count` layers. */
static oproj_status load_passes(bench_rig *rig, int32_t count) {
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  config.progress = stop_where_interrupted;
  oproj_layer **made = calloc((size_t)layers, sizeof *made);
  int32_t *chosen = calloc((size_t)layers, sizeof *chosen);
  oproj_status status =
      made && chosen ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d layers", layers);
  status = oproj_comm_agree(rig->job->comm, status);
  for (int32_t i = 0; i < layers && status == OPROJ_OK; i += count) {
    for (int32_t k = 0; k < count; k++) chosen[k] = i + k;
    status = oproj_layers_load(made + i, rig->ctx, checkpoint, chosen, count, &config, NULL);
  }
  for (int32_t i = 0; made && i < layers; i++) oproj_layer_destroy(made[i]);
  free(made);
  free(chosen);
  return status;
}

static oproj_status way_all(bench_rig *rig) {
  return load_passes(rig, layers);
}

static oproj_status way_single(bench_rig *rig) {
  return load_passes(rig, 1);
}

static oproj_status way_direct(bench_rig *rig) {
  (void)rig;
  return load_direct(&set);
}

static oproj_status way_mpi_io(bench_rig *rig) {
  (void)rig;
  return load_mpi_io(&set);
}

static oproj_status way_slices(bench_rig *rig) {
  (void)rig;
  return load_slices(&set);
}

static const struct {
  const char *rung, *name;
  const char *place; /* of a rank that is lost in it */
  oproj_status (*run)(bench_rig *rig);
  bool whole, mpi; /* needs a whole checkpoint; needs MPI */
  bool may_lack;   /* not every file system has it */
} ways[] = {
    {"naive", "row slices, each rank for itself", "reading row slices", way_slices, true, false,
     false},
    {"direct", "16 MB direct reads by one rank", "direct reads", way_direct, true, false, true},
    {"mpi-io", "MPI-IO, subarray views", "reading by MPI-IO", way_mpi_io, true, true, false},
    {"oproj", "oproj_layers_load, one pass", "all layers", way_all, false, false, false},
    {"single", "oproj_layer_load, layer by layer", "single layers", way_single, false, false,
     false},
};

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* COLLECTIVE.  The slowest rank's time, and what came from storage for each byte needed. */
static oproj_status time_once(bench_rig *rig, int way, double *us, double *fetched) {
  if (!rig->args->warm) load_set_forget(&set);
  oproj_comm_note(rig->job->comm, ways[way].place, 1); /* one may read for all */
  oproj_status status = job_agree_to_go_on(rig->job);
  if (status != OPROJ_OK) return status;
  int64_t before = load_storage_bytes();
  double begin = now_us();
  status = ways[way].run(rig);
  *us = job_max(rig->job, now_us() - begin);
  *fetched = (double)job_sum(rig->job, load_storage_bytes() - before) / bytes;
  return status;
}

static oproj_status time_way(bench_rig *rig, const bench_table *table, int way, int32_t replays,
                             double *naive_us) {
  double *us = calloc((size_t)replays, sizeof *us), fetched = 0.0;
  char path[128];
  oproj_status status = us ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for times");
  status = oproj_comm_agree(rig->job->comm, status);
  for (int32_t i = 0; i < replays && status == OPROJ_OK; i++)
    status = time_once(rig, way, &us[i], &fetched);
  if (status == OPROJ_OK) {
    qsort(us, (size_t)replays, sizeof *us, ascending);
    snprintf(path, sizeof path, "%s; %.2f x from storage", ways[way].name, fetched);
    if (way == 0) *naive_us = us[replays / 2];
    table_row row = {.rung = ways[way].rung,
                     .path = path,
                     .calls = 1,
                     .replays = replays,
                     .layers = layers,
                     .p50_us = us[replays / 2],
                     .p99_us = us[replays - 1],
                     .naive_us = *naive_us,
                     .cost = {.bytes = bytes},
                     .wrong = -1};
    status = table_put(table, &row);
  }
  free(us);
  return oproj_comm_agree(rig->job->comm, status);
}

static oproj_status rows_case(bench_rig *rig, const bench_table *table, int32_t replays) {
  oproj_status status = OPROJ_OK;
  double naive_us = 0.0;
  for (int way = 0; way < (int)(sizeof ways / sizeof ways[0]) && status == OPROJ_OK; way++) {
    if ((ways[way].whole && (!is_whole() || rig->args->no_naive)) ||
        (ways[way].mpi && !rig->job->mpi))
      continue;
    status = time_way(rig, table, way, replays, &naive_us);
    if (ways[way].may_lack && status == OPROJ_ERR_UNSUPPORTED) status = OPROJ_OK;
  }
  return status;
}

const bench_case case_load = {.name = "load",
                              .summary = "all layers from the files of --dir, and other ways to it",
                              .eager = true,
                              .loads = true,
                              .dims = dims_case,
                              .open = open_case,
                              .close = close_case,
                              .rows = rows_case};
