/* log.c - level from the environment, one write per line so that ranks do not interleave. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/environment.h"

static const char *const level_names[] = {"error", "warn", "info", "debug"};

static atomic_int log_rank = -1;

void oproj_base_log_rank(int rank) {
  atomic_store(&log_rank, rank);
}

void oproj_base_log(oproj_base_level level, const char *format, ...) {
  if ((int)level > oproj_base_word(OPROJ_ENVIRONMENT_LOG)) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  int rank = atomic_load(&log_rank);
  if (rank < 0)
    fprintf(stderr, "oproj %s: %s\n", level_names[level], text);
  else
    fprintf(stderr, "oproj[%d] %s: %s\n", rank, level_names[level], text);
}
