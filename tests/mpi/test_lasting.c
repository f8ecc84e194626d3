/* test_lasting.c - ranks over time: many forwards of changing size, ranks that are late, fail or
 * differ, and a new start in the same processes.  Started by mpirun at several sizes.
 *
 * OPROJ_TEST_FORWARDS is how many forwards the longest case makes (default 2000). */
#include <dirent.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "oproj/mpi.h"
#include "support/data.h"
#include "support/expect.h"
#include "support/together.h"
#include "tp/ctx.h"

enum { MOST_TOKENS = 64 };

static const double LATE_S = 0.4; /* the deadline of cases with a late rank */

/* As little work as the rules allow: what is tested is what lies between. */
static const oproj_dims small = {.hidden = 48,
                                 .heads = 8,
                                 .head_dim = 32,
                                 .rope_dim = 16,
                                 .groups = 8,
                                 .lora_rank = 32,
                                 .quant_block = 32};

static int32_t size, rank;

/* Everything that one start makes. */
typedef struct rig {
  data_layer data;
  oproj_comm *comm;
  oproj_ctx *ctx;
  oproj_layer *layer;
  oproj_io io;
  uint16_t *want, *y; /* [MOST_TOKENS, hidden]: one rank's, and the ranks' */
} rig;

static void open_rig(rig *r, oproj_comm *comm) {
  r->comm = comm;
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = MOST_TOKENS;
  EXPECT_OK(oproj_ctx_create(&r->ctx, comm, &small, &config));
  data_share share = data_take(&r->data, oproj_ctx_shard(r->ctx));
  EXPECT_OK(oproj_layer_create(&r->layer, r->ctx, &share.wo_a, &share.wo_b));
  data_share_free(&share);
  r->io = data_io(&r->data, oproj_ctx_shard(r->ctx));
  r->y = malloc((size_t)MOST_TOKENS * (size_t)small.hidden * sizeof *r->y);
  r->io.y = r->y;
}

/* As after a failure: whatever a call was given is freed. */
static void close_rig(rig *r) {
  oproj_layer_destroy(r->layer);
  oproj_ctx_destroy(r->ctx);
  oproj_comm_destroy(r->comm);
  free(r->y);
}

static rig make_rig(void) {
  rig alone = {.data = data_make(&small, true, OPROJ_DTYPE_E4M3, OPROJ_DTYPE_E4M3, MOST_TOKENS)};
  oproj_comm *self, *all;
  EXPECT_OK(oproj_comm_self(&self));
  open_rig(&alone, self);
  EXPECT_OK(oproj_forward(alone.layer, &alone.io, NULL));
  rig r = {.data = alone.data, .want = alone.y};
  alone.y = NULL;
  close_rig(&alone);
  ALL_OK(oproj_comm_mpi(&all, MPI_COMM_WORLD));
  open_rig(&r, all);
  return r;
}

static void free_rig(rig *r) {
  close_rig(r);
  free(r->want);
  data_free(&r->data);
}

/* Nonzero: a forward of `tokens` gave the bits of one rank, and touched no others. */
static int forward_is_right(rig *r, int32_t tokens) {
  size_t row = (size_t)small.hidden * sizeof *r->y, bytes = (size_t)tokens * row;
  memset(r->y, 0xAA, MOST_TOKENS * row);
  r->io.tokens = tokens;
  if (oproj_forward(r->layer, &r->io, NULL) != OPROJ_OK) return 0;
  if (memcmp(r->y, r->want, bytes) != 0) return 0;
  return tokens == MOST_TOKENS || r->y[(size_t)tokens * (size_t)small.hidden] == 0xAAAA;
}

static void rest(double seconds) {
  nanosleep(&(struct timespec){.tv_sec = (time_t)seconds,
                               .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)},
            NULL);
}

static int entries(const char *path) {
  int count = 0;
  DIR *folder = opendir(path);
  while (folder && readdir(folder)) count++;
  if (folder) closedir(folder);
  return count;
}

