/* device_absent.c - stands in for device_cuda.c in builds without CUDA: there is only the host. */
#include "device.h"

static oproj_status absent(void) {
  return oproj_fail(OPROJ_ERR_UNSUPPORTED, "this build of oproj-bench has no CUDA");
}

oproj_status device_open(bench_device **out, int32_t index) {
  (void)out, (void)index;
  return absent();
}

void device_close(bench_device *device) {
  (void)device;
}

const device_facts *device_describe(const bench_device *device) {
  (void)device;
  return NULL;
}

void *device_stream(const bench_device *device) {
  (void)device;
  return NULL;
}

oproj_status device_sync(bench_device *device) {
  (void)device;
  return OPROJ_OK;
}

oproj_status device_graph_create(bench_graph **out, bench_device *device, device_work work,
                                 void *user) {
  (void)out, (void)device, (void)work, (void)user;
  return absent();
}

void device_graph_destroy(bench_graph *graph) {
  (void)graph;
}

oproj_status device_graph_time(bench_graph *graph, int32_t warmups, int32_t replays, double *us,
                               device_load *load) {
  (void)graph, (void)warmups, (void)replays, (void)us, (void)load;
  return absent();
}
