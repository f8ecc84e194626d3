/* test_cuda_pulse.c - what the device counts of sums over ranks, and that a device which hangs in
 * one is told from one which is busy with many.  A function of the host that does not return takes
 * the place of a collective that hangs. */
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <time.h>

#include "gpu/cuda_rig.h"
#include "gpu/cuda_run.h"
#include "support/expect.h"
#include "tp/board.h"

enum { DEADLINE_MS = 300, COUNT = 4096 };

static atomic_bool holding;

static void rest(long milliseconds) {
  nanosleep(
      &(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L},
      NULL);
}

static void CUDART_CB hold(void *unused) {
  (void)unused;
  for (int i = 0; i < 10000 && atomic_load(&holding); i++) rest(1);
}

static int64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

typedef struct bench {
  rig r;
  oproj_kernels_pulse *pulse;
  cudaStream_t stream;
  uint16_t *parts, *sum; /* device memory [2, COUNT], [COUNT] */
  oproj_board_rank board;
} bench;

static bench bench_open(void) {
  bench b = {.r = rig_open(64, 1, 128, 2, 128, 128, 1)};
  void *memory;
  EXPECT_OK(b.r.ops->pulse_create(b.r.cuda, &b.pulse));
  EXPECT_OK(b.r.ops->buffer_create(b.r.cuda, 3 * COUNT * sizeof *b.parts, &memory));
  b.parts = memory;
  b.sum = b.parts + 2 * COUNT;
  CUDA_OK(cudaStreamCreateWithFlags(&b.stream, cudaStreamNonBlocking));
  CUDA_OK(cudaMemset(memory, 0, 3 * COUNT * sizeof *b.parts));
  return b;
}

static void bench_close(bench *b) {
  CUDA_OK(cudaStreamSynchronize(b->stream));
  CUDA_OK(cudaStreamDestroy(b->stream));
  b->r.ops->buffer_destroy(b->r.cuda, b->parts);
  b->r.ops->pulse_destroy(b->r.cuda, b->pulse);
  rig_close(&b->r);
}

static void expect_counts(const bench *b, uint64_t begun, uint64_t ended) {
  uint64_t found_begun, found_ended;
  b->r.ops->pulse_read(b->pulse, &found_begun, &found_ended);
  ck_assert_uint_eq(found_begun, begun);
  ck_assert_uint_eq(found_ended, ended);
}

/* Whether a watch that looked now would lose this rank. */
static bool is_lost(bench *b) {
  char sentence[OPROJ_BOARD_SENTENCE];
  oproj_board_report report = {.step = 1};
  b->r.ops->pulse_read(b->pulse, &report.sums_begun, &report.sums_ended);
  oproj_board_hear(&b->board, &report, milliseconds());
  return oproj_board_judge_sums(&b->board, 1, milliseconds(), DEADLINE_MS, sentence) == 0;
}

/* One sum as a communicator enqueues it: counted as ended by a kernel of its own, or by the sum of
 * the parts. */
static void enqueue_sum(const bench *b, bool folded) {
  EXPECT_OK(b->r.ops->pulse_begin(b->r.cuda, b->pulse, b->stream));
  CUDA_OK(cudaLaunchHostFunc(b->stream, hold, NULL));
  EXPECT_OK(b->r.ops->sum_ranks(b->r.cuda, b->parts, 2, COUNT, b->sum, folded ? b->pulse : NULL,
                                b->stream));
  if (!folded) EXPECT_OK(b->r.ops->pulse_end(b->r.cuda, b->pulse, b->stream));
}

