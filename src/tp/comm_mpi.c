/* comm_mpi.c - ranks of an MPI communicator, data in host memory.
 *
 * The reduction.  Every element of y has one owner; the owner gathers that element's bf16 partials
 * from all ranks, adds them in f32 in rank order 0..n-1 and rounds once.  REDUCE_SCATTER stops
 * there, with rows as owned ranges; REDUCE_ALL deals the elements evenly and sends the sums back to
 * all. Order and rounding do not depend on who owns what, so both give the same bits on every
 * rank.
 *
 * Waiting.  Every call of MPI is non-blocking and polled, so that a lost rank ends it.  What was
 * begun then cannot be taken back: MPI may still read and write its buffers.  So MPI is given
 * memory of the communicator alone, and a communicator that failed leaves that memory behind. */
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"
#include "base/num.h"
#include "oproj/mpi.h"
#include "tp/comm.h"

enum {
  PIECE = 1 << 18,     /* elements exchanged with each rank at a time: 512 KB */
  MESSAGE = 1 << 20,   /* bytes of a control message at a time */
  TESTS_PER_LOOK = 256 /* MPI_Test between looks around: some 20 us */
};

typedef struct comm_mpi {
  oproj_comm head;
  MPI_Comm mpi;
  MPI_Op bf16_sum;    /* pairwise, for REDUCE_VENDOR */
  uint16_t *outgoing; /* [size, PIECE]: to each rank */
  uint16_t *gathered; /* [size, PIECE]: from each rank */
  void *message;      /* [MESSAGE] */
  int64_t *begin;     /* [size + 1]: owned ranges, elements */
  int *counts;        /* [size] x 4: what an exchange sends and receives, and where */
  int broken;         /* MPI may still use the buffers */
} comm_mpi;

static comm_mpi *mpi_of(oproj_comm *comm) {
  return (comm_mpi *)comm;
}

static oproj_status translate(int code, const char *call) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  return oproj_fail(OPROJ_ERR_COMM, "%s failed: %.*s", call, length, text);
}

#define MPI_TRY(call, name)                                          \
  do {                                                               \
    int mpi_code_ = (call);                                          \
    if (mpi_code_ != MPI_SUCCESS) return translate(mpi_code_, name); \
  } while (0)

/* ---- waiting ------------------------------------------------------------------------------- */

static int64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Ends a wait: for a rank that the watch has lost, or, where nobody watches, at the deadline. */
static oproj_status look_around(const comm_mpi *c, int64_t begin_ms, const char *call) {
  const oproj_watch *watch = c->head.watch;
  TRY(oproj_watch_check(watch));
  int64_t deadline_ms = oproj_watch_deadline_ms(watch);
  REQUIRE(!oproj_watch_alone(watch) || deadline_ms == 0 || milliseconds() - begin_ms < deadline_ms,
          OPROJ_ERR_PEER, "%s: some rank has not come within %.1f s", call,
          (double)deadline_ms * 1e-3);
  return OPROJ_OK;
}

static oproj_status poll_request(comm_mpi *c, MPI_Request *request, const char *call) {
  int done = 0;
  int64_t begin = milliseconds();
  for (unsigned tests = 1; !done; tests++) {
    MPI_TRY(MPI_Test(request, &done, MPI_STATUS_IGNORE), call);
    if (done || tests % TESTS_PER_LOOK != 0) continue;
    TRY(look_around(c, begin, call));
    sched_yield(); /* the rank that is waited for may want this CPU */
  }
  return OPROJ_OK;
}

static oproj_status await(comm_mpi *c, int started, MPI_Request *request, const char *call) {
  if (started != MPI_SUCCESS) {
    c->broken = 1;
    return translate(started, call);
  }
  oproj_watch_wait(c->head.watch, 1);
  oproj_status status = poll_request(c, request, call);
  oproj_watch_wait(c->head.watch, 0);
  if (status != OPROJ_OK) c->broken = 1;
  return status;
}

/* Starts a non-blocking `call`, whose last argument is `&request`, and waits for it. */
#define MPI_AWAIT(c, call, name)                                           \
  do {                                                                     \
    MPI_Request request = MPI_REQUEST_NULL;                                \
    TRY(oproj_watch_check((c)->head.watch));                               \
    REQUIRE(!(c)->broken, OPROJ_ERR_PEER, "this communicator has failed"); \
    oproj_watch_step((c)->head.watch);                                     \
    TRY(await((c), (call), &request, name));                               \
  } while (0)

