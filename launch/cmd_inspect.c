/* cmd_inspect.c - `oproj inspect`: what a checkpoint holds and what each rank would get of it. */
#include <jansson.h>
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "job/job.h"
#include "oproj/checkpoint.h"
#include "report.h"
#include "target.h"

/* --tp where it was not given; no number of ranks that the plan would take. */
static const int64_t NO_TP = INT64_MIN;

typedef struct inspect_args {
  const char *dir, *json;
  int64_t tp;
  bool uneven;
} inspect_args;

static const char *dtype_word(oproj_dtype dtype) {
  return dtype == OPROJ_DTYPE_BF16 ? "BF16" : "F8_E4M3";
}

static void show_model(const oproj_model *m, json_t *result) {
  const oproj_dims *d = &m->dims;
  printf("model       %s, layers %d, draft layers %d, positions below %lld\n", m->model_type,
         m->layers, m->draft_layers, (long long)m->max_position);
  printf(
      "dimensions  hidden %d, heads %d x %d (rotary %d), groups %d, o_lora_rank %d, blocks of %d\n",
      d->hidden, d->heads, d->head_dim, d->rope_dim, d->groups, d->lora_rank, d->quant_block);
  json_object_set_new(
      result, "model",
      json_pack("{s:s, s:i, s:i, s:I}", "model_type", m->model_type, "layers", m->layers,
                "draft_layers", m->draft_layers, "max_position", (json_int_t)m->max_position));
  json_object_set_new(
      result, "dims",
      json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "hidden", d->hidden, "heads", d->heads,
                "head_dim", d->head_dim, "rope_dim", d->rope_dim, "groups", d->groups, "lora_rank",
                d->lora_rank, "quant_block", d->quant_block));
}

/* The path that one token takes through a layer on this machine's first GPU, or on the host where
 * there is none; no weights are needed to know it. */
static oproj_status path_of(const oproj_dims *dims, const oproj_layer_info *info,
                            oproj_path_choice *choice) {
  oproj_path_query query = {.sm = oproj_device_capability(0),
                            .tokens = 1,
                            .dims = *dims,
                            .groups = dims->groups,
                            .wo_a = info->wo_a,
                            .wo_b = info->wo_b};
  return oproj_path_choose(&query, choice);
}

static oproj_status show_layers(const oproj_checkpoint *checkpoint, json_t *result) {
  const oproj_model *m = oproj_checkpoint_model(checkpoint);
  json_t *layers = json_array();
  json_object_set_new(result, "layers", layers);
  printf("\n#%-10s %6s %-11s %-16s %-16s %s\n", "layer", "ratio", "angles", "WO-A (scales)",
         "WO-B (scales)", "path of one token here, and why");
  for (int32_t i = 0; i < m->layers + m->draft_layers; i++) {
    oproj_layer_info info;
    oproj_path_choice choice;
    oproj_status status = oproj_checkpoint_layer(checkpoint, i, &info);
    if (status == OPROJ_OK) status = path_of(&m->dims, &info, &choice);
    if (status != OPROJ_OK) return status;
    const char *angles = info.compressed ? "compressed" : "plain";
    char wo_a[32], wo_b[32];
    snprintf(wo_a, sizeof wo_a, "%s %s", dtype_word(info.wo_a), info.wo_a_scale_dtype);
    snprintf(wo_b, sizeof wo_b, "%s %s", dtype_word(info.wo_b), info.wo_b_scale_dtype);
    printf(" %-10s %6d %-11s %-16s %-16s %s: %s\n", info.name, info.compress_ratio, angles, wo_a,
           wo_b, choice.name, choice.reason);
    json_array_append_new(
        layers, json_pack("{s:s, s:i, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s}", "layer",
                          info.name, "compress_ratio", info.compress_ratio, "angles", angles,
                          "wo_a_tensor", info.wo_a_tensor, "wo_a", dtype_word(info.wo_a),
                          "wo_a_scales", info.wo_a_scale_dtype, "wo_b_tensor", info.wo_b_tensor,
                          "wo_b", dtype_word(info.wo_b), "wo_b_scales", info.wo_b_scale_dtype,
                          "path", choice.name, "reason", choice.reason));
  }
  return OPROJ_OK;
}

static oproj_status share_bytes(const oproj_checkpoint *checkpoint, const oproj_shard *shard,
                                int64_t *out) {
  const oproj_model *m = oproj_checkpoint_model(checkpoint);
  *out = 0;
  for (int32_t i = 0; i < m->layers + m->draft_layers; i++) {
    int64_t bytes;
    oproj_status status = oproj_checkpoint_layer_bytes(checkpoint, i, shard, &bytes);
    if (status != OPROJ_OK) return status;
    *out += bytes;
  }
  return OPROJ_OK;
}

