/* target.h - files that a command is asked to write, looked at before any work is done for them. */
#ifndef OPROJ_LAUNCH_TARGET_H
#define OPROJ_LAUNCH_TARGET_H

#include "oproj.h"

/* Refuses a `path` that oproj_tensors_target refuses, that is the file `input`, or that is one of
 * the files of which the checkpoint in `dir` consists.  `flag` names it in the sentence; a NULL
 * path is nothing to write, a NULL input or dir nothing to spare. */
oproj_status target_check(const char *flag, const char *path, const char *input, const char *dir);

/* Whether both, which target_check has passed, are one file, there already or not. */
int target_same(const char *a, const char *b);

#endif /* OPROJ_LAUNCH_TARGET_H */
