/* same_files.h - what ranks must read alike: on several hosts one path may name several
 * checkpoints. */
#ifndef OPROJ_JOB_SAME_FILES_H
#define OPROJ_JOB_SAME_FILES_H

#include "oproj/checkpoint.h"

/* COLLECTIVE.  ERR_INVALID on every rank where ranks see different checkpoints in `dir`, or
 * different files `input` (NULL: none), naming what differs.  Compares oproj_checkpoint_digest, the
 * JSON files, and the size and three samples of the input; ERR_IO where the first cannot be had. */
oproj_status job_compare_files(oproj_comm *comm, const oproj_checkpoint *checkpoint,
                               const char *dir, const char *input);

#endif /* OPROJ_JOB_SAME_FILES_H */
