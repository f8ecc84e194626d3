/* json_text.h - texts of the machine's, paths and names, as JSON. */
#ifndef OPROJ_JOB_JSON_TEXT_H
#define OPROJ_JOB_JSON_TEXT_H

#include <jansson.h>

/* A text; where it is not UTF-8, bytes from 128 on are written out as \xHH. */
json_t *job_json_text(const char *text);

#endif /* OPROJ_JOB_JSON_TEXT_H */
