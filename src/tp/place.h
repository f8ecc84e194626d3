/* place.h - what of this host a rank may use, asked of hwloc. */
#ifndef OPROJ_TP_PLACE_H
#define OPROJ_TP_PLACE_H

#include <hwloc.h>

#include "oproj.h"

/* ---- threads -------------------------------------------------------------------------------- */

/* Host threads for one of `local_ranks` ranks: OMP_NUM_THREADS where it is set, but no more than
 * the CPUs that this process may run on; else those CPUs, shared among the ranks unless the
 * launcher has bound each to its own. */
int32_t oproj_place_threads(int32_t local_ranks);

/* Threads for a parallel region outside any context: OpenMP's own number, but no more than those
 * CPUs, because a team of thousands ends the process. */
int32_t oproj_place_team(void);

/* Open MPI binds each rank to one core when a job has one or two, which nobody asked for.  Such a
 * rank is bound to its share of the machine instead, before it starts threads: to be called with
 * its place among the ranks of this host (0 of 1: the whole machine).  OPROJ_BIND=0 forbids it. */
void oproj_place_unbind(int32_t local_rank, int32_t local_ranks);

/* ---- GPUs ----------------------------------------------------------------------------------- */

/* The GPU of a host's rank `local_rank`: one each, in order, while there are enough; else round
 * robin.  A launcher that shows each rank its own GPU alone leaves count 1: device 0 for all.  -1
 * where count is 0. */
int32_t oproj_place_device(int32_t local_rank, int32_t count);

/* Binds this process's threads to the CPUs of the NUMA node of the GPU at PCI `bus_id`, and its new
 * memory to that node, as oproj_place_near decides.  OPROJ_BIND=0 forbids it.  Only a preference:
 * what fails is logged. */
void oproj_place_bind(const char *bus_id);

/* The NUMA node of the GPU at PCI `bus_id`, or -1 where it has none or several. */
int32_t oproj_place_node(const char *bus_id);

/* ---- the same for any machine, without touching the process --------------------------------- */

/* The CPUs, within `bound` (where a process may run), that are nearest to the device at PCI
 * `bus_id`.  False, with `out` undefined, where the process should stay as it is: the device or its
 * place is unknown, none of its CPUs are in `bound`, or `bound` is narrower already. */
int oproj_place_near(hwloc_topology_t topology, const char *bus_id, hwloc_const_bitmap_t bound,
                     hwloc_bitmap_t out);

/* The CPUs that one of `local_ranks` should have which is bound to a single core: an equal run of
 * the machine's cores.  False, with `out` undefined, where it is bound otherwise, or where there
 * are not two cores for each rank. */
int oproj_place_share(hwloc_topology_t topology, hwloc_const_bitmap_t bound, int32_t local_rank,
                      int32_t local_ranks, hwloc_bitmap_t out);

/* The one NUMA node that is local to the device, or -1. */
int32_t oproj_place_node_in(hwloc_topology_t topology, const char *bus_id);

#endif /* OPROJ_TP_PLACE_H */
