/* test_gpu_ranks.c - several ranks on GPUs.  Started by mpirun as `test_gpu_ranks mpi` (ranks may
 * share one GPU, sums go through the host) or `test_gpu_ranks nccl` (one GPU each).
 *
 * Verdicts are agreed before they are asserted, so that every rank leaves a test together. */
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <mpi.h>
#include <nccl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/num.h"
#include "oproj/cuda.h"
#include "support/data.h"
#include "support/expect.h"
#include "support/together.h"

enum { TOKENS = 13, REPLAYS = 100 };

static oproj_comm *comm;    /* the one under test */
static oproj_comm *control; /* MPI's, for agreements */
static int32_t size, rank;
static bool nccl;

#define ALL_CUDA(call)                                                              \
  do {                                                                              \
    cudaError_t error_ = (call);                                                    \
    ALL_ASSERT(error_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(error_)); \
  } while (0)

/* Groups enough for every size the test is started with. */
static oproj_dims dims_for_ranks(const oproj_dims *tiny) {
  oproj_dims dims = *tiny;
  dims.groups = 8;
  return dims;
}

static oproj_ctx *open_ctx(oproj_comm *over, const oproj_dims *dims, int32_t max_tokens,
                           oproj_reduce reduce, int64_t chunk_tokens) {
  oproj_ctx *ctx = NULL;
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "cuda";
  config.max_tokens = max_tokens;
  config.reduce = reduce;
  config.chunk_tokens = chunk_tokens;
  EXPECT_OK(oproj_ctx_create(&ctx, over, dims, &config));
  return ctx;
}

/* ---- a layer on the device ----------------------------------------------------------------- */

typedef struct share {
  oproj_ctx *ctx;
  oproj_layer *layer;
  void *attn_out, *positions, *cos_sin, *y;
  size_t values; /* of y */
  oproj_io io;   /* on the device */
} share;

static void *upload(oproj_ctx *ctx, const void *from, size_t bytes) {
  void *to = NULL;
  EXPECT_OK(oproj_buffer_create(ctx, bytes, &to));
  EXPECT_OK(oproj_buffer_write(ctx, to, from, bytes, NULL));
  return to;
}

static void poison(share *s) {
  uint16_t *values = malloc(s->values * sizeof *values);
  memset(values, 0xAA, s->values * sizeof *values);
  EXPECT_OK(oproj_buffer_write(s->ctx, s->y, values, s->values * sizeof *values, NULL));
  free(values);
}

static share open_chunked(oproj_comm *over, const data_layer *data, oproj_reduce reduce,
                          int64_t chunk_tokens) {
  share s = {.ctx = open_ctx(over, &data->dims, data->tokens, reduce, chunk_tokens)};
  const oproj_dims *d = &data->dims;
  data_share weights = data_take(data, oproj_ctx_shard(s.ctx));
  EXPECT_OK(oproj_layer_create(&s.layer, s.ctx, &weights.wo_a, &weights.wo_b));
  data_share_free(&weights);
  s.io = data_io(data, oproj_ctx_shard(s.ctx));
  size_t tokens = (size_t)data->tokens;
  s.attn_out =
      upload(s.ctx, data->attn_out, tokens * (size_t)(d->heads * d->head_dim) * sizeof(uint16_t));
  s.positions = upload(s.ctx, data->positions, tokens * sizeof *data->positions);
  s.cos_sin = upload(s.ctx, data->cos_sin,
                     (size_t)(data->cos_sin_rows * d->rope_dim) * sizeof *data->cos_sin);
  s.values = tokens * (size_t)d->hidden;
  EXPECT_OK(oproj_buffer_create(s.ctx, s.values * sizeof *s.io.y, &s.y));
  s.io.attn_out = (uint16_t *)s.attn_out + (s.io.attn_out - data->attn_out);
  s.io.positions = s.positions;
  s.io.cos_sin = s.cos_sin;
  s.io.y = s.y;
  poison(&s);
  return s;
}

static share open_share(oproj_comm *over, const data_layer *data, oproj_reduce reduce) {
  return open_chunked(over, data, reduce, 0);
}

