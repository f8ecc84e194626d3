/* describe.c - GPUs and their libraries in words, for people. */
#include <stdio.h>

#include "base/error.h"
#include "tp/comm.h"
#include "tp/place.h"

int32_t oproj_device_count(void) {
  return oproj_kernels_cuda_count();
}

int32_t oproj_device_capability(int32_t device) {
  oproj_kernels_device found;
  return oproj_kernels_cuda_device(device, &found) == OPROJ_OK ? found.capability : 0;
}

oproj_status oproj_device_describe(int32_t device, char *text, size_t bytes) {
  REQUIRE(text && bytes > 0, OPROJ_ERR_INVALID, "text must not be NULL");
  oproj_kernels_device found;
  TRY(oproj_kernels_cuda_device(device, &found));
  char node[32] = "";
  int32_t number = oproj_place_node(found.bus_id);
  if (number >= 0) snprintf(node, sizeof node, ", NUMA node %d", number);
  snprintf(text, bytes, "%s, capability %d.%d, %.1f GiB, PCI %s%s", found.name,
           found.capability / 10, found.capability % 10, (double)found.bytes / (1 << 30),
           found.bus_id, node);
  return OPROJ_OK;
}

void oproj_versions_describe(char *text, size_t bytes) {
  char cuda[128], nccl[32];
  snprintf(text, bytes, "%s, %s", oproj_kernels_cuda_versions(cuda, sizeof cuda),
           oproj_comm_nccl_version(nccl, sizeof nccl));
}
