/* cmd_run.c - `oproj run`: the main job.  Every rank loads its share of the layers, projects the
 * input through each, and the ranks' shares are summed; rank 0 prints, writes and checks. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "commands.h"
#include "job/choose.h"
#include "job/job.h"
#include "job/same_files.h"
#include "oproj/checkpoint.h"
#include "oproj/safetensors.h"
#include "report.h"
#include "run_args.h"
#include "run_check.h"
#include "run_input.h"
#include "run_load.h"
#include "run_memory.h"
#include "target.h"

/* ---- one run -------------------------------------------------------------------------------- */

/* A rotary table in host memory and on the device. */
typedef struct table {
  float *host;
  void *device;
  int64_t rows;
} table;

typedef struct run {
  const run_args *args;
  job_state *job;
  oproj_checkpoint *checkpoint;
  const oproj_model *model;
  oproj_split split;
  oproj_shard shard;
  run_input input, whole; /* this rank's heads; all heads, on rank 0 with --check */
  oproj_ctx *ctx;
  run_load load;
  void *attn_out, *positions, *y; /* on the device; positions are rows of the tables */
  uint16_t *host_y;               /* this rank's rows of y */
  uint16_t *whole_y;              /* rank 0: all rows */
  table tables[2];                /* plain, compressed: made when first needed */
  run_check *check;
  oproj_tensors_writer *writer;
  json_t *rows;
  bool passed;
} run;

static double microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int32_t last_layer(const run *r) {
  int32_t layers = r->model->layers + r->model->draft_layers;
  return r->args->layer_end < 0 ? layers : r->args->layer_end;
}

/* Rank 0: what it will write must be possible, and nothing that is read. */
static oproj_status check_targets(const run *r) {
  const run_args *args = r->args;
  if (r->job->rank != 0) return OPROJ_OK;
  oproj_status status = target_check("--output", args->output, args->input, args->dir);
  if (status == OPROJ_OK) status = target_check("--json", args->json, args->input, args->dir);
  if (status == OPROJ_OK && args->output && args->json && target_same(args->output, args->json))
    status = oproj_fail(OPROJ_ERR_INVALID, "--output and --json are both %s", args->json);
  return status;
}

/* Headers of all chosen layers, then their scales: one that cannot be used must not be found after
 * others have run. */
static oproj_status check_layers(const run *r) {
  oproj_status status = OPROJ_OK;
  for (int32_t i = r->args->layer_begin; i < last_layer(r) && status == OPROJ_OK; i++) {
    oproj_layer_info info;
    status = oproj_checkpoint_layer(r->checkpoint, i, &info);
  }
  for (int32_t i = r->args->layer_begin; i < last_layer(r) && status == OPROJ_OK; i++)
    status = oproj_checkpoint_check_scales(r->checkpoint, i, &r->shard);
  return status;
}

/* What can be refused from the checkpoint's headers and scales, without its weights. */
static oproj_status check_plan(run *r) {
  int32_t layers = r->model->layers + r->model->draft_layers;
  int32_t made_for = oproj_checkpoint_split_size(r->checkpoint);
  r->split = made_for > 0 ? oproj_checkpoint_split_kind(r->checkpoint) : r->args->split;
  oproj_status status =
      oproj_plan_shard(&r->model->dims, r->split, r->job->size, r->job->rank, &r->shard);
  if (status != OPROJ_OK) return status;
  if (made_for > 0 && made_for != r->job->size)
    return oproj_fail(OPROJ_ERR_SHAPE, "%s was split for %d ranks; %d are running", r->args->dir,
                      made_for, r->job->size);
  if (last_layer(r) > layers)
    return oproj_fail(OPROJ_ERR_INVALID, "--layers %s: the checkpoint has layers 0 to %d",
                      r->args->layers, layers - 1);
  return check_layers(r);
}

static oproj_status load_input(run *r, const oproj_shard *shard, run_input *out) {
  int32_t tokens = r->args->tokens;
  int64_t token_bytes = run_memory_per_token(r->model, r->job->size, r->args->check);
  if (r->args->input)
    return run_input_read(r->args->input, r->model, shard, tokens, token_bytes, out);
  return run_input_make(r->model, shard, r->args->seed, tokens < 0 ? 16 : tokens, token_bytes, out);
}

