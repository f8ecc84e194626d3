/* comm.h - the contract between a context and the ranks it works with.
 *
 *   comm_self.c   one rank alone
 *   comm_mpi.c    ranks of an MPI communicator, data in host memory
 *   comm_nccl.c   one GPU per rank, data in device memory; control messages go through a comm_mpi.
 *                 comm_nccl_absent.c stands in for it in builds without CUDA */
#ifndef OPROJ_TP_COMM_H
#define OPROJ_TP_COMM_H

#include <stddef.h>

#include "kernels/kernels.h"
#include "oproj.h"
#include "tp/watch.h"

/* Partials of one rank up to here are gathered by all ranks, which is bound by latency; larger ones
 * go through owners. */
enum { OPROJ_TP_GATHER_BYTES = 512 << 10 };

/* One context's end of a communicator that sums in device memory; each kind appends its fields. */
typedef struct oproj_comm_end {
  uint16_t *partial; /* bf16 [max_tokens, hidden], where this rank's share of y is best computed */
} oproj_comm_end;

/* What the communicator needs to know of a context and its device. */
typedef struct oproj_comm_site {
  const oproj_kernels_ops *ops;
  oproj_kernels *kernels;
  int32_t max_tokens, hidden;
} oproj_comm_site;

/* Calls fail with ERR_PEER, naming the rank and its phase, once a rank is lost or the deadline has
 * passed; what they were given may be freed all the same.
 *
 * No sum is asked for of one rank alone, nor with OPROJ_REDUCE_NONE. */
typedef struct oproj_comm_ops {
  const char *name;

  /* COLLECTIVE.  root's bytes on every rank. */
  oproj_status (*broadcast)(oproj_comm *comm, int32_t root, void *data, size_t bytes);

  /* COLLECTIVE.  Everybody's `bytes`, in rank order, on every rank. */
  oproj_status (*gather)(oproj_comm *comm, const void *mine, void *all, int32_t bytes);

  /* COLLECTIVE.  The smallest value over ranks. */
  oproj_status (*min_i32)(oproj_comm *comm, int32_t mine, int32_t *out);

  /* COLLECTIVE. Sends send_bytes[r] bytes to every rank r and receives receive_bytes[r] from it.
   * At both ends they lie one behind the other in rank order, in host memory, 2^31 - 1 bytes at
   * most. NULL for one rank alone. */
  oproj_status (*exchange)(oproj_comm *comm, const void *send, const int32_t *send_bytes,
                           void *receive, const int32_t *receive_bytes);

  /* COLLECTIVE.  Sums bf16 [tokens, hidden] partials in host memory, as mode says (oproj.h); `y`
   * may be `partial`.  NULL for one rank alone. */
  oproj_status (*reduce)(oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                         const uint16_t *partial, uint16_t *y);

  /* The same in device memory, or NULL, all four, where the communicator knows host memory alone.
   * attach is COLLECTIVE, allocates for max_tokens once, and leaves with one status on all ranks;
   * its kernels must outlive the end.  detach frees device memory, which waits for what still runs.
   * reduce_device only enqueues on `stream`, a CUDA graph may capture it, and every rank must call
   * it, with the same mode and tokens > 0.  Calls of one end come on different streams, ordered by
   * events. */
  oproj_status (*attach)(oproj_comm *comm, const oproj_comm_site *site, oproj_comm_end **out);
  void (*detach)(oproj_comm *comm, oproj_comm_end *end);
  oproj_status (*reduce_device)(oproj_comm *comm, oproj_comm_end *end, oproj_reduce mode,
                                int32_t tokens, const uint16_t *partial, uint16_t *y, int sent,
                                void *stream);

  /* Where a backend may push this rank's part before reduce_device, which is then told that it is
   * `sent`; NULL: nowhere, or not a sum of that mode and size. */
  const oproj_kernels_push *(*sink)(const oproj_comm_end *end, oproj_reduce mode, int32_t tokens);

  void (*destroy)(oproj_comm *comm);
} oproj_comm_ops;

/* The head of every communicator; each kind appends its own fields. */
struct oproj_comm {
  const oproj_comm_ops *ops;
  int32_t rank, size;
  int32_t local_rank, local_size; /* among the ranks on this host */
  int32_t device;                 /* the only GPU its contexts may use; -1: any */
  oproj_watch *watch;             /* NULL for one rank alone */
};

/* "NCCL 2.28.3" into text, cut to `bytes`; "no NCCL" in builds without it.  Returns text. */
const char *oproj_comm_nccl_version(char *text, size_t bytes);

#endif /* OPROJ_TP_COMM_H */