static void close_share(share *s) {
  oproj_buffer_destroy(s->ctx, s->attn_out);
  oproj_buffer_destroy(s->ctx, s->positions);
  oproj_buffer_destroy(s->ctx, s->cos_sin);
  oproj_buffer_destroy(s->ctx, s->y);
  oproj_layer_destroy(s->layer);
  oproj_ctx_destroy(s->ctx);
}

/* y in host memory, to be freed; *status says how the read went. */
static uint16_t *read_y(const share *s, oproj_status *status) {
  uint16_t *y = malloc(s->values * sizeof *y);
  *status = oproj_buffer_read(s->ctx, y, s->y, s->values * sizeof *y, NULL);
  return y;
}

static uint16_t *project(share *s) {
  oproj_status status;
  ALL_OK(oproj_forward(s->layer, &s->io, NULL));
  uint16_t *y = read_y(s, &status);
  ALL_OK(status);
  return y;
}

/* y of the whole layer on one rank alone, of the same backend. */
static uint16_t *project_alone(const data_layer *data) {
  oproj_comm *self;
  EXPECT_OK(oproj_comm_self(&self));
  share s = open_share(self, data, OPROJ_REDUCE_ALL);
  uint16_t *y = project(&s);
  close_share(&s);
  oproj_comm_destroy(self);
  return y;
}

static size_t count_nans(const uint16_t *y, size_t values) {
  size_t nans = 0;
  for (size_t i = 0; i < values; i++) nans += (y[i] & 0x7FFF) > 0x7F80;
  return nans;
}

/* V4 and V4.1 on the paths that few and many tokens take, and on shapes that only the portable
 * kernels take. */
static const struct {
  oproj_dims dims;
  int32_t tokens;
} shapes[] = {{{640, 16, 512, 64, 8, 256, 128}, TOKENS}, {{640, 16, 512, 64, 8, 256, 32}, TOKENS},
              {{640, 16, 512, 64, 8, 256, 128}, 130},    {{640, 16, 512, 64, 8, 256, 32}, 130},
              {{640, 16, 512, 64, 8, 256, 128}, 1001},   {{640, 16, 512, 64, 8, 256, 32}, 1001},
              {{577, 16, 512, 64, 8, 128, 128}, TOKENS}, {{80, 16, 512, 64, 8, 160, 32}, TOKENS}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

START_TEST(exact_data_equals_one_rank) {
  static const oproj_reduce modes[] = {OPROJ_REDUCE_ALL, OPROJ_REDUCE_VENDOR, OPROJ_REDUCE_SCATTER};
  oproj_dims dims = shapes[_i].dims;
  int32_t tokens = shapes[_i].tokens;
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, tokens);
  uint16_t *want = project_alone(&data);
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    share s = open_share(comm, &data, modes[m]);
    uint16_t *y = project(&s);
    int32_t begin = 0, end = tokens;
    if (modes[m] == OPROJ_REDUCE_SCATTER) oproj_plan_rows(tokens, size, rank, &begin, &end);
    size_t mine = (size_t)((end - begin) * dims.hidden);
    ALL_ASSERT(memcmp(y, want + begin * dims.hidden, mine * sizeof *y) == 0,
               "shape %d, mode %d: y differs from one rank's", _i, (int)modes[m]);
    ALL_ASSERT(mine == s.values || y[mine] == 0xAAAA, "mode %d: more than this rank's rows written",
               (int)modes[m]);
    free(y);
    close_share(&s);
  }
  free(want);
  data_free(&data);
}
END_TEST

/* Calls that are taken apart have the bits of whole ones, call after call. */
START_TEST(chunks_have_the_bits_of_whole_calls) {
  enum { MOST = 1001, CALLS = 20 };
  static const int64_t chunks[] = {128, 300, 640};
  oproj_dims dims = {640, 16, 512, 64, 8, 256, _i ? 32 : 128};
  data_layer data = data_make(&dims, false, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, MOST);
  for (int scatter = 0; scatter < 2; scatter++) {
    oproj_reduce mode = scatter ? OPROJ_REDUCE_SCATTER : OPROJ_REDUCE_ALL;
    share whole = open_chunked(comm, &data, mode, MOST);
    uint16_t *want = project(&whole);
    for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
      share s = open_chunked(comm, &data, mode, chunks[c]);
      for (int call = 0; call < CALLS; call++) {
        uint16_t *y = project(&s);
        ALL_ASSERT(memcmp(y, want, s.values * sizeof *y) == 0,
                   "mode %d, chunks of %d, call %d: y differs from a whole call's", (int)mode,
                   (int)chunks[c], call);
        free(y);
      }
      close_share(&s);
    }
    free(want);
    close_share(&whole);
  }
  data_free(&data);
}
END_TEST

