/* test_cuda_chunks.c - calls taken apart on one GPU: the bits of whole calls on every path, eager
 * and captured, and sums that run beside the chains.
 *
 * The communicator is made up: rank 0 of 2, whose sum is this rank's share alone, copied on the
 * stream that it is given. */
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "gpu/cuda_rig.h"
#include "gpu/cuda_run.h"
#include "support/ranks.h"
#include "tp/ctx.h"

enum { MOST = 2500, WHOLE = 1 << 20, REPLAYS = 5 };

static const oproj_dims recipes[] = {{640, 16, 512, 64, 4, 256, 128},
                                     {640, 16, 512, 64, 4, 256, 32}};
enum { RECIPES = sizeof recipes / sizeof recipes[0], HIDDEN = 640 };

static const int32_t counts[] = {1, 128, 129, 300, 768, 1001, MOST};
static const int64_t chunks[] = {1, 256, 1000};
enum { COUNTS = sizeof counts / sizeof counts[0], CHUNKS = sizeof chunks / sizeof chunks[0] };

/* ---- the made-up communicator -------------------------------------------------------------- */

static void CUDART_CB wait_for_next(void *next);

/* Of the test of overlap: what a chain leaves when it ends, and how many sums were enqueued. */
static volatile int32_t *ended; /* pinned */
static int32_t sums, sums_that_wait;

static oproj_status fake_attach(oproj_comm *comm, const oproj_comm_site *site,
                                oproj_comm_end **out) {
  (void)comm;
  void *partial;
  size_t bytes = (size_t)site->max_tokens * (size_t)site->hidden * sizeof(uint16_t);
  EXPECT_OK(site->ops->buffer_create(site->kernels, bytes, &partial));
  *out = malloc(sizeof **out);
  (*out)->partial = partial;
  return OPROJ_OK;
}

static void fake_detach(oproj_comm *comm, oproj_comm_end *end) {
  (void)comm;
  CUDA_OK(cudaFree(end->partial));
  free(end);
}

static oproj_status fake_reduce_device(oproj_comm *comm, oproj_comm_end *end, oproj_reduce mode,
                                       int32_t tokens, const uint16_t *partial, uint16_t *y,
                                       int sent, void *stream) {
  (void)end, (void)sent;
  int32_t begin = 0, rows = tokens;
  if (mode == OPROJ_REDUCE_SCATTER) oproj_plan_rows(tokens, comm->size, comm->rank, &begin, &rows);
  if (++sums <= sums_that_wait)
    CUDA_OK(cudaLaunchHostFunc(stream, wait_for_next, (void *)&ended[sums]));
  CUDA_OK(cudaMemcpyAsync(y, partial, (size_t)rows * HIDDEN * sizeof *y, cudaMemcpyDeviceToDevice,
                          stream));
  return OPROJ_OK;
}

static const oproj_kernels_push *fake_sink(const oproj_comm_end *end, oproj_reduce mode,
                                           int32_t tokens) {
  (void)end, (void)mode, (void)tokens;
  return NULL;
}

static oproj_comm_ops fake_ops;

static run open_run(oproj_path path, oproj_reduce reduce, int64_t chunk_tokens,
                    const data_layer *data) {
  run r = {.comm = ranks_comm(0, 2), .layer_count = 1};
  oproj_config config = OPROJ_CONFIG_INIT;
  fake_ops = *r.comm->ops;
  fake_ops.attach = fake_attach;
  fake_ops.detach = fake_detach;
  fake_ops.reduce_device = fake_reduce_device;
  fake_ops.sink = fake_sink;
  r.comm->ops = &fake_ops;
  config.backend = "cuda";
  config.max_tokens = MOST;
  config.path = path;
  config.reduce = reduce;
  config.chunk_tokens = chunk_tokens;
  EXPECT_OK(oproj_ctx_create(&r.ctx, r.comm, &data->dims, &config));
  data_share share = data_take(data, oproj_ctx_shard(r.ctx));
  EXPECT_OK(oproj_layer_create(&r.layers[0], r.ctx, &share.wo_a, &share.wo_b));
  data_share_free(&share);
  return r;
}

static data_layer make(const oproj_dims *dims, oproj_dtype dtype) {
  return data_make(dims, false, dtype, dtype, MOST);
}

/* ---- the same bits ------------------------------------------------------------------------- */

static void add_adapter(const run *r) {
  enum { RANK = 5 };
  const oproj_dims *d = oproj_ctx_dims(r->ctx);
  size_t groups = 2, cols = (size_t)(d->heads / d->groups * d->head_dim);
  size_t a_count = groups * RANK * cols, b_count = groups * RANK * (size_t)d->lora_rank;
  uint16_t *a = malloc(a_count * sizeof *a), *b = malloc(b_count * sizeof *b);
  for (size_t i = 0; i < a_count; i++) a[i] = 0x3C00 | (uint16_t)(data_hash(7, i) & 0x80FF);
  for (size_t i = 0; i < b_count; i++) b[i] = 0x3C00 | (uint16_t)(data_hash(8, i) & 0x80FF);
  EXPECT_OK(oproj_layer_set_adapter(r->layers[0], &(oproj_adapter){.rank = RANK, .a = a, .b = b}));
  free(a);
  free(b);
}

