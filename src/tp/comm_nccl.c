/* comm_nccl.c - one GPU per rank, sums in device memory through NCCL.
 *
 * Control messages go through a comm_mpi of the same ranks.  The sum in rank order, where NCCL's
 * own order is not ours:
 *
 *   few bytes   where the GPUs can, each pushes its partial to all others (push.h); else all-gather
 *               the partials, and every rank adds them all: one exchange, n times the bytes
 *   many bytes  every element has one owner: exchange, add, and (REDUCE_ALL) all-gather the sums
 *
 * All add in f32 from rank 0 on and round once, so all give the same bits on every rank.
 *
 * Blocking calls of NCCL only enqueue once a communicator is there; a non-blocking communicator
 * would start a thread for each.  What can wait for a lost rank runs on threads of its own, with a
 * deadline: its birth, and its abort.  The abort comes when the watch over the control
 * communicator has lost a rank, or NCCL itself reports one; it ends the kernels that wait for that
 * rank, and with them the waits of the host.
 *
 * What no process and no error of NCCL's shows, a sum that hangs while all processes live, is seen
 * by the counts of sums that the device itself begins and ends: the watch hears of them. */
#include <errno.h>
#include <nccl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checked.h"
#include "base/error.h"
#include "base/log.h"
#include "oproj/cuda.h"
#include "tp/comm.h"
#include "tp/ctx.h"
#include "tp/push.h"

enum {
  ABORT_SECONDS = 5, /* for ncclCommAbort; captured collectives keep it until their graph ends */
  GATHER_BYTES = OPROJ_TP_GATHER_BYTES,
  PAGE = 4096 /* keeps both parts of a context's memory aligned for wide loads */
};

typedef struct comm_nccl {
  oproj_comm head;
  oproj_comm *mpi; /* the same ranks */
  ncclComm_t nccl;
  bool owned;
  pthread_mutex_t using; /* held while calls enqueue, so that an abort does not come between */
  bool aborted;          /* no further calls: under `using`, or after its time-out */
  pthread_t aborter;     /* runs or has run, where `aborted`, and at the end */

  pthread_mutex_t listing; /* of the next two */
  struct nccl_end *ends;   /* whose sums are counted */
  uint64_t sums;           /* of ends that are gone */
} comm_nccl;

typedef struct nccl_end {
  oproj_comm_end head;
  struct nccl_end *next; /* in the communicator's list */
  const oproj_kernels_ops *ops;
  oproj_kernels *kernels;
  int32_t hidden;
  void *memory;               /* partial, then gathered */
  uint16_t *gathered;         /* other ranks' partials */
  oproj_push *push;           /* NULL where the ranks cannot write to one another's memory */
  oproj_kernels_pulse *pulse; /* of sums through NCCL: those of `push` have bounds of their own */
} nccl_end;

static comm_nccl *nccl_of(oproj_comm *comm) {
  return (comm_nccl *)comm;
}

/* The one border where an NCCL error becomes an oproj_status. */
static oproj_status nccl_fail(ncclComm_t nccl, ncclResult_t result, const char *call) {
  const char *detail = ncclGetLastError(nccl);
  return oproj_fail(OPROJ_ERR_COMM, "%s: %s%s%s", call, ncclGetErrorString(result),
                    detail && *detail ? ": " : "", detail ? detail : "");
}