/* ---- control messages ---------------------------------------------------------------------- */

static oproj_status mpi_broadcast(oproj_comm *comm, int32_t root, void *data, size_t bytes) {
  comm_mpi *c = mpi_of(comm);
  for (size_t done = 0; done < bytes;) {
    size_t piece = bytes - done < MESSAGE ? bytes - done : MESSAGE;
    if (comm->rank == root) memcpy(c->message, (char *)data + done, piece);
    MPI_AWAIT(c, MPI_Ibcast(c->message, (int)piece, MPI_BYTE, root, c->mpi, &request),
              "MPI_Ibcast");
    if (comm->rank != root) memcpy((char *)data + done, c->message, piece);
    done += piece;
  }
  return OPROJ_OK;
}

/* Everybody's piece comes into `gathered`, which holds PIECE elements of each. */
static oproj_status mpi_gather(oproj_comm *comm, const void *mine, void *all, int32_t bytes) {
  const size_t most = PIECE * sizeof(uint16_t);
  comm_mpi *c = mpi_of(comm);
  for (size_t done = 0; done < (size_t)bytes;) {
    size_t piece = (size_t)bytes - done < most ? (size_t)bytes - done : most;
    memcpy(c->outgoing, (const char *)mine + done, piece);
    MPI_AWAIT(c,
              MPI_Iallgather(c->outgoing, (int)piece, MPI_BYTE, c->gathered, (int)piece, MPI_BYTE,
                             c->mpi, &request),
              "MPI_Iallgather");
    for (int32_t r = 0; r < comm->size; r++)
      memcpy((char *)all + (size_t)r * (size_t)bytes + done,
             (char *)c->gathered + (size_t)r * piece, piece);
    done += piece;
  }
  return OPROJ_OK;
}

static oproj_status mpi_min_i32(oproj_comm *comm, int32_t mine, int32_t *out) {
  comm_mpi *c = mpi_of(comm);
  int32_t *values = c->message; /* mine, smallest */
  values[0] = mine;
  MPI_AWAIT(c, MPI_Iallreduce(values, values + 1, 1, MPI_INT32_T, MPI_MIN, c->mpi, &request),
            "MPI_Iallreduce");
  *out = values[1];
  return OPROJ_OK;
}

/* ---- an exchange --------------------------------------------------------------------------- */

/* Of `bytes` for or from each rank, what is left behind the first `done` and fits a piece; where it
 * lies in the caller's memory. */
static int next_piece(const int32_t *bytes, int32_t rank, int64_t done, int64_t *at) {
  const int64_t most = PIECE * sizeof(uint16_t);
  int64_t left = bytes[rank] - done;
  *at = done;
  for (int32_t r = 0; r < rank; r++) *at += bytes[r];
  return (int)(left < 0 ? 0 : left < most ? left : most);
}

/* COLLECTIVE.  How many pieces the longest message of any rank takes. */
static oproj_status count_pieces(oproj_comm *comm, const int32_t *send_bytes, int32_t *out) {
  const int32_t most = PIECE * sizeof(uint16_t);
  int32_t longest = 0;
  for (int32_t r = 0; r < comm->size; r++)
    if (send_bytes[r] > longest) longest = send_bytes[r];
  TRY(mpi_min_i32(comm, -((longest + most - 1) / most), out));
  *out = -*out;
  return OPROJ_OK;
}

static oproj_status mpi_exchange(oproj_comm *comm, const void *send, const int32_t *send_bytes,
                                 void *receive, const int32_t *receive_bytes) {
  const int64_t most = PIECE * sizeof(uint16_t);
  comm_mpi *c = mpi_of(comm);
  int32_t size = c->head.size, pieces;
  int *sent = c->counts, *received = sent + size, *at = received + size;
  char *outgoing = (char *)c->outgoing, *gathered = (char *)c->gathered;
  int64_t from;
  TRY(count_pieces(comm, send_bytes, &pieces));
  for (int32_t piece = 0; piece < pieces; piece++) {
    for (int32_t r = 0; r < size; r++) {
      at[r] = (int)(r * most);
      sent[r] = next_piece(send_bytes, r, piece * most, &from);
      if (sent[r] > 0) memcpy(outgoing + at[r], (const char *)send + from, (size_t)sent[r]);
      received[r] = next_piece(receive_bytes, r, piece * most, &from);
    }
    MPI_AWAIT(c,
              MPI_Ialltoallv(outgoing, sent, at, MPI_BYTE, gathered, received, at, MPI_BYTE, c->mpi,
                             &request),
              "MPI_Ialltoallv");
    for (int32_t r = 0; r < size; r++)
      if (next_piece(receive_bytes, r, piece * most, &from) > 0)
        memcpy((char *)receive + from, gathered + at[r], (size_t)received[r]);
  }
  return OPROJ_OK;
}

