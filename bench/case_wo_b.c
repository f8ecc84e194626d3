/* case_wo_b.c - quantisation of z and WO-B: from z to this rank's partial sum. */
#include "cases.h"
#include "check.h"

static oproj_status open_case(bench_rig *rig) {
  oproj_status status = rig_make_layers(rig, RIG_WO_B);
  return status == OPROJ_OK ? rig_make_outputs(rig) : status;
}

static oproj_status call_case(bench_rig *rig, int32_t tokens, int32_t call, void *stream) {
  return oproj_out_forward(rig_layer(rig, call), tokens, rig->z, rig->y, stream);
}

static bench_cost cost_case(const bench_rig *rig, int32_t tokens) {
  return (bench_cost){
      .bytes = rig_wo_b_bytes(rig) + 2.0 * tokens * (rig->z_cols + (double)rig->dims.hidden),
      .flops = 2.0 * tokens * (double)rig->dims.hidden * rig->z_cols};
}

static oproj_status poison_case(bench_rig *rig, int32_t tokens) {
  return rig_poison(rig, rig->y, (size_t)tokens * (size_t)rig->dims.hidden * sizeof *rig->y);
}

static oproj_status check_case(bench_rig *rig, int32_t tokens, int32_t call, int64_t *wrong) {
  return check_values(rig, CHECK_WO_B, tokens, call, call % rig->layer_count, rig->y, wrong);
}

const bench_case case_wo_b = {.name = "wo_b",
                              .summary = "WO-B from z (oproj_out_forward)",
                              .open = open_case,
                              .call = call_case,
                              .cost = cost_case,
                              .poison = poison_case,
                              .check = check_case};