#define NCCL_TRY(nccl, call)                                                        \
  do {                                                                              \
    ncclResult_t nccl_result_ = (call);                                             \
    if (nccl_result_ != ncclSuccess) return nccl_fail((nccl), nccl_result_, #call); \
  } while (0)

/* ---- control messages ---------------------------------------------------------------------- */

static oproj_status nccl_broadcast(oproj_comm *comm, int32_t root, void *data, size_t bytes) {
  oproj_comm *mpi = nccl_of(comm)->mpi;
  return mpi->ops->broadcast(mpi, root, data, bytes);
}

static oproj_status nccl_gather(oproj_comm *comm, const void *mine, void *all, int32_t bytes) {
  oproj_comm *mpi = nccl_of(comm)->mpi;
  return mpi->ops->gather(mpi, mine, all, bytes);
}

static oproj_status nccl_min_i32(oproj_comm *comm, int32_t mine, int32_t *out) {
  oproj_comm *mpi = nccl_of(comm)->mpi;
  return mpi->ops->min_i32(mpi, mine, out);
}

static oproj_status nccl_exchange(oproj_comm *comm, const void *send, const int32_t *send_bytes,
                                  void *receive, const int32_t *receive_bytes) {
  oproj_comm *mpi = nccl_of(comm)->mpi;
  return mpi->ops->exchange(mpi, send, send_bytes, receive, receive_bytes);
}

static oproj_status nccl_reduce(oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                                const uint16_t *partial, uint16_t *y) {
  oproj_comm *mpi = nccl_of(comm)->mpi;
  return mpi->ops->reduce(mpi, mode, tokens, hidden, partial, y);
}

/* ---- the sums ------------------------------------------------------------------------------ */

/* Where rank's elements begin; those of rank `size` would begin at the end. */
static int64_t owned_begin(oproj_reduce mode, int32_t tokens, int32_t hidden, int32_t size,
                           int32_t rank) {
  int32_t begin, end;
  if (mode == OPROJ_REDUCE_ALL) return (int64_t)tokens * hidden * rank / size;
  oproj_plan_rows(tokens, size, rank, &begin, &end);
  return (int64_t)begin * hidden;
}

/* Counts the gathering as ended, which saves a launch where latency counts. */
static oproj_status gather_and_sum(comm_nccl *c, nccl_end *e, int64_t elements,
                                   const uint16_t *partial, uint16_t *y, void *stream) {
  NCCL_TRY(c->nccl,
           ncclAllGather(partial, e->gathered, (size_t)elements, ncclBfloat16, c->nccl, stream));
  return e->ops->sum_ranks(e->kernels, e->gathered, c->head.size, elements, y, e->pulse, stream);
}

/* gathered[r] = rank r's partial of this rank's elements. */
static ncclResult_t exchange(comm_nccl *c, nccl_end *e, oproj_reduce mode, int32_t tokens,
                             const uint16_t *partial, void *stream) {
  int32_t size = c->head.size, rank = c->head.rank;
  int64_t mine = owned_begin(mode, tokens, e->hidden, size, rank + 1) -
                 owned_begin(mode, tokens, e->hidden, size, rank);
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return result;
  for (int32_t r = 0; r < size && result == ncclSuccess; r++) {
    int64_t begin = owned_begin(mode, tokens, e->hidden, size, r);
    int64_t theirs = owned_begin(mode, tokens, e->hidden, size, r + 1) - begin;
    if (theirs > 0)
      result = ncclSend(partial + begin, (size_t)theirs, ncclBfloat16, r, c->nccl, stream);
    if (mine > 0 && result == ncclSuccess)
      result = ncclRecv(e->gathered + r * mine, (size_t)mine, ncclBfloat16, r, c->nccl, stream);
  }
  ncclResult_t end = ncclGroupEnd();
  return result == ncclSuccess ? end : result;
}

/* Every rank's owned elements of y, to all. */
static ncclResult_t spread(comm_nccl *c, nccl_end *e, int32_t tokens, uint16_t *y, void *stream) {
  int32_t size = c->head.size;
  int64_t elements = (int64_t)tokens * e->hidden;
  if (elements % size == 0)
    return ncclAllGather(y + elements / size * c->head.rank, y, (size_t)(elements / size),
                         ncclBfloat16, c->nccl, stream);
  ncclResult_t result = ncclGroupStart();
  if (result != ncclSuccess) return result;
  for (int32_t r = 0; r < size && result == ncclSuccess; r++) {
    int64_t begin = owned_begin(OPROJ_REDUCE_ALL, tokens, e->hidden, size, r);
    int64_t end = owned_begin(OPROJ_REDUCE_ALL, tokens, e->hidden, size, r + 1);
    if (end > begin)
      result = ncclBroadcast(y + begin, y + begin, (size_t)(end - begin), ncclBfloat16, r, c->nccl,
                             stream);
  }
  ncclResult_t end = ncclGroupEnd();
  return result == ncclSuccess ? end : result;
}

static oproj_status sum_by_owners(comm_nccl *c, nccl_end *e, oproj_reduce mode, int32_t tokens,
                                  const uint16_t *partial, uint16_t *y, void *stream) {
  int32_t size = c->head.size, rank = c->head.rank;
  int64_t begin = owned_begin(mode, tokens, e->hidden, size, rank);
  int64_t mine = owned_begin(mode, tokens, e->hidden, size, rank + 1) - begin;
  uint16_t *owned = mode == OPROJ_REDUCE_ALL ? y + begin : y;
  NCCL_TRY(c->nccl, exchange(c, e, mode, tokens, partial, stream));
  if (mine > 0) TRY(e->ops->sum_ranks(e->kernels, e->gathered, size, mine, owned, NULL, stream));
  if (mode == OPROJ_REDUCE_ALL) NCCL_TRY(c->nccl, spread(c, e, tokens, y, stream));
  return OPROJ_OK;
}

static oproj_status vendor_sum(comm_nccl *c, int64_t elements, const uint16_t *partial, uint16_t *y,
                               void *stream) {
  NCCL_TRY(c->nccl,
           ncclAllReduce(partial, y, (size_t)elements, ncclBfloat16, ncclSum, c->nccl, stream));
  return OPROJ_OK;
}

/* A sum that NCCL refuses has ended all the same. */
static oproj_status counted_sum(comm_nccl *c, nccl_end *e, oproj_reduce mode, int32_t tokens,
                                const uint16_t *partial, uint16_t *y, void *stream) {
  int64_t elements = (int64_t)tokens * e->hidden;
  bool few = mode == OPROJ_REDUCE_ALL && elements * 2 <= GATHER_BYTES;
  TRY(e->ops->pulse_begin(e->kernels, e->pulse, stream));
  oproj_status status = few ? gather_and_sum(c, e, elements, partial, y, stream)
                        : mode == OPROJ_REDUCE_VENDOR
                            ? vendor_sum(c, elements, partial, y, stream)
                            : sum_by_owners(c, e, mode, tokens, partial, y, stream);
  if (few && status == OPROJ_OK) return OPROJ_OK;
  oproj_status end = e->ops->pulse_end(e->kernels, e->pulse, stream);
  return status == OPROJ_OK ? end : status;
}

static oproj_status enqueue_sum(comm_nccl *c, nccl_end *e, oproj_reduce mode, int32_t tokens,
                                const uint16_t *partial, uint16_t *y, int sent, void *stream) {
  int64_t elements = (int64_t)tokens * e->hidden;
  if (oproj_push_takes(e->push, mode, elements))
    return oproj_push_sum(e->push, elements, partial, y, sent, stream);
  return counted_sum(c, e, mode, tokens, partial, y, stream);
}

static oproj_status nccl_reduce_device(oproj_comm *comm, oproj_comm_end *end, oproj_reduce mode,
                                       int32_t tokens, const uint16_t *partial, uint16_t *y,
                                       int sent, void *stream) {
  comm_nccl *c = nccl_of(comm);
  pthread_mutex_lock(&c->using);
  oproj_status status = oproj_watch_check(comm->watch);
  if (status == OPROJ_OK)
    status = enqueue_sum(c, (nccl_end *)end, mode, tokens, partial, y, sent, stream);
  pthread_mutex_unlock(&c->using);
  return status;
}

static const oproj_kernels_push *nccl_sink(const oproj_comm_end *end, oproj_reduce mode,
                                           int32_t tokens) {
  const nccl_end *e = (const nccl_end *)end;
  return oproj_push_takes(e->push, mode, (int64_t)tokens * e->hidden) ? oproj_push_sink(e->push)
                                                                      : NULL;
}

/* ---- lost ranks ---------------------------------------------------------------------------- */

static struct timespec from_now(int64_t ms) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  at.tv_sec += ms / 1000;
  at.tv_nsec += ms % 1000 * 1000000;
  if (at.tv_nsec >= 1000000000) {
    at.tv_sec++;
    at.tv_nsec -= 1000000000;
  }
  return at;
}

