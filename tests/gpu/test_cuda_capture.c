/* test_cuda_capture.c - what a forward call leaves alone: it allocates nothing, waits for nothing,
 * and can be captured in a graph in every mode, from a context's very first call on. */
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "gpu/cuda_rig.h"
#include "gpu/cuda_run.h"
#include "kernels/cuda/cuda.h"
#include "tp/ctx.h"

enum { MOST = 1001 };

static const int32_t counts[] = {1, 8, 9, 17, 32, 33, 65, 129, 767, 768, MOST};
enum { COUNTS = sizeof counts / sizeof counts[0] };

static data_layer make(const oproj_dims *dims) {
  return data_make(dims, false, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, MOST);
}

static size_t free_memory(void) {
  size_t free_bytes = 0, all_bytes = 0;
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaMemGetInfo(&free_bytes, &all_bytes));
  return free_bytes;
}

/* ---- memory -------------------------------------------------------------------------------- */

/* The first test of the program: code that is loaded by a first call would show as well.  (So would
 * a sanitizer's own memory.) */
START_TEST(calls_allocate_nothing) {
  const run_path *path = &run_paths[_i % RUN_PATHS];
  data_layer data = make(&run_recipes[_i / RUN_PATHS]);
  if (run_serves(path, &data.dims, path->least) && !test_is_short()) {
    run r = run_open("cuda", path->path, MOST, &data, 1);
    batch b = batch_open(&r, &data, 0, MOST, 8);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    size_t before = free_memory();
    for (int i = 0; i < COUNTS; i++) {
      if (!run_serves(path, &data.dims, counts[i])) continue;
      batch_set_tokens(&b, &data, counts[i]);
      EXPECT_OK(oproj_forward(r.layers[0], &b.io, stream));
      size_t after = free_memory();
      ck_assert_msg(after == before, "%s, %d tokens: %zu bytes of device memory became %zu",
                    path->name, counts[i], before, after);
    }
    CUDA_OK(cudaStreamDestroy(stream));
    batch_close(&r, &b);
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

/* ---- waiting ------------------------------------------------------------------------------- */

static atomic_int released, waited_in_vain;

static void pause_a_millisecond(void) {
  nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* Holds a stream until the test releases it, at most ten seconds. */
static void CUDART_CB hold(void *unused) {
  (void)unused;
  for (int i = 0; i < 10000 && !atomic_load(&released); i++) pause_a_millisecond();
  if (!atomic_load(&released)) atomic_store(&waited_in_vain, 1);
}

/* The stream cannot move, so a call that waited for it would not return.  (A sanitizer may.) */
START_TEST(calls_wait_for_nothing) {
  const run_path *path = &run_paths[_i % RUN_PATHS];
  data_layer data = make(&run_recipes[_i / RUN_PATHS]);
  if (run_serves(path, &data.dims, path->least) && !test_is_short()) {
    run r = run_open("cuda", path->path, MOST, &data, 1);
    batch b = batch_open(&r, &data, 0, MOST, 8);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    atomic_store(&released, 0);
    atomic_store(&waited_in_vain, 0);
    CUDA_OK(cudaLaunchHostFunc(stream, hold, NULL));
    for (int i = 0; i < COUNTS; i++) {
      if (!run_serves(path, &data.dims, counts[i])) continue;
      batch_set_tokens(&b, &data, counts[i]);
      EXPECT_OK(oproj_forward(r.layers[0], &b.io, stream));
    }
    ck_assert_msg(cudaStreamQuery(stream) == cudaErrorNotReady, "the stream was not held");
    atomic_store(&released, 1);
    CUDA_OK(cudaStreamSynchronize(stream));
    ck_assert_msg(!atomic_load(&waited_in_vain), "%s: a call waited for the stream", path->name);
    CUDA_OK(cudaStreamDestroy(stream));
    batch_close(&r, &b);
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

/* ---- capture ------------------------------------------------------------------------------- */

static const enum cudaStreamCaptureMode modes[] = {
    cudaStreamCaptureModeRelaxed, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeGlobal};
enum { MODES = 3 };

static void check_capture(const run *r, const run_path *path, batch *b, const uint16_t *wanted,
                          enum cudaStreamCaptureMode mode) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_OK(cudaStreamBeginCapture(stream, mode));
  EXPECT_OK(oproj_forward(r->layers[0], &b->io, stream));
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_OK(cudaMemsetAsync(b->io.y, 0xAA, b->y_count * sizeof *b->io.y, stream));
  run_poison_workspace(r, stream);
  CUDA_OK(cudaGraphLaunch(exec, stream));
  uint16_t *y = malloc(b->y_count * sizeof *y);
  EXPECT_OK(oproj_buffer_read(r->ctx, y, b->io.y, b->y_count * sizeof *y, stream));
  expect_same(path->name, y, wanted, b->y_count);
  free(y);
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
}

/* Every call of the second context is a captured one. */
START_TEST(calls_are_captured_in_every_mode) {
  const run_path *path = &run_paths[_i % RUN_PATHS];
  data_layer data = make(&run_recipes[_i / RUN_PATHS % RUN_RECIPES]);
  enum cudaStreamCaptureMode mode = modes[_i / RUN_PATHS / RUN_RECIPES];
  if (run_serves(path, &data.dims, path->least)) {
    run eager = run_open("cuda", path->path, MOST, &data, 1);
    run captured = run_open("cuda", path->path, MOST, &data, 1);
    batch a = batch_open(&eager, &data, 0, MOST, 8), b = batch_open(&captured, &data, 0, MOST, 8);
    b.io.flags = OPROJ_EARLY_TRIGGER;
    for (int i = 0; i < COUNTS; i++) {
      if (!run_serves(path, &data.dims, counts[i])) continue;
      batch_set_tokens(&a, &data, counts[i]);
      batch_set_tokens(&b, &data, counts[i]);
      uint16_t *wanted = run_forward(&eager, 0, &a);
      check_capture(&captured, path, &b, wanted, mode);
      free(wanted);
    }
    batch_close(&eager, &a);
    batch_close(&captured, &b);
    run_close(&eager);
    run_close(&captured);
  }
  data_free(&data);
}
END_TEST

/* ---- staging ------------------------------------------------------------------------------- */

/* Where ranks meet on the host, copies move through pinned memory. */
START_TEST(staging_memory_is_pinned) {
  data_layer data = make(&run_recipes[0]);
  run r = run_open("cuda", OPROJ_PATH_AUTO, 1, &data, 0);
  struct cudaPointerAttributes attributes;
  void *memory = NULL;
  EXPECT_OK(r.ctx->ops->host_create(r.ctx->kernels, 1 << 20, &memory));
  CUDA_OK(cudaPointerGetAttributes(&attributes, memory));
  ck_assert_int_eq(attributes.type, cudaMemoryTypeHost);
  r.ctx->ops->host_destroy(r.ctx->kernels, memory);
  run_close(&r);
  data_free(&data);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_capture");
  TCase *tests = tcase_create("capture");
  tcase_add_loop_test(tests, calls_allocate_nothing, 0, RUN_PATHS * RUN_RECIPES);
  tcase_add_loop_test(tests, calls_wait_for_nothing, 0, RUN_PATHS * RUN_RECIPES);
  tcase_add_loop_test(tests, calls_are_captured_in_every_mode, 0, RUN_PATHS * RUN_RECIPES * MODES);
  tcase_add_test(tests, staging_memory_is_pinned);
  return run_gpu_suite(suite, tests);
}