static oproj_status open_inputs(run *r) {
  oproj_shard everything;
  oproj_status status = load_input(r, &r->shard, &r->input);
  if (status == OPROJ_OK && r->args->check && r->job->rank == 0) {
    status = oproj_plan_shard(&r->model->dims, OPROJ_SPLIT_EVEN, 1, 0, &everything);
    if (status == OPROJ_OK) status = load_input(r, &everything, &r->whole);
    if (status == OPROJ_OK)
      status = run_check_create(&r->check, r->checkpoint, r->job->size, r->args->reduce, &r->whole);
  }
  return status;
}

static oproj_status upload(run *r, const void *from, size_t bytes, void **to) {
  oproj_status status = oproj_buffer_create(r->ctx, bytes, to);
  return status == OPROJ_OK ? oproj_buffer_write(r->ctx, *to, from, bytes, NULL) : status;
}

static oproj_status create_buffers(run *r) {
  const oproj_dims *d = &r->model->dims;
  size_t tokens = (size_t)r->input.tokens;
  size_t y_bytes = tokens * (size_t)d->hidden * sizeof *r->host_y;
  size_t heads = (size_t)(r->shard.head_end - r->shard.head_begin);
  r->host_y = malloc(y_bytes + 1);
  r->whole_y = r->job->rank == 0 ? malloc(y_bytes + 1) : NULL;
  if (!r->host_y || (r->job->rank == 0 && !r->whole_y))
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for y of %d tokens", r->input.tokens);
  oproj_status status = oproj_buffer_create(r->ctx, y_bytes, &r->y);
  if (status == OPROJ_OK)
    status = upload(r, r->input.attn_out, tokens * heads * (size_t)d->head_dim * 2, &r->attn_out);
  if (status == OPROJ_OK)
    status = upload(r, r->input.rows, tokens * sizeof *r->input.rows, &r->positions);
  return status;
}

static oproj_status create_output(run *r) {
  if (!r->args->output || r->job->rank != 0) return OPROJ_OK;
  int32_t first = r->args->layer_begin, count = last_layer(r) - first;
  oproj_tensor *tensors = calloc((size_t)count + 1, sizeof *tensors);
  char(*names)[64] = calloc((size_t)count + 1, sizeof *names);
  oproj_status status = tensors && names ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory");
  for (int32_t i = 0; i < count && status == OPROJ_OK; i++) {
    oproj_layer_info info;
    status = oproj_checkpoint_layer(r->checkpoint, first + i, &info);
    if (status != OPROJ_OK) break;
    snprintf(names[i], sizeof names[i], "%s.y", info.name);
    tensors[i] = (oproj_tensor){.name = names[i],
                                .dtype = "BF16",
                                .dimensions = 2,
                                .shape = {r->input.tokens, r->model->dims.hidden}};
  }
  if (status == OPROJ_OK)
    status = oproj_tensors_create(&r->writer, r->args->output, tensors, count, NULL, 0);
  free(names);
  free(tensors);
  return status;
}

/* The table that a layer's angles come from. */
static oproj_status layer_table(run *r, int compressed, const table **out) {
  table *t = &r->tables[r->input.cos_sin ? 0 : compressed];
  *out = t;
  if (t->host) return OPROJ_OK;
  int32_t width = r->model->dims.rope_dim;
  const oproj_rope *rope = compressed ? &r->model->compressed : &r->model->plain;
  oproj_status status = run_input_table(&r->input, rope, width, &t->host, &t->rows);
  if (status != OPROJ_OK) return status;
  return upload(r, t->host, (size_t)t->rows * (size_t)width * sizeof *t->host, &t->device);
}

/* ---- one layer ------------------------------------------------------------------------------ */

