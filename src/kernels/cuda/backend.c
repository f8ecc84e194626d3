/* backend.c - the stages of the CUDA backend, their chain, and its table.
 *
 *   input -> WO_A (one launch for all groups, adapter added) -> z -> quantised z -> WO_B
 *
 * Stages enqueue on the caller's stream and return; they neither allocate, copy to the host nor
 * synchronise, so that a CUDA graph can capture them.  Their workspace belongs to the context:
 * calls of one context must be ordered among themselves, on one stream or by events.
 *
 * Every entry makes the context's device current for the calling thread and leaves it so.  Each
 * stage is a range of NVTX: input, adapter, WO_A, z, WO_B. */
#include "base/error.h"
#include "base/log.h"
#include "kernels/cuda/cublaslt.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/range.h"
#include "kernels/cuda/sm90_decode.h"

enum { ALIGNMENT = 16 }; /* bytes: the kernels' loads and stores of codes, x and z */

static oproj_status check_aligned(const void *pointer, const char *name) {
  REQUIRE((uintptr_t)pointer % ALIGNMENT == 0, OPROJ_ERR_INVALID,
          "%s is at %p; the cuda backend needs it aligned to %d bytes", name, pointer, ALIGNMENT);
  return OPROJ_OK;
}

static oproj_status launch_product(const cuda_product *product, cudaStream_t stream) {
  CUDA_TRY(cuda_launch_project(product, stream));
  return OPROJ_OK;
}

/* ---- which path --------------------------------------------------------------------------- */

static oproj_status choose_path(const oproj_kernels_weights *w, int32_t tokens, int own_out,
                                oproj_path_choice *out) {
  const oproj_kernels *k = w->kernels;
  oproj_path_query query = {.tokens = tokens,
                            .dims = k->config.dims,
                            .groups = k->config.groups,
                            .wo_a = w->wo_a.dtype,
                            .wo_b = w->wo_b.dtype,
                            .has_adapter = w->adapter.rank > 0,
                            .own_out = own_out,
                            .forced = k->config.path};
  cuda_describe(w, &query);
  return oproj_path_choose(&query, out);
}

/* Each path once per context. */
static void log_choice(oproj_kernels *k, int32_t tokens, const oproj_path_choice *choice) {
  if (k->paths_logged & 1u << choice->path) return;
  k->paths_logged |= 1u << choice->path;
  oproj_base_log(OPROJ_LOG_INFO, "%d tokens: %s (%s)", tokens, choice->name, choice->reason);
}

/* ---- input --------------------------------------------------------------------------------- */

static cuda_input describe_input(const oproj_kernels *k, const oproj_io *io,
                                 const oproj_kernels_part *part) {
  const oproj_dims *dims = &k->config.dims;
  int32_t heads_per_group = k->group_cols / dims->head_dim;
  return (cuda_input){.tokens = part->tokens,
                      .begin = part->begin,
                      .strip = part->strip,
                      .stride = part->stride,
                      .heads = k->config.groups * heads_per_group,
                      .heads_per_group = heads_per_group,
                      .head_dim = dims->head_dim,
                      .rope_dim = dims->rope_dim,
                      .block = dims->quant_block,
                      .attn_out = io->attn_out,
                      .token_stride = io->token_stride,
                      .head_stride = io->head_stride,
                      .positions = io->positions,
                      .positions_i32 = io->position_type == OPROJ_POSITION_I32,
                      .cos_sin = io->cos_sin,
                      .cos_sin_rows = io->cos_sin_rows,
                      .fault = k->fault_device,
                      .claim = k->claim,
                      .dependent = k->dependent};
}

static oproj_status quantize_input(const oproj_kernels *k, const oproj_io *io,
                                   const oproj_kernels_part *part, const oproj_quant *out,
                                   int joined, cudaStream_t stream) {
  TRY(check_aligned(out->codes, "codes"));
  cuda_input input = describe_input(k, io, part);
  input.joined = joined;
  input.codes = out->codes;
  input.scales = out->scales;
  input.layout = out->layout;
  CUDA_TRY(cuda_launch_input_quantize(&input, stream));
  return OPROJ_OK;
}

