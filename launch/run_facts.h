/* run_facts.h - what the ranks of `oproj run` must read alike: on several hosts one path may name
 * several checkpoints. */
#ifndef OPROJ_LAUNCH_RUN_FACTS_H
#define OPROJ_LAUNCH_RUN_FACTS_H

#include "oproj/checkpoint.h"

/* COLLECTIVE.  ERR_INVALID on every rank where ranks see different checkpoints in `dir`, or
 * different files `input` (NULL: none), naming what differs.  Compares oproj_checkpoint_digest, the
 * JSON files, and the size and three samples of the input; ERR_IO where the first cannot be had. */
oproj_status run_facts_compare(oproj_comm *comm, const oproj_checkpoint *checkpoint,
                               const char *dir, const char *input);

#endif /* OPROJ_LAUNCH_RUN_FACTS_H */
