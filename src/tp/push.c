/* push.c - mailboxes: made, opened by the other ranks, closed and freed. */
#include "tp/push.h"

#include <stdlib.h>

#include "base/environment.h"
#include "base/error.h"
#include "base/log.h"

enum {
  FEW_RANKS = 4, /* what is pushed goes to every other rank: the more there are, the less pays */
  FEW_BYTES = 512 << 10,
  MANY_BYTES = 256 << 10,
  PATIENT_MS = 1 << 30 /* without a deadline: 12 days */
};

struct oproj_push {
  oproj_comm *comm; /* borrowed */
  const oproj_kernels_ops *ops;
  oproj_kernels *kernels;
  oproj_kernels_push at;
};

static int64_t capacity_of(const oproj_comm *comm, const oproj_comm_site *site) {
  int64_t all = (int64_t)site->max_tokens * site->hidden;
  int64_t most = (comm->size <= FEW_RANKS ? FEW_BYTES : MANY_BYTES) / (int64_t)sizeof(uint16_t);
  return all < most ? all : most;
}

/* NULL, or why this rank cannot take part. */
static const char *why_not(const oproj_comm *comm, const oproj_comm_site *site) {
  if (!oproj_base_word(OPROJ_ENVIRONMENT_PUSH)) return "OPROJ_PUSH is not 1";
  if (!site->ops->sum_pushed) return "the backend has no memory that others can write to";
  if (comm->size > OPROJ_KERNELS_PUSH_RANKS) return "there are more than 16 ranks";
  if (comm->local_size != comm->size) return "the ranks are on several hosts";
  if (capacity_of(comm, site) == 0) return "there is nothing to sum";
  return NULL;
}

/* What a rank tells the others. */
typedef struct invitation {
  int32_t made;
  oproj_kernels_handle handle;
} invitation;

static oproj_status make_mailbox(oproj_push *p, invitation *mine) {
  size_t bytes = p->ops->mailbox_bytes(p->at.size, p->at.capacity);
  TRY(p->ops->mailbox_create(p->kernels, bytes, &p->at.mailboxes[p->at.rank], &mine->handle));
  mine->made = 1;
  return OPROJ_OK;
}

static oproj_status open_mailboxes(oproj_push *p, const invitation *all) {
  for (int32_t r = 0; r < p->at.size; r++) {
    REQUIRE(all[r].made, OPROJ_ERR_UNSUPPORTED, "rank %d has no mailbox", r);
    if (r == p->at.rank) continue;
    TRY(p->ops->mailbox_open(p->kernels, &all[r].handle, &p->at.mailboxes[r]));
  }
  return OPROJ_OK;
}

/* COLLECTIVE.  *able: all ranks have all mailboxes. */
static oproj_status meet(oproj_push *p, int32_t *able) {
  invitation mine = {0}, all[OPROJ_KERNELS_PUSH_RANKS];
  oproj_status status = make_mailbox(p, &mine);
  TRY(p->comm->ops->gather(p->comm, &mine, all, sizeof mine));
  if (status == OPROJ_OK) status = open_mailboxes(p, all);
  if (status != OPROJ_OK)
    oproj_base_log(OPROJ_LOG_WARN, "few tokens are summed by NCCL alone: %s", oproj_last_error());
  return p->comm->ops->min_i32(p->comm, status == OPROJ_OK, able);
}

oproj_status oproj_push_open(oproj_push **out, oproj_comm *comm, const oproj_comm_site *site) {
  const char *why = why_not(comm, site);
  int32_t able = 0;
  *out = NULL;
  oproj_push *p = calloc(1, sizeof *p);
  if (!p) why = "there is no memory";
  oproj_status status = comm->ops->min_i32(comm, !why, &able);
  if (status != OPROJ_OK || !able) {
    int asked = oproj_base_word(OPROJ_ENVIRONMENT_PUSH) && comm->rank == 0; /* one warning */
    oproj_base_level level = asked ? OPROJ_LOG_WARN : OPROJ_LOG_INFO;
    if (why) oproj_base_log(level, "few tokens are summed by NCCL alone: %s", why);
    free(p);
    return status;
  }
  int64_t deadline_ms = oproj_watch_deadline_ms(comm->watch);
  *p = (oproj_push){.comm = comm,
                    .ops = site->ops,
                    .kernels = site->kernels,
                    .at = {.size = comm->size,
                           .rank = comm->rank,
                           .capacity = capacity_of(comm, site),
                           .patience_ms = deadline_ms > 0 ? deadline_ms : PATIENT_MS}};
  status = meet(p, &able);
  if (status != OPROJ_OK || !able) {
    oproj_push_close(p);
    return status;
  }
  *out = p;
  return OPROJ_OK;
}

void oproj_push_close(oproj_push *p) {
  int32_t all;
  if (!p) return;
  for (int32_t r = 0; r < p->at.size; r++)
    if (r != p->at.rank) p->ops->mailbox_close(p->kernels, p->at.mailboxes[r]);
  (void)p->comm->ops->min_i32(p->comm, 1, &all); /* where a rank is lost, nobody waits for it */
  p->ops->mailbox_destroy(p->kernels, p->at.mailboxes[p->at.rank]);
  free(p);
}

int oproj_push_takes(const oproj_push *p, oproj_reduce mode, int64_t elements) {
  return p && mode == OPROJ_REDUCE_ALL && elements <= p->at.capacity;
}

const oproj_kernels_push *oproj_push_sink(const oproj_push *p) {
  return &p->at;
}

oproj_status oproj_push_sum(oproj_push *p, int64_t elements, const uint16_t *partial, uint16_t *y,
                            int sent, void *stream) {
  return p->ops->sum_pushed(p->kernels, &p->at, elements, partial, y, sent, stream);
}