/* oproj_watch_helper's. */
static void count_sums(void *comm, uint64_t *begun, uint64_t *ended) {
  comm_nccl *c = comm;
  pthread_mutex_lock(&c->listing);
  *begun = *ended = c->sums;
  for (const nccl_end *e = c->ends; e; e = e->next) {
    uint64_t more_begun, more_ended;
    e->ops->pulse_read(e->pulse, &more_begun, &more_ended);
    *begun += more_begun;
    *ended += more_ended;
  }
  pthread_mutex_unlock(&c->listing);
}

/* oproj_watch_helper's: what NCCL has noticed by itself. */
static int look_at_nccl(void *comm, char sentence[OPROJ_BOARD_SENTENCE]) {
  comm_nccl *c = comm;
  ncclResult_t result = ncclSuccess;
  if (ncclCommGetAsyncError(c->nccl, &result) != ncclSuccess) return 0;
  if (result == ncclSuccess || result == ncclInProgress) return 0;
  snprintf(sentence, OPROJ_BOARD_SENTENCE, "rank %d: NCCL reports: %s", c->head.rank,
           ncclGetErrorString(result));
  return 1;
}

/* Calls that enqueue take microseconds; one that has not ended by then waits for the lost rank, and
 * the abort frees it. */
static void *abort_nccl(void *comm) {
  comm_nccl *c = comm;
  struct timespec soon = from_now(1000);
  bool alone = pthread_mutex_timedlock(&c->using, &soon) == 0;
  if (alone) pthread_mutex_unlock(&c->using); /* later calls see the verdict */
  ncclCommAbort(c->nccl);
  return NULL;
}

