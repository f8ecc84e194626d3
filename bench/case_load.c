/* case_load.c - a layer from a checkpoint's files to the device; call i loads layer i.
 *
 * The files are in the page cache after the first round, unless the caller drops it. */
#include "cases.h"
#include "oproj/checkpoint.h"

static oproj_checkpoint *checkpoint;
static int32_t layers;
static int64_t bytes; /* of one layer's share, as stored */

static oproj_status open_files(const char *dir) {
  oproj_status status = oproj_checkpoint_open(&checkpoint, dir);
  if (status != OPROJ_OK) return status;
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  layers = model->layers + model->draft_layers;
  return OPROJ_OK;
}

static oproj_status dims_case(const bench_ranks *ranks, const bench_args *args, oproj_dims *out) {
  oproj_status status = oproj_comm_agree(ranks->comm, open_files(args->dir));
  if (status == OPROJ_OK) *out = oproj_checkpoint_model(checkpoint)->dims;
  return status;
}

static oproj_status open_case(bench_rig *rig) {
  return oproj_checkpoint_layer_bytes(checkpoint, 0, oproj_ctx_shard(rig->ctx), &bytes);
}

static void close_case(bench_rig *rig) {
  (void)rig;
  oproj_checkpoint_close(checkpoint);
  checkpoint = NULL;
}

static oproj_status call_case(bench_rig *rig, int32_t tokens, int32_t call, void *stream) {
  (void)tokens, (void)stream;
  oproj_layer *layer = NULL;
  oproj_status status = oproj_layer_load(&layer, rig->ctx, checkpoint, call % layers);
  oproj_layer_destroy(layer);
  return status;
}

static bench_cost cost_case(const bench_rig *rig, int32_t tokens) {
  (void)rig, (void)tokens;
  return (bench_cost){.bytes = (double)bytes};
}

const bench_case case_load = {.name = "load",
                              .summary = "one layer from the files of --dir (oproj_layer_load)",
                              .eager = true,
                              .loads = true,
                              .dims = dims_case,
                              .open = open_case,
                              .close = close_case,
                              .call = call_case,
                              .cost = cost_case};