static oproj_status project(run *r, oproj_layer *layer, const table *cos_sin, double *us) {
  oproj_io io = {.tokens = r->input.tokens,
                 .attn_out = r->attn_out,
                 .positions = r->positions,
                 .cos_sin = cos_sin->device,
                 .cos_sin_rows = cos_sin->rows,
                 .cos_sin_width = r->model->dims.rope_dim,
                 .y = r->y};
  oproj_status status = oproj_comm_agree(r->job->comm, OPROJ_OK); /* all start together */
  double begin = microseconds();
  if (status == OPROJ_OK) status = oproj_forward(layer, &io, NULL);
  uint16_t probe; /* the read waits for the device */
  if (status == OPROJ_OK && io.tokens > 0)
    status = oproj_buffer_read(r->ctx, &probe, r->y, sizeof probe, NULL);
  double mine = microseconds() - begin;
  status = oproj_comm_agree(r->job->comm, status);
  *us = job_max(r->job, mine);
  return status;
}

/* y in host memory of rank 0: whole_y. */
static oproj_status collect(run *r) {
  int32_t tokens = r->input.tokens, hidden = r->model->dims.hidden, begin = 0, end = tokens;
  bool scattered = r->args->reduce == OPROJ_REDUCE_SCATTER;
  if (scattered) oproj_plan_rows(tokens, r->job->size, r->job->rank, &begin, &end);
  size_t bytes = (size_t)(end - begin) * (size_t)hidden * sizeof *r->host_y;
  oproj_status status = oproj_buffer_read(r->ctx, r->host_y, r->y, bytes, NULL);
  status = oproj_comm_agree(r->job->comm, status);
  if (status != OPROJ_OK) return status;
  if (scattered)
    job_gather_rows(r->job, tokens, hidden, r->host_y, r->whole_y);
  else if (r->job->rank == 0)
    memcpy(r->whole_y, r->host_y, bytes);
  return OPROJ_OK;
}

static void print_heading(const run *r) {
  const oproj_dims *d = &r->model->dims;
  printf("# %s: hidden %d, %d heads, %d groups, o_lora_rank %d, blocks of %d\n",
         r->model->model_type, d->hidden, d->heads, d->groups, d->lora_rank, d->quant_block);
  printf("# %d rank%s (%s), backend %s, communicator %s, reduction %s, %d tokens\n", r->job->size,
         r->job->size == 1 ? "" : "s", r->split == OPROJ_SPLIT_UNEVEN ? "uneven" : "even",
         oproj_ctx_backend(r->ctx), oproj_comm_name(r->job->comm), choose_reduces[r->args->reduce],
         r->input.tokens);
  printf("#%-10s %-12s %12s  %-16s%s\n", "layer", "path", "time", "checksum of y",
         r->args->check ? "  check error     vs one rank" : "");
  printf("#%-10s %-12s %12s\n", "", "", "us");
}

static void print_row(run *r, const oproj_layer_info *info, const char *path, double us,
                      const run_check_result *check) {
  size_t bytes = (size_t)r->input.tokens * (size_t)r->model->dims.hidden * sizeof *r->whole_y;
  char checksum[17];
  snprintf(checksum, sizeof checksum, "%016llx",
           (unsigned long long)XXH3_64bits(r->whole_y, bytes));
  printf(" %-10s %-12s %12.1f  %s", info->name, path, us, checksum);
  json_t *row = json_pack("{s:s, s:s, s:f, s:s}", "layer", info->name, "path", path, "us", us,
                          "checksum", checksum);
  if (check) {
    printf("  %-4s %.2e  %.2e", check->passed ? "ok" : "FAIL", check->error, check->one_rank_error);
    json_object_set_new(
        row, "check",
        json_pack("{s:b, s:o, s:f, s:o, s:I, s:I, s:I, s:I}", "passed", check->passed, "error",
                  report_number(check->error), "tolerance", check->tolerance, "one_rank_error",
                  report_number(check->one_rank_error), "one_rank_differs",
                  (json_int_t)check->one_rank_differs, "nan_differs",
                  (json_int_t)check->nan_differs, "not_finite", (json_int_t)check->not_finite,
                  "compared", (json_int_t)check->compared));
  }
  printf("\n");
  job_flush(r->job);
  json_array_append_new(r->rows, row);
}

