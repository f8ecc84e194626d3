/* place.c - CPUs and memory nodes of this process, for the thread count and for `oproj info`. */
#include "tp/place.h"

#include <hwloc.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/error.h"

typedef struct cpu_view {
  int32_t allowed, machine; /* CPUs this process may run on; CPUs of the machine */
} cpu_view;

static cpu_view count_cpus(hwloc_topology_t topology, hwloc_bitmap_t bound) {
  hwloc_const_cpuset_t all = hwloc_topology_get_topology_cpuset(topology);
  cpu_view view = {.machine = hwloc_bitmap_weight(all)};
  if (hwloc_get_cpubind(topology, bound, HWLOC_CPUBIND_PROCESS) != 0) hwloc_bitmap_copy(bound, all);
  hwloc_bitmap_and(bound, bound, all);
  view.allowed = hwloc_bitmap_weight(bound);
  return view;
}

static hwloc_topology_t load_topology(void) {
  hwloc_topology_t topology;
  if (hwloc_topology_init(&topology) != 0) return NULL;
  if (hwloc_topology_load(topology) != 0) {
    hwloc_topology_destroy(topology);
    return NULL;
  }
  return topology;
}

static int32_t at_most_cpus(long threads) {
  int cpus = omp_get_num_procs();
  return threads < cpus ? (int32_t)threads : cpus;
}

int32_t oproj_place_team(void) {
  return at_most_cpus(omp_get_max_threads());
}

int32_t oproj_place_threads(int32_t local_ranks) {
  const char *asked = getenv("OMP_NUM_THREADS");
  if (asked) {
    long threads = strtol(asked, NULL, 10);
    if (threads >= 1) return at_most_cpus(threads);
  }
  hwloc_topology_t topology = load_topology();
  if (!topology) return 1;
  hwloc_bitmap_t bound = hwloc_bitmap_alloc();
  cpu_view view = bound ? count_cpus(topology, bound) : (cpu_view){1, 1};
  hwloc_bitmap_free(bound);
  hwloc_topology_destroy(topology);
  int32_t threads = view.allowed < view.machine ? view.allowed : view.allowed / local_ranks;
  return threads > 1 ? threads : 1;
}

oproj_status oproj_place_describe(char *text, size_t bytes) {
  REQUIRE(text && bytes > 0, OPROJ_ERR_INVALID, "text must not be NULL");
  hwloc_topology_t topology = load_topology();
  REQUIRE(topology, OPROJ_ERR_UNSUPPORTED, "hwloc cannot read this machine's topology");
  hwloc_bitmap_t bound = hwloc_bitmap_alloc(), nodes = hwloc_bitmap_alloc();
  oproj_status status = OPROJ_OK;
  REQUIRE_GOTO(bound && nodes, status, out, OPROJ_ERR_NOMEM, "no memory for a CPU set");
  cpu_view view = count_cpus(topology, bound);
  hwloc_cpuset_to_nodeset(topology, bound, nodes);
  char cpu_list[256], node_list[128];
  hwloc_bitmap_list_snprintf(cpu_list, sizeof cpu_list, bound);
  hwloc_bitmap_list_snprintf(node_list, sizeof node_list, nodes);
  snprintf(text, bytes, "cpus %s (%d of %d), NUMA node %s", cpu_list, view.allowed, view.machine,
           node_list);
out:
  hwloc_bitmap_free(nodes);
  hwloc_bitmap_free(bound);
  hwloc_topology_destroy(topology);
  return status;
}