static oproj_status rotate_input(const oproj_kernels *k, const oproj_io *io,
                                 const oproj_kernels_part *part, uint16_t *x, cudaStream_t stream) {
  TRY(check_aligned(x, "x"));
  cuda_input input = describe_input(k, io, part);
  input.x = x;
  CUDA_TRY(cuda_launch_input_rotate(&input, stream));
  return OPROJ_OK;
}

static oproj_status stage_input_quantize(oproj_kernels *k, const oproj_io *io,
                                         const oproj_quant *out, void *stream) {
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  TRY(cuda_enter(k));
  return CUDA_IN_RANGE("input", quantize_input(k, io, &whole, out, 0, stream));
}

static oproj_status stage_input_rotate(oproj_kernels *k, const oproj_io *io, uint16_t *x,
                                       void *stream) {
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  TRY(cuda_enter(k));
  return CUDA_IN_RANGE("input", rotate_input(k, io, &whole, x, stream));
}

/* ---- WO_A ---------------------------------------------------------------------------------- */

static cuda_product group_product(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                  uint16_t *z) {
  const oproj_kernels *k = w->kernels;
  return (cuda_product){.groups = k->config.groups,
                        .tokens = part->tokens,
                        .call_tokens = part->call_tokens,
                        .rows = k->config.dims.lora_rank,
                        .cols = k->group_cols,
                        .dtype = w->wo_a.dtype,
                        .block = w->wo_a.block,
                        .w = w->wo_a.data,
                        .w_scales = w->wo_a.scales,
                        .out = z,
                        .out_stride = k->z_cols};
}

static oproj_status add_adapter(const oproj_kernels_weights *w, int32_t tokens, const uint16_t *x,
                                cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  cuda_lora lora = {.groups = k->config.groups,
                    .tokens = tokens,
                    .rank = w->adapter.rank,
                    .rows = k->config.dims.lora_rank,
                    .cols = k->group_cols,
                    .x = x,
                    .a = w->adapter.a,
                    .b = w->adapter.b,
                    .down = w->adapter.down,
                    .delta = k->work.delta};
  CUDA_TRY(cuda_launch_lora(&lora, stream));
  return OPROJ_OK;
}

static oproj_status project_groups(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                   const oproj_quant *x, int joined, const float *addend,
                                   uint16_t *z, cudaStream_t stream) {
  TRY(check_aligned(x->codes, "codes"));
  TRY(check_aligned(x->scales, "scales"));
  if (!addend && cuda_lt_takes_groups(w, part, x, z))
    return cuda_lt_project_groups(w, part, x, z, stream);
  if (x->layout == OPROJ_SCALE_F32 && sm90_takes_groups(w)) {
    sm90_result result = {.addend = addend, .z = z};
    return sm90_project_groups(w, part, x, joined, NULL, &result, stream);
  }
  cuda_product product = group_product(w, part, z);
  product.a = x->codes;
  product.a_scales = x->scales;
  product.layout = x->layout;
  product.addend = addend;
  return launch_product(&product, stream);
}

/* The workspace's quantised input, described for this call. */
static oproj_quant workspace_xq(const oproj_kernels *k, int32_t tokens) {
  oproj_quant xq = k->work.xq;
  xq.layout = OPROJ_SCALE_F32;
  xq.groups = k->config.groups;
  xq.tokens = tokens;
  xq.cols = k->group_cols;
  return xq;
}

/* z from the quantised input (e4m3 WO_A) or from the rotated one (bf16 WO_A); with an adapter the
 * rotated input is needed in both cases. */
