/* json_text.c - see json_text.h. */
#include "job/json_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

json_t *job_json_text(const char *text) {
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