/* Rank 0's part after a layer: write, check, print.  The others wait as long as that takes. */
static oproj_status conclude(run *r, int32_t index, const oproj_layer_info *info,
                             const table *cos_sin, const oproj_path_choice *path, double us) {
  if (r->job->rank != 0) return OPROJ_OK;
  char note[64];
  snprintf(note, sizeof note, "the check of %s", info->name);
  oproj_comm_note(r->job->comm, note, 1);
  int64_t bytes = (int64_t)r->input.tokens * r->model->dims.hidden * 2;
  run_check_result check;
  oproj_status status = OPROJ_OK;
  if (r->writer) status = oproj_tensors_write(r->writer, r->whole_y, bytes);
  if (status == OPROJ_OK && r->check) {
    status = run_check_layer(r->check, index, path->exact != 0, cos_sin->host, cos_sin->rows,
                             r->whole_y, &check);
    if (status == OPROJ_OK && !check.passed) r->passed = false;
  }
  if (status == OPROJ_OK && json_array_size(r->rows) == 0) print_heading(r);
  if (status == OPROJ_OK) print_row(r, info, path->name, us, r->check ? &check : NULL);
  return status;
}

static oproj_status run_layer(run *r, int32_t index) {
  oproj_layer_info info;
  oproj_path_choice path;
  const table *cos_sin = NULL;
  oproj_layer *layer = NULL;
  double us = 0.0;
  oproj_status status = oproj_checkpoint_layer(r->checkpoint, index, &info);
  if (status == OPROJ_OK) status = layer_table(r, info.compressed != 0, &cos_sin);
  status = oproj_comm_agree(r->job->comm, status);
  if (status == OPROJ_OK) status = run_load_layer(&r->load, index, &layer);
  if (status == OPROJ_OK) oproj_comm_note(r->job->comm, info.name, 0);
  if (status == OPROJ_OK && r->job->rank == 0)
    report_step("layer", index - r->args->layer_begin + 1, last_layer(r) - r->args->layer_begin);
  if (status == OPROJ_OK)
    status = oproj_comm_agree(r->job->comm, oproj_layer_path(layer, r->input.tokens, &path));
  if (status == OPROJ_OK) status = project(r, layer, cos_sin, &us);
  if (status == OPROJ_OK) status = collect(r);
  if (status == OPROJ_OK)
    status = oproj_comm_agree(r->job->comm, conclude(r, index, &info, cos_sin, &path, us));
  return status;
}