/* oproj_watch_helper's. */
static void lose_nccl(void *comm) {
  comm_nccl *c = comm;
  c->aborted = pthread_create(&c->aborter, NULL, abort_nccl, c) == 0;
}

/* A communicator that the caller has brought is his to abort. */
static void watch_nccl(comm_nccl *c) {
  oproj_watch_help(c->head.watch, &(oproj_watch_helper){.count = count_sums,
                                                        .look = look_at_nccl,
                                                        .lost = c->owned ? lose_nccl : NULL,
                                                        .user = c});
}

/* ---- a context's end ----------------------------------------------------------------------- */

static void list_end(comm_nccl *c, nccl_end *e) {
  pthread_mutex_lock(&c->listing);
  e->next = c->ends;
  c->ends = e;
  pthread_mutex_unlock(&c->listing);
}

/* Whatever it has begun counts as ended: nobody will wait for it. */
static void unlist_end(comm_nccl *c, const nccl_end *e) {
  uint64_t begun = 0, ended;
  pthread_mutex_lock(&c->listing);
  nccl_end **at = &c->ends;
  while (*at && *at != e) at = &(*at)->next;
  if (*at) {
    *at = e->next;
    e->ops->pulse_read(e->pulse, &begun, &ended);
  }
  c->sums += begun;
  pthread_mutex_unlock(&c->listing);
}

static void nccl_detach(oproj_comm *comm, oproj_comm_end *end) {
  nccl_end *e = (nccl_end *)end;
  unlist_end(nccl_of(comm), e);
  oproj_push_close(e->push);
  e->ops->pulse_destroy(e->kernels, e->pulse);
  if (e->memory) e->ops->buffer_destroy(e->kernels, e->memory);
  free(e);
}

/* Both ways of gathering fit: all partials of few tokens, or the longest owned range from every
 * rank (of rows, which are dealt whole, at most one row more than an even share). */
static size_t gathered_elements(const oproj_comm_site *site, int32_t size) {
  int64_t all = (int64_t)site->max_tokens * site->hidden;
  int64_t few = all < GATHER_BYTES / 2 ? all : GATHER_BYTES / 2;
  int64_t owned = all + (int64_t)size * site->hidden;
  return (size_t)(few * size > owned ? few * size : owned);
}

