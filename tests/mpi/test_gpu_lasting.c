/* test_gpu_lasting.c - ranks on GPUs over time: many forwards of changing size, called and
 * replayed, each with the bits of one rank; and a rank that pauses.  Started by mpirun as
 *
 *   test_gpu_lasting mpi    ranks may share a GPU, sums go through the host
 *   test_gpu_lasting push   ranks of one host, which may share a GPU: sums are pushed from process
 *                           to process, over a communicator of this file's that knows nothing else
 *   test_gpu_lasting nccl   a GPU each
 *
 * OPROJ_TEST_FORWARDS is how many forwards the longest case makes (default 2000). */
#include <cuda_runtime_api.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "oproj/cuda.h"
#include "support/data.h"
#include "support/expect.h"
#include "support/together.h"
#include "tp/comm.h"
#include "tp/push.h"

enum { MOST_TOKENS = 64, DEADLINE_S = 2 };

/* What every path of few tokens takes, as little of it as goes. */
static const oproj_dims dims = {.hidden = 640,
                                .heads = 16,
                                .head_dim = 512,
                                .rope_dim = 64,
                                .groups = 8,
                                .lora_rank = 256,
                                .quant_block = 128};

static enum { OVER_MPI, OVER_PUSH, OVER_NCCL } kind;
static int32_t size, rank;

#define ALL_CUDA(call)                                                              \
  do {                                                                              \
    cudaError_t error_ = (call);                                                    \
    ALL_ASSERT(error_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(error_)); \
  } while (0)

/* ---- a communicator that pushes ------------------------------------------------------------- */

typedef struct pusher {
  oproj_comm head;
  oproj_comm *mpi; /* the same ranks */
} pusher;

typedef struct pusher_end {
  oproj_comm_end head;
  oproj_comm_site site;
  oproj_push *push;
} pusher_end;

static oproj_comm *mpi_of(oproj_comm *comm) {
  return ((pusher *)comm)->mpi;
}

static oproj_status push_broadcast(oproj_comm *comm, int32_t root, void *data, size_t bytes) {
  return mpi_of(comm)->ops->broadcast(mpi_of(comm), root, data, bytes);
}

static oproj_status push_gather(oproj_comm *comm, const void *mine, void *all, int32_t bytes) {
  return mpi_of(comm)->ops->gather(mpi_of(comm), mine, all, bytes);
}

static oproj_status push_min(oproj_comm *comm, int32_t mine, int32_t *out) {
  return mpi_of(comm)->ops->min_i32(mpi_of(comm), mine, out);
}

static void push_detach(oproj_comm *comm, oproj_comm_end *end) {
  (void)comm;
  pusher_end *e = (pusher_end *)end;
  oproj_push_close(e->push);
  if (e->head.partial) e->site.ops->buffer_destroy(e->site.kernels, e->head.partial);
  free(e);
}

static oproj_status push_attach(oproj_comm *comm, const oproj_comm_site *site,
                                oproj_comm_end **out) {
  pusher_end *e = calloc(1, sizeof *e);
  void *partial = NULL;
  e->site = *site;
  oproj_status status = site->ops->buffer_create(
      site->kernels, (size_t)site->max_tokens * (size_t)site->hidden * sizeof(uint16_t), &partial);
  e->head.partial = partial;
  status = oproj_comm_agree(comm, status);
  if (status == OPROJ_OK) status = oproj_push_open(&e->push, mpi_of(comm), site);
  if (status == OPROJ_OK && !e->push)
    status = oproj_fail(OPROJ_ERR_UNSUPPORTED, "these processes cannot push to one another");
  if (status == OPROJ_OK)
    *out = &e->head;
  else
    push_detach(comm, &e->head);
  return status;
}

