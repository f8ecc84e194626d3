/* device.h - the GPU that a run is timed on: its stream, graphs, events and facts.
 *
 * A NULL device is the host: work on it has finished when its call returns.  device_cuda.c or, in
 * builds without CUDA, device_absent.c. */
#ifndef OPROJ_BENCH_DEVICE_H
#define OPROJ_BENCH_DEVICE_H

#include <stdint.h>

#include "oproj.h"

typedef struct bench_device bench_device;
typedef struct bench_graph bench_graph;

/* The attainable ceilings are measured ones (bench/README.md); 0 where none are known. */
typedef struct device_facts {
  int32_t ordinal;
  char name[256];
  char text[512]; /* multiprocessors, memory, clocks */
  double bytes_per_s, flops_per_s;
  double link_bytes_per_s; /* to other GPUs of the host, one direction */
} device_facts;

/* Takes GPU `index` modulo their number, for this thread too.  ERR_UNSUPPORTED without CUDA. */
oproj_status device_open(bench_device **out, int32_t index);
void device_close(bench_device *device); /* NULL is allowed, here and below */

const device_facts *device_describe(const bench_device *device); /* of a GPU */
void *device_stream(const bench_device *device);
oproj_status device_sync(bench_device *device);

/* Enqueues the calls that are timed together on `stream`. */
typedef oproj_status (*device_work)(void *user, void *stream);

/* Captures them; whatever they load lazily must have been loaded by a run before. */
oproj_status device_graph_create(bench_graph **out, bench_device *device, device_work work,
                                 void *user);
void device_graph_destroy(bench_graph *graph);

/* How a GPU ran meanwhile; 0 where unknown, as in runs too short to tell. */
typedef struct device_load {
  double sm_mhz; /* mean clock of the multiprocessors */
  double watts;  /* at the end, averaged by the driver over about a second */
} device_load;

/* Replays the graph warmups + replays times; us[i] is the time of the i-th counted replay between
 * two events around it. */
oproj_status device_graph_time(bench_graph *graph, int32_t warmups, int32_t replays, double *us,
                               device_load *load);

#endif /* OPROJ_BENCH_DEVICE_H */
