/* report.c - progress for people, JSON for programs. */
#include "report.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int report_bytes(void *progress, int64_t done_bytes, int64_t total_bytes) {
  report_progress *p = progress;
  int percent = total_bytes > 0 ? (int)(100.0 * (double)done_bytes / (double)total_bytes) : 100;
  if (percent == p->shown_percent || !isatty(STDERR_FILENO)) return 0;
  p->shown_percent = percent;
  fprintf(stderr, "\r%s %.2f of %.2f GB, %d %%%s", p->what, (double)done_bytes / 1e9,
          (double)total_bytes / 1e9, percent, done_bytes >= total_bytes ? "\n" : "");
  fflush(stderr);
  return 0;
}

void report_step(const char *what, int32_t step, int32_t steps) {
  if (!isatty(STDERR_FILENO)) return;
  fprintf(stderr, "\r%s %d of %d%s", what, step, steps, step >= steps ? "\n" : "");
  fflush(stderr);
}

oproj_status report_json(const char *path, json_t *result) {
  char temporary[4096];
  oproj_status status = OPROJ_OK;
  if (snprintf(temporary, sizeof temporary, "%s.tmp-%ld", path, (long)getpid()) >=
      (int)sizeof temporary)
    status = oproj_fail(OPROJ_ERR_INVALID, "the path %.80s... is too long", path);
  else if (json_dump_file(result, temporary, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) != 0 ||
           rename(temporary, path) != 0) {
    status = oproj_fail(OPROJ_ERR_IO, "cannot write %s: %s", path, strerror(errno));
    unlink(temporary);
  }
  json_decref(result);
  return status;
}