static oproj_status push_reduce(oproj_comm *comm, oproj_comm_end *end, oproj_reduce mode,
                                int32_t tokens, const uint16_t *partial, uint16_t *y, int sent,
                                void *stream) {
  (void)comm, (void)mode;
  pusher_end *e = (pusher_end *)end;
  return oproj_push_sum(e->push, (int64_t)tokens * e->site.hidden, partial, y, sent, stream);
}

static const oproj_kernels_push *push_sink(const oproj_comm_end *end, oproj_reduce mode,
                                           int32_t tokens) {
  (void)mode, (void)tokens;
  return oproj_push_sink(((const pusher_end *)end)->push);
}

static void push_destroy(oproj_comm *comm) {
  oproj_comm_destroy(mpi_of(comm));
  free(comm);
}

static const oproj_comm_ops push_ops = {.name = "push",
                                        .broadcast = push_broadcast,
                                        .gather = push_gather,
                                        .min_i32 = push_min,
                                        .attach = push_attach,
                                        .detach = push_detach,
                                        .reduce_device = push_reduce,
                                        .sink = push_sink,
                                        .destroy = push_destroy};

static oproj_comm *new_comm(void) {
  oproj_comm *made = NULL;
  if (kind == OVER_NCCL)
    ALL_OK(oproj_comm_nccl(&made, MPI_COMM_WORLD, -1));
  else
    ALL_OK(oproj_comm_mpi(&made, MPI_COMM_WORLD));
  if (kind != OVER_PUSH) return made;
  pusher *p = calloc(1, sizeof *p);
  p->head = *made;
  p->head.ops = &push_ops;
  p->mpi = made;
  return &p->head;
}

/* ---- everything that one start makes -------------------------------------------------------- */

typedef struct start {
  oproj_comm *comm;
  oproj_ctx *ctx;
  oproj_layer *layer;
  void *attn_out, *positions, *cos_sin;
  uint16_t *y; /* device memory [MOST_TOKENS, hidden] */
  oproj_io io;
  cudaStream_t stream;
  cudaGraphExec_t graphs[MOST_TOKENS + 1]; /* by tokens; NULL: none, as of 0 tokens */
} start;

static const size_t row_bytes = sizeof(uint16_t) * 640;

static void *upload(oproj_ctx *ctx, const void *from, size_t bytes) {
  void *to = NULL;
  EXPECT_OK(oproj_buffer_create(ctx, bytes, &to));
  EXPECT_OK(oproj_buffer_write(ctx, to, from, bytes, NULL));
  return to;
}