static oproj_status forward_groups(const oproj_kernels_weights *w, const oproj_io *io,
                                   const oproj_kernels_part *part, uint16_t *z,
                                   cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  const cuda_workspace *work = &k->work;
  const float *addend = NULL;
  if (w->wo_a.dtype == OPROJ_DTYPE_BF16 || w->adapter.rank > 0)
    TRY(CUDA_IN_RANGE("input", rotate_input(k, io, part, work->x, stream)));
  if (w->adapter.rank > 0) {
    TRY(CUDA_IN_RANGE("adapter", add_adapter(w, part->tokens, work->x, stream)));
    addend = work->delta;
  }
  if (w->wo_a.dtype == OPROJ_DTYPE_E4M3) {
    oproj_path_choice choice;
    int joined = w->wo_a_joined != NULL;
    cuda_input input = describe_input(k, io, part);
    if (choose_path(w, part->call_tokens, 1, &choice) == OPROJ_OK &&
        choice.path == OPROJ_PATH_FUSED && sm90_loads_input(&input)) {
      sm90_result result = {.z = z};
      return CUDA_IN_RANGE("WO_A",
                           sm90_project_groups(w, part, NULL, joined, &input, &result, stream));
    }
    oproj_quant xq = workspace_xq(k, part->tokens);
    TRY(CUDA_IN_RANGE("input", quantize_input(k, io, part, &xq, joined, stream)));
    return CUDA_IN_RANGE("WO_A", project_groups(w, part, &xq, joined, addend, z, stream));
  }
  cuda_product product = group_product(w, part, z);
  product.a = work->x;
  product.addend = addend;
  return CUDA_IN_RANGE("WO_A", launch_product(&product, stream));
}

static oproj_status stage_group_forward(oproj_kernels_weights *w, const oproj_io *io, uint16_t *z,
                                        void *stream) {
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  TRY(cuda_enter(w->kernels));
  return forward_groups(w, io, &whole, z, stream);
}

static oproj_status stage_group_project(oproj_kernels_weights *w, const oproj_quant *x, uint16_t *z,
                                        void *stream) {
  oproj_kernels_part whole = oproj_kernels_whole(x->tokens);
  TRY(cuda_enter(w->kernels));
  return CUDA_IN_RANGE("WO_A", project_groups(w, &whole, x, 0, NULL, z, stream));
}

/* ---- z and WO_B ---------------------------------------------------------------------------- */

static oproj_status quantize_z(const oproj_kernels *k, int32_t tokens, const uint16_t *z,
                               const oproj_quant *out, int joined, cudaStream_t stream) {
  TRY(check_aligned(z, "z"));
  TRY(check_aligned(out->codes, "codes"));
  cuda_z description = {.tokens = tokens,
                        .cols = k->z_cols,
                        .block = k->config.dims.quant_block,
                        .joined = joined,
                        .z = z,
                        .codes = out->codes,
                        .scales = out->scales,
                        .layout = out->layout};
  CUDA_TRY(cuda_launch_z_quantize(&description, stream));
  return OPROJ_OK;
}

/* The workspace's quantised z, described for this call. */
static oproj_quant workspace_zq(const oproj_kernels *k, int32_t tokens, oproj_scale_layout layout) {
  oproj_quant zq = k->work.zq;
  zq.layout = layout;
  zq.groups = 1;
  zq.tokens = tokens;
  zq.cols = k->z_cols;
  return zq;
}

static cuda_product out_product(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                uint16_t *partial) {
  const oproj_kernels *k = w->kernels;
  return (cuda_product){.groups = 1,
                        .tokens = part->tokens,
                        .call_tokens = part->call_tokens,
                        .rows = k->config.dims.hidden,
                        .cols = k->z_cols,
                        .dtype = w->wo_b.dtype,
                        .block = w->wo_b.block,
                        .w = w->wo_b.data,
                        .w_scales = w->wo_b.scales,
                        .out = partial,
                        .out_stride = k->config.dims.hidden};
}

static oproj_status project_out(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                const oproj_quant *z, int joined, uint16_t *partial, uint32_t flags,
                                cudaStream_t stream) {
  TRY(check_aligned(z->codes, "codes"));
  TRY(check_aligned(z->scales, "scales"));
  if (cuda_lt_takes_out(w, part, z, joined, partial))
    return cuda_lt_project_out(w, part, z, partial, stream);
  if (z->layout == OPROJ_SCALE_F32 && sm90_takes_out(w))
    return sm90_project_out(w, part, z, joined, partial, (flags & OPROJ_EARLY_TRIGGER) != 0,
                            stream);
  cuda_product product = out_product(w, part, partial);
  product.a = z->codes;
  product.a_scales = z->scales;
  product.layout = z->layout;
  return launch_product(&product, stream);
}

