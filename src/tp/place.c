/* place.c - CPUs, memory nodes and GPUs of this process: how many threads, which GPU, and where to
 * run beside it. */
#include "tp/place.h"

#include <hwloc.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/environment.h"
#include "base/error.h"
#include "base/log.h"

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
  hwloc_topology_set_io_types_filter(topology, HWLOC_TYPE_FILTER_KEEP_IMPORTANT); /* GPUs */
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

/* ---- Open MPI's default --------------------------------------------------------------------- */

int oproj_place_share(hwloc_topology_t topology, hwloc_const_bitmap_t bound, int32_t local_rank,
                      int32_t local_ranks, hwloc_bitmap_t out) {
  int cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE), holder = -1;
  for (int i = 0; i < cores && holder < 0; i++) {
    hwloc_obj_t core = hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, (unsigned)i);
    if (hwloc_bitmap_isincluded(bound, core->cpuset)) holder = i;
  }
  if (holder < 0 || cores < 2 * local_ranks) return 0;
  hwloc_bitmap_zero(out);
  for (int i = cores * local_rank / local_ranks; i < cores * (local_rank + 1) / local_ranks; i++)
    hwloc_bitmap_or(out, out, hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, (unsigned)i)->cpuset);
  return 1;
}

/* A binding that was asked for has a policy, a set of CPUs, a file, or processing elements. */
static int bound_by_default(void) {
  static const char *const asked[] = {"OMPI_MCA_hwloc_base_binding_policy",
                                      "OMPI_MCA_hwloc_base_cpu_set", "OMPI_MCA_orte_rankfile",
                                      "OMPI_MCA_rmaps_rank_file_path"};
  const char *mapping = getenv("OMPI_MCA_rmaps_base_mapping_policy");
  if (mapping && strstr(mapping, "pe=")) return 0;
  for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++)
    if (getenv(asked[i])) return 0;
  return getenv("OMPI_MCA_orte_bound_at_launch") != NULL;
}

static void take_share(hwloc_topology_t topology, int32_t local_rank, int32_t local_ranks,
                       hwloc_bitmap_t bound, hwloc_bitmap_t share) {
  char cpus[256];
  if (hwloc_get_cpubind(topology, bound, HWLOC_CPUBIND_PROCESS) != 0) return;
  if (!oproj_place_share(topology, bound, local_rank, local_ranks, share)) return;
  hwloc_bitmap_list_snprintf(cpus, sizeof cpus, share);
  if (hwloc_set_cpubind(topology, share, HWLOC_CPUBIND_PROCESS) != 0)
    oproj_base_log(OPROJ_LOG_WARN,
                   "mpirun has bound this rank to one core; --bind-to none frees it");
  else
    oproj_base_log(OPROJ_LOG_INFO,
                   "bound to cpus %s, no longer to the one core of mpirun's default", cpus);
}

void oproj_place_unbind(int32_t local_rank, int32_t local_ranks) {
  if (!bound_by_default() || !oproj_base_word(OPROJ_ENVIRONMENT_BIND)) return;
  hwloc_topology_t topology = load_topology();
  if (!topology) return;
  hwloc_bitmap_t bound = hwloc_bitmap_alloc(), share = hwloc_bitmap_alloc();
  if (bound && share) take_share(topology, local_rank, local_ranks, bound, share);
  hwloc_bitmap_free(share);
  hwloc_bitmap_free(bound);
  hwloc_topology_destroy(topology);
}

/* ---- GPUs ----------------------------------------------------------------------------------- */

int32_t oproj_place_device(int32_t local_rank, int32_t count) {
  return count > 0 ? local_rank % count : -1;
}

/* What of the machine the device hangs from; NULL where it is unknown. */
static hwloc_obj_t place_of(hwloc_topology_t topology, const char *bus_id) {
  hwloc_obj_t device = hwloc_get_pcidev_by_busidstring(topology, bus_id);
  return device ? hwloc_get_non_io_ancestor_obj(topology, device) : NULL;
}

int oproj_place_near(hwloc_topology_t topology, const char *bus_id, hwloc_const_bitmap_t bound,
                     hwloc_bitmap_t out) {
  hwloc_obj_t place = place_of(topology, bus_id);
  if (!place || !place->cpuset) return 0;
  hwloc_bitmap_and(out, bound, place->cpuset);
  if (hwloc_bitmap_iszero(out) || hwloc_bitmap_isequal(out, bound)) return 0;
  /* A launcher that chose fewer CPUs than the node has, some of them elsewhere, meant it. */
  return hwloc_bitmap_weight(bound) >= hwloc_bitmap_weight(place->cpuset);
}

int32_t oproj_place_node_in(hwloc_topology_t topology, const char *bus_id) {
  hwloc_obj_t place = place_of(topology, bus_id);
  if (!place || !place->nodeset || hwloc_bitmap_weight(place->nodeset) != 1) return -1;
  return hwloc_bitmap_first(place->nodeset);
}

int32_t oproj_place_node(const char *bus_id) {
  hwloc_topology_t topology = load_topology();
  if (!topology) return -1;
  int32_t node = oproj_place_node_in(topology, bus_id);
  hwloc_topology_destroy(topology);
  return node;
}

/* Threads first: memory is to follow them, and a policy alone would only cost. */
static void bind_near(hwloc_topology_t topology, const char *bus_id, hwloc_bitmap_t bound,
                      hwloc_bitmap_t near) {
  char cpus[256];
  if (hwloc_get_cpubind(topology, bound, HWLOC_CPUBIND_PROCESS) != 0) return;
  if (!oproj_place_near(topology, bus_id, bound, near)) return;
  hwloc_bitmap_list_snprintf(cpus, sizeof cpus, near);
  if (hwloc_set_cpubind(topology, near, HWLOC_CPUBIND_PROCESS) != 0) {
    oproj_base_log(OPROJ_LOG_WARN, "cannot bind to cpus %s, near the GPU at %s", cpus, bus_id);
    return;
  }
  /* A preference: full nodes spill over instead of ending the process. */
  if (hwloc_set_membind(topology, near, HWLOC_MEMBIND_BIND, 0) != 0)
    oproj_base_log(OPROJ_LOG_INFO, "memory stays unbound near the GPU at %s", bus_id);
  oproj_base_log(OPROJ_LOG_INFO, "bound to cpus %s, near the GPU at %s", cpus, bus_id);
}

void oproj_place_bind(const char *bus_id) {
  if (!oproj_base_word(OPROJ_ENVIRONMENT_BIND)) return;
  hwloc_topology_t topology = load_topology();
  if (!topology) return;
  hwloc_bitmap_t bound = hwloc_bitmap_alloc(), near = hwloc_bitmap_alloc();
  if (bound && near) bind_near(topology, bus_id, bound, near);
  hwloc_bitmap_free(near);
  hwloc_bitmap_free(bound);
  hwloc_topology_destroy(topology);
}
