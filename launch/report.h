/* report.h - what long work shows while it runs, and results as JSON files. */
#ifndef OPROJ_LAUNCH_REPORT_H
#define OPROJ_LAUNCH_REPORT_H

#include <jansson.h>
#include <stdint.h>

#include "oproj.h"

/* Progress on stderr, with rate and time left: a bar redrawn in place on a terminal, elsewhere a
 * line every REPORT_SECONDS.  Zero-initialise, then fill. */
enum { REPORT_SECONDS = 10 };

typedef struct report_progress {
  const char *what;     /* "writing"; NULL says nothing, and only watches for interrupts */
  double begun, spoken; /* seconds; 0 before the first */
} report_progress;

/* An oproj_progress_fn over a report_progress; stops the work when the job is interrupted. */
int report_bytes(void *progress, int64_t done_bytes, int64_t total_bytes);

/* The same for steps of any kind ("layer 3 of 43"); call with step == steps at the end. */
void report_step(const char *what, int32_t step, int32_t steps);

/* A number; JSON has none that are not finite, so those are the texts "nan", "inf" and "-inf". */
json_t *report_number(double value);

/* A JSON file that is complete but has not got its name yet. */
typedef struct report_file {
  char *path, *temporary; /* NULL: none */
} report_file;

/* Writes `result` under a temporary name beside `path`; releases `result`.  On failure nothing is
 * left.  ERR_IO names the path. */
oproj_status report_stage(report_file *file, const char *path, json_t *result);
oproj_status report_keep(report_file *file); /* gives it its name; drops it on failure */
void report_drop(report_file *file);         /* a zeroed, kept or dropped one is allowed */

/* Both steps at once. */
oproj_status report_json(const char *path, json_t *result);

#endif /* OPROJ_LAUNCH_REPORT_H */
