/* comm_mpi.c - ranks of an MPI communicator, data in host memory.
 *
 * The reduction.  Every element of y has one owner; the owner gathers that element's bf16 partials
 * from all ranks, adds them in f32 in rank order 0..n-1 and rounds once.  REDUCE_SCATTER stops
 * there, with rows as owned ranges; REDUCE_ALL deals the elements evenly and sends the sums back to
 * all. Order and rounding do not depend on who owns what, so both give the same bits on every
 * rank. */
#include <limits.h>
#include <stdlib.h>

#include "base/error.h"
#include "base/num.h"
#include "oproj/mpi.h"
#include "tp/comm.h"

enum { PIECE = 1 << 18 }; /* elements gathered from each rank at a time: 512 KB */

typedef struct comm_mpi {
  oproj_comm head;
  MPI_Comm mpi;
  MPI_Op bf16_sum;    /* pairwise, for REDUCE_VENDOR */
  uint16_t *gathered; /* [size, PIECE] */
  int64_t *begin;     /* [size + 1]: owned ranges, elements */
  int *counts;        /* [size] x 4: what an exchange sends and receives, and where */
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

static oproj_status mpi_broadcast(oproj_comm *comm, int32_t root, void *data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    size_t piece = bytes - done < INT_MAX ? bytes - done : INT_MAX;
    MPI_TRY(MPI_Bcast((char *)data + done, (int)piece, MPI_BYTE, root, mpi_of(comm)->mpi),
            "MPI_Bcast");
    done += piece;
  }
  return OPROJ_OK;
}

static oproj_status mpi_gather(oproj_comm *comm, const void *mine, void *all, int32_t bytes) {
  MPI_TRY(MPI_Allgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, mpi_of(comm)->mpi),
          "MPI_Allgather");
  return OPROJ_OK;
}

static oproj_status mpi_min_i32(oproj_comm *comm, int32_t mine, int32_t *out) {
  MPI_TRY(MPI_Allreduce(&mine, out, 1, MPI_INT32_T, MPI_MIN, mpi_of(comm)->mpi), "MPI_Allreduce");
  return OPROJ_OK;
}

/* ---- the deterministic sum ----------------------------------------------------------------- */

/* Elements of rank r's range that lie in [offset, offset + PIECE) of it. */
static int piece_count(const comm_mpi *c, int32_t rank, int64_t offset) {
  int64_t left = c->begin[rank + 1] - c->begin[rank] - offset;
  return (int)(left < 0 ? 0 : left < PIECE ? left : PIECE);
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
  int64_t longest = 0;
  for (int32_t r = 0; r < size; r++)
    if (c->begin[r + 1] - c->begin[r] > longest) longest = c->begin[r + 1] - c->begin[r];

  for (int64_t offset = 0; offset < longest; offset += PIECE) {
    int mine = piece_count(c, rank, offset);
    for (int32_t r = 0; r < size; r++) {
      send[r] = piece_count(c, r, offset);
      send_at[r] = send[r] ? (int)(c->begin[r] + offset) : 0;
      receive[r] = mine;
      receive_at[r] = r * mine;
    }
    MPI_TRY(MPI_Alltoallv(partial, send, send_at, MPI_UINT16_T, c->gathered, receive, receive_at,
                          MPI_UINT16_T, c->mpi),
            "MPI_Alltoallv");
    sum_in_rank_order(c, mine, owned + offset);
  }
  return OPROJ_OK;
}

static oproj_status reduce_all(comm_mpi *c, int64_t elements, const uint16_t *partial,
                               uint16_t *y) {
  int32_t size = c->head.size;
  int *counts = c->counts, *at = counts + size;
  for (int32_t r = 0; r <= size; r++) c->begin[r] = elements * r / size;
  TRY(sum_owned(c, partial, y + c->begin[c->head.rank]));
  for (int32_t r = 0; r < size; r++) {
    counts[r] = (int)(c->begin[r + 1] - c->begin[r]);
    at[r] = (int)c->begin[r];
  }
  MPI_TRY(MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, y, counts, at, MPI_UINT16_T, c->mpi),
          "MPI_Allgatherv");
  return OPROJ_OK;
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
  const void *from = partial == y ? MPI_IN_PLACE : (const void *)partial;
  MPI_TRY(MPI_Allreduce(from, y, (int)elements, MPI_UINT16_T, c->bf16_sum, c->mpi),
          "MPI_Allreduce");
  return OPROJ_OK;
}

static oproj_status mpi_reduce(oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                               const uint16_t *partial, uint16_t *y) {
  comm_mpi *c = mpi_of(comm);
  int64_t elements = (int64_t)tokens * hidden;
  REQUIRE(elements <= INT_MAX, OPROJ_ERR_INVALID, "%d tokens x %d exceed 2^31 - 1", tokens, hidden);
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
  if (c->bf16_sum != MPI_OP_NULL) MPI_Op_free(&c->bf16_sum);
  if (c->mpi != MPI_COMM_NULL) MPI_Comm_free(&c->mpi);
  free(c->gathered);
  free(c->begin);
  free(c->counts);
  free(c);
}

static const oproj_comm_ops mpi_ops = {
    .name = "mpi",
    .broadcast = mpi_broadcast,
    .gather = mpi_gather,
    .min_i32 = mpi_min_i32,
    .reduce = mpi_reduce,
    .destroy = mpi_destroy,
};

static oproj_status ranks_on_this_host(comm_mpi *c) {
  MPI_Comm local;
  int size = 0, rank = 0;
  int32_t host = c->head.rank;
  MPI_TRY(MPI_Comm_split_type(c->mpi, MPI_COMM_TYPE_SHARED, c->head.rank, MPI_INFO_NULL, &local),
          "MPI_Comm_split_type");
  int code = MPI_Comm_size(local, &size);
  if (code == MPI_SUCCESS) code = MPI_Comm_rank(local, &rank);
  if (code == MPI_SUCCESS) code = MPI_Bcast(&host, 1, MPI_INT32_T, 0, local);
  MPI_Comm_free(&local);
  MPI_TRY(code, "MPI_Bcast on one host");
  c->head.local_size = size;
  c->head.local_rank = rank;
  c->head.host = host;
  return OPROJ_OK;
}

static oproj_status initialise(comm_mpi *c, MPI_Comm mpi) {
  int rank, size;
  MPI_TRY(MPI_Comm_dup(mpi, &c->mpi), "MPI_Comm_dup");
  MPI_TRY(MPI_Comm_set_errhandler(c->mpi, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_TRY(MPI_Comm_rank(c->mpi, &rank), "MPI_Comm_rank");
  MPI_TRY(MPI_Comm_size(c->mpi, &size), "MPI_Comm_size");
  MPI_TRY(MPI_Op_create(add_bf16, 1, &c->bf16_sum), "MPI_Op_create");
  c->head.rank = rank;
  c->head.size = size;
  TRY(ranks_on_this_host(c));
  c->gathered = malloc((size_t)size * PIECE * sizeof *c->gathered);
  c->begin = malloc(((size_t)size + 1) * sizeof *c->begin);
  c->counts = malloc((size_t)size * 4 * sizeof *c->counts);
  REQUIRE(c->gathered && c->begin && c->counts, OPROJ_ERR_NOMEM,
          "no memory for a communicator of %d ranks", size);
  return OPROJ_OK;
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
