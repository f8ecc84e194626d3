/* engine.c - see engine.h.
 *
 * On a GPU one replay is a CUDA graph of consecutive calls on one stream, timed by two events; a
 * case that waits on the host, and every case on the host, is timed by the host's clock instead. */
#include "engine.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "naive.h"
#include "table.h"

typedef struct engine {
  const bench_case *which;
  bench_rig rig;
  bench_table table;
  bench_naive *naive;
  int32_t warmups, replays;
  double *us; /* [replays] */
  int64_t wrong;
} engine;

/* ---- one replay's calls -------------------------------------------------------------------- */

typedef struct calls {
  engine *e;
  bool naive;
  int32_t tokens, count;
} calls;

static oproj_status enqueue(void *user, void *stream) {
  const calls *c = user;
  oproj_status status = OPROJ_OK;
  for (int32_t i = 0; i < c->count && status == OPROJ_OK; i++)
    status = c->naive ? naive_call(c->e->naive, c->tokens, i, stream)
                      : c->e->which->call(&c->e->rig, c->tokens, i, stream);
  return status;
}

/* Whole rounds of layers, so that a replay begins where its predecessor's weights are oldest. */
static int32_t count_calls(const engine *e, int32_t layers) {
  int64_t asked = e->rig.args->iterations;
  if (asked == 0) asked = e->rig.device ? 16 : 1;
  if (layers < 1) layers = 1;
  return (int32_t)((asked + layers - 1) / layers * layers);
}

/* Where this rank is, for the sentence about one that is lost. */
static void note_place(const engine *e, const char *before, int32_t tokens, bool patient) {
  char note[48];
  snprintf(note, sizeof note, "%s%d token%s", before, tokens, tokens == 1 ? "" : "s");
  oproj_comm_note(e->rig.job->comm, note, patient);
}

/* ---- timing -------------------------------------------------------------------------------- */

static double microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static oproj_status time_plainly(engine *e, calls *c) {
  oproj_status status = OPROJ_OK;
  for (int32_t i = -e->warmups; i < e->replays && status == OPROJ_OK; i++) {
    status = job_agree_to_go_on(e->rig.job); /* all begin together */
    if (status != OPROJ_OK) break;
    double begin = microseconds();
    status = enqueue(c, device_stream(e->rig.device));
    if (status == OPROJ_OK) status = device_sync(e->rig.device);
    if (i >= 0) e->us[i] = microseconds() - begin;
    /* A peer's failure must not leave this rank alone in the next call. */
    status = oproj_comm_agree(e->rig.job->comm, status);
  }
  return status;
}

