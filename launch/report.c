/* report.c - progress for people, JSON for programs. */
#include "report.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "job/job.h"
#include "oproj/safetensors.h"

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* "1.20 of 3.00 GB, 0.60 GB/s, 3 s left" */
static void describe(const report_progress *p, double now, double done, double total, char *text,
                     size_t bytes) {
  double rate = now > p->begun ? done / (now - p->begun) : 0.0;
  int used = snprintf(text, bytes, "%.2f of %.2f GB", done / 1e9, total / 1e9);
  if (rate > 0.0)
    snprintf(text + used, bytes - (size_t)used, ", %.2f GB/s, %.0f s left", rate / 1e9,
             (total - done) / rate);
}

static void draw(const report_progress *p, double share, const char *text, bool last) {
  char bar[31];
  int full = (int)(share * (double)(sizeof bar - 1));
  memset(bar, '=', (size_t)full);
  memset(bar + full, ' ', sizeof bar - 1 - (size_t)full);
  bar[sizeof bar - 1] = '\0';
  /* What is left of a longer line before it is erased. */
  fprintf(stderr, "\r%s [%s] %s\033[K%s", p->what, bar, text, last ? "\n" : "");
  fflush(stderr);
}

int report_bytes(void *progress, int64_t done_bytes, int64_t total_bytes) {
  report_progress *p = progress;
  if (job_interrupted()) return 1;
  if (!p->what) return 0;
  bool terminal = job_on_terminal(), last = done_bytes >= total_bytes;
  double now = seconds(), done = (double)done_bytes, total = (double)total_bytes;
  if (p->begun == 0.0) p->begun = p->spoken = now;
  if (now - p->spoken < (terminal ? 0.1 : REPORT_SECONDS) && !(terminal && last)) return 0;
  char text[128];
  p->spoken = now;
  describe(p, now, done, total, text, sizeof text);
  if (terminal)
    draw(p, total > 0.0 ? done / total : 1.0, text, last);
  else
    fprintf(stderr, "oproj: %s %s\n", p->what, text);
  return 0;
}

void report_step(const char *what, int32_t step, int32_t steps) {
  if (!job_on_terminal()) return;
  fprintf(stderr, "%s %d of %d\r%s", what, step, steps, step >= steps ? "\n" : "");
  fflush(stderr);
}

json_t *report_number(double value) {
  if (isnan(value)) return json_string("nan");
  if (isinf(value)) return json_string(value > 0.0 ? "inf" : "-inf");
  return json_real(value);
}

oproj_status report_stage(report_file *file, const char *path, json_t *result) {
  *file = (report_file){0};
  oproj_status status = oproj_tensors_target(path, &file->path);
  if (status == OPROJ_OK &&
      asprintf(&file->temporary, "%s.tmp-%ld", file->path, (long)getpid()) < 0) {
    file->temporary = NULL;
    status = oproj_fail(OPROJ_ERR_NOMEM, "%s: no memory for its name", path);
  }
  if (status == OPROJ_OK && !result)
    status = oproj_fail(OPROJ_ERR_NOMEM, "%s: no memory for the result", path);
  if (status == OPROJ_OK &&
      json_dump_file(result, file->temporary, JSON_INDENT(2) | JSON_REAL_PRECISION(12)) != 0)
    status = oproj_fail(OPROJ_ERR_IO, "%s: cannot be written: %s", path, strerror(errno));
  json_decref(result);
  if (status != OPROJ_OK) report_drop(file);
  return status;
}

oproj_status report_keep(report_file *file) {
  oproj_status status = OPROJ_OK;
  if (!file->temporary) return status;
  if (rename(file->temporary, file->path) != 0)
    status = oproj_fail(OPROJ_ERR_IO, "%s: cannot be written: %s", file->path, strerror(errno));
  if (status == OPROJ_OK) {
    free(file->temporary);
    file->temporary = NULL;
  }
  report_drop(file);
  return status;
}

void report_drop(report_file *file) {
  if (file->temporary) unlink(file->temporary);
  free(file->temporary);
  free(file->path);
  *file = (report_file){0};
}

oproj_status report_json(const char *path, json_t *result) {
  report_file file;
  oproj_status status = report_stage(&file, path, result);
  return status == OPROJ_OK ? report_keep(&file) : status;
}