START_TEST(partials_are_left_alone_without_reduction) {
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, TOKENS);
  share s = open_share(comm, &data, OPROJ_REDUCE_NONE);
  uint16_t *partial = project(&s), *want = project_alone(&data);
  float *mine = malloc(s.values * sizeof *mine), *sum = malloc(s.values * sizeof *sum);
  for (size_t i = 0; i < s.values; i++) mine[i] = oproj_bf16_to_f32(partial[i]);
  MPI_Allreduce(mine, sum, (int)s.values, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  size_t wrong = 0;
  for (size_t i = 0; i < s.values; i++) wrong += sum[i] != oproj_bf16_to_f32(want[i]);
  ALL_ASSERT(wrong == 0, "%zu partial sums do not add up", wrong);
  free(sum);
  free(mine);
  free(want);
  free(partial);
  close_share(&s);
  data_free(&data);
}
END_TEST

/* ---- the rule of the sum ------------------------------------------------------------------- */

static uint16_t partial_value(int32_t of_rank, size_t i) {
  return oproj_bf16_from_f32((float)(data_uniform(70 + (uint64_t)of_rank, i) * 1000.0));
}

/* Elements of this rank's y that are not the f32 sum in rank order, rounded once. */
static size_t count_wrong(const uint16_t *y, size_t first, size_t count) {
  size_t wrong = 0;
  for (size_t i = 0; i < count; i++) {
    float sum = 0.0f;
    for (int32_t r = 0; r < size; r++) sum += oproj_bf16_to_f32(partial_value(r, first + i));
    wrong += y[i] != oproj_bf16_from_f32(sum);
  }
  return wrong;
}

/* Of one shape and mode: into another buffer, then in place. */
static void check_rule(oproj_comm *over, const oproj_dims *dims, int32_t tokens,
                       oproj_reduce mode) {
  oproj_ctx *ctx = open_ctx(over, dims, tokens, mode, 0);
  size_t values = (size_t)tokens * (size_t)dims->hidden;
  uint16_t *host = malloc(values * sizeof *host);
  for (size_t i = 0; i < values; i++) host[i] = partial_value(rank, i);
  uint16_t *partial = upload(ctx, host, values * sizeof *host);
  uint16_t *y = upload(ctx, host, values * sizeof *host);
  int32_t begin = 0, end = tokens;
  if (mode == OPROJ_REDUCE_SCATTER) oproj_plan_rows(tokens, size, rank, &begin, &end);
  size_t first = (size_t)begin * (size_t)dims->hidden;
  size_t count = (size_t)(end - begin) * (size_t)dims->hidden;
  for (int in_place = 0; in_place < 2; in_place++) {
    uint16_t *to = in_place ? partial : y;
    ALL_OK(oproj_partial_reduce(ctx, tokens, partial, to, NULL));
    ALL_OK(oproj_buffer_read(ctx, host, to, count * sizeof *host, NULL));
    size_t wrong = count_wrong(host, first, count);
    ALL_ASSERT(wrong == 0, "%d tokens, mode %d, in place %d: %zu elements are wrong", tokens,
               (int)mode, in_place, wrong);
  }
  oproj_buffer_destroy(ctx, partial);
  oproj_buffer_destroy(ctx, y);
  free(host);
  oproj_ctx_destroy(ctx);
}

/* Few bytes, many, and sizes that divide by nothing. */
START_TEST(sums_are_in_rank_order) {
  static const int32_t tokens[] = {1, 13, 455, 456, 1001};
  oproj_dims dims = dims_for_ranks(&data_tiny_v4), odd = dims;
  odd.hidden = 577;
  for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++) {
    check_rule(comm, &dims, tokens[i], OPROJ_REDUCE_ALL);
    check_rule(comm, &odd, tokens[i], OPROJ_REDUCE_ALL);
    check_rule(comm, &dims, tokens[i], OPROJ_REDUCE_SCATTER);
  }
}
END_TEST

