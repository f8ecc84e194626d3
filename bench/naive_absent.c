/* naive_absent.c - stands in for naive_cuda.c in builds without CUDA. */
#include "naive.h"

oproj_status naive_create(bench_naive **out, bench_rig *rig) {
  (void)out, (void)rig;
  return oproj_fail(OPROJ_ERR_UNSUPPORTED, "the naive composition needs CUDA");
}

void naive_destroy(bench_naive *naive) {
  (void)naive;
}

int32_t naive_layers(const bench_naive *naive) {
  (void)naive;
  return 1;
}

oproj_status naive_prepare(bench_naive *naive, int32_t tokens) {
  (void)naive, (void)tokens;
  return OPROJ_OK;
}

oproj_status naive_call(bench_naive *naive, int32_t tokens, int32_t call, void *stream) {
  (void)naive, (void)tokens, (void)call, (void)stream;
  return OPROJ_OK;
}
