/* test_cuda_models.c - the chain that a context chooses, at the dimensions of the released models
 * and one rank's share of them, for every small token count. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "gpu/cuda_rig.h"
#include "gpu/cuda_run.h"

enum { MOST_TOKENS = 64 };

static const oproj_dims models[] = {{7168, 128, 512, 64, 16, 1024, 128},
                                    {4096, 64, 512, 64, 8, 1024, 128},
                                    {5120, 64, 512, 64, 8, 1024, 32}};
static const int32_t sizes[] = {1, 2, 4, 8, 16};
enum { MODELS = sizeof models / sizeof models[0], SIZES = sizeof sizes / sizeof sizes[0] };

/* Rank 0's share of `size` as a model of its own; positions and table stay the whole one's. */
static data_layer take_share(const data_layer *whole, int32_t size) {
  oproj_shard shard;
  EXPECT_OK(oproj_plan_shard(&whole->dims, OPROJ_SPLIT_EVEN, size, 0, &shard));
  data_share weights = data_take(whole, &shard);
  data_layer share = *whole;
  share.dims.heads /= size;
  share.dims.groups /= size;
  share.wo_a = weights.wo_a;
  share.wo_b = weights.wo_b;
  size_t held = (size_t)share.dims.heads * (size_t)share.dims.head_dim, all = held * (size_t)size;
  share.attn_out = malloc((size_t)share.tokens * held * sizeof *share.attn_out);
  for (size_t t = 0; t < (size_t)share.tokens; t++)
    memcpy(share.attn_out + t * held, whole->attn_out + t * all, held * sizeof *share.attn_out);
  return share;
}

static void free_share(data_layer *share) {
  data_share weights = {share->wo_a, share->wo_b};
  data_share_free(&weights);
  free(share->attn_out);
}

static double difference(const uint16_t *found, const uint16_t *wanted, size_t count) {
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < count; i++) {
    double a = (double)oproj_bf16_to_f32(found[i]), b = (double)oproj_bf16_to_f32(wanted[i]);
    error += (a - b) * (a - b);
    norm += b * b;
  }
  return sqrt(error / norm);
}

/* Against the portable kernels, whose sums are FP32's.  A path called fast lies within 4e-3 of
 * double precision and they within 1.7e-3, so both within the root of the squares' sum. */
static void check_share(const data_layer *share) {
  const double most = 4.4e-3;
  run chosen = run_open("cuda", OPROJ_PATH_AUTO, MOST_TOKENS, share, 1);
  run portable = run_open("cuda", OPROJ_PATH_PORTABLE, MOST_TOKENS, share, 1);
  batch a = batch_open(&chosen, share, 0, MOST_TOKENS, 0);
  batch b = batch_open(&portable, share, 0, MOST_TOKENS, 0);
  for (int32_t tokens = 1; tokens <= MOST_TOKENS; tokens += test_is_short() ? 15 : 1) {
    batch_set_tokens(&a, share, tokens);
    batch_set_tokens(&b, share, tokens);
    uint16_t *found = run_forward(&chosen, 0, &a), *again = run_forward(&chosen, 0, &a);
    uint16_t *wanted = run_forward(&portable, 0, &b);
    double off = difference(found, wanted, a.y_count);
    ck_assert_msg(off <= most, "hidden %d, %d groups, %d tokens: y is off by %g",
                  share->dims.hidden, share->dims.groups, tokens, off);
    expect_same("y again", again, found, a.y_count);
    free(found);
    free(again);
    free(wanted);
  }
  batch_close(&chosen, &a);
  batch_close(&portable, &b);
  run_close(&chosen);
  run_close(&portable);
}

START_TEST(shares_match_the_portable_kernels) {
  data_layer whole = data_make(&models[_i], false, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, MOST_TOKENS);
  for (int i = 0; i < SIZES && sizes[i] <= models[_i].groups; i++) {
    data_layer share = take_share(&whole, sizes[i]);
    check_share(&share);
    free_share(&share);
  }
  data_free(&whole);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_models");
  TCase *tests = tcase_create("models");
  tcase_add_loop_test(tests, shares_match_the_portable_kernels, 0, MODELS);
  return run_gpu_suite(suite, tests);
}
