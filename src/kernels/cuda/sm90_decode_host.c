/* sm90_decode_host.c - the decode kernel's exchange memory, rings and arguments. */
#include <stdlib.h>

#include "base/error.h"
#include "kernels/cuda/sm90_decode.h"

enum {
  TILE = OPROJ_KERNELS_DECODE_TILE,
  MOST_STAGES = 12,  /* ring slots: what lies ready when z arrives */
  MOST_Z_STAGES = 8, /* one and more for each warp that receives z */
  FEWEST_STAGES = 4  /* the largest window, and more than the two slots multiplied at a time */
};

/* ---- state --------------------------------------------------------------------------------- */

static oproj_status make_empty(void **out, size_t bytes) {
  CUDA_TRY(cudaMalloc(out, bytes));
  CUDA_TRY(cudaMemset(*out, 0xFF, bytes));
  return OPROJ_OK;
}

static oproj_status open_exchange(const oproj_kernels *k, sm90_decode_state *s) {
  decode_exchange *x = &s->exchange;
  size_t z_words = (size_t)(k->z_cols / TILE) * OPROJ_KERNELS_DECODE_TOKENS * DECODE_Z_WORDS;
  size_t partials = (size_t)(s->shape.tiles * s->shape.split) * OPROJ_KERNELS_DECODE_TOKENS * TILE;
  CUDA_TRY(cudaMalloc((void **)&x->control, sizeof *x->control));
  CUDA_TRY(cudaMemset(x->control, 0, sizeof *x->control));
  for (int epoch = 0; epoch < 2; epoch++) {
    TRY(make_empty((void **)&x->z[epoch], z_words * sizeof *x->z[epoch]));
    if (s->shape.split > 1)
      TRY(make_empty((void **)&x->partials[epoch], partials * sizeof *x->partials[epoch]));
  }
  CUDA_TRY(cudaDeviceSynchronize());
  return OPROJ_OK;
}

oproj_status sm90_decode_open(oproj_kernels *k) {
  oproj_path path = k->config.path;
  int32_t resident = 0;
  oproj_kernels_decode shape;
  if (k->capability != 90 || k->no_native || (path != OPROJ_PATH_AUTO && path != OPROJ_PATH_DECODE))
    return OPROJ_OK;
  CUDA_TRY(sm90_decode_capacity(&resident));
  if (oproj_kernels_decode_shape(&k->config.dims, k->config.groups, resident, &shape))
    return OPROJ_OK;
  k->decode = calloc(1, sizeof *k->decode);
  REQUIRE(k->decode, OPROJ_ERR_NOMEM, "no memory for a context");
  k->decode->shape = shape;
  CUDA_TRY(sm90_decode_load(k->config.dims.quant_block));
  return open_exchange(k, k->decode);
}

void sm90_decode_close(oproj_kernels *k) {
  if (!k->decode) return;
  for (int epoch = 0; epoch < 2; epoch++) {
    cudaFree(k->decode->exchange.z[epoch]);
    cudaFree(k->decode->exchange.partials[epoch]);
  }
  cudaFree(k->decode->exchange.control);
  free(k->decode);
  k->decode = NULL;
}

/* ---- calls --------------------------------------------------------------------------------- */

int sm90_decode_takes(const oproj_kernels_weights *w, int32_t tokens) {
  return w->kernels->decode && tokens > 0 && tokens <= w->kernels->decode->shape.most;
}

static int is_aligned(const cuda_input *in, const uint16_t *partial) {
  return sm90_loads_input(in) && (uintptr_t)in->cos_sin % 16 == 0 && (uintptr_t)partial % 4 == 0;
}

/* As many slots of weights as there are, or as fit. */
static oproj_status choose_rings(sm90_decode *p) {
  int32_t a_slots = p->group_cols / TILE / p->shape.split, b_slots = p->z_cols / (2 * TILE);
  p->z_stages = b_slots < MOST_Z_STAGES ? b_slots : MOST_Z_STAGES;
  p->stages = a_slots + b_slots < MOST_STAGES ? a_slots + b_slots : MOST_STAGES;
  if (p->stages < FEWEST_STAGES) p->stages = FEWEST_STAGES;
  while (sm90_decode_shared_bytes(p) > SM90_SHARED_BYTES) p->stages--;
  REQUIRE(p->stages >= FEWEST_STAGES, OPROJ_ERR_UNSUPPORTED,
          "groups of %d columns leave no room for weights", p->group_cols);
  return OPROJ_OK;
}

oproj_status sm90_decode_forward(const oproj_kernels_weights *w, const cuda_input *input,
                                 uint16_t *partial, const oproj_kernels_push *sink, int early,
                                 cudaStream_t stream) {
  const oproj_kernels *k = w->kernels;
  sm90_decode p = {.wo_a = w->wo_a_map,
                   .wo_b = w->wo_b_decode_map,
                   .input = *input,
                   .shape = k->decode->shape,
                   .exchange = k->decode->exchange,
                   .group_cols = k->group_cols,
                   .tiles_per_group = k->config.dims.lora_rank / TILE,
                   .z_cols = k->z_cols,
                   .hidden = k->config.dims.hidden,
                   .wo_a_scales = w->wo_a.scales,
                   .wo_b_scales = w->wo_b.scales,
                   .partial = partial,
                   .early = early};
  if (sink) p.sink = cuda_describe_push(k, sink);
  TRY(choose_rings(&p));
  CUDA_TRY(sm90_launch_decode(&p, is_aligned(input, partial), stream));
  return OPROJ_OK;
}