/* ---- many forwards -------------------------------------------------------------------------- */

START_TEST(sizes_change_from_call_to_call) {
  const char *asked = getenv("OPROJ_TEST_FORWARDS");
  long forwards = asked ? strtol(asked, NULL, 10) : 2000, wrong = 0;
  rig r = make_rig();
  for (long i = 0; i < forwards; i++)
    wrong += !forward_is_right(&r, (int32_t)(data_hash(77, (uint64_t)i) % (MOST_TOKENS + 1)));
  ALL_ASSERT(wrong == 0, "%ld of %ld forwards differ from one rank's: %s", wrong, forwards,
             oproj_last_error());
  free_rig(&r);
}
END_TEST

/* ---- losing a rank, and starting anew ------------------------------------------------------- */

/* One rank pauses longer than the deadline while the others are in a forward.  All of them, itself
 * included, are told the same; what they gave may be freed; then all start anew. */
START_TEST(a_late_rank_ends_the_forward_of_all) {
  if (size == 1) return;
  int32_t late = _i == 0 ? 0 : size - 1;
  rig r = make_rig();
  ALL_ASSERT(forward_is_right(&r, 5), "%s", oproj_last_error());
  oproj_comm_set_deadline(r.comm, LATE_S);
  oproj_comm_note(r.comm, "layers.7", 0);
  ALL_ASSERT(forward_is_right(&r, 6), "%s", oproj_last_error());
  if (rank == late) rest(4 * LATE_S + 1);
  r.io.tokens = 64;
  oproj_status status = oproj_forward(r.layer, &r.io, NULL);
  char words[128];
  snprintf(words, sizeof words,
           "rank %d has kept others waiting for %.1f s; it is in forward of layers.7", late,
           LATE_S);
  ALL_ASSERT(status == OPROJ_ERR_PEER && strcmp(oproj_last_error(), words) == 0, "%d: %s",
             (int)status, oproj_last_error());
  /* It serves no more, whatever is asked of it. */
  ALL_ASSERT(oproj_forward(r.layer, &r.io, NULL) == OPROJ_ERR_PEER &&
                 oproj_comm_check(r.comm) == OPROJ_ERR_PEER &&
                 oproj_comm_agree(r.comm, OPROJ_OK) == OPROJ_ERR_PEER,
             "a communicator without a rank serves on");
  close_rig(&r);
  oproj_comm *again;
  ALL_OK(oproj_comm_mpi(&again, MPI_COMM_WORLD));
  open_rig(&r, again);
  for (int32_t tokens = 0; tokens <= MOST_TOKENS; tokens++)
    ALL_ASSERT(forward_is_right(&r, tokens), "%d tokens: %s", tokens, oproj_last_error());
  free_rig(&r);
}
END_TEST

START_TEST(patience_is_respected) {
  if (size == 1) return;
  rig r = make_rig();
  oproj_comm_set_deadline(r.comm, LATE_S);
  if (rank == 0) {
    oproj_comm_note(r.comm, "a long check", 1);
    rest(3 * LATE_S);
    oproj_comm_note(r.comm, "", 0);
  }
  ALL_OK(oproj_comm_agree(r.comm, OPROJ_OK));
  ALL_ASSERT(forward_is_right(&r, 3), "%s", oproj_last_error());
  free_rig(&r);
}
END_TEST

static oproj_status rest_in_stage(oproj_kernels_weights *weights, int32_t tokens, const uint16_t *z,
                                  uint16_t *partial, void *stream) {
  (void)weights, (void)tokens, (void)z, (void)partial, (void)stream;
  rest(3 * LATE_S);
  return OPROJ_OK;
}