/* y of a graph's last replay over poison. */
static uint16_t *replay(const run *r, const batch *b) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  EXPECT_OK(oproj_forward(r->layers[0], &b->io, stream));
  EXPECT_OK(oproj_forward(r->layers[0], &b->io, stream)); /* one call behind another */
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < REPLAYS; i++) {
    CUDA_OK(cudaMemsetAsync(b->io.y, 0xA5, b->y_count * sizeof *b->io.y, stream));
    run_poison_workspace(r, stream);
    CUDA_OK(cudaGraphLaunch(exec, stream));
  }
  uint16_t *y = malloc(b->y_count * sizeof *y + 1);
  EXPECT_OK(oproj_buffer_read(r->ctx, y, b->io.y, b->y_count * sizeof *y, stream));
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
  return y;
}

static void check_chunk(const run_path *path, const run *whole, const run *cut,
                        const data_layer *data) {
  batch a = batch_open(whole, data, 0, MOST, 8), b = batch_open(cut, data, 0, MOST, 8);
  for (int i = 0; i < COUNTS; i++) {
    oproj_path_choice choice;
    batch_set_tokens(&a, data, counts[i]);
    batch_set_tokens(&b, data, counts[i]);
    if (oproj_layer_path(whole->layers[0], counts[i], &choice) != OPROJ_OK) continue;
    uint16_t *wanted = run_forward(whole, 0, &a);
    uint16_t *eager = run_forward(cut, 0, &b);
    expect_same(path->name, eager, wanted, b.y_count);
    b.io.flags = OPROJ_EARLY_TRIGGER;
    uint16_t *captured = replay(cut, &b);
    expect_same(path->name, captured, wanted, b.y_count);
    b.io.flags = 0;
    free(captured);
    free(eager);
    free(wanted);
  }
  batch_close(whole, &a);
  batch_close(cut, &b);
}

typedef enum kind { FP8, BF16, WITH_ADAPTER, KINDS } kind;

static void check_path(const run_path *path, oproj_reduce reduce, const data_layer *data, kind of) {
  run whole = open_run(path->path, reduce, WHOLE, data);
  if (of == WITH_ADAPTER) add_adapter(&whole);
  for (int c = 0; c < CHUNKS; c++) {
    run cut = open_run(path->path, reduce, chunks[c], data);
    if (of == WITH_ADAPTER) add_adapter(&cut);
    check_chunk(path, &whole, &cut, data);
    run_close(&cut);
  }
  run_close(&whole);
}

/* Random values, whose sums hang on every order. */
START_TEST(chunks_have_the_bits_of_whole_calls) {
  const run_path *path = &run_paths[_i % RUN_PATHS];
  kind of = (kind)(_i / RUN_PATHS % KINDS);
  data_layer data =
      make(&recipes[_i / RUN_PATHS / KINDS], of == BF16 ? OPROJ_DTYPE_BF16 : OPROJ_DTYPE_E4M3);
  bool served = of == FP8 || path->path <= OPROJ_PATH_GROUPED; /* the others refuse such layers */
  if (run_has(path->path) && served && !(of == BF16 && path->path == OPROJ_PATH_GROUPED)) {
    check_path(path, OPROJ_REDUCE_ALL, &data, of);
    check_path(path, OPROJ_REDUCE_SCATTER, &data, of);
  }
  data_free(&data);
}
END_TEST

/* ---- beside the chains --------------------------------------------------------------------- */

static atomic_int released, waited_in_vain;

