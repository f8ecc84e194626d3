/* place.h - what of this host a rank may use, asked of hwloc. */
#ifndef OPROJ_TP_PLACE_H
#define OPROJ_TP_PLACE_H

#include "oproj.h"

/* Host threads for one of `local_ranks` ranks: OMP_NUM_THREADS where it is set, but no more than
 * the CPUs that this process may run on; else those CPUs, shared among the ranks unless the
 * launcher has bound each to its own. */
int32_t oproj_place_threads(int32_t local_ranks);

/* Threads for a parallel region outside any context: OpenMP's own number, but no more than those
 * CPUs, because a team of thousands ends the process. */
int32_t oproj_place_team(void);

#endif /* OPROJ_TP_PLACE_H */