static void open_start(start *s, oproj_comm *comm, const data_layer *data) {
  *s = (start){.comm = comm};
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "cuda";
  config.max_tokens = MOST_TOKENS;
  ALL_OK(oproj_ctx_create(&s->ctx, comm, &dims, &config));
  const oproj_shard *shard = oproj_ctx_shard(s->ctx);
  data_share share = data_take(data, shard);
  ALL_OK(oproj_layer_create(&s->layer, s->ctx, &share.wo_a, &share.wo_b));
  data_share_free(&share);
  s->io = data_io(data, shard);
  size_t heads = (size_t)(dims.heads * dims.head_dim);
  s->attn_out = upload(s->ctx, data->attn_out, MOST_TOKENS * heads * sizeof(uint16_t));
  s->positions = upload(s->ctx, data->positions, MOST_TOKENS * sizeof *data->positions);
  s->cos_sin = upload(s->ctx, data->cos_sin,
                      (size_t)(data->cos_sin_rows * dims.rope_dim) * sizeof *data->cos_sin);
  void *y = NULL;
  EXPECT_OK(oproj_buffer_create(s->ctx, MOST_TOKENS * row_bytes, &y));
  s->io.attn_out = (uint16_t *)s->attn_out + (s->io.attn_out - data->attn_out);
  s->io.positions = s->positions;
  s->io.cos_sin = s->cos_sin;
  s->io.y = s->y = y;
  ALL_CUDA(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
}

static void close_start(start *s) {
  for (int t = 0; t <= MOST_TOKENS; t++)
    if (s->graphs[t]) cudaGraphExecDestroy(s->graphs[t]);
  cudaStreamDestroy(s->stream);
  oproj_buffer_destroy(s->ctx, s->attn_out);
  oproj_buffer_destroy(s->ctx, s->positions);
  oproj_buffer_destroy(s->ctx, s->cos_sin);
  oproj_buffer_destroy(s->ctx, s->y);
  oproj_layer_destroy(s->layer);
  oproj_ctx_destroy(s->ctx);
  oproj_comm_destroy(s->comm);
}

static data_layer make_data(void) {
  return data_make(&dims, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, MOST_TOKENS);
}

/* y of one rank alone; to be freed. */
static uint16_t *project_alone(const data_layer *data) {
  oproj_comm *self;
  start s;
  EXPECT_OK(oproj_comm_self(&self));
  open_start(&s, self, data);
  uint16_t *y = malloc(MOST_TOKENS * row_bytes);
  ALL_OK(oproj_forward(s.layer, &s.io, s.stream));
  ALL_OK(oproj_buffer_read(s.ctx, y, s.y, MOST_TOKENS * row_bytes, s.stream));
  close_start(&s);
  return y;
}

static void capture_all(start *s) {
  for (int32_t tokens = 1; tokens <= MOST_TOKENS; tokens++) {
    cudaGraph_t graph = NULL;
    s->io.tokens = tokens;
    ALL_CUDA(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    oproj_status status = oproj_forward(s->layer, &s->io, s->stream);
    ALL_CUDA(cudaStreamEndCapture(s->stream, &graph));
    ALL_OK(status);
    ALL_CUDA(cudaGraphInstantiate(&s->graphs[tokens], graph, 0));
    cudaGraphDestroy(graph);
  }
}

/* One forward, replayed where that was captured; y in `found`. */
static oproj_status forward(start *s, int32_t tokens, bool replayed, uint16_t *found) {
  if (cudaMemsetAsync(s->y, 0xAA, MOST_TOKENS * row_bytes, s->stream) != cudaSuccess)
    return oproj_fail(OPROJ_ERR_DEVICE, "cudaMemsetAsync failed");
  s->io.tokens = tokens;
  if (replayed && s->graphs[tokens]) {
    cudaError_t error = cudaGraphLaunch(s->graphs[tokens], s->stream);
    if (error != cudaSuccess) return oproj_fail(OPROJ_ERR_DEVICE, "%s", cudaGetErrorString(error));
  } else {
    oproj_status status = oproj_forward(s->layer, &s->io, s->stream);
    if (status != OPROJ_OK) return status;
  }
  return oproj_buffer_read(s->ctx, found, s->y, MOST_TOKENS * row_bytes, s->stream);
}

/* Nonzero: it gave the bits of one rank, and touched no others. */
static int forward_is_right(start *s, const uint16_t *want, int32_t tokens, bool replayed) {
  static uint16_t found[MOST_TOKENS * 640];
  if (forward(s, tokens, replayed, found) != OPROJ_OK) return 0;
  size_t values = (size_t)(tokens * dims.hidden);
  if (memcmp(found, want, values * sizeof *found) != 0) return 0;
  return tokens == MOST_TOKENS || found[values] == 0xAAAA;
}

/* ---- cases ---------------------------------------------------------------------------------- */

START_TEST(sizes_change_from_call_to_call) {
  const char *asked = getenv("OPROJ_TEST_FORWARDS");
  long forwards = asked ? strtol(asked, NULL, 10) : 2000, wrong = 0, first = -1;
  data_layer data = make_data();
  uint16_t *want = project_alone(&data);
  start s;
  open_start(&s, new_comm(), &data);
  if (kind != OVER_MPI) capture_all(&s);
  double begin = MPI_Wtime();
  for (long i = 0; i < forwards; i++) {
    uint64_t draw = data_hash(77, (uint64_t)i);
    if (forward_is_right(&s, want, (int32_t)(draw % (MOST_TOKENS + 1)), draw >> 32 & 1)) continue;
    if (wrong++ == 0) first = i;
  }
  ALL_ASSERT(wrong == 0, "%ld of %ld forwards differ from one rank's, the first is %ld: %s", wrong,
             forwards, first, oproj_last_error());
  if (rank == 0)
    printf("%ld forwards in %.1f s, %s\n", forwards, MPI_Wtime() - begin,
           kind == OVER_MPI ? "called" : "called and replayed");
  close_start(&s);
  free(want);
  data_free(&data);
}
END_TEST

static void rest(time_t seconds) {
  nanosleep(&(struct timespec){.tv_sec = seconds}, NULL);
}

/* The last rank pauses, its process alive, while the others are in a forward: that ends in an error
 * which names it, then all start anew. */
START_TEST(a_paused_rank_ends_the_forward_of_the_others) {
  static uint16_t found[MOST_TOKENS * 640];
  bool replayed = _i != 0, last = rank == size - 1;
  data_layer data = make_data();
  uint16_t *want = project_alone(&data);
  start s;
  oproj_comm *comm = new_comm();
  oproj_comm_set_deadline(comm, DEADLINE_S);
  open_start(&s, comm, &data);
  if (kind != OVER_MPI) capture_all(&s);
  ALL_ASSERT(forward_is_right(&s, want, 6, replayed), "%s", oproj_last_error());
  MPI_Barrier(MPI_COMM_WORLD);
  if (last) rest(3 * DEADLINE_S);
  double begin = MPI_Wtime();
  oproj_status status = forward(&s, 5, replayed, found);
  if (status == OPROJ_OK) status = oproj_comm_check(comm);
  double seconds = MPI_Wtime() - begin;
  char words[32];
  snprintf(words, sizeof words, "rank %d ", size - 1);
  int told = (status == OPROJ_ERR_PEER || status == OPROJ_ERR_COMM) &&
             strstr(oproj_last_error(), words) != NULL;
  ALL_ASSERT(last || (told && seconds < DEADLINE_S + 5), "after %.1f s, status %d: %s", seconds,
             (int)status, oproj_last_error());
  close_start(&s);
  open_start(&s, new_comm(), &data);
  if (kind != OVER_MPI) capture_all(&s);
  for (int32_t tokens = 0; tokens <= MOST_TOKENS; tokens++)
    ALL_ASSERT(forward_is_right(&s, want, tokens, replayed), "%d tokens: %s", tokens,
               oproj_last_error());
  close_start(&s);
  free(want);
  data_free(&data);
}
END_TEST

/* ---- start ---------------------------------------------------------------------------------- */

static int run_cases(void) {
  Suite *suite = suite_create("gpu_lasting");
  TCase *tc = tcase_create("gpu_lasting");
  tcase_set_timeout(tc, 0);
  tcase_add_test(tc, sizes_change_from_call_to_call);
  tcase_add_loop_test(tc, a_paused_rank_ends_the_forward_of_the_others, 0,
                      kind == OVER_MPI ? 1 : 2);
  suite_add_tcase(suite, tc);
  int failed = together_run(suite, rank);
  return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv) {
  static const char *const kinds[] = {"mpi", "push", "nccl"};
  int known = 0, code;
  MPI_Init(&argc, &argv);
  for (int i = 0; i < 3 && argc == 2; i++) {
    if (strcmp(argv[1], kinds[i]) != 0) continue;
    kind = i;
    known = 1;
  }
  if (!known) {
    fprintf(stderr, "usage: mpirun -n N test_gpu_lasting mpi|push|nccl\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (kind == OVER_PUSH) setenv("OPROJ_PUSH", "1", 1);
  code = together_lack_of_gpus(rank, kind == OVER_NCCL ? size : 1);
  if (code == 0) code = run_cases();
  MPI_Finalize();
  return code;
}