static oproj_status allocate_end(const oproj_comm_site *site, int32_t size, nccl_end **out) {
  nccl_end *e = calloc(1, sizeof *e);
  REQUIRE(e, OPROJ_ERR_NOMEM, "no memory for a communicator's buffers");
  *out = e;
  e->ops = site->ops;
  e->kernels = site->kernels;
  e->hidden = site->hidden;
  size_t partial = (size_t)site->max_tokens * (size_t)site->hidden * sizeof(uint16_t);
  partial = (partial + PAGE - 1) / PAGE * PAGE;
  size_t gathered = gathered_elements(site, size) * sizeof(uint16_t);
  TRY(site->ops->buffer_create(site->kernels, partial + gathered, &e->memory));
  e->head.partial = e->memory;
  e->gathered = (uint16_t *)((char *)e->memory + partial);
  return site->ops->pulse_create(site->kernels, &e->pulse);
}

/* The first use of each kind of exchange makes NCCL connect the ranks, which takes about a second
 * and must not happen in a forward call. */
static oproj_status warm(comm_nccl *c, nccl_end *e, int32_t max_tokens) {
  if (max_tokens == 0) return OPROJ_OK;
  uint16_t *one_token = e->head.partial, probe;
  if (oproj_push_takes(e->push, OPROJ_REDUCE_ALL, e->hidden))
    TRY(oproj_push_sum(e->push, e->hidden, one_token, one_token, 0, NULL));
  TRY(counted_sum(c, e, OPROJ_REDUCE_ALL, 1, one_token, one_token, NULL));
  TRY(sum_by_owners(c, e, OPROJ_REDUCE_ALL, 1, one_token, one_token, NULL));
  TRY(counted_sum(c, e, OPROJ_REDUCE_VENDOR, 1, one_token, one_token, NULL));
  return e->ops->buffer_read(e->kernels, &probe, one_token, sizeof probe, NULL);
}

static oproj_status nccl_attach(oproj_comm *comm, const oproj_comm_site *site,
                                oproj_comm_end **out) {
  comm_nccl *c = nccl_of(comm);
  nccl_end *e = NULL;
  oproj_watch_enter(comm->watch, "warm-up", 0);
  oproj_status status = oproj_comm_agree(comm, allocate_end(site, comm->size, &e));
  if (status == OPROJ_OK) {
    list_end(c, e);
    status = oproj_push_open(&e->push, comm, site);
  }
  if (status == OPROJ_OK) status = oproj_comm_agree(comm, warm(c, e, site->max_tokens));
  if (status != OPROJ_OK) {
    if (e) nccl_detach(comm, &e->head);
    return status;
  }
  *out = &e->head;
  return OPROJ_OK;
}

/* ---- which GPU ----------------------------------------------------------------------------- */

/* Where a rank sits. */
typedef struct seat {
  char bus_id[32];
  char uuid[40];
  char name[128];
} seat;

/* NCCL refuses two ranks on one GPU too, but only after they have met, and in other words. */
static oproj_status refuse_sharing(oproj_comm *mpi, const seat *mine) {
  seat *seats = calloc((size_t)mpi->size, sizeof *seats);
  oproj_status status =
      seats ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d ranks", mpi->size);
  TRY_GOTO(oproj_comm_agree(mpi, status), status, out);
  TRY_GOTO(mpi->ops->gather(mpi, mine, seats, sizeof *mine), status, out);
  for (int32_t b = 1; b < mpi->size; b++) {
    for (int32_t a = 0; a < b; a++) {
      bool same = strcmp(seats[a].uuid, seats[b].uuid) == 0;
      REQUIRE_GOTO(!same, status, out, OPROJ_ERR_UNSUPPORTED,
                   "ranks %d and %d share one GPU (%s, PCI %s); NCCL needs one for each rank", a, b,
                   seats[a].name, seats[a].bus_id);
    }
  }
out:
  free(seats);
  return status;
}

static oproj_status take_seat(int32_t device, seat *out) {
  oproj_kernels_device found;
  REQUIRE(oproj_kernels_cuda_count() > 0, OPROJ_ERR_UNSUPPORTED, "this rank sees no CUDA device");
  TRY(oproj_kernels_cuda_device(device, &found));
  TRY(oproj_kernels_cuda_use(device));
  memcpy(out->bus_id, found.bus_id, sizeof out->bus_id);
  memcpy(out->uuid, found.uuid, sizeof out->uuid);
  memcpy(out->name, found.name, sizeof out->name);
  return OPROJ_OK;
}

