/* case_forward.c - the whole chain of one rank, without the sum over ranks (forward) and with it
 * (layer). */
#include "cases.h"
#include "check.h"

static oproj_status open_case(bench_rig *rig) {
  oproj_status status = rig_make_layers(rig, RIG_WO_A | RIG_WO_B);
  if (status == OPROJ_OK) status = rig_make_inputs(rig);
  return status == OPROJ_OK ? rig_make_outputs(rig) : status;
}

static oproj_status call_case(bench_rig *rig, int32_t tokens, int32_t call, void *stream) {
  oproj_io io = rig_io(rig, tokens, call);
  return oproj_forward(rig_layer(rig, call), &io, stream);
}

static bench_cost cost_case(const bench_rig *rig, int32_t tokens) {
  double a = (double)rig->z_cols * rig->group_cols, b = (double)rig->dims.hidden * rig->z_cols;
  return (bench_cost){.bytes = rig_wo_a_bytes(rig) + rig_wo_b_bytes(rig) +
                               rig_input_bytes(rig, tokens) + 2.0 * tokens * rig->dims.hidden,
                      .flops = 2.0 * tokens * (a + b),
                      .link_bytes = rig_link_bytes(rig, tokens)};
}

static oproj_status poison_case(bench_rig *rig, int32_t tokens) {
  return rig_poison(rig, rig->y, (size_t)tokens * (size_t)rig->dims.hidden * sizeof *rig->y);
}

static oproj_status check_case(bench_rig *rig, int32_t tokens, int32_t call, int64_t *wrong) {
  return check_values(rig, CHECK_FORWARD, tokens, call, call % rig->layer_count, rig->y, wrong);
}

const bench_case case_forward = {.name = "forward",
                                 .summary = "the whole chain of one rank, without the reduction",
                                 .naive = true,
                                 .chain = true,
                                 .open = open_case,
                                 .call = call_case,
                                 .cost = cost_case,
                                 .poison = poison_case,
                                 .check = check_case};

const bench_case case_layer = {
    .name = "layer",
    .summary = "the whole layer: the chain and the sum over ranks; by mpirun",
    .naive = true,
    .chain = true,
    .reduces = true,
    .overlaps = true,
    .open = open_case,
    .call = call_case,
    .cost = cost_case,
    .poison = poison_case,
    .check = check_case};