static oproj_status forward_out(const oproj_kernels_weights *w, const oproj_kernels_part *part,
                                const uint16_t *z, uint16_t *partial, uint32_t flags,
                                cudaStream_t stream) {
  if (w->wo_b.dtype == OPROJ_DTYPE_E4M3) {
    oproj_quant zq = workspace_zq(w->kernels, part->tokens, OPROJ_SCALE_F32);
    int joined = w->wo_b_joined != NULL;
    TRY(CUDA_IN_RANGE("z", quantize_z(w->kernels, part->tokens, z, &zq, joined, stream)));
    return CUDA_IN_RANGE("WO_B", project_out(w, part, &zq, joined, partial, flags, stream));
  }
  TRY(check_aligned(z, "z"));
  cuda_product product = out_product(w, part, partial);
  product.a = z;
  return CUDA_IN_RANGE("WO_B", launch_product(&product, stream));
}

static oproj_status stage_z_quantize(oproj_kernels *k, int32_t tokens, const uint16_t *z,
                                     const oproj_quant *out, void *stream) {
  TRY(cuda_enter(k));
  return CUDA_IN_RANGE("z", quantize_z(k, tokens, z, out, 0, stream));
}

static oproj_status stage_out_forward(oproj_kernels_weights *w, int32_t tokens, const uint16_t *z,
                                      uint16_t *partial, void *stream) {
  oproj_kernels_part whole = oproj_kernels_whole(tokens);
  TRY(cuda_enter(w->kernels));
  return forward_out(w, &whole, z, partial, 0, stream);
}

static oproj_status stage_out_project(oproj_kernels_weights *w, const oproj_quant *z,
                                      uint16_t *partial, void *stream) {
  oproj_kernels_part whole = oproj_kernels_whole(z->tokens);
  TRY(cuda_enter(w->kernels));
  return CUDA_IN_RANGE("WO_B", project_out(w, &whole, z, 0, partial, 0, stream));
}

/* ---- the chain ----------------------------------------------------------------------------- */

/* Input to quantised z without z in memory, the input quantised inside WO_A or in front of it. */
static oproj_status forward_to_quantized_z(const oproj_kernels_weights *w, const oproj_io *io,
                                           const oproj_kernels_part *part, int fused,
                                           const oproj_quant *zq, int z_joined,
                                           cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  int joined = w->wo_a_joined != NULL;
  sm90_result result = {.zq = *zq, .joined = z_joined};
  cuda_input input = describe_input(k, io, part);
  if (fused && sm90_loads_input(&input))
    return CUDA_IN_RANGE("WO_A",
                         sm90_project_groups(w, part, NULL, joined, &input, &result, stream));
  oproj_quant xq = workspace_xq(k, part->tokens);
  TRY(CUDA_IN_RANGE("input", quantize_input(k, io, part, &xq, joined, stream)));
  return CUDA_IN_RANGE("WO_A", sm90_project_groups(w, part, &xq, joined, NULL, &result, stream));
}

static oproj_status forward_chain(const oproj_kernels_weights *w, const oproj_io *io,
                                  const oproj_kernels_part *part, const oproj_kernels_out *out,
                                  uint16_t *partial, cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  oproj_path_choice choice;
  TRY(choose_path(w, part->call_tokens, out->fn != NULL, &choice));
  log_choice(w->kernels, part->call_tokens, &choice);
  if (choice.path == OPROJ_PATH_DECODE && sm90_decode_takes(w, part->tokens)) {
    cuda_input input = describe_input(k, io, part);
    int early = (io->flags & OPROJ_EARLY_TRIGGER) != 0;
    return CUDA_IN_RANGE("decode",
                         sm90_decode_forward(w, &input, partial, out->sink, early, stream));
  }
  int fused = choice.path == OPROJ_PATH_FUSED;
  oproj_quant zq = workspace_zq(k, part->tokens, out->fn ? out->layout : OPROJ_SCALE_F32);
  int joined = !out->fn && w->wo_b_joined; /* the caller's WO_B takes z as the format has it */
  int own_wo_a = choice.path != OPROJ_PATH_PORTABLE && sm90_takes_groups(w);
  if (own_wo_a && w->adapter.rank == 0) {
    TRY(forward_to_quantized_z(w, io, part, fused, &zq, joined, stream));
  } else {
    TRY(forward_groups(w, io, part, k->work.z, stream));
    if (!out->fn) return forward_out(w, part, k->work.z, partial, io->flags, stream);
    TRY(CUDA_IN_RANGE("z", quantize_z(k, part->tokens, k->work.z, &zq, 0, stream)));
  }
  return CUDA_IN_RANGE("WO_B", out->fn
                                   ? out->fn(out->user, &zq, partial, stream)
                                   : project_out(w, part, &zq, joined, partial, io->flags, stream));
}

