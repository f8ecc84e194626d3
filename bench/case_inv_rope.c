/* case_inv_rope.c - inverse RoPE and block quantisation of the attention output. */
#include "cases.h"
#include "check.h"

/* One case runs in a process, so its buffers may be static. */
static oproj_quant out;

static size_t code_bytes(const bench_rig *rig, int32_t tokens) {
  return (size_t)rig->groups * (size_t)tokens * (size_t)rig->group_cols;
}

static size_t scale_bytes(const bench_rig *rig, int32_t tokens) {
  return oproj_scale_bytes(OPROJ_SCALE_F32, rig->groups, tokens, rig->group_cols,
                           rig->dims.quant_block);
}

static oproj_status open_case(bench_rig *rig) {
  void *codes = NULL;
  out = (oproj_quant){.layout = OPROJ_SCALE_F32, .groups = rig->groups, .cols = rig->group_cols};
  oproj_status status = rig_make_inputs(rig);
  if (status == OPROJ_OK)
    status = oproj_buffer_create(rig->ctx, code_bytes(rig, rig->max_tokens), &codes);
  out.codes = codes;
  if (status == OPROJ_OK)
    status = oproj_buffer_create(rig->ctx, scale_bytes(rig, rig->max_tokens), &out.scales);
  return status;
}

static void close_case(bench_rig *rig) {
  oproj_buffer_destroy(rig->ctx, out.codes);
  oproj_buffer_destroy(rig->ctx, out.scales);
}

static oproj_status call_case(bench_rig *rig, int32_t tokens, int32_t call, void *stream) {
  oproj_io io = rig_io(rig, tokens, call);
  out.tokens = tokens;
  return oproj_input_quantize(rig->ctx, &io, &out, stream);
}

static bench_cost cost_case(const bench_rig *rig, int32_t tokens) {
  return (bench_cost){.bytes = rig_input_bytes(rig, tokens) + (double)code_bytes(rig, tokens) +
                               (double)scale_bytes(rig, tokens)};
}

static oproj_status poison_case(bench_rig *rig, int32_t tokens) {
  oproj_status status = rig_poison(rig, out.codes, code_bytes(rig, tokens));
  return status == OPROJ_OK ? rig_poison(rig, out.scales, scale_bytes(rig, tokens)) : status;
}

static oproj_status check_case(bench_rig *rig, int32_t tokens, int32_t call, int64_t *wrong) {
  return check_quantized(rig, tokens, call, &out, wrong);
}

const bench_case case_inv_rope = {
    .name = "inv_rope",
    .summary = "inverse RoPE and block quantisation (oproj_input_quantize)",
    .open = open_case,
    .close = close_case,
    .call = call_case,
    .cost = cost_case,
    .poison = poison_case,
    .check = check_case};
