/* ranks.c - see ranks.h. */
#include "support/ranks.h"

#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "support/expect.h"
#include "tp/comm.h"

static oproj_status fake_broadcast(oproj_comm *comm, int32_t root, void *data, size_t bytes) {
  (void)comm, (void)root, (void)data, (void)bytes;
  return OPROJ_OK;
}

/* Everybody else says the same. */
static oproj_status fake_gather(oproj_comm *comm, const void *mine, void *all, int32_t bytes) {
  for (int32_t r = 0; r < comm->size; r++)
    memcpy((char *)all + (size_t)r * (size_t)bytes, mine, (size_t)bytes);
  return OPROJ_OK;
}

/* Everybody else has succeeded. */
static oproj_status fake_min(oproj_comm *comm, int32_t mine, int32_t *out) {
  (void)comm;
  *out = mine;
  return OPROJ_OK;
}

static oproj_status fake_reduce(oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                                const uint16_t *partial, uint16_t *y) {
  (void)comm, (void)mode;
  if (y != partial) memcpy(y, partial, (size_t)tokens * (size_t)hidden * sizeof *y);
  return OPROJ_OK;
}

static void fake_destroy(oproj_comm *comm) {
  free(comm);
}

static const oproj_comm_ops fake_ops = {.name = "fake",
                                        .broadcast = fake_broadcast,
                                        .gather = fake_gather,
                                        .min_i32 = fake_min,
                                        .reduce = fake_reduce,
                                        .destroy = fake_destroy};

oproj_comm *ranks_comm(int32_t rank, int32_t size) {
  oproj_comm *comm = malloc(sizeof *comm);
  *comm = (oproj_comm){.ops = &fake_ops, .rank = rank, .size = size, .local_size = 1, .device = -1};
  return comm;
}

ranks_one ranks_open(const data_layer *data, oproj_split split, int32_t size, int32_t rank) {
  ranks_one one = {.comm = ranks_comm(rank, size)};
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = data->tokens;
  config.split = split;
  config.reduce = OPROJ_REDUCE_NONE;
  EXPECT_OK(oproj_ctx_create(&one.ctx, one.comm, &data->dims, &config));
  data_share share = data_take(data, oproj_ctx_shard(one.ctx));
  EXPECT_OK(oproj_layer_create(&one.layer, one.ctx, &share.wo_a, &share.wo_b));
  data_share_free(&share);
  return one;
}

void ranks_close(ranks_one *one) {
  oproj_layer_destroy(one->layer);
  oproj_ctx_destroy(one->ctx);
  oproj_comm_destroy(one->comm);
}

uint16_t *ranks_forward(const data_layer *data, oproj_split split, int32_t size) {
  size_t values = (size_t)data->tokens * (size_t)data->dims.hidden;
  uint16_t *y = malloc(values * sizeof *y + 1), *partial = malloc(values * sizeof *partial + 1);
  float *sum = calloc(values + 1, sizeof *sum);
  for (int32_t rank = 0; rank < size; rank++) {
    ranks_one one = ranks_open(data, split, size, rank);
    oproj_io io = data_io(data, oproj_ctx_shard(one.ctx));
    io.y = partial;
    EXPECT_OK(oproj_forward(one.layer, &io, NULL));
    for (size_t i = 0; i < values; i++) sum[i] += oproj_bf16_to_f32(partial[i]);
    ranks_close(&one);
  }
  for (size_t i = 0; i < values; i++) y[i] = oproj_bf16_from_f32(sum[i]);
  free(sum);
  free(partial);
  return y;
}