/* What a part has met is for a later call to report, not for the parts behind it. */
static oproj_status cuda_forward(oproj_kernels_weights *w, const oproj_io *io,
                                 const oproj_kernels_part *part, const oproj_kernels_out *out,
                                 uint16_t *partial, void *stream) {
  if (part->begin == 0)
    TRY(cuda_enter(w->kernels));
  else
    CUDA_TRY(cudaSetDevice(w->kernels->device));
  return forward_chain(w, io, part, out, partial, stream);
}

static int cuda_can_push(const oproj_kernels_weights *w, int32_t tokens,
                         const oproj_kernels_out *out) {
  oproj_path_choice choice;
  return choose_path(w, tokens, out->fn != NULL, &choice) == OPROJ_OK &&
         choice.path == OPROJ_PATH_DECODE && sm90_decode_takes(w, tokens);
}

/* ---- warm-up ------------------------------------------------------------------------------- */

/* What a warm-up reads: zeros, the heads in the workspace's x. */
static oproj_io warm_input(const oproj_kernels *k, char *zeros, int32_t tokens) {
  int32_t head_dim = k->config.dims.head_dim;
  return (oproj_io){.tokens = tokens,
                    .attn_out = k->work.x,
                    .head_stride = head_dim,
                    .token_stride = (int64_t)k->config.groups * k->group_cols,
                    .cos_sin = (const float *)zeros,
                    .cos_sin_rows = 1,
                    .cos_sin_width = k->config.dims.rope_dim,
                    .positions = zeros};
}

/* Heads or a table that 16-byte loads cannot take have kernels of their own, and so have blocks
 * that a chain joins and a stage alone does not. */
static oproj_status warm_inputs(const oproj_kernels_weights *w, char *zeros, cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  oproj_quant xq = workspace_xq(k, 1);
  oproj_io odd_table = warm_input(k, zeros, 1), odd_heads = odd_table;
  oproj_kernels_part whole = oproj_kernels_whole(1);
  odd_table.cos_sin++;
  odd_heads.head_stride++;
  TRY(quantize_input(k, &odd_table, &whole, &xq, 0, stream));
  TRY(quantize_input(k, &odd_heads, &whole, &xq, 0, stream));
  for (int32_t tokens = 1, most = k->config.max_tokens;; tokens = most) {
    oproj_io io = warm_input(k, zeros, tokens);
    oproj_kernels_part part = oproj_kernels_whole(tokens);
    xq = workspace_xq(k, tokens);
    TRY(quantize_input(k, &io, &part, &xq, 0, stream));
    if (tokens == most) break;
  }
  TRY(rotate_input(k, &odd_heads, &whole, k->work.x, stream));
  return rotate_input(k, &odd_table, &whole, k->work.x, stream);
}

/* Every power of two of tokens and the most there are: each variant begins at one of them.  A
 * forced path may refuse some.  x holds the input, and y once the input is spent. */
static oproj_status warm_counts(const oproj_kernels_weights *w, char *zeros, cudaStream_t stream) {
  static const oproj_kernels_out own = {.layout = OPROJ_SCALE_F32};
  int32_t most = w->kernels->config.max_tokens;
  for (int64_t next = 1, tokens = 0; tokens < most; next *= 2) {
    tokens = next < most ? next : most;
    int32_t whole = (int32_t)(tokens < CUDA_LT_TOKENS ? tokens : tokens & -CUDA_LT_MULTIPLE);
    oproj_io io = warm_input(w->kernels, zeros, whole);
    oproj_kernels_part part = oproj_kernels_whole(whole);
    oproj_status status = forward_chain(w, &io, &part, &own, w->kernels->work.x, stream);
    if (status != OPROJ_OK && status != OPROJ_ERR_UNSUPPORTED) return status;
  }
  return OPROJ_OK;
}

