/* case_wo_a.c - inverse RoPE, quantisation and WO-A: from the attention output to z. */
#include "cases.h"
#include "check.h"

static oproj_status open_case(bench_rig *rig) {
  oproj_status status = rig_make_layers(rig, RIG_WO_A);
  if (status == OPROJ_OK) status = rig_make_inputs(rig);
  return status == OPROJ_OK ? rig_make_outputs(rig) : status;
}

static oproj_status call_case(bench_rig *rig, int32_t tokens, int32_t call, void *stream) {
  oproj_io io = rig_io(rig, tokens, call);
  return oproj_group_forward(rig_layer(rig, call), &io, rig->z, stream);
}

static bench_cost cost_case(const bench_rig *rig, int32_t tokens) {
  return (bench_cost){
      .bytes = rig_wo_a_bytes(rig) + rig_input_bytes(rig, tokens) + 2.0 * tokens * rig->z_cols,
      .flops = 2.0 * tokens * (double)rig->z_cols * rig->group_cols};
}

static oproj_status poison_case(bench_rig *rig, int32_t tokens) {
  return rig_poison(rig, rig->z, (size_t)tokens * (size_t)rig->z_cols * sizeof *rig->z);
}

static oproj_status check_case(bench_rig *rig, int32_t tokens, int32_t call, int64_t *wrong) {
  return check_values(rig, CHECK_WO_A, tokens, call, call % rig->layer_count, rig->z, wrong);
}

const bench_case case_wo_a = {.name = "wo_a",
                              .summary = "WO-A from the attention output (oproj_group_forward)",
                              .open = open_case,
                              .call = call_case,
                              .cost = cost_case,
                              .poison = poison_case,
                              .check = check_case};
