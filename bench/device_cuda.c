/* device_cuda.c - device.h by the CUDA runtime.
 *
 * liboproj holds its own static copy of the runtime.  Both copies share the device's primary
 * context, and streams and captures are the driver's, so what the library enqueues on our stream is
 * captured by us. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device.h"
#include "meter.h"
#include "try_cuda.h"

struct bench_device {
  cudaStream_t stream;
  device_facts facts;
  meter *meter;
};

struct bench_graph {
  bench_device *device;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
};

static oproj_status describe(device_facts *f) {
  struct cudaDeviceProp p;
  int clock_khz = 0, memory_khz = 0;
  CUDA_TRY(cudaGetDeviceProperties(&p, f->ordinal));
  CUDA_TRY(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, f->ordinal));
  CUDA_TRY(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, f->ordinal));
  snprintf(f->name, sizeof f->name, "%s", p.name);
  snprintf(f->text, sizeof f->text,
           "sm_%d%d, %d multiprocessors, %.1f GiB, L2 %.0f MiB, boost clock %d MHz, memory clock "
           "%d MHz",
           p.major, p.minor, p.multiProcessorCount, (double)p.totalGlobalMem / (1 << 30),
           (double)p.l2CacheSize / (1 << 20), clock_khz / 1000, memory_khz / 1000);
  if (strstr(p.name, "H200")) {
    f->bytes_per_s = 4.28e12;
    f->flops_per_s = 1500e12;
    f->link_bytes_per_s = 397e9;
  }
  return OPROJ_OK;
}

static oproj_status open_into(bench_device *d, int32_t index) {
  int count = 0;
  char bus[32];
  CUDA_TRY(cudaGetDeviceCount(&count));
  if (count == 0) return oproj_fail(OPROJ_ERR_UNSUPPORTED, "this machine has no GPU");
  d->facts.ordinal = index % count;
  CUDA_TRY(cudaSetDevice(d->facts.ordinal));
  CUDA_TRY(cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking));
  CUDA_TRY(cudaDeviceGetPCIBusId(bus, sizeof bus, d->facts.ordinal));
  d->meter = meter_open(bus);
  return describe(&d->facts);
}

oproj_status device_open(bench_device **out, int32_t index) {
  bench_device *d = calloc(1, sizeof *d);
  if (!d) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a device");
  oproj_status status = open_into(d, index);
  if (status != OPROJ_OK) {
    device_close(d);
    return status;
  }
  *out = d;
  return OPROJ_OK;
}

void device_close(bench_device *device) {
  if (!device) return;
  if (device->stream) cudaStreamDestroy(device->stream);
  meter_close(device->meter);
  free(device);
}

const device_facts *device_describe(const bench_device *device) {
  return &device->facts;
}

void *device_stream(const bench_device *device) {
  return device ? device->stream : NULL;
}

oproj_status device_sync(bench_device *device) {
  if (device) CUDA_TRY(cudaStreamSynchronize(device->stream));
  return OPROJ_OK;
}

/* ---- graphs -------------------------------------------------------------------------------- */

/* A capture that has begun must end, also where the work failed. */
static oproj_status capture(bench_graph *g, device_work work, void *user) {
  cudaStream_t stream = g->device->stream;
  CUDA_TRY(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  oproj_status status = work(user, stream);
  cudaError_t error = cudaStreamEndCapture(stream, &g->graph);
  if (status != OPROJ_OK) return status;
  CUDA_TRY(error);
  CUDA_TRY(cudaGraphInstantiate(&g->exec, g->graph, 0));
  CUDA_TRY(cudaGraphUpload(g->exec, stream));
  return OPROJ_OK;
}

oproj_status device_graph_create(bench_graph **out, bench_device *device, device_work work,
                                 void *user) {
  bench_graph *g = calloc(1, sizeof *g);
  if (!g) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a graph");
  g->device = device;
  oproj_status status = capture(g, work, user);
  if (status != OPROJ_OK) {
    device_graph_destroy(g);
    return status;
  }
  *out = g;
  return OPROJ_OK;
}

void device_graph_destroy(bench_graph *graph) {
  if (!graph) return;
  if (graph->exec) cudaGraphExecDestroy(graph->exec);
  if (graph->graph) cudaGraphDestroy(graph->graph);
  free(graph);
}

/* Waits for the stream and reads the meter meanwhile. */
static oproj_status wait_and_read(const bench_device *d, device_load *load) {
  enum { LEAST_READS = 50 };
  const struct timespec pause = {.tv_nsec = 2000000};
  double sum = 0.0, mhz = 0.0, watts = 0.0;
  int reads = 0;
  cudaError_t error;
  while ((error = cudaStreamQuery(d->stream)) == cudaErrorNotReady) {
    meter_read(d->meter, &mhz, &watts);
    sum += mhz;
    reads++;
    nanosleep(&pause, NULL);
  }
  *load = (device_load){0};
  if (reads >= LEAST_READS) *load = (device_load){.sm_mhz = sum / reads, .watts = watts};
  CUDA_TRY(error);
  return OPROJ_OK;
}

/* All replays are queued before the host waits, so that the GPU never waits for the host. */
static oproj_status replay(bench_graph *g, int32_t warmups, int32_t replays, cudaEvent_t *events,
                           double *us, device_load *load) {
  cudaStream_t stream = g->device->stream;
  for (int32_t i = 0; i < 2 * replays; i++) CUDA_TRY(cudaEventCreate(&events[i]));
  for (int32_t i = 0; i < warmups; i++) CUDA_TRY(cudaGraphLaunch(g->exec, stream));
  for (int32_t i = 0; i < replays; i++) {
    CUDA_TRY(cudaEventRecord(events[2 * i], stream));
    CUDA_TRY(cudaGraphLaunch(g->exec, stream));
    CUDA_TRY(cudaEventRecord(events[2 * i + 1], stream));
  }
  oproj_status status = wait_and_read(g->device, load);
  if (status != OPROJ_OK) return status;
  for (int32_t i = 0; i < replays; i++) {
    float ms = 0.0f;
    CUDA_TRY(cudaEventElapsedTime(&ms, events[2 * i], events[2 * i + 1]));
    us[i] = (double)ms * 1e3;
  }
  return OPROJ_OK;
}

oproj_status device_graph_time(bench_graph *graph, int32_t warmups, int32_t replays, double *us,
                               device_load *load) {
  cudaEvent_t *events = calloc(2 * (size_t)replays, sizeof *events);
  if (!events) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d events", 2 * replays);
  oproj_status status = replay(graph, warmups, replays, events, us, load);
  for (int32_t i = 0; i < 2 * replays; i++)
    if (events[i]) cudaEventDestroy(events[i]);
  free(events);
  return status;
}