/* ---- the deterministic sum ----------------------------------------------------------------- */

/* Elements of rank r's range that lie in [offset, offset + PIECE) of it. */
static int piece_count(const comm_mpi *c, int32_t rank, int64_t offset) {
  int64_t left = c->begin[rank + 1] - c->begin[rank] - offset;
  return (int)(left < 0 ? 0 : left < PIECE ? left : PIECE);
}

static int64_t longest_range(const comm_mpi *c) {
  int64_t longest = 0;
  for (int32_t r = 0; r < c->head.size; r++)
    if (c->begin[r + 1] - c->begin[r] > longest) longest = c->begin[r + 1] - c->begin[r];
  return longest;
}

static void sum_in_rank_order(const comm_mpi *c, int count, uint16_t *out) {
  for (int i = 0; i < count; i++) {
    float sum = oproj_bf16_to_f32(c->gathered[i]);
    for (int32_t rank = 1; rank < c->head.size; rank++)
      sum += oproj_bf16_to_f32(c->gathered[(int64_t)rank * count + i]);
    out[i] = oproj_bf16_from_f32(sum);
  }
}

/* Sums this rank's range of the partials into `owned`.  A piece leaves every rank before its sum is
 * written, so `owned` may be that range of `partial`. */
static oproj_status sum_owned(comm_mpi *c, const uint16_t *partial, uint16_t *owned) {
  int32_t size = c->head.size, rank = c->head.rank;
  int *send = c->counts, *send_at = send + size, *receive = send_at + size,
      *receive_at = receive + size;
  for (int64_t offset = 0; offset < longest_range(c); offset += PIECE) {
    int mine = piece_count(c, rank, offset);
    for (int32_t r = 0; r < size; r++) {
      send[r] = piece_count(c, r, offset);
      send_at[r] = r * PIECE;
      receive[r] = mine;
      receive_at[r] = r * mine;
      if (send[r] > 0)
        memcpy(c->outgoing + send_at[r], partial + c->begin[r] + offset,
               (size_t)send[r] * sizeof *partial);
    }
    MPI_AWAIT(c,
              MPI_Ialltoallv(c->outgoing, send, send_at, MPI_UINT16_T, c->gathered, receive,
                             receive_at, MPI_UINT16_T, c->mpi, &request),
              "MPI_Ialltoallv");
    sum_in_rank_order(c, mine, owned + offset);
  }
  return OPROJ_OK;
}

/* Sends every rank's range of y to all. */
static oproj_status spread(comm_mpi *c, uint16_t *y) {
  int32_t size = c->head.size, rank = c->head.rank;
  int *counts = c->counts, *at = counts + size;
  for (int64_t offset = 0; offset < longest_range(c); offset += PIECE) {
    for (int32_t r = 0; r < size; r++) {
      counts[r] = piece_count(c, r, offset);
      at[r] = r * PIECE;
    }
    if (counts[rank] > 0)
      memcpy(c->outgoing, y + c->begin[rank] + offset, (size_t)counts[rank] * sizeof *y);
    MPI_AWAIT(c,
              MPI_Iallgatherv(c->outgoing, counts[rank], MPI_UINT16_T, c->gathered, counts, at,
                              MPI_UINT16_T, c->mpi, &request),
              "MPI_Iallgatherv");
    for (int32_t r = 0; r < size; r++)
      if (r != rank && counts[r] > 0)
        memcpy(y + c->begin[r] + offset, c->gathered + at[r], (size_t)counts[r] * sizeof *y);
  }
  return OPROJ_OK;
}

static oproj_status reduce_all(comm_mpi *c, int64_t elements, const uint16_t *partial,
                               uint16_t *y) {
  int32_t size = c->head.size;
  for (int32_t r = 0; r <= size; r++) c->begin[r] = elements * r / size;
  TRY(sum_owned(c, partial, y + c->begin[c->head.rank]));
  return spread(c, y);
}

static oproj_status reduce_scatter(comm_mpi *c, int32_t tokens, int32_t hidden,
                                   const uint16_t *partial, uint16_t *y) {
  for (int32_t r = 0; r < c->head.size; r++) {
    int32_t begin, end;
    oproj_plan_rows(tokens, c->head.size, r, &begin, &end);
    c->begin[r] = (int64_t)begin * hidden;
    c->begin[r + 1] = (int64_t)end * hidden;
  }
  return sum_owned(c, partial, y);
}