/* ---- one rank in trouble ------------------------------------------------------------------- */

static void set_position(share *s, int64_t token, int64_t position) {
  EXPECT_OK(oproj_buffer_write(s->ctx, (int64_t *)s->positions + token, &position, sizeof position,
                               NULL));
}

/* Where the host takes part, everybody hears of it in the same call. */
START_TEST(bad_position_is_everybodys) {
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, TOKENS);
  share s = open_share(comm, &data, OPROJ_REDUCE_ALL);
  if (rank == size - 1) set_position(&s, 1, 1 << 20);
  oproj_status status = oproj_forward(s.layer, &s.io, NULL);
  int right = status == OPROJ_ERR_INVALID &&
              strstr(oproj_last_error(), "positions[1] of an earlier call is 1048576");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  if (rank == size - 1) set_position(&s, 1, data.positions[1]);
  uint16_t *y = project(&s), *want = project_alone(&data);
  ALL_ASSERT(memcmp(y, want, s.values * sizeof *y) == 0, "the next call is wrong");
  free(want);
  free(y);
  close_share(&s);
  data_free(&data);
}
END_TEST

/* Where it does not, a rank that fails joins the sum, of every chunk, with NaN and says so
 * itself. */
START_TEST(failed_rank_strands_nobody) {
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, _i ? 300 : TOKENS);
  share s = open_chunked(comm, &data, OPROJ_REDUCE_ALL, 128);
  bool last = rank == size - 1;
  oproj_status status;

  /* The device meets the position: its token becomes NaN everywhere. */
  if (last) set_position(&s, 1, 1 << 20);
  ALL_OK(oproj_forward(s.layer, &s.io, NULL));
  ALL_CUDA(cudaDeviceSynchronize());
  if (last) set_position(&s, 1, data.positions[1]);

  /* The next call reports it on that rank; the others get NaN instead of waiting. */
  poison(&s);
  status = oproj_forward(s.layer, &s.io, NULL);
  ALL_ASSERT(status == (last ? OPROJ_ERR_INVALID : OPROJ_OK), "status %d", (int)status);
  uint16_t *y = read_y(&s, &status);
  ALL_OK(status);
  size_t nans = count_nans(y, s.values);
  ALL_ASSERT(last ? y[0] == 0xAAAA : nans == s.values, "%zu of %zu are NaN", nans, s.values);
  free(y);

  /* And the one after is as if nothing had been. */
  y = project(&s);
  uint16_t *want = project_alone(&data);
  ALL_ASSERT(memcmp(y, want, s.values * sizeof *y) == 0, "the call after is wrong");
  free(want);
  free(y);
  close_share(&s);
  data_free(&data);
}
END_TEST

/* ---- NCCL ---------------------------------------------------------------------------------- */

START_TEST(ranks_on_one_gpu_are_refused) {
  oproj_comm *shared = NULL;
  oproj_status status = oproj_comm_nccl(&shared, MPI_COMM_WORLD, 0);
  int right = status == OPROJ_ERR_UNSUPPORTED && !shared &&
              strstr(oproj_last_error(), "ranks 0 and 1 share one GPU");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
}
END_TEST

START_TEST(missing_gpus_are_refused) {
  oproj_comm *none = NULL;
  int32_t device = rank == size - 1 ? 1000 : 0;
  oproj_status status = oproj_comm_nccl(&none, MPI_COMM_WORLD, device);
  int right = status == OPROJ_ERR_INVALID && !none && strstr(oproj_last_error(), "1000");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
}
END_TEST

static cudaGraphExec_t capture(share *s, cudaStream_t stream) {
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  ALL_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  oproj_status status = oproj_forward(s->layer, &s->io, stream);
  ALL_CUDA(cudaStreamEndCapture(stream, &graph));
  ALL_OK(status);
  ALL_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaGraphDestroy(graph);
  return exec;
}

