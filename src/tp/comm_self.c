/* comm_self.c - one rank alone: nothing to exchange, nothing to sum. */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "tp/comm.h"

static oproj_status self_broadcast(oproj_comm *comm, int32_t root, void *data, size_t bytes) {
  (void)comm;
  (void)root;
  (void)data;
  (void)bytes;
  return OPROJ_OK;
}

static oproj_status self_gather(oproj_comm *comm, const void *mine, void *all, int32_t bytes) {
  (void)comm;
  memcpy(all, mine, (size_t)bytes);
  return OPROJ_OK;
}

static oproj_status self_min_i32(oproj_comm *comm, int32_t mine, int32_t *out) {
  (void)comm;
  *out = mine;
  return OPROJ_OK;
}

static void self_destroy(oproj_comm *comm) {
  free(comm);
}

static const oproj_comm_ops self_ops = {
    .name = "self",
    .broadcast = self_broadcast,
    .gather = self_gather,
    .min_i32 = self_min_i32,
    .destroy = self_destroy,
};

oproj_status oproj_comm_self(oproj_comm **out) {
  REQUIRE(out, OPROJ_ERR_INVALID, "out must not be NULL");
  oproj_comm *comm = malloc(sizeof *comm);
  REQUIRE(comm, OPROJ_ERR_NOMEM, "no memory for a communicator");
  *comm = (oproj_comm){.ops = &self_ops, .rank = 0, .size = 1, .local_size = 1, .device = -1};
  *out = comm;
  return OPROJ_OK;
}
