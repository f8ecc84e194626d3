/* error.c - this thread's last failure, and the words for each status. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { SENTENCE_BYTES = 1024 };

static _Thread_local char last_sentence[SENTENCE_BYTES];

unsigned oproj_version(void) {
  return OPROJ_VERSION_MAJOR * 10000u + OPROJ_VERSION_MINOR * 100u + OPROJ_VERSION_PATCH;
}

const char *oproj_status_string(oproj_status status) {
  switch (status) {
#define STATUS_CASE(name, value, text) \
  case OPROJ_##name:                   \
    return text;
    OPROJ_STATUS_MAP(STATUS_CASE)
#undef STATUS_CASE
  }
  return "unknown status";
}

const char *oproj_last_error(void) {
  return last_sentence;
}

oproj_status oproj_fail(oproj_status status, const char *format, ...) {
  /* Formatted aside first: an argument may be the last sentence itself. */
  char sentence[SENTENCE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  memcpy(last_sentence, sentence, sizeof sentence);
  return status;
}

oproj_status oproj_base_fail_in(oproj_status status, const char *format, ...) {
  char prefix[SENTENCE_BYTES];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(prefix, sizeof prefix, format, arguments);
  va_end(arguments);
  return oproj_fail(status, "%.511s: %.511s", prefix, last_sentence);
}