START_TEST(graphs_replay_what_eager_calls_give) {
  static const oproj_reduce modes[] = {OPROJ_REDUCE_ALL, OPROJ_REDUCE_VENDOR, OPROJ_REDUCE_SCATTER};
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  for (size_t m = 0; m < sizeof modes / sizeof modes[0]; m++) {
    /* NCCL's own order may differ between graphs and eager calls; exact sums do not.  The many
     * tokens are taken apart. */
    data_layer data = data_make(&dims, modes[m] == OPROJ_REDUCE_VENDOR, OPROJ_DTYPE_E4M3,
                                OPROJ_DTYPE_E4M3, _i ? 500 : TOKENS);
    share s = open_chunked(comm, &data, modes[m], 128);
    cudaStream_t stream = NULL;
    oproj_status status;
    ALL_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    uint16_t *eager = project(&s);
    cudaGraphExec_t exec = capture(&s, stream);
    poison(&s);
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < REPLAYS && error == cudaSuccess; i++) error = cudaGraphLaunch(exec, stream);
    ALL_CUDA(error);
    ALL_CUDA(cudaStreamSynchronize(stream));
    uint16_t *replayed = read_y(&s, &status);
    ALL_OK(status);
    ALL_ASSERT(memcmp(eager, replayed, s.values * sizeof *eager) == 0,
               "mode %d: the graph gives another y", (int)modes[m]);
    cudaGraphExecDestroy(exec);
    cudaStreamDestroy(stream);
    free(replayed);
    free(eager);
    close_share(&s);
    data_free(&data);
  }
}
END_TEST

START_TEST(ranks_agree_on_every_bit) {
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, false, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, 500);
  share s = open_share(comm, &data, OPROJ_REDUCE_ALL);
  uint16_t *y = project(&s), *first = malloc(s.values * sizeof *first);
  memcpy(first, y, s.values * sizeof *first);
  MPI_Bcast(first, (int)s.values, MPI_UINT16_T, 0, MPI_COMM_WORLD);
  ALL_ASSERT(memcmp(y, first, s.values * sizeof *y) == 0, "y differs from rank 0's");
  free(first);
  free(y);
  close_share(&s);
  data_free(&data);
}
END_TEST

START_TEST(callers_communicator_serves) {
  ncclUniqueId id;
  ncclComm_t own = NULL;
  if (rank == 0) ncclGetUniqueId(&id);
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
  ALL_CUDA(cudaSetDevice(oproj_comm_device(comm)));
  ALL_ASSERT(ncclCommInitRank(&own, size, id, rank) == ncclSuccess, "ncclCommInitRank failed");
  oproj_comm *adopted = NULL;
  EXPECT_OK(oproj_comm_nccl_adopt(&adopted, MPI_COMM_WORLD, own));
  ck_assert_int_eq(oproj_comm_device(adopted), oproj_comm_device(comm));
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  check_rule(adopted, &dims, 5, OPROJ_REDUCE_ALL);
  oproj_comm_destroy(adopted);
  ncclCommDestroy(own);
  EXPECT_FAIL(oproj_comm_nccl_adopt(&adopted, MPI_COMM_WORLD, NULL), OPROJ_ERR_INVALID, "NULL");
}
END_TEST

/* ---- losing a rank ------------------------------------------------------------------------- */

/* Stops this process; a child lets it go on after `seconds`. */
static void stop_for(unsigned seconds) {
  pid_t self = getpid(), child = fork();
  if (child == 0) { /* nothing of MPI's or CUDA's is touched here */
    kill(self, SIGSTOP);
    sleep(seconds);
    kill(self, SIGCONT);
    _exit(0);
  }
  waitpid(child, NULL, 0);
}

static oproj_comm *new_comm(void) {
  oproj_comm *made = NULL;
  ALL_OK(nccl ? oproj_comm_nccl(&made, MPI_COMM_WORLD, -1) : oproj_comm_mpi(&made, MPI_COMM_WORLD));
  return made;
}

static size_t free_memory(void) {
  size_t unused = 0, all;
  cudaDeviceSynchronize();
  cudaMemGetInfo(&unused, &all);
  return unused;
}