static oproj_status show_shares(const oproj_checkpoint *checkpoint, int32_t tp, oproj_split split,
                                json_t *result) {
  const oproj_model *m = oproj_checkpoint_model(checkpoint);
  json_t *ranks = json_array();
  json_object_set_new(result, "ranks", ranks);
  printf("\n#%-6s %-12s %-12s %-16s %14s\n", "rank", "groups", "heads", "z columns", "bytes");
  for (int32_t rank = 0; rank < tp; rank++) {
    oproj_shard s;
    int64_t bytes;
    oproj_status status = oproj_plan_shard(&m->dims, split, tp, rank, &s);
    if (status == OPROJ_OK) status = share_bytes(checkpoint, &s, &bytes);
    if (status != OPROJ_OK) return status;
    char groups[32], heads[32], columns[32];
    snprintf(groups, sizeof groups, "[%d, %d)", s.group_begin, s.group_end);
    snprintf(heads, sizeof heads, "[%d, %d)", s.head_begin, s.head_end);
    snprintf(columns, sizeof columns, "[%d, %d)", s.z_begin, s.z_end);
    printf(" %-6d %-12s %-12s %-16s %14lld\n", rank, groups, heads, columns, (long long)bytes);
    json_array_append_new(
        ranks, json_pack("{s:i, s:[i,i], s:[i,i], s:[i,i], s:I}", "rank", rank, "groups",
                         s.group_begin, s.group_end, "heads", s.head_begin, s.head_end, "z_columns",
                         s.z_begin, s.z_end, "bytes", (json_int_t)bytes));
  }
  return OPROJ_OK;
}

/* Scales as the ranks will read them: a split set holds each rank's apart. */
static oproj_status check_scales(const oproj_checkpoint *checkpoint) {
  const oproj_model *m = oproj_checkpoint_model(checkpoint);
  int32_t made_for = oproj_checkpoint_split_size(checkpoint), size = made_for > 0 ? made_for : 1;
  oproj_status status = OPROJ_OK;
  for (int32_t rank = 0; rank < size && status == OPROJ_OK; rank++) {
    oproj_shard shard;
    status =
        oproj_plan_shard(&m->dims, oproj_checkpoint_split_kind(checkpoint), size, rank, &shard);
    for (int32_t i = 0; i < m->layers + m->draft_layers && status == OPROJ_OK; i++)
      status = oproj_checkpoint_check_scales(checkpoint, i, &shard);
  }
  return status;
}

static oproj_status inspect(const inspect_args *args, const oproj_checkpoint *checkpoint,
                            json_t *result) {
  oproj_split split = args->uneven ? OPROJ_SPLIT_UNEVEN : OPROJ_SPLIT_EVEN;
  int32_t made_for = oproj_checkpoint_split_size(checkpoint);
  int32_t tp = args->tp != NO_TP ? (int32_t)args->tp : made_for > 0 ? made_for : 1;
  if (made_for > 0) split = oproj_checkpoint_split_kind(checkpoint);
  /* What is refused is refused before anything is shown. */
  oproj_shard first;
  oproj_status status =
      oproj_plan_shard(&oproj_checkpoint_model(checkpoint)->dims, split, tp, 0, &first);
  if (status == OPROJ_OK && made_for > 0 && made_for != tp)
    status = oproj_fail(OPROJ_ERR_SHAPE, "%s was split for %d ranks; --tp is %d", args->dir,
                        made_for, tp);
  if (status == OPROJ_OK) status = check_scales(checkpoint);
  if (status != OPROJ_OK) return status;
  show_model(oproj_checkpoint_model(checkpoint), result);
  if (made_for > 0) printf("split       for %d ranks\n", made_for);
  status = show_layers(checkpoint, result);
  if (status == OPROJ_OK) status = show_shares(checkpoint, tp, split, result);
  return status;
}

oproj_status cmd_inspect(job_state *job, int argc, char **argv) {
  inspect_args args = {.tp = NO_TP};
  const args_option options[] = {
      {"tp", "N", "ranks to plan for (default 1, or those of a split checkpoint)",
       .number = &args.tp, .least = INT32_MIN, .most = INT32_MAX},
      {"uneven", NULL, "allow ranks that do not divide the groups", .on = &args.uneven},
      {"json", "FILE", "write the same as JSON", .text = &args.json},
      {0}};
  const args_command command = {
      "oproj inspect",
      "Shows dimensions, layers, dtypes and per-rank shares of the checkpoint in DIR.", options,
      "DIR", &args.dir};
  if (!args_parse(job, &command, argc, argv)) return OPROJ_OK;

  oproj_checkpoint *checkpoint = NULL;
  json_t *result = json_object();
  oproj_status status = target_check("--json", args.json, NULL, args.dir);
  if (status == OPROJ_OK) status = oproj_checkpoint_open(&checkpoint, args.dir);
  if (status == OPROJ_OK) status = inspect(&args, checkpoint, result);
  if (status == OPROJ_OK && args.json) status = report_json(args.json, json_incref(result));
  json_decref(result);
  oproj_checkpoint_close(checkpoint);
  return status;
}
