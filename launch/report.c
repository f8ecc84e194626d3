/* report.c - progress for people, JSON for programs. */
#include "report.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "job.h"
#include "oproj/safetensors.h"

int report_bytes(void *progress, int64_t done_bytes, int64_t total_bytes) {
  report_progress *p = progress;
  int percent = total_bytes > 0 ? (int)(100.0 * (double)done_bytes / (double)total_bytes) : 100;
  if (job_interrupted()) return 1;
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

json_t *report_number(double value) {
  if (isnan(value)) return json_string("nan");
  if (isinf(value)) return json_string(value > 0.0 ? "inf" : "-inf");
  return json_real(value);
}

json_t *report_text(const char *text) {
  json_t *value = json_string(text);
  if (value) return value;
  char *escaped = malloc(4 * strlen(text) + 1), *to = escaped;
  for (const char *from = text; escaped && *from; from++)
    if ((unsigned char)*from < 128)
      *to++ = *from;
    else
      to += sprintf(to, "\\x%02x", (unsigned char)*from);
  if (escaped) {
    *to = '\0';
    value = json_string(escaped);
  }
  free(escaped);
  return value;
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