/* The last rank is stopped while the others are in a forward: their waits end, in an error that
 * names it; then all start anew, and the GPU's memory is as it was. */
START_TEST(a_stopped_rank_ends_the_waits_of_all) {
  enum { DEADLINE = 2, STOPPED = 6 };
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, TOKENS);
  uint16_t *want = project_alone(&data);
  size_t before = 0;
  for (int round = 0; round < 2; round++) {
    oproj_comm *over = new_comm();
    share s = open_share(over, &data, OPROJ_REDUCE_ALL);
    uint16_t *y = project(&s);
    ALL_ASSERT(memcmp(y, want, s.values * sizeof *y) == 0, "round %d: y differs", round);
    oproj_comm_set_deadline(over, DEADLINE);
    double begin = MPI_Wtime();
    if (rank == size - 1) stop_for(STOPPED);
    oproj_status forward = oproj_forward(s.layer, &s.io, NULL), read;
    free(y);
    y = read_y(&s, &read);
    double seconds = MPI_Wtime() - begin;
    char words[64];
    snprintf(words, sizeof words, "rank %d has been silent for", size - 1);
    oproj_status again = oproj_forward(s.layer, &s.io, NULL);
    ALL_ASSERT((forward == OPROJ_ERR_PEER || read == OPROJ_ERR_PEER) && again == OPROJ_ERR_PEER &&
                   strstr(oproj_last_error(), words),
               "round %d: forward %d, read %d, next forward %d: %s", round, (int)forward, (int)read,
               (int)again, oproj_last_error());
    ALL_ASSERT(seconds < DEADLINE + STOPPED + 5, "it took %.1f s", seconds);
    free(y);
    close_share(&s);
    oproj_comm_destroy(over);
    size_t now = free_memory();
    if (round == 0) before = now;
    ALL_ASSERT(now + (64 << 20) >= before, "round %d: %zu bytes are free, %zu were", round, now,
               before);
  }
  free(want);
  data_free(&data);
}
END_TEST

/* ---- a GPU that hangs ---------------------------------------------------------------------- */

static bool hold_gathers;
static atomic_bool holding;

/* A function of the stream's that does not return before a rank counts as lost. */
static void CUDART_CB hold(void *over) {
  for (int i = 0; i < 20000 && atomic_load(&holding) && oproj_comm_check(over) == OPROJ_OK; i++)
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static oproj_comm *held_comm;

/* In front of NCCL's: a gathering that this GPU has begun and does not come to. */
ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type,
                           ncclComm_t of, cudaStream_t stream) {
  ncclResult_t (*real)(const void *, void *, size_t, ncclDataType_t, ncclComm_t, cudaStream_t);
  void *found = dlsym(RTLD_NEXT, "ncclAllGather");
  memcpy(&real, &found, sizeof real);
  if (hold_gathers) cudaLaunchHostFunc(stream, hold, held_comm);
  return real(from, to, count, type, of, stream);
}

static cudaGraphExec_t capture_held(share *s, cudaStream_t stream, bool inside) {
  cudaGraph_t graph = NULL;
  cudaGraphExec_t exec = NULL;
  ALL_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  if (!inside) cudaLaunchHostFunc(stream, hold, held_comm);
  hold_gathers = inside;
  oproj_status status = oproj_forward(s->layer, &s->io, stream);
  hold_gathers = false;
  ALL_CUDA(cudaStreamEndCapture(stream, &graph));
  ALL_OK(status);
  ALL_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaGraphDestroy(graph);
  return exec;
}