static oproj_status time_graph(engine *e, calls *c, device_load *load) {
  bench_graph *graph = NULL;
  oproj_status status = enqueue(c, device_stream(e->rig.device)); /* loads kernels */
  if (status == OPROJ_OK) status = device_sync(e->rig.device);
  if (status == OPROJ_OK) status = device_graph_create(&graph, e->rig.device, enqueue, c);
  if (status == OPROJ_OK && e->which->poison) status = e->which->poison(&e->rig, c->tokens);
  status = oproj_comm_agree(e->rig.job->comm, status);
  /* Sums keep the ranks together; without them one may be any slower than another. */
  note_place(e, "replays of ", c->tokens, !e->rig.reduces);
  if (status == OPROJ_OK) status = device_graph_time(graph, e->warmups, e->replays, e->us, load);
  device_graph_destroy(graph);
  return oproj_comm_agree(e->rig.job->comm, status);
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* The smallest value that at least this part of all values does not exceed. */
static double quantile(const double *sorted, int32_t count, double part) {
  int32_t at = (int32_t)ceil(part * count) - 1;
  return sorted[at < 0 ? 0 : at];
}

static bool uses_graph(const engine *e) {
  return rig_enqueues(&e->rig) && !e->which->eager && !e->rig.args->eager;
}

/* Leaves the times per call, of the slowest rank, in the row. */
static oproj_status measure(engine *e, calls *c, table_row *row) {
  oproj_status status = OPROJ_OK;
  if (!uses_graph(e) && e->which->poison)
    status = oproj_comm_agree(e->rig.job->comm, e->which->poison(&e->rig, c->tokens));
  if (status == OPROJ_OK)
    status = uses_graph(e) ? time_graph(e, c, &row->load) : time_plainly(e, c);
  if (status != OPROJ_OK) return status;
  qsort(e->us, (size_t)e->replays, sizeof *e->us, ascending);
  row->tokens = c->tokens;
  row->calls = c->count;
  row->warmups = e->warmups;
  row->replays = e->replays;
  row->graph = uses_graph(e);
  row->p50_us = job_max(e->rig.job, quantile(e->us, e->replays, 0.50)) / c->count;
  row->p99_us = job_max(e->rig.job, quantile(e->us, e->replays, 0.99)) / c->count;
  return OPROJ_OK;
}

/* ---- one size ------------------------------------------------------------------------------ */

/* What the last of the calls has left is held against the reference. */
static oproj_status check(engine *e, const calls *c, table_row *row) {
  int64_t wrong = 0;
  row->wrong = -1;
  if (!e->rig.args->check || !e->which->check) return OPROJ_OK;
  note_place(e, "the check of ", c->tokens, true);
  oproj_status status = c->naive ? check_values(&e->rig, CHECK_NAIVE, c->tokens, c->count - 1,
                                                (c->count - 1) % row->layers, e->rig.y, &wrong)
                                 : e->which->check(&e->rig, c->tokens, c->count - 1, &wrong);
  status = oproj_comm_agree(e->rig.job->comm, status);
  if (status != OPROJ_OK) return status;
  row->wrong = job_sum(e->rig.job, wrong);
  e->wrong += row->wrong;
  return OPROJ_OK;
}

static oproj_status path_name(const engine *e, int32_t tokens, const char **out) {
  oproj_path_choice choice;
  *out = oproj_ctx_backend(e->rig.ctx);
  if (e->rig.layer_count == 0) return OPROJ_OK;
  oproj_status status = oproj_layer_path(e->rig.layers[0], tokens, &choice);
  if (status == OPROJ_OK) *out = choice.name;
  return status;
}

static oproj_status run_naive(engine *e, int32_t tokens, bench_cost cost, table_row *row) {
  int32_t layers = naive_layers(e->naive);
  calls c = {e, true, tokens, count_calls(e, layers)};
  note_place(e, "the naive rung at ", tokens, false);
  *row = (table_row){.rung = "naive", .path = "naive-bf16", .layers = layers, .cost = cost};
  oproj_status status = oproj_comm_agree(e->rig.job->comm, naive_prepare(e->naive, tokens));
  if (status == OPROJ_OK) status = measure(e, &c, row);
  return status == OPROJ_OK ? check(e, &c, row) : status;
}

static oproj_status run_size(engine *e, int32_t tokens) {
  calls c = {e, false, tokens, count_calls(e, e->rig.layer_count)};
  table_row row = {.rung = "oproj", .layers = e->rig.layer_count}, naive;
  row.cost = e->which->cost(&e->rig, tokens);
  note_place(e, "", tokens, false);
  oproj_status status = job_agree_to_go_on(e->rig.job);
  if (status == OPROJ_OK) status = path_name(e, tokens, &row.path);
  if (status == OPROJ_OK) status = measure(e, &c, &row);
  if (status == OPROJ_OK) status = check(e, &c, &row);
  if (status == OPROJ_OK && e->naive) {
    status = run_naive(e, tokens, row.cost, &naive);
    row.naive_us = status == OPROJ_OK ? naive.p50_us : 0.0;
  }
  if (status == OPROJ_OK) status = table_put(&e->table, &row);
  if (status == OPROJ_OK && e->naive) status = table_put(&e->table, &naive);
  return oproj_comm_agree(e->rig.job->comm, status);
}

/* ---- all sizes ----------------------------------------------------------------------------- */

static oproj_status prepare(engine *e) {
  const bench_args *args = e->rig.args;
  bool host = !e->rig.device;
  e->warmups = (int32_t)(args->warmups ? args->warmups : e->which->rows ? 0 : host ? 1 : 3);
  e->replays = (int32_t)(args->replays ? args->replays : host || e->which->rows ? 5 : 30);
  e->us = calloc((size_t)e->replays, sizeof *e->us);
  if (!e->us) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d times", e->replays);
  return OPROJ_OK;
}

static oproj_status open_engine(engine *e, const bench_args *args, job_state *job,
                                const char *command) {
  oproj_dims dims;
  oproj_status status =
      oproj_comm_agree(job->comm, table_open(&e->table, &e->rig, e->which, job, args, command));
  if (status == OPROJ_OK && e->which->dims) status = e->which->dims(job, args, &dims);
  if (status != OPROJ_OK) return status;
  status = rig_open(&e->rig, args, job, e->which->dims ? &dims : NULL, e->which->reduces);
  if (status == OPROJ_OK) status = oproj_comm_agree(job->comm, prepare(e));
  oproj_comm_note(job->comm, "making inputs", 1);
  if (status == OPROJ_OK) status = oproj_comm_agree(job->comm, e->which->open(&e->rig));
  if (status == OPROJ_OK && e->which->naive && e->rig.device && !args->no_naive &&
      args->reduce != OPROJ_REDUCE_SCATTER) /* it leaves all rows on every rank */
    status = oproj_comm_agree(job->comm, naive_create(&e->naive, &e->rig));
  return status;
}

oproj_status engine_run(const bench_case *which, const bench_args *args, job_state *job,
                        const char *command, int64_t *wrong) {
  engine e = {.which = which};
  oproj_status status = open_engine(&e, args, job, command);
  bool opened = status == OPROJ_OK;
  if (opened)
    table_heading(&e.table, count_calls(&e, e.rig.layer_count), e.warmups, e.replays,
                  uses_graph(&e));
  if (opened && which->rows) status = which->rows(&e.rig, &e.table, e.replays);
  for (int64_t t = args->begin; t <= args->end && status == OPROJ_OK && !which->rows;
       t *= args->factor)
    status = run_size(&e, (int32_t)t);
  oproj_status closed = table_close(&e.table);
  if (opened) status = oproj_comm_agree(job->comm, status == OPROJ_OK ? closed : status);
  naive_destroy(e.naive);
  if (which->close) which->close(&e.rig);
  rig_close(&e.rig);
  free(e.us);
  *wrong = e.wrong;
  return status;
}