static oproj_status warm_all(const oproj_kernels_weights *w, char *zeros, size_t bytes) {
  const oproj_kernels *k = w->kernels;
  size_t rows = (size_t)k->config.groups * (size_t)k->config.max_tokens + CUDA_LT_SLACK;
  size_t x_bytes = rows * (size_t)k->group_cols * sizeof *k->work.x;
  CUDA_TRY(cudaMemsetAsync(zeros, 0, bytes, k->upload));
  CUDA_TRY(cudaMemsetAsync(k->work.x, 0, x_bytes, k->upload));
  TRY(warm_inputs(w, zeros, k->upload));
  TRY(warm_counts(w, zeros, k->upload));
  CUDA_TRY(cudaStreamSynchronize(k->upload));
  return OPROJ_OK;
}

oproj_status cuda_warm(const oproj_kernels_weights *w) {
  oproj_kernels *k = w->kernels;
  int joined = (w->wo_a_joined != NULL) | (w->wo_b_joined != NULL) << 1;
  uint32_t kind =
      1u << (w->wo_a.dtype | w->wo_b.dtype << 1 | (w->adapter.rank > 0) << 2 | joined << 3);
  if (k->warm & kind || k->config.max_tokens == 0) return OPROJ_OK;
  size_t table = ((size_t)k->config.dims.rope_dim + 1) * sizeof(float);
  size_t positions = (size_t)k->config.max_tokens * sizeof(int64_t);
  size_t bytes = table > positions ? table : positions;
  void *zeros;
  CUDA_TRY(cudaDeviceSynchronize()); /* calls of other layers may still use the workspace */
  CUDA_TRY(cudaMalloc(&zeros, bytes));
  oproj_status status = warm_all(w, zeros, bytes);
  cudaFree(zeros);
  if (status == OPROJ_OK) k->warm |= kind;
  return status;
}

/* ---- the table ----------------------------------------------------------------------------- */

static const oproj_kernels_ops cuda_ops = {
    .name = "cuda",
    .host = 0,
    .open = cuda_open,
    .close = cuda_close,
    .weights_create = cuda_weights_create,
    .weights_check = cuda_weights_check,
    .weights_replace = cuda_weights_replace,
    .weights_destroy = cuda_weights_destroy,
    .adapter_set = cuda_adapter_set,
    .input_quantize = stage_input_quantize,
    .input_rotate = stage_input_rotate,
    .group_forward = stage_group_forward,
    .group_project = stage_group_project,
    .z_quantize = stage_z_quantize,
    .out_forward = stage_out_forward,
    .out_project = stage_out_project,
    .forward = cuda_forward,
    .fork = cuda_fork,
    .join = cuda_join,
    .buffer_create = cuda_buffer_create,
    .buffer_destroy = cuda_buffer_destroy,
    .buffer_write = cuda_buffer_write,
    .buffer_read = cuda_buffer_read,
    .host_create = cuda_host_create,
    .host_destroy = cuda_host_destroy,
    .sum_ranks = cuda_sum_ranks,
    .pulse_create = cuda_pulse_create,
    .pulse_destroy = cuda_pulse_destroy,
    .pulse_begin = cuda_pulse_begin,
    .pulse_end = cuda_pulse_end,
    .pulse_read = cuda_pulse_read,
    .mailbox_bytes = cuda_mailbox_bytes,
    .mailbox_create = cuda_mailbox_create,
    .mailbox_destroy = cuda_mailbox_destroy,
    .mailbox_open = cuda_mailbox_open,
    .mailbox_close = cuda_mailbox_close,
    .can_push = cuda_can_push,
    .sum_pushed = cuda_sum_pushed,
    .make_nan = cuda_make_nan,
    .capability = cuda_capability,
    .describe = cuda_describe,
};

const oproj_kernels_ops *oproj_kernels_cuda(const char **why) {
  const char *unusable = cuda_why_unusable();
  if (unusable && why) *why = unusable;
  return unusable ? NULL : &cuda_ops;
}