static void pause_a_millisecond(void) {
  nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* Holds the sum of one chunk until the chain of the next has ended, at most ten seconds. */
static void CUDART_CB wait_for_next(void *next) {
  volatile int32_t *flag = next;
  for (int i = 0; i < 10000 && !*flag; i++) pause_a_millisecond();
  if (!*flag) atomic_store(&waited_in_vain, 1);
}

/* WO_B of a caller that leaves a mark behind each chunk. */
typedef struct marker {
  oproj_layer *layer;
  const int32_t *one; /* on the device */
  int32_t chunks;
} marker;

static oproj_status mark_out(void *user, const oproj_quant *z, uint16_t *partial, void *stream) {
  marker *m = user;
  oproj_status status = oproj_out_project(m->layer, z, partial, stream);
  CUDA_OK(cudaMemcpyAsync((void *)&ended[m->chunks++], m->one, sizeof *m->one,
                          cudaMemcpyDeviceToHost, stream));
  return status;
}

static void forget(marker *m, int32_t count) {
  for (int32_t i = 0; i < count; i++) ended[i] = 0;
  m->chunks = 0;
  sums = 0;
  sums_that_wait = count - 1;
}

static void check_overlap(const run *r, batch *b, marker *m, int32_t count) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  forget(m, count);
  EXPECT_OK(oproj_forward(r->layers[0], &b->io, stream));
  CUDA_OK(cudaStreamSynchronize(stream));
  ck_assert_msg(m->chunks == count && sums == count, "%d chains, %d sums", m->chunks, sums);
  ck_assert_msg(!atomic_load(&waited_in_vain), "a sum waited in vain for the next chain");
  forget(m, count);
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  EXPECT_OK(oproj_forward(r->layers[0], &b->io, stream));
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < REPLAYS; i++) {
    forget(m, count);
    CUDA_OK(cudaGraphLaunch(exec, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    ck_assert_msg(!atomic_load(&waited_in_vain), "replay %d: a sum waited in vain", i);
  }
  CUDA_OK(cudaGraphExecDestroy(exec));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
}

/* No sum ends before the next chunk's chain has, and yet all of them end.  (A sanitizer lets
 * nothing run beside anything.) */
START_TEST(sums_run_beside_chains) {
  enum { TOKENS = 1000, CHUNK = 256, COUNT = 4 };
  data_layer data = make(&recipes[0], OPROJ_DTYPE_E4M3);
  run r = open_run(OPROJ_PATH_AUTO, _i ? OPROJ_REDUCE_SCATTER : OPROJ_REDUCE_ALL, CHUNK, &data);
  batch b = batch_open(&r, &data, 0, TOKENS, 8);
  marker m = {.layer = r.layers[0]};
  void *flags, *one;
  const int32_t value = 1;
  CUDA_OK(cudaMallocHost(&flags, COUNT * sizeof *ended));
  EXPECT_OK(oproj_buffer_create(r.ctx, sizeof value, &one));
  EXPECT_OK(oproj_buffer_write(r.ctx, one, &value, sizeof value, NULL));
  ended = flags;
  m.one = one;
  EXPECT_OK(oproj_layer_set_out(r.layers[0], mark_out, &m, OPROJ_SCALE_F32));
  atomic_store(&waited_in_vain, 0);
  if (!test_is_short()) check_overlap(&r, &b, &m, COUNT);
  sums_that_wait = 0;
  oproj_buffer_destroy(r.ctx, one);
  CUDA_OK(cudaFreeHost(flags));
  batch_close(&r, &b);
  run_close(&r);
  data_free(&data);
}
END_TEST

/* ---- what a call leaves alone -------------------------------------------------------------- */

static void CUDART_CB hold(void *unused) {
  (void)unused;
  for (int i = 0; i < 10000 && !atomic_load(&released); i++) pause_a_millisecond();
  if (!atomic_load(&released)) atomic_store(&waited_in_vain, 1);
}

static size_t free_memory(void) {
  size_t free_bytes = 0, all_bytes = 0;
  CUDA_OK(cudaDeviceSynchronize());
  CUDA_OK(cudaMemGetInfo(&free_bytes, &all_bytes));
  return free_bytes;
}

START_TEST(chunks_allocate_nothing_and_wait_for_nothing) {
  data_layer data = make(&recipes[_i], OPROJ_DTYPE_E4M3);
  if (!test_is_short()) {
    run r = open_run(OPROJ_PATH_AUTO, OPROJ_REDUCE_ALL, 256, &data);
    batch b = batch_open(&r, &data, 0, MOST, 8);
    cudaStream_t stream;
    CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    atomic_store(&released, 0);
    atomic_store(&waited_in_vain, 0);
    size_t before = free_memory();
    CUDA_OK(cudaLaunchHostFunc(stream, hold, NULL));
    EXPECT_OK(oproj_forward(r.layers[0], &b.io, stream));
    ck_assert_msg(cudaStreamQuery(stream) == cudaErrorNotReady, "the stream was not held");
    atomic_store(&released, 1);
    CUDA_OK(cudaStreamSynchronize(stream));
    ck_assert_msg(!atomic_load(&waited_in_vain), "a call waited for the stream");
    size_t after = free_memory();
    ck_assert_msg(after == before, "%zu bytes of device memory became %zu", before, after);
    CUDA_OK(cudaStreamDestroy(stream));
    batch_close(&r, &b);
    run_close(&r);
  }
  data_free(&data);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("cuda_chunks");
  TCase *tc = tcase_create("cuda_chunks");
  tcase_add_loop_test(tc, chunks_allocate_nothing_and_wait_for_nothing, 0, RECIPES);
  tcase_add_loop_test(tc, chunks_have_the_bits_of_whole_calls, 0, RUN_PATHS * KINDS * RECIPES);
  tcase_add_loop_test(tc, sums_run_beside_chains, 0, 2);
  return run_gpu_suite(suite, tc);
}
