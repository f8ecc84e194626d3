/* case_reduce.c - the sum of the ranks' partial results; to be run under mpirun. */
#include <math.h>
#include <stdlib.h>

#include "cases.h"
#include "check.h"

enum { SEED = 100 }; /* rank r's partial is the random stream SEED + r */

static uint16_t *partial;

static oproj_status open_case(bench_rig *rig) {
  int64_t count = (int64_t)rig->max_tokens * rig->dims.hidden;
  void *y = NULL;
  oproj_status status = rig_random_buffer(rig, SEED + (uint64_t)rig->job->rank, count, &partial);
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
  return (bench_cost){.bytes = 2.0 * tokens * rig->dims.hidden,
                      .link_bytes = rig_link_bytes(rig, tokens)};
}

static oproj_status poison_case(bench_rig *rig, int32_t tokens) {
  return rig_poison(rig, rig->y, (size_t)tokens * (size_t)rig->dims.hidden * sizeof *rig->y);
}

/* Sums in rank order and rounds once, as the reduction promises: the bits must be the same.  The
 * library's own sum rounds up to `ranks` times, off by up to 2^-9 of a sum below 2 * ranks each. */
static int64_t count_wrong(const bench_rig *rig, const uint16_t *got, float *sum, uint16_t *term,
                           int32_t tokens) {
  int64_t wrong = 0, count = (int64_t)tokens * rig->dims.hidden;
  int32_t ranks = rig->job->size, begin = 0, end = tokens;
  bool vendor = rig->args->reduce == OPROJ_REDUCE_VENDOR;
  float most = vendor ? (float)ranks * (float)ranks / 256.0f : 0.0f;
  if (rig->args->reduce == OPROJ_REDUCE_SCATTER)
    oproj_plan_rows(tokens, ranks, rig->job->rank, &begin, &end);
  for (int64_t i = 0; i < count; i++) sum[i] = 0.0f;
  for (int32_t r = 0; r < ranks; r++) {
    data_bf16(SEED + (uint64_t)r, count, term);
    for (int64_t i = 0; i < count; i++) sum[i] += data_from_bf16(term[i]);
  }
  const float *mine = sum + (int64_t)begin * rig->dims.hidden;
  for (int64_t i = 0; i < (int64_t)(end - begin) * rig->dims.hidden; i++) {
    float want = data_from_bf16(data_to_bf16(mine[i]));
    if (!(fabsf(data_from_bf16(got[i]) - want) <= most)) wrong++;
  }
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
  if (status == OPROJ_OK) *wrong = count_wrong(rig, got, sum, term, tokens);
  free(got);
  free(term);
  free(sum);
  return status;
}

const bench_case case_reduce = {.name = "reduce",
                                .summary = "the sum over ranks (oproj_partial_reduce), by mpirun",
                                .reduces = true,
                                .open = open_case,
                                .close = close_case,
                                .call = call_case,
                                .cost = cost_case,
                                .poison = poison_case,
                                .check = check_case};