/* ---- birth --------------------------------------------------------------------------------- */

typedef struct birth {
  int32_t device, size, rank;
  ncclUniqueId id;
  ncclComm_t nccl;
  ncclResult_t result;
} birth;

static void *give_birth(void *argument) {
  birth *b = argument;
  b->result = ncclUnhandledCudaError;
  if (oproj_kernels_cuda_use(b->device) == OPROJ_OK)
    b->result = ncclCommInitRank(&b->nccl, b->size, b->id, b->rank);
  return NULL;
}

/* Waits for the thread until the deadline, or until a rank is lost. */
static oproj_status await_birth(const comm_nccl *c, pthread_t thread) {
  enum { SLICE_MS = 50 };
  int64_t deadline_ms = oproj_watch_deadline_ms(c->head.watch);
  for (int64_t waited = 0;; waited += SLICE_MS) {
    struct timespec slice = from_now(SLICE_MS);
    if (pthread_timedjoin_np(thread, NULL, &slice) == 0) return OPROJ_OK;
    TRY(oproj_watch_check(c->head.watch));
    const char *interface = getenv("NCCL_SOCKET_IFNAME");
    REQUIRE(deadline_ms == 0 || waited < deadline_ms, OPROJ_ERR_COMM,
            "NCCL did not bring %d ranks together within %.1f s (NCCL_SOCKET_IFNAME is %s)",
            c->head.size, (double)deadline_ms * 1e-3, interface ? interface : "not set");
  }
}

/* The ranks meet here.  After the deadline the thread and what it waits with are left behind: NCCL
 * may still be using them. */
static oproj_status meet(comm_nccl *c, const ncclUniqueId *id) {
  birth *b = calloc(1, sizeof *b);
  REQUIRE(b, OPROJ_ERR_NOMEM, "no memory for a communicator");
  *b = (birth){.device = c->head.device, .size = c->head.size, .rank = c->head.rank, .id = *id};
  pthread_t thread;
  int error = pthread_create(&thread, NULL, give_birth, b);
  if (error != 0) {
    free(b);
    return oproj_fail(OPROJ_ERR_COMM, "no thread to start NCCL on: %s", strerror(error));
  }
  oproj_status status = await_birth(c, thread);
  if (status != OPROJ_OK) {
    pthread_detach(thread);
    return status;
  }
  ncclResult_t result = b->result;
  c->nccl = b->nccl;
  free(b);
  if (result == ncclSuccess) return OPROJ_OK;
  c->nccl = NULL;
  return nccl_fail(NULL, result, "ncclCommInitRank");
}

static oproj_status draw_id(const oproj_comm *mpi, ncclUniqueId *id) {
  if (mpi->rank == 0) NCCL_TRY(NULL, ncclGetUniqueId(id));
  return OPROJ_OK;
}

static oproj_status initialise(comm_nccl *c, int32_t device) {
  oproj_comm *mpi = c->mpi;
  seat mine = {0};
  ncclUniqueId id = {0};
  c->head.device = device == -1 ? oproj_comm_device(mpi) : device;
  TRY(oproj_ctx_compare_switches(mpi)); /* NCCL's own might keep it from starting */
  TRY(oproj_comm_agree(mpi, take_seat(c->head.device, &mine)));
  TRY(refuse_sharing(mpi, &mine));
  TRY(oproj_comm_agree(mpi, draw_id(mpi, &id)));
  TRY(mpi->ops->broadcast(mpi, 0, &id, sizeof id));
  oproj_watch_enter(mpi->watch, "NCCL's start", 0);
  c->owned = true;
  return oproj_comm_agree(mpi, meet(c, &id));
}