static oproj_status run_layers(run *r) {
  oproj_status status = OPROJ_OK;
  int32_t first = r->args->layer_begin, count = last_layer(r) - first;
  for (int32_t i = 0; i < count && status == OPROJ_OK; i++) {
    status = job_agree_to_go_on(r->job);
    if (status == OPROJ_OK) status = run_layer(r, first + i);
  }
  return status == OPROJ_OK ? job_agree_to_go_on(r->job) : status;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static json_t *whole_table(const run *r) {
  const run_load *l = &r->load;
  json_t *load = json_pack("{s:I, s:I, s:I, s:f}", "needed_bytes", (json_int_t)l->needed_bytes,
                           "read_bytes", (json_int_t)l->read_bytes, "moved_bytes",
                           (json_int_t)l->moved_bytes, "seconds", l->seconds);
  return json_pack("{s:s, s:i, s:s, s:s, s:s, s:i, s:b, s:b, s:o, s:O}", "model",
                   r->model->model_type, "ranks", r->job->size, "backend",
                   oproj_ctx_backend(r->ctx), "comm", oproj_comm_name(r->job->comm), "reduce",
                   choose_reduces[r->args->reduce], "tokens", r->input.tokens, "checked",
                   r->args->check, "passed", r->passed, "load", load, "layers", r->rows);
}

/* Takes away an output that has got its name already. */
static void withdraw(const char *path) {
  char *real;
  if (oproj_tensors_target(path, &real) != OPROJ_OK) return;
  unlink(real);
  free(real);
}

/* Both files or none: what can fail for lack of space is done before the first gets its name. */
static oproj_status write_results(run *r) {
  if (r->job->rank != 0) return OPROJ_OK;
  report_file json = {0};
  oproj_status status = OPROJ_OK;
  bool with_output = r->writer != NULL;
  if (r->args->json) status = report_stage(&json, r->args->json, whole_table(r));
  if (status == OPROJ_OK && with_output) {
    status = oproj_tensors_finish(r->writer);
    r->writer = NULL; /* finish freed it */
  }
  if (status == OPROJ_OK) {
    status = report_keep(&json);
    if (status != OPROJ_OK && with_output) withdraw(r->args->output);
  }
  report_drop(&json);
  return status;
}

static oproj_status open_checkpoint(run *r) {
  oproj_comm *comm = r->job->comm;
  oproj_status status = oproj_comm_agree(comm, check_targets(r));
  if (status == OPROJ_OK)
    status = oproj_comm_agree(comm, oproj_checkpoint_open(&r->checkpoint, r->args->dir));
  if (status != OPROJ_OK) return status;
  r->model = oproj_checkpoint_model(r->checkpoint);
  status = job_compare_files(comm, r->checkpoint, r->args->dir, r->args->input);
  if (status != OPROJ_OK) return status;
  return oproj_comm_agree(comm, check_plan(r));
}

static oproj_status execute(run *r) {
  oproj_comm_note(r->job->comm, "reading the checkpoint's headers", 1);
  oproj_status status = open_checkpoint(r);
  if (status == OPROJ_OK)
    status = job_choose_comm(r->job, r->args->comm, r->args->backend == RUN_BACKEND_REF);
  oproj_comm *comm = r->job->comm;
  oproj_comm_note(comm, "reading the input", 1);
  if (status == OPROJ_OK) status = oproj_comm_agree(comm, open_inputs(r));
  if (status != OPROJ_OK) return status;
  oproj_comm_note(comm, "", 0);

  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = r->args->backend == RUN_BACKEND_AUTO ? NULL : run_backends[r->args->backend];
  config.max_tokens = r->input.tokens;
  config.split = r->split;
  config.reduce = r->args->reduce;
  config.chunk_tokens = r->args->chunk_tokens;
  status = oproj_ctx_create(&r->ctx, comm, &r->model->dims, &config);
  if (status == OPROJ_OK) status = oproj_comm_agree(comm, create_buffers(r));
  if (status == OPROJ_OK) status = oproj_comm_agree(comm, create_output(r));
  r->load = (run_load){.job = r->job,
                       .checkpoint = r->checkpoint,
                       .ctx = r->ctx,
                       .end = last_layer(r),
                       .memory_bytes = r->args->load_bytes};
  if (status == OPROJ_OK) status = run_layers(r);
  if (status == OPROJ_OK) status = oproj_comm_agree(comm, write_results(r));
  return status;
}

static void release(run *r) {
  oproj_tensors_abandon(r->writer);
  run_check_destroy(r->check);
  for (int i = 0; i < 2; i++) {
    free(r->tables[i].host);
    oproj_buffer_destroy(r->ctx, r->tables[i].device);
  }
  oproj_buffer_destroy(r->ctx, r->attn_out);
  oproj_buffer_destroy(r->ctx, r->positions);
  oproj_buffer_destroy(r->ctx, r->y);
  run_load_free(&r->load);
  oproj_ctx_destroy(r->ctx);
  free(r->host_y);
  free(r->whole_y);
  run_input_free(&r->input);
  run_input_free(&r->whole);
  oproj_checkpoint_close(r->checkpoint);
  json_decref(r->rows);
}

oproj_status cmd_run(job_state *job, int argc, char **argv) {
  run_args args;
  if (!run_args_parse(job, argc, argv, &args)) return OPROJ_OK;
  if (args.deadline >= 0) job_set_deadline(job, (double)args.deadline);
  job_catch_interrupts();
  run r = {.args = &args, .job = job, .passed = true, .rows = json_array()};
  oproj_status status = execute(&r);
  if (!r.passed) job->code = JOB_CHECK_FAILED;
  release(&r);
  return status;
}