/* ---- MPI's own sum ------------------------------------------------------------------------- */

static void add_bf16(void *in, void *inout, int *count, MPI_Datatype *type) {
  (void)type;
  const uint16_t *a = in;
  uint16_t *b = inout;
  for (int i = 0; i < *count; i++)
    b[i] = oproj_bf16_from_f32(oproj_bf16_to_f32(a[i]) + oproj_bf16_to_f32(b[i]));
}

static oproj_status reduce_vendor(comm_mpi *c, int64_t elements, const uint16_t *partial,
                                  uint16_t *y) {
  for (int64_t offset = 0; offset < elements; offset += PIECE) {
    int count = (int)(elements - offset < PIECE ? elements - offset : PIECE);
    memcpy(c->outgoing, partial + offset, (size_t)count * sizeof *partial);
    MPI_AWAIT(c,
              MPI_Iallreduce(c->outgoing, c->gathered, count, MPI_UINT16_T, c->bf16_sum, c->mpi,
                             &request),
              "MPI_Iallreduce");
    memcpy(y + offset, c->gathered, (size_t)count * sizeof *y);
  }
  return OPROJ_OK;
}

/* COLLECTIVE.  A count that differs would leave messages of other lengths than awaited. */
static oproj_status check_tokens(comm_mpi *c, int32_t tokens) {
  int32_t *values = c->message; /* mine, negated, then the smallest of both */
  values[0] = tokens;
  values[1] = -tokens;
  MPI_AWAIT(c, MPI_Iallreduce(values, values + 2, 2, MPI_INT32_T, MPI_MIN, c->mpi, &request),
            "MPI_Iallreduce");
  REQUIRE(values[2] == -values[3], OPROJ_ERR_INVALID,
          "ranks sum %d to %d tokens, this one %d; all of them must call with as many", values[2],
          -values[3], tokens);
  return OPROJ_OK;
}