/* Its own rank, size and device must be what MPI says of this rank. */
static oproj_status check_adopted(comm_nccl *c) {
  int rank, size, device;
  REQUIRE(c->nccl, OPROJ_ERR_INVALID, "nccl must not be NULL");
  NCCL_TRY(c->nccl, ncclCommUserRank(c->nccl, &rank));
  NCCL_TRY(c->nccl, ncclCommCount(c->nccl, &size));
  NCCL_TRY(c->nccl, ncclCommCuDevice(c->nccl, &device));
  REQUIRE(rank == c->head.rank && size == c->head.size, OPROJ_ERR_INVALID,
          "rank %d of %d in NCCL is rank %d of %d in MPI", rank, size, c->head.rank, c->head.size);
  c->head.device = device;
  return oproj_kernels_cuda_use(device);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void *destroy_nccl(void *argument) {
  comm_nccl *c = argument;
  if (oproj_kernels_cuda_use(c->head.device) == OPROJ_OK) ncclCommDestroy(c->nccl);
  return NULL;
}

/* False: NCCL still uses it, and what it holds is left behind. */
static bool end_nccl(comm_nccl *c) {
  oproj_watch_help(c->head.watch, NULL); /* from here `aborted` stands */
  if (!c->owned || !c->nccl) return true;
  if (!c->aborted) {
    if (oproj_watch_lost(c->head.watch)) return true;
    if (pthread_create(&c->aborter, NULL, destroy_nccl, c) != 0) return false;
  }
  struct timespec deadline = from_now(ABORT_SECONDS * 1000);
  if (pthread_timedjoin_np(c->aborter, NULL, &deadline) == 0) return true;
  pthread_detach(c->aborter);
  oproj_base_log(OPROJ_LOG_WARN, "NCCL has not given up its communicator within %d s",
                 ABORT_SECONDS);
  return false;
}

static void nccl_destroy(oproj_comm *comm) {
  comm_nccl *c = nccl_of(comm);
  bool ended = end_nccl(c);
  oproj_comm_destroy(c->mpi);
  if (!ended) return;
  pthread_mutex_destroy(&c->listing);
  pthread_mutex_destroy(&c->using);
  free(c);
}

static const oproj_comm_ops nccl_ops = {
    .name = "nccl",
    .broadcast = nccl_broadcast,
    .gather = nccl_gather,
    .min_i32 = nccl_min_i32,
    .exchange = nccl_exchange,
    .reduce = nccl_reduce,
    .attach = nccl_attach,
    .detach = nccl_detach,
    .reduce_device = nccl_reduce_device,
    .sink = nccl_sink,
    .destroy = nccl_destroy,
};

/* The part that both kinds of birth share: everything but the ncclComm_t and the device. */
static oproj_status begin(comm_nccl **out, MPI_Comm mpi) {
  oproj_comm *control;
  TRY(oproj_comm_mpi(&control, mpi));
  comm_nccl *c = calloc(1, sizeof *c);
  oproj_status status = c ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for a communicator");
  status = oproj_comm_agree(control, status);
  if (status != OPROJ_OK) {
    free(c);
    oproj_comm_destroy(control);
    return status;
  }
  c->head = *control;
  c->head.ops = &nccl_ops;
  c->mpi = control;
  pthread_mutex_init(&c->using, NULL);
  pthread_mutex_init(&c->listing, NULL);
  *out = c;
  return OPROJ_OK;
}

static oproj_status finish(oproj_comm **out, comm_nccl *c, oproj_status status) {
  if (status != OPROJ_OK) {
    nccl_destroy(&c->head);
    return status;
  }
  watch_nccl(c);
  *out = &c->head;
  return OPROJ_OK;
}

oproj_status oproj_comm_nccl(oproj_comm **out, MPI_Comm mpi, int32_t device) {
  REQUIRE(out, OPROJ_ERR_INVALID, "out must not be NULL");
  comm_nccl *c;
  TRY(begin(&c, mpi));
  return finish(out, c, initialise(c, device));
}

oproj_status oproj_comm_nccl_adopt(oproj_comm **out, MPI_Comm mpi, struct ncclComm *nccl) {
  REQUIRE(out, OPROJ_ERR_INVALID, "out must not be NULL");
  comm_nccl *c;
  TRY(begin(&c, mpi));
  c->nccl = nccl;
  return finish(out, c, oproj_comm_agree(c->mpi, check_adopted(c)));
}

const char *oproj_comm_nccl_version(char *text, size_t bytes) {
  int version = 0;
  if (ncclGetVersion(&version) != ncclSuccess) version = 0;
  snprintf(text, bytes, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
  return text;
}
