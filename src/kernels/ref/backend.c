/* backend.c - the reference backend's state, its weights, and the chain of its steps.
 *
 *   input -> WO_A (one product per group, adapter added) -> z -> quantised z -> WO_B
 *
 * Everything runs on the host and is complete on return. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checked.h"
#include "base/error.h"
#include "base/layout.h"
#include "base/num.h"
#include "kernels/ref/ref.h"

/* ---- state --------------------------------------------------------------------------------- */

static void ref_close(oproj_kernels *k) {
  if (!k) return;
  free(k->work.x);
  free(k->work.xq.codes);
  free(k->work.xq.scales);
  free(k->work.z);
  free(k->work.zq.codes);
  free(k->work.zq.scales);
  free(k);
}

/* Room for the largest of the three layouts. */
static size_t any_scale_bytes(int32_t groups, int32_t tokens, int64_t columns) {
  int64_t f32 = oproj_layout_bytes(OPROJ_SCALE_F32, groups, tokens, columns);
  int64_t tile = oproj_layout_bytes(OPROJ_SCALE_UE8M0_TILE, groups, tokens, columns);
  return (size_t)(f32 > tile ? f32 : tile); /* packed is never larger than f32 */
}

static oproj_status ref_open(oproj_kernels **out, const oproj_kernels_config *config) {
  oproj_kernels *k = calloc(1, sizeof *k);
  REQUIRE(k, OPROJ_ERR_NOMEM, "no memory for a context");
  k->config = *config;
  k->group_cols = oproj_kernels_group_cols(config);
  k->z_cols = oproj_kernels_z_cols(config);

  /* A context for zero tokens still has buffers, so that no pointer is NULL. */
  int32_t tokens = config->max_tokens > 0 ? config->max_tokens : 1,
          block = config->dims.quant_block;
  size_t input = (size_t)config->groups * (size_t)tokens * (size_t)k->group_cols;
  size_t z = (size_t)tokens * (size_t)k->z_cols;
  ref_workspace *w = &k->work;
  w->x = malloc(input * sizeof *w->x);
  w->xq.codes = malloc(input);
  w->xq.scales = malloc(any_scale_bytes(config->groups, tokens, k->group_cols / block));
  w->z = malloc(z * sizeof *w->z);
  w->zq.codes = malloc(z);
  w->zq.scales = malloc(any_scale_bytes(1, tokens, k->z_cols / block));
  if (!w->x || !w->xq.codes || !w->xq.scales || !w->z || !w->zq.codes || !w->zq.scales) {
    ref_close(k);
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a workspace of %d tokens", tokens);
  }
  *out = k;
  return OPROJ_OK;
}

/* ---- large memory -------------------------------------------------------------------------- */

/* In huge pages where there are any: weights are hundreds of megabytes, and faults on small pages
 * would take longer than reading them. */