static cudaGraphExec_t capture_sum(const bench *b, bool folded) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
  enqueue_sum(b, folded);
  CUDA_OK(cudaStreamEndCapture(b->stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_OK(cudaGraphDestroy(graph));
  return exec;
}

START_TEST(every_sum_is_counted) {
  enum { SUMS = 500 };
  bench b = bench_open();
  expect_counts(&b, 0, 0);
  for (int i = 0; i < SUMS; i++) enqueue_sum(&b, _i != 0);
  CUDA_OK(cudaStreamSynchronize(b.stream));
  expect_counts(&b, SUMS, SUMS);
  cudaGraphExec_t exec = capture_sum(&b, _i != 0);
  expect_counts(&b, SUMS, SUMS);
  for (int i = 0; i < SUMS; i++) CUDA_OK(cudaGraphLaunch(exec, b.stream));
  CUDA_OK(cudaStreamSynchronize(b.stream));
  expect_counts(&b, 2 * SUMS, 2 * SUMS);
  CUDA_OK(cudaGraphExecDestroy(exec));
  bench_close(&b);
}
END_TEST

/* In the second of two replays. */
START_TEST(a_hanging_sum_is_seen) {
  bench b = bench_open();
  cudaGraphExec_t exec = capture_sum(&b, _i != 0);
  CUDA_OK(cudaGraphLaunch(exec, b.stream));
  CUDA_OK(cudaStreamSynchronize(b.stream));
  ck_assert(!is_lost(&b));
  atomic_store(&holding, true);
  CUDA_OK(cudaGraphLaunch(exec, b.stream));
  int64_t begin = milliseconds();
  while (!is_lost(&b) && milliseconds() - begin < 10 * DEADLINE_MS) rest(10);
  int64_t took = milliseconds() - begin;
  expect_counts(&b, 2, 1);
  ck_assert_msg(took >= DEADLINE_MS && took < 3 * DEADLINE_MS, "lost after %d ms", (int)took);
  atomic_store(&holding, false);
  CUDA_OK(cudaStreamSynchronize(b.stream));
  expect_counts(&b, 2, 2);
  ck_assert(!is_lost(&b));
  CUDA_OK(cudaGraphExecDestroy(exec));
  bench_close(&b);
}
END_TEST

/* Sums queue up for several deadlines; then nothing runs for one. */
START_TEST(a_busy_device_is_left_alone) {
  bench b = bench_open();
  cudaGraphExec_t exec = capture_sum(&b, false);
  for (int64_t begin = milliseconds(); milliseconds() - begin < 5 * DEADLINE_MS;) {
    for (int i = 0; i < 100; i++) CUDA_OK(cudaGraphLaunch(exec, b.stream));
    while (cudaStreamQuery(b.stream) == cudaErrorNotReady) ck_assert(!is_lost(&b));
  }
  for (int i = 0; i < 2 * DEADLINE_MS / 10; i++) {
    rest(10);
    ck_assert(!is_lost(&b));
  }
  CUDA_OK(cudaGraphExecDestroy(exec));
  bench_close(&b);
}
END_TEST

/* Says what a sum pays in a graph for being counted. */
START_TEST(counting_is_cheap) {
  enum { SUMS = 1000 };
  bench b = bench_open();
  float us[3];
  for (int kind = 0; kind < 3; kind++) { /* uncounted, ended by the sum, ended by a kernel */
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    CUDA_OK(cudaStreamBeginCapture(b.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < SUMS; i++) {
      if (kind > 0) EXPECT_OK(b.r.ops->pulse_begin(b.r.cuda, b.pulse, b.stream));
      EXPECT_OK(b.r.ops->sum_ranks(b.r.cuda, b.parts, 2, COUNT, b.sum, kind == 1 ? b.pulse : NULL,
                                   b.stream));
      if (kind == 2) EXPECT_OK(b.r.ops->pulse_end(b.r.cuda, b.pulse, b.stream));
    }
    CUDA_OK(cudaStreamEndCapture(b.stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    CUDA_OK(cudaEventCreate(&from));
    CUDA_OK(cudaEventCreate(&to));
    for (int round = 0; round < 3; round++) { /* the last one counts */
      CUDA_OK(cudaEventRecord(from, b.stream));
      CUDA_OK(cudaGraphLaunch(exec, b.stream));
      CUDA_OK(cudaEventRecord(to, b.stream));
      CUDA_OK(cudaStreamSynchronize(b.stream));
    }
    CUDA_OK(cudaEventElapsedTime(&us[kind], from, to));
    us[kind] *= 1e3f / SUMS;
    CUDA_OK(cudaEventDestroy(from));
    CUDA_OK(cudaEventDestroy(to));
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  printf("a sum of parts takes %.2f us; counted %.2f us, or %.2f us with a kernel at its end\n",
         (double)us[0], (double)us[1], (double)us[2]);
  ck_assert_msg(test_is_short() || us[2] - us[0] < 20.0f, "counting takes %.1f us",
                (double)(us[2] - us[0]));
  bench_close(&b);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_pulse");
  TCase *tests = tcase_create("pulse");
  tcase_add_loop_test(tests, every_sum_is_counted, 0, 2);
  tcase_add_loop_test(tests, a_hanging_sum_is_seen, 0, 2);
  tcase_add_test(tests, a_busy_device_is_left_alone);
  tcase_add_test(tests, counting_is_cheap);
  return run_gpu_suite(suite, tests);
}
