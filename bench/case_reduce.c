/* case_reduce.c - the sum of the ranks' partial results; to be run under mpirun. */
#include <stdlib.h>

#include "cases.h"
#include "check.h"

enum { SEED = 100 }; /* rank r's partial is the random stream SEED + r */

static uint16_t *partial;

static oproj_status open_case(bench_rig *rig) {
  int64_t count = (int64_t)rig->max_tokens * rig->dims.hidden;
  void *y = NULL;
  oproj_status status = rig_random_buffer(rig, SEED + (uint64_t)rig->ranks->rank, count, &partial);
  if (status == OPROJ_OK)
    status = oproj_buffer_create(rig->ctx, (size_t)count * sizeof *rig->y, &y);
  rig->y = y;
  return status;
}

static void close_case(bench_rig *rig) {
  oproj_buffer_destroy(rig->ctx, partial);
}

static oproj_status call_case(bench_rig *rig, int32_t tokens, int32_t call, void *stream) {
  (void)call;
  return oproj_partial_reduce(rig->ctx, tokens, partial, rig->y, stream);
}

/* As nccl-tests' algorithm bandwidth: the size of the result. */
static bench_cost cost_case(const bench_rig *rig, int32_t tokens) {
  return (bench_cost){.bytes = 2.0 * tokens * rig->dims.hidden};
}

static oproj_status poison_case(bench_rig *rig, int32_t tokens) {
  return rig_poison(rig, rig->y, (size_t)tokens * (size_t)rig->dims.hidden * sizeof *rig->y);
}

/* Sums in rank order and rounds once, as the reduction promises: the bits must be the same. */
static int64_t count_wrong(const uint16_t *got, float *sum, uint16_t *term, int64_t count,
                           int32_t ranks) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < count; i++) sum[i] = 0.0f;
  for (int32_t r = 0; r < ranks; r++) {
    data_bf16(SEED + (uint64_t)r, count, term);
    for (int64_t i = 0; i < count; i++) sum[i] += data_from_bf16(term[i]);
  }
  for (int64_t i = 0; i < count; i++) wrong += data_to_bf16(sum[i]) != got[i];
  return wrong;
}

static oproj_status check_case(bench_rig *rig, int32_t tokens, int32_t call, int64_t *wrong) {
  (void)call;
  int64_t count = (int64_t)tokens * rig->dims.hidden;
  uint16_t *got = malloc((size_t)count * sizeof *got), *term = malloc((size_t)count * sizeof *term);
  float *sum = malloc((size_t)count * sizeof *sum);
  oproj_status status = OPROJ_OK;
  if (!got || !term || !sum)
    status = oproj_fail(OPROJ_ERR_NOMEM, "no memory for a check");
  else
    status = oproj_buffer_read(rig->ctx, got, rig->y, (size_t)count * sizeof *got,
                               device_stream(rig->device));
  if (status == OPROJ_OK) *wrong = count_wrong(got, sum, term, count, rig->ranks->size);
  free(got);
  free(term);
  free(sum);
  return status;
}

const bench_case case_reduce = {.name = "reduce",
                                .summary = "the sum over ranks (oproj_partial_reduce), by mpirun",
                                .eager = true, /* the MPI communicator stages on the host */
                                .reduces = true,
                                .open = open_case,
                                .close = close_case,
                                .call = call_case,
                                .cost = cost_case,
                                .poison = poison_case,
                                .check = check_case};