/* A stage on the host may take longer than the deadline; a rank that is late behind it may not. */
START_TEST(a_slow_stage_is_waited_for) {
  if (size == 1) return;
  rig r = make_rig();
  oproj_kernels_ops slow = *r.ctx->ops;
  slow.out_forward = rest_in_stage;
  r.ctx->ops = &slow;
  oproj_comm_set_deadline(r.comm, LATE_S);
  if (rank == 0) EXPECT_OK(oproj_out_forward(r.layer, 1, r.want, r.y, NULL));
  ALL_OK(oproj_comm_agree(r.comm, OPROJ_OK));
  if (rank == 0) rest(4 * LATE_S + 1);
  ALL_ASSERT(oproj_comm_agree(r.comm, OPROJ_OK) == OPROJ_ERR_PEER, "rank 0 was waited for");
  free_rig(&r);
}
END_TEST

/* A rank that comes too late to make a communicator has made the others give up, and does so. */
START_TEST(a_communicator_that_never_meets_is_given_up) {
  if (size == 1) return;
  char seconds[16];
  snprintf(seconds, sizeof seconds, "%g", LATE_S);
  setenv("OPROJ_DEADLINE", seconds, 1);
  oproj_comm *comm = NULL;
  MPI_Comm world;
  MPI_Comm_dup(MPI_COMM_WORLD, &world);
  if (rank == size - 1) rest(3 * LATE_S);
  oproj_status status = oproj_comm_mpi(&comm, world);
  unsetenv("OPROJ_DEADLINE");
  int right = status == OPROJ_ERR_PEER && !comm &&
              strstr(oproj_last_error(), "some rank has not come within 0.4 s") != NULL;
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  rig r = make_rig();
  ALL_ASSERT(forward_is_right(&r, 9), "%s", oproj_last_error());
  free_rig(&r);
}
END_TEST

/* Set-up that fails on one rank, and forwards that do, leave what works to work on; and nothing is
 * left of what was made and destroyed. */
START_TEST(failures_leave_nothing_behind) {
  rig r = make_rig();
  free_rig(&r);
  int files = entries("/proc/self/fd"), threads = entries("/proc/self/task");
  for (int round = 0; round < 5; round++) {
    r = make_rig();
    oproj_layer *none = NULL;
    data_share share = data_take(&r.data, oproj_ctx_shard(r.ctx));
    if (rank == round % size) share.wo_a.rows--;
    oproj_status status = oproj_layer_create(&none, r.ctx, &share.wo_a, &share.wo_b);
    data_share_free(&share);
    ALL_ASSERT(status == OPROJ_ERR_SHAPE && !none, "status %d", (int)status);
    int64_t *positions = r.data.positions, right = positions[0];
    if (rank == round % size) positions[0] = -1;
    r.io.tokens = 2;
    status = oproj_forward(r.layer, &r.io, NULL);
    positions[0] = right;
    ALL_ASSERT(status == OPROJ_ERR_INVALID, "status %d", (int)status);
    ALL_ASSERT(forward_is_right(&r, 7), "%s", oproj_last_error());
    free_rig(&r);
  }
  ALL_ASSERT(entries("/proc/self/fd") <= files && entries("/proc/self/task") <= threads,
             "%d files and %d threads were %d and %d", entries("/proc/self/fd"),
             entries("/proc/self/task"), files, threads);
}
END_TEST

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  Suite *suite = suite_create("lasting");
  TCase *work = tcase_create("work"), *loss = tcase_create("loss"), *start = tcase_create("start");
  tcase_add_test(work, failures_leave_nothing_behind);
  tcase_add_test(work, sizes_change_from_call_to_call);
  tcase_add_test(work, patience_is_respected);
  tcase_add_test(loss, a_slow_stage_is_waited_for);
  tcase_add_loop_test(loss, a_late_rank_ends_the_forward_of_all, 0, 2);
  tcase_add_test(start, a_communicator_that_never_meets_is_given_up);
  suite_add_tcase(suite, work);
  suite_add_tcase(suite, loss);
  suite_add_tcase(suite, start);
  int failed = together_run(suite, rank);
  MPI_Finalize();
  return failed;
}
