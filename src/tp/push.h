/* push.h - inside tp: the sum over ranks of one host whose GPUs write to one another's memory, in
 * one launch and one trip over the link. A communicator on GPUs uses it for what is bound by
 * latency, where the ranks can. */
#ifndef OPROJ_TP_PUSH_H
#define OPROJ_TP_PUSH_H

#include "tp/comm.h"

typedef struct oproj_push oproj_push;

/* COLLECTIVE.  Makes this rank's mailbox, and opens those of all others.  OPROJ_OK with *out NULL
 * where some rank cannot: several hosts, too many ranks, no way from one GPU to another, or no
 * OPROJ_PUSH=1 in its environment; says so once. */
oproj_status oproj_push_open(oproj_push **out, oproj_comm *comm, const oproj_comm_site *site);

/* COLLECTIVE, unless a rank was lost: nobody's memory goes while another may write to it.  NULL is
 * allowed. */
void oproj_push_close(oproj_push *push);

/* Whether it serves such a sum; the same on all ranks.  NULL serves none. */
int oproj_push_takes(const oproj_push *push, oproj_reduce mode, int64_t elements);

/* Where a backend's forward may push this rank's part itself. */
const oproj_kernels_push *oproj_push_sink(const oproj_push *push);

/* Enqueues the sum in rank order of every rank's bf16 [elements]; y may be partial.  `sent`: this
 * rank's part has been pushed. */
oproj_status oproj_push_sum(oproj_push *push, int64_t elements, const uint16_t *partial,
                            uint16_t *y, int sent, void *stream);

#endif /* OPROJ_TP_PUSH_H */