static void *allocate(size_t bytes) {
  enum { HUGE_BYTES = 2 << 20 };
  if (bytes < HUGE_BYTES) return malloc(bytes ? bytes : 1);
  void *memory = aligned_alloc(HUGE_BYTES, (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES);
  if (memory) (void)madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

/* ---- weights ------------------------------------------------------------------------------- */

static void copy_values(const oproj_matrix *to, const oproj_matrix *from) {
  memcpy((void *)to->data, from->data, oproj_kernels_data_bytes(from));
  if (oproj_kernels_scale_bytes(from))
    memcpy((void *)to->scales, from->scales, oproj_kernels_scale_bytes(from));
}

static oproj_status copy_matrix(oproj_matrix *to, const oproj_matrix *from) {
  *to = *from;
  to->data = allocate(oproj_kernels_data_bytes(from));
  to->scales = oproj_kernels_scale_bytes(from) ? malloc(oproj_kernels_scale_bytes(from)) : NULL;
  REQUIRE(to->data && (to->scales || !oproj_kernels_scale_bytes(from)), OPROJ_ERR_NOMEM,
          "no memory for weights of %lld x %lld", (long long)from->rows, (long long)from->cols);
  copy_values(to, from);
  return OPROJ_OK;
}

static void ref_weights_destroy(oproj_kernels_weights *w) {
  if (!w) return;
  free((void *)w->wo_a.data);
  free((void *)w->wo_a.scales);
  free((void *)w->wo_b.data);
  free((void *)w->wo_b.scales);
  ref_adapter_clear(&w->adapter);
  free(w);
}

static oproj_status ref_weights_create(oproj_kernels_weights **out, oproj_kernels *k,
                                       const oproj_matrix *wo_a, const oproj_matrix *wo_b) {
  oproj_kernels_weights *w = calloc(1, sizeof *w);
  REQUIRE(w, OPROJ_ERR_NOMEM, "no memory for a layer");
  w->kernels = k;
  oproj_status status = OPROJ_OK;
  TRY_GOTO(copy_matrix(&w->wo_a, wo_a), status, out);
  TRY_GOTO(copy_matrix(&w->wo_b, wo_b), status, out);
  *out = w;
  return OPROJ_OK;
out:
  ref_weights_destroy(w);
  return status;
}

static oproj_status ref_weights_check(const oproj_kernels_weights *w, const oproj_matrix *wo_a,
                                      const oproj_matrix *wo_b) {
  (void)w, (void)wo_a, (void)wo_b;
  return OPROJ_OK;
}

static oproj_status ref_weights_replace(oproj_kernels_weights *w, const oproj_matrix *wo_a,
                                        const oproj_matrix *wo_b) {
  copy_values(&w->wo_a, wo_a);
  copy_values(&w->wo_b, wo_b);
  return OPROJ_OK;
}

/* ---- stages -------------------------------------------------------------------------------- */

static oproj_status stage_input_quantize(oproj_kernels *k, const oproj_io *io,
                                         const oproj_quant *out, void *stream) {
  (void)stream;
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  TRY(ref_check_positions(io));
  ref_input_quantize(k, io, &whole, out);
  return OPROJ_OK;
}

static oproj_status stage_input_rotate(oproj_kernels *k, const oproj_io *io, uint16_t *x,
                                       void *stream) {
  (void)stream;
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  TRY(ref_check_positions(io));
  ref_input_rotate(k, io, &whole, x);
  return OPROJ_OK;
}

static oproj_status stage_z_quantize(oproj_kernels *k, int32_t tokens, const uint16_t *z,
                                     const oproj_quant *out, void *stream) {
  (void)stream;
  ref_z_quantize(k, tokens, z, out);
  return OPROJ_OK;
}

/* Rows of WO_A of one group against that group's input. */
static ref_product group_product(const oproj_kernels_weights *w, int32_t group, int32_t tokens,
                                 uint16_t *z) {
  const oproj_kernels *k = w->kernels;
  int32_t lora_rank = k->config.dims.lora_rank;
  int64_t first_row = (int64_t)group * lora_rank;
  size_t value_bytes = w->wo_a.dtype == OPROJ_DTYPE_BF16 ? 2 : 1;
  ref_product p = {
      .tokens = tokens,
      .rows = lora_rank,
      .cols = k->group_cols,
      .dtype = w->wo_a.dtype,
      .w = (const char *)w->wo_a.data + (size_t)(first_row * k->group_cols) * value_bytes,
      .block = w->wo_a.block,
      .out = z + first_row,
      .out_stride = k->z_cols,
      .threads = k->config.threads};
  if (w->wo_a.scales)
    p.w_scales = w->wo_a.scales + first_row / p.block * oproj_base_ceil_div(p.cols, p.block);
  return p;
}

/* z from the quantised input (e4m3 WO_A) or from the rotated one (bf16 WO_A); with an adapter the
 * rotated input is needed in both cases. */
static oproj_status project_groups(oproj_kernels_weights *w, int32_t tokens, const oproj_quant *xq,
                                   const uint16_t *x, uint16_t *z) {
  const oproj_kernels *k = w->kernels;
  oproj_status status = OPROJ_OK;
  float *delta = NULL;
  if (w->adapter.rank > 0 && tokens > 0) {
    delta = malloc((size_t)tokens * (size_t)k->config.dims.lora_rank * sizeof *delta);
    REQUIRE(delta, OPROJ_ERR_NOMEM, "no memory for the adapter's share of %d tokens", tokens);
  }
  for (int32_t group = 0; group < k->config.groups; group++) {
    int64_t first_value = (int64_t)group * tokens * k->group_cols;
    ref_product p = group_product(w, group, tokens, z);
    if (p.dtype == OPROJ_DTYPE_E4M3) {
      p.a = xq->codes + first_value;
      p.a_quant = xq;
      p.a_group = group;
    } else {
      p.a = x + first_value;
    }
    if (delta) {
      TRY_GOTO(ref_adapter_delta(w, group, tokens, x, delta), status, out);
      p.addend = delta;
    }
    TRY_GOTO(ref_project(&p), status, out);
  }
out:
  free(delta);
  return status;
}

static oproj_status forward_groups(oproj_kernels_weights *w, const oproj_io *io,
                                   const oproj_kernels_part *part, uint16_t *z) {
  oproj_kernels *k = w->kernels;
  TRY(ref_check_positions(io));
  oproj_quant *xq = &k->work.xq;
  xq->layout = OPROJ_SCALE_F32;
  xq->groups = k->config.groups;
  xq->tokens = part->tokens;
  xq->cols = k->group_cols;
  if (w->wo_a.dtype == OPROJ_DTYPE_E4M3) ref_input_quantize(k, io, part, xq);
  if (w->wo_a.dtype == OPROJ_DTYPE_BF16 || w->adapter.rank > 0)
    ref_input_rotate(k, io, part, k->work.x);
  return project_groups(w, part->tokens, xq, k->work.x, z);
}

static oproj_status stage_group_forward(oproj_kernels_weights *w, const oproj_io *io, uint16_t *z,
                                        void *stream) {
  (void)stream;
  oproj_kernels_part whole = oproj_kernels_whole(io->tokens);
  return forward_groups(w, io, &whole, z);
}

static oproj_status stage_group_project(oproj_kernels_weights *w, const oproj_quant *x, uint16_t *z,
                                        void *stream) {
  (void)stream;
  return project_groups(w, x->tokens, x, NULL, z);
}

static ref_product out_product(const oproj_kernels_weights *w, int32_t tokens, uint16_t *partial) {
  const oproj_kernels *k = w->kernels;
  return (ref_product){.tokens = tokens,
                       .rows = k->config.dims.hidden,
                       .cols = k->z_cols,
                       .dtype = w->wo_b.dtype,
                       .w = w->wo_b.data,
                       .w_scales = w->wo_b.scales,
                       .block = w->wo_b.block,
                       .out = partial,
                       .out_stride = k->config.dims.hidden,
                       .threads = k->config.threads};
}

static oproj_status stage_out_project(oproj_kernels_weights *w, const oproj_quant *z,
                                      uint16_t *partial, void *stream) {
  (void)stream;
  ref_product p = out_product(w, z->tokens, partial);
  p.a = z->codes;
  p.a_quant = z;
  return ref_project(&p);
}

static const oproj_quant *quantized_z(oproj_kernels *k, int32_t tokens, const uint16_t *z,
                                      oproj_scale_layout layout) {
  oproj_quant *zq = &k->work.zq;
  zq->layout = layout;
  zq->groups = 1;
  zq->tokens = tokens;
  zq->cols = k->z_cols;
  ref_z_quantize(k, tokens, z, zq);
  return zq;
}

static oproj_status stage_out_forward(oproj_kernels_weights *w, int32_t tokens, const uint16_t *z,
                                      uint16_t *partial, void *stream) {
  if (w->wo_b.dtype == OPROJ_DTYPE_E4M3)
    return stage_out_project(w, quantized_z(w->kernels, tokens, z, OPROJ_SCALE_F32), partial,
                             stream);
  ref_product p = out_product(w, tokens, partial);
  p.a = z;
  return ref_project(&p);
}

static oproj_status ref_forward(oproj_kernels_weights *w, const oproj_io *io,
                                const oproj_kernels_part *part, const oproj_kernels_out *out,
                                uint16_t *partial, void *stream) {
  oproj_kernels *k = w->kernels;
  TRY(forward_groups(w, io, part, k->work.z));
  if (out->fn)
    return out->fn(out->user, quantized_z(k, part->tokens, k->work.z, out->layout), partial,
                   stream);
  return stage_out_forward(w, part->tokens, k->work.z, partial, stream);
}

static oproj_status ref_fork(oproj_kernels *k, void *stream, void **beside) {
  (void)k;
  *beside = stream;
  return OPROJ_OK;
}

static oproj_status ref_join(oproj_kernels *k, void *stream) {
  (void)k;
  (void)stream;
  return OPROJ_OK;
}

/* ---- memory -------------------------------------------------------------------------------- */

static oproj_status ref_buffer_create(oproj_kernels *k, size_t bytes, void **out) {
  (void)k;
  void *buffer = allocate(bytes);
  REQUIRE(buffer, OPROJ_ERR_NOMEM, "no memory for a buffer of %zu bytes", bytes);
  *out = buffer;
  return OPROJ_OK;
}

static void ref_buffer_destroy(oproj_kernels *k, void *buffer) {
  (void)k;
  free(buffer);
}

static oproj_status ref_buffer_copy(oproj_kernels *k, void *to, const void *from, size_t bytes,
                                    void *stream) {
  (void)k;
  (void)stream;
  if (bytes) memcpy(to, from, bytes);
  return OPROJ_OK;
}

static oproj_status ref_sum_ranks(oproj_kernels *k, const uint16_t *parts, int32_t n, int64_t count,
                                  uint16_t *out, oproj_kernels_pulse *waited, void *stream) {
  (void)waited;
  if (n == 1) return ref_buffer_copy(k, out, parts, (size_t)count * sizeof *out, stream);
  for (int64_t i = 0; i < count; i++) {
    float sum = oproj_bf16_to_f32(parts[i]);
    for (int32_t rank = 1; rank < n; rank++)
      sum = oproj_num_add(sum, oproj_bf16_to_f32(parts[rank * count + i]));
    out[i] = oproj_bf16_from_f32(sum);
  }
  return OPROJ_OK;
}

static oproj_status ref_make_nan(oproj_kernels *k, uint16_t *values, int64_t count, void *stream) {
  (void)k;
  (void)stream;
  for (int64_t i = 0; i < count; i++) values[i] = OPROJ_BF16_NAN;
  return OPROJ_OK;
}

static int32_t ref_capability(const oproj_kernels *k) {
  (void)k;
  return 0;
}

static void ref_describe(const oproj_kernels_weights *w, oproj_path_query *query) {
  (void)w;
  query->sm = 0;
}

const oproj_kernels_ops oproj_kernels_ref = {
    .name = "ref",
    .host = 1,
    .open = ref_open,
    .close = ref_close,
    .weights_create = ref_weights_create,
    .weights_check = ref_weights_check,
    .weights_replace = ref_weights_replace,
    .weights_destroy = ref_weights_destroy,
    .adapter_set = ref_adapter_set,
    .input_quantize = stage_input_quantize,
    .input_rotate = stage_input_rotate,
    .group_forward = stage_group_forward,
    .group_project = stage_group_project,
    .z_quantize = stage_z_quantize,
    .out_forward = stage_out_forward,
    .out_project = stage_out_project,
    .forward = ref_forward,
    .fork = ref_fork,
    .join = ref_join,
    .buffer_create = ref_buffer_create,
    .buffer_destroy = ref_buffer_destroy,
    .buffer_write = ref_buffer_copy,
    .buffer_read = ref_buffer_copy,
    .host_create = ref_buffer_create,
    .host_destroy = ref_buffer_destroy,
    .sum_ranks = ref_sum_ranks,
    .make_nan = ref_make_nan,
    .capability = ref_capability,
    .describe = ref_describe,
};
