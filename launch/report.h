/* report.h - what long work shows while it runs, and results as JSON files. */
#ifndef OPROJ_LAUNCH_REPORT_H
#define OPROJ_LAUNCH_REPORT_H

#include <jansson.h>
#include <stdint.h>

#include "oproj.h"

/* A progress line on stderr: redrawn in place on a terminal, silent elsewhere. */
typedef struct report_progress {
  const char *what;  /* "writing" */
  int shown_percent; /* -1 before the first */
} report_progress;

/* An oproj_progress_fn over a report_progress. */
int report_bytes(void *progress, int64_t done_bytes, int64_t total_bytes);

/* The same for steps of any kind ("layer 3 of 43"); call with step == steps at the end. */
void report_step(const char *what, int32_t step, int32_t steps);

/* Writes `result` to `path` under a temporary name, then renames; releases `result`.  ERR_IO names
 * the path. */
oproj_status report_json(const char *path, json_t *result);

#endif /* OPROJ_LAUNCH_REPORT_H */