/* As many times on all ranks. */
static cudaError_t replay_for(double seconds, cudaGraphExec_t exec, cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  double begin = MPI_Wtime();
  do {
    for (int i = 0; i < REPLAYS && error == cudaSuccess; i++) error = cudaGraphLaunch(exec, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  } while (together_all(error == cudaSuccess && MPI_Wtime() - begin < seconds));
  return error;
}

/* All processes live and wait for their GPUs; the last rank's does not come to a sum, or, having
 * begun it, not to NCCL's part of it.  A graph replays what it captured. */
START_TEST(a_hanging_gpu_ends_the_waits_of_all) {
  enum { DEADLINE = 2 };
  bool inside = _i != 0;
  const char *push = getenv("OPROJ_PUSH");
  if (push && strcmp(push, "1") == 0) return; /* its polls have bounds of their own */
  oproj_dims dims = dims_for_ranks(&data_tiny_v4);
  data_layer data = data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, TOKENS);
  oproj_comm *over = held_comm = new_comm();
  share s = open_share(over, &data, OPROJ_REDUCE_ALL);
  cudaStream_t stream = NULL;
  ALL_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraphExec_t exec = capture_held(&s, stream, inside);
  oproj_comm_set_deadline(over, DEADLINE);
  ALL_CUDA(replay_for(2 * DEADLINE, exec, stream));
  ALL_OK(oproj_comm_check(over));
  atomic_store(&holding, rank == size - 1);
  double begin = MPI_Wtime();
  cudaGraphLaunch(exec, stream);
  cudaStreamSynchronize(stream); /* how it ends is NCCL's */
  double seconds = MPI_Wtime() - begin;
  char words[80];
  snprintf(words, sizeof words, "rank %d has kept the GPUs of others waiting for", size - 1);
  oproj_status status = oproj_forward(s.layer, &s.io, stream);
  ALL_ASSERT(status == OPROJ_ERR_PEER && seconds < DEADLINE + 8 &&
                 strstr(oproj_last_error(), inside ? "'s GPU has waited for" : words),
             "after %.1f s, status %d: %s", seconds, (int)status, oproj_last_error());
  atomic_store(&holding, false);
  cudaGraphExecDestroy(exec);
  cudaStreamDestroy(stream);
  close_share(&s);
  oproj_comm_destroy(over);
  data_free(&data);
}
END_TEST

/* ---- start --------------------------------------------------------------------------------- */

static TCase *cases(void) {
  TCase *tc = tcase_create("gpu_ranks");
  tcase_add_loop_test(tc, exact_data_equals_one_rank, 0, SHAPES);
  tcase_add_loop_test(tc, chunks_have_the_bits_of_whole_calls, 0, 2);
  tcase_add_test(tc, partials_are_left_alone_without_reduction);
  tcase_add_test(tc, sums_are_in_rank_order);
  if (nccl) {
    tcase_add_loop_test(tc, failed_rank_strands_nobody, 0, 2);
    tcase_add_loop_test(tc, graphs_replay_what_eager_calls_give, 0, 2);
    tcase_add_test(tc, ranks_agree_on_every_bit);
    tcase_add_test(tc, callers_communicator_serves);
    tcase_add_loop_test(tc, a_hanging_gpu_ends_the_waits_of_all, 0, 2);
  } else {
    tcase_add_test(tc, bad_position_is_everybodys);
  }
  tcase_add_test(tc, ranks_on_one_gpu_are_refused);
  tcase_add_test(tc, missing_gpus_are_refused);
  tcase_add_test(tc, a_stopped_rank_ends_the_waits_of_all);
  return tc;
}

static int run_cases(void) {
  oproj_status status = nccl ? oproj_comm_nccl(&comm, MPI_COMM_WORLD, -1) : OPROJ_OK;
  if (status != OPROJ_OK) {
    if (rank == 0) fprintf(stderr, "%s\n", oproj_last_error());
    return EXIT_FAILURE;
  }
  if (!nccl) comm = control;
  Suite *suite = suite_create("gpu_ranks");
  TCase *tc = cases();
  tcase_set_timeout(tc, 0);
  suite_add_tcase(suite, tc);
  int failed = together_run(suite, rank);
  if (nccl) oproj_comm_destroy(comm);
  return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  if (argc != 2 || oproj_comm_mpi(&control, MPI_COMM_WORLD) != OPROJ_OK) {
    fprintf(stderr, "usage: mpirun -n N test_gpu_ranks mpi|nccl\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  size = oproj_comm_size(control);
  rank = oproj_comm_rank(control);
  nccl = strcmp(argv[1], "nccl") == 0;
  int code = together_lack_of_gpus(rank, nccl ? size : 1);
  if (code == 0) code = run_cases();
  oproj_comm_destroy(control);
  MPI_Finalize();
  return code;
}
