/* siblings.h - the ranks that the same launcher has started on this machine, as /proc shows them:
 * for the sentence about a rank that never came, when nothing else is known of it. */
#ifndef OPROJ_JOB_SIBLINGS_H
#define OPROJ_JOB_SIBLINGS_H

#include <stdint.h>

/* Not seen: it has ended, or runs on another machine. */
typedef enum sibling { SIBLING_UNSEEN, SIBLING_RUNS, SIBLING_STOPPED } sibling;

/* Fills ranks[0 .. size), this process's own among them. */
void siblings_look(sibling *ranks, int32_t size);

/* The lowest rank that runs, this process's own `rank` at most. */
int32_t siblings_lowest(int32_t rank, int32_t size);

/* Whether all `size` ranks of the job are children of one launcher on this machine, so that an
 * unseen one has ended. */
int siblings_all_here(int32_t size);

#endif /* OPROJ_JOB_SIBLINGS_H */