static oproj_status mpi_reduce(oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                               const uint16_t *partial, uint16_t *y) {
  comm_mpi *c = mpi_of(comm);
  int64_t elements = (int64_t)tokens * hidden;
  REQUIRE(elements <= INT_MAX, OPROJ_ERR_INVALID, "%d tokens x %d exceed 2^31 - 1", tokens, hidden);
  TRY(check_tokens(c, tokens));
  switch (mode) {
    case OPROJ_REDUCE_ALL:
      return reduce_all(c, elements, partial, y);
    case OPROJ_REDUCE_SCATTER:
      return reduce_scatter(c, tokens, hidden, partial, y);
    case OPROJ_REDUCE_VENDOR:
      return reduce_vendor(c, elements, partial, y);
    case OPROJ_REDUCE_NONE:
      break;
  }
  return oproj_fail(OPROJ_ERR_INVALID, "reduce mode %d is unknown", (int)mode);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void mpi_destroy(oproj_comm *comm) {
  comm_mpi *c = mpi_of(comm);
  oproj_watch_destroy(comm->watch);
  comm->watch = NULL;
  if (c->broken) {
    oproj_base_log(OPROJ_LOG_INFO, "the memory of a communicator that failed is left to MPI");
    return;
  }
  if (c->bf16_sum != MPI_OP_NULL) MPI_Op_free(&c->bf16_sum);
  if (c->mpi != MPI_COMM_NULL) MPI_Comm_free(&c->mpi);
  free(c->outgoing);
  free(c->gathered);
  free(c->message);
  free(c->begin);
  free(c->counts);
  free(c);
}

static const oproj_comm_ops mpi_ops = {
    .name = "mpi",
    .broadcast = mpi_broadcast,
    .gather = mpi_gather,
    .min_i32 = mpi_min_i32,
    .exchange = mpi_exchange,
    .reduce = mpi_reduce,
    .destroy = mpi_destroy,
};

/* What tells a host, and the network that its sockets live in. */
typedef struct home {
  char host[64], boot[64], network[64];
} home;

static void read_line(const char *path, char *out, size_t bytes) {
  FILE *file = fopen(path, "re");
  if (file && !fgets(out, (int)bytes, file)) out[0] = '\0';
  if (file) fclose(file);
}

static oproj_status find_neighbours(comm_mpi *c, int32_t *one_host) {
  home mine = {.host = ""};
  gethostname(mine.host, sizeof mine.host - 1);
  read_line("/proc/sys/kernel/random/boot_id", mine.boot, sizeof mine.boot);
  if (readlink("/proc/self/ns/net", mine.network, sizeof mine.network - 1) < 0)
    mine.network[0] = '\0';
  home *all = calloc((size_t)c->head.size, sizeof *all);
  REQUIRE(all, OPROJ_ERR_NOMEM, "no memory for %d ranks", c->head.size);
  oproj_status status = mpi_gather(&c->head, &mine, all, sizeof mine);
  *one_host = 1;
  for (int32_t r = 0; r < c->head.size && status == OPROJ_OK; r++) {
    bool same = strcmp(all[r].host, mine.host) == 0 && strcmp(all[r].boot, mine.boot) == 0;
    *one_host = *one_host && same && strcmp(all[r].network, mine.network) == 0;
    if (!same) continue;
    if (r < c->head.rank) c->head.local_rank++;
    c->head.local_size++;
  }
  free(all);
  return status;
}

/* COLLECTIVE.  Ranks that cannot be connected work on without a watch over them. */
static oproj_status begin_watch(comm_mpi *c, int32_t one_host) {
  oproj_watch *watch = c->head.watch;
  oproj_link_door door = {.token = 0};
  oproj_status mine = OPROJ_OK;
  if (c->head.rank == 0) mine = oproj_watch_open(watch, one_host, &door);
  oproj_status status = oproj_comm_agree(&c->head, mine);
  if (status == OPROJ_OK) {
    TRY(mpi_broadcast(&c->head, 0, &door, sizeof door));
    status = oproj_comm_agree(&c->head, oproj_watch_meet(watch, &door));
  }
  if (status == OPROJ_OK) return oproj_comm_agree(&c->head, oproj_watch_start(watch));
  oproj_watch_give_up(watch);
  if (status == OPROJ_ERR_PEER) return status;
  if (c->head.rank == 0)
    oproj_base_log(OPROJ_LOG_WARN, "nobody watches the ranks of this job: %s", oproj_last_error());
  return OPROJ_OK;
}

static oproj_status allocate(comm_mpi *c) {
  size_t size = (size_t)c->head.size;
  c->outgoing = malloc(size * PIECE * sizeof *c->outgoing);
  c->gathered = malloc(size * PIECE * sizeof *c->gathered);
  c->message = malloc(MESSAGE);
  c->begin = malloc((size + 1) * sizeof *c->begin);
  c->counts = malloc(size * 4 * sizeof *c->counts);
  REQUIRE(c->outgoing && c->gathered && c->message && c->begin && c->counts, OPROJ_ERR_NOMEM,
          "no memory for a communicator of %d ranks", c->head.size);
  return OPROJ_OK;
}

static oproj_status initialise(comm_mpi *c, MPI_Comm mpi) {
  int rank, size;
  MPI_TRY(MPI_Comm_rank(mpi, &rank), "MPI_Comm_rank");
  MPI_TRY(MPI_Comm_size(mpi, &size), "MPI_Comm_size");
  MPI_TRY(MPI_Op_create(add_bf16, 1, &c->bf16_sum), "MPI_Op_create");
  c->head.rank = rank;
  c->head.size = size;
  TRY(oproj_watch_create(&c->head.watch, rank, size));
  TRY(allocate(c));
  MPI_AWAIT(c, MPI_Comm_idup(mpi, &c->mpi, &request), "MPI_Comm_idup");
  MPI_TRY(MPI_Comm_set_errhandler(c->mpi, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int32_t one_host;
  TRY(find_neighbours(c, &one_host));
  return size > 1 ? begin_watch(c, one_host) : OPROJ_OK;
}

oproj_status oproj_comm_mpi(oproj_comm **out, MPI_Comm mpi) {
  REQUIRE(out, OPROJ_ERR_INVALID, "out must not be NULL");
  int initialised = 0, finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  REQUIRE(initialised && !finalised, OPROJ_ERR_COMM, "MPI is not initialised");
  comm_mpi *c = calloc(1, sizeof *c);
  REQUIRE(c, OPROJ_ERR_NOMEM, "no memory for a communicator");
  c->head.ops = &mpi_ops;
  c->head.device = -1;
  c->mpi = MPI_COMM_NULL;
  c->bf16_sum = MPI_OP_NULL;
  oproj_status status = initialise(c, mpi);
  if (status != OPROJ_OK) {
    mpi_destroy(&c->head);
    return status;
  }
  *out = &c->head;
  return OPROJ_OK;
}
