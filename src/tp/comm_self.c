/* comm_self.c - one rank alone: every collective is a copy. */
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

static oproj_status self_min_i32(oproj_comm *comm, int32_t mine, int32_t *out) {
  (void)comm;
  *out = mine;
  return OPROJ_OK;
}

static oproj_status self_reduce(oproj_comm *comm, oproj_reduce mode, int32_t tokens, int32_t hidden,
                                const uint16_t *partial, uint16_t *y) {
  (void)comm;
  (void)mode;
  if (y != partial && tokens > 0) memcpy(y, partial, (size_t)tokens * (size_t)hidden * sizeof *y);
  return OPROJ_OK;
}

static void self_destroy(oproj_comm *comm) {
  free(comm);
}

static const oproj_comm_ops self_ops = {
    .name = "self",
    .broadcast = self_broadcast,
    .min_i32 = self_min_i32,
    .reduce = self_reduce,
    .destroy = self_destroy,
};

oproj_status oproj_comm_self(oproj_comm **out) {
  REQUIRE(out, OPROJ_ERR_INVALID, "out must not be NULL");
  oproj_comm *comm = malloc(sizeof *comm);
  REQUIRE(comm, OPROJ_ERR_NOMEM, "no memory for a communicator");
  *comm = (oproj_comm){.ops = &self_ops, .rank = 0, .size = 1, .local_size = 1};
  *out = comm;
  return OPROJ_OK;
}
