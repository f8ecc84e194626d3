/* test_cuda_models.c - the chain that a context chooses, at the dimensions of the released models
 * and one rank's share of them: which kernel and tile runs depends on those. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "gpu/cuda_rig.h"
#include "gpu/cuda_run.h"

enum { FEW_TOKENS = 64, MANY_TOKENS = 1025, SHORT_TOKENS = 500, MOST_TOKENS = 32768 };

/* V4.1 with scales in f32, and as it is released. */
static const oproj_dims models[] = {{7168, 128, 512, 64, 16, 1024, 128},
                                    {4096, 64, 512, 64, 8, 1024, 128},
                                    {5120, 64, 512, 64, 8, 1024, 32},
                                    {5120, 64, 512, 64, 8, 1024, 32}};
/* Of scales that are powers of two; 0: of others. */
static const int binades[] = {0, 0, 0, 3};
static const int32_t sizes[] = {1, 2, 4, 8, 16};
static const int32_t many[] = {65,  100, 127, 128, 129, 161,  192,
                               193, 257, 385, 500, 769, 1024, 1025};
enum {
  MODELS = sizeof models / sizeof models[0],
  SIZES = sizeof sizes / sizeof sizes[0],
  MANY = sizeof many / sizeof many[0]
};

static data_layer make(int model, const oproj_dims *dims, int32_t tokens) {
  data_layer data = data_make(dims, false, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, tokens);
  if (binades[model] > 0) data_spread(&data, binades[model]);
  return data;
}

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

/* A context of the path that is chosen and one of the portable kernels. */
typedef struct pair {
  run chosen, portable;
  batch a, b;
  const data_layer *share;
} pair;

static pair open_pair(const data_layer *share, int32_t most) {
  pair p = {.chosen = run_open("cuda", OPROJ_PATH_AUTO, most, share, 1),
            .portable = run_open("cuda", OPROJ_PATH_PORTABLE, most, share, 1),
            .share = share};
  p.a = batch_open(&p.chosen, share, 0, most, 0);
  p.b = batch_open(&p.portable, share, 0, most, 0);
  return p;
}

static void close_pair(pair *p) {
  batch_close(&p->chosen, &p->a);
  batch_close(&p->portable, &p->b);
  run_close(&p->chosen);
  run_close(&p->portable);
}

/* The portable kernels' sums are FP32's.  A path called fast lies within 4e-3 of double precision
 * and they within 1.7e-3, so both within the root of the squares' sum.  Of few z one that falls on
 * the other side of a code's border counts: by an eighth of itself, and the largest are four times
 * the usual. */
static double most_difference(const oproj_dims *dims, int32_t tokens) {
  const double usual = 4.4e-3, border = 4.0 / 8.0;
  double values = (double)tokens * dims->groups * dims->lora_rank;
  return sqrt(usual * usual + border * border / values);
}

static void check_tokens(pair *p, int32_t tokens) {
  double most = most_difference(&p->share->dims, tokens);
  batch_set_tokens(&p->a, p->share, tokens);
  batch_set_tokens(&p->b, p->share, tokens);
  uint16_t *found = run_forward(&p->chosen, 0, &p->a), *again = run_forward(&p->chosen, 0, &p->a);
  uint16_t *wanted = run_forward(&p->portable, 0, &p->b);
  double off = difference(found, wanted, p->a.y_count);
  ck_assert_msg(off <= most, "hidden %d, %d groups, %d tokens: y is off by %g",
                p->share->dims.hidden, p->share->dims.groups, tokens, off);
  expect_same("y again", again, found, p->a.y_count);
  free(found);
  free(again);
  free(wanted);
}

/* Short: without cuBLASLt, whose kernels racecheck does not survive. */
START_TEST(shares_match_the_portable_kernels) {
  int32_t most = test_is_short() ? SHORT_TOKENS : MANY_TOKENS;
  data_layer whole = make(_i, &models[_i], most);
  for (int i = 0; i < SIZES && sizes[i] <= models[_i].groups; i++) {
    data_layer share = take_share(&whole, sizes[i]);
    pair p = open_pair(&share, most);
    for (int32_t tokens = 1; tokens <= FEW_TOKENS; tokens += test_is_short() ? 15 : 1)
      check_tokens(&p, tokens);
    for (int k = 0; k < MANY && many[k] <= most; k += test_is_short() ? 4 : 1)
      check_tokens(&p, many[k]);
    close_pair(&p);
    free_share(&share);
  }
  data_free(&whole);
}
END_TEST

/* An eighth of each model, whose inputs take half a gigabyte. */
START_TEST(most_tokens_match_too) {
  static const int32_t counts[] = {2048, 8191, 8192, MOST_TOKENS};
  oproj_dims dims = models[_i];
  if (test_is_short()) return;
  dims.heads /= 8;
  dims.groups /= 8;
  data_layer share = make(_i, &dims, MOST_TOKENS);
  pair p = open_pair(&share, MOST_TOKENS);
  for (size_t k = 0; k < sizeof counts / sizeof counts[0]; k++) check_tokens(&p, counts[k]);
  close_pair(&p);
  data_free(&share);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_models");
  TCase *tests = tcase_create("models");
  tcase_add_loop_test(tests, shares_match_the_portable_kernels, 0, MODELS);
  tcase_add_loop_test(tests, most_tokens_match_too, 0, MODELS);
  return run_gpu_suite(suite, tests);
}
