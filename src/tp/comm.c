/* comm.c - what every kind of communicator has in common: its size and rank, and agreeing. */
#include "tp/comm.h"

#include <string.h>

#include "base/error.h"
#include "tp/place.h"

int32_t oproj_comm_rank(const oproj_comm *comm) {
  return comm->rank;
}

int32_t oproj_comm_size(const oproj_comm *comm) {
  return comm->size;
}

const char *oproj_comm_name(const oproj_comm *comm) {
  return comm->ops->name;
}

int32_t oproj_comm_device(const oproj_comm *comm) {
  if (comm->device >= 0) return comm->device;
  return oproj_place_device(comm->local_rank, oproj_kernels_cuda_count());
}

void oproj_comm_set_deadline(oproj_comm *comm, double seconds) {
  if (seconds >= 0) oproj_watch_set_deadline(comm->watch, seconds);
}

void oproj_comm_note(oproj_comm *comm, const char *note, int32_t patient) {
  oproj_watch_note(comm->watch, note, patient);
}

void oproj_comm_on_loss(oproj_comm *comm, oproj_loss_fn fn, void *user) {
  oproj_watch_on_loss(comm->watch, fn, user);
}

oproj_status oproj_comm_check(const oproj_comm *comm) {
  return oproj_watch_check(comm->watch);
}

void oproj_comm_destroy(oproj_comm *comm) {
  if (comm) comm->ops->destroy(comm);
}

/* What the failing rank tells the others. */
typedef struct verdict {
  int32_t status;
  char sentence[1000];
} verdict;

oproj_status oproj_comm_agree(oproj_comm *comm, oproj_status mine) {
  int32_t failed = mine == OPROJ_OK ? comm->size : comm->rank, lowest;
  TRY(comm->ops->min_i32(comm, failed, &lowest));
  if (lowest == comm->size) return OPROJ_OK;

  verdict v = {.status = mine};
  if (comm->rank == lowest) strncpy(v.sentence, oproj_last_error(), sizeof v.sentence - 1);
  TRY(comm->ops->broadcast(comm, lowest, &v, sizeof v));
  if (comm->rank == lowest) return mine;
  return oproj_fail((oproj_status)v.status, "rank %d: %s", lowest, v.sentence);
}
