/* json.h - JSON files and their fields, with errors that name the file and the field.
 *
 * `where` is what a sentence begins with: the file, and the object inside it if not the root.
 * Numbers are taken as written: 1.0 is no integer, "1" no number. */
#ifndef OPROJ_WEIGHTS_JSON_H
#define OPROJ_WEIGHTS_JSON_H

#include <jansson.h>
#include <stdbool.h>

#include "base/error.h"

/* Reads a whole file of at most max_bytes; *out ends in an extra NUL and is freed by the caller. */
oproj_status oproj_weights_read_text(const char *path, size_t max_bytes, char **out, size_t *bytes);

/* Parses text that must be one object without duplicate keys; *out is a new reference. */
oproj_status oproj_weights_json_parse(const char *where, const char *text, size_t bytes,
                                      json_t **out);

/* A field that must be there, of the type and in the range [min, max].  ERR_IO when it is not. */
oproj_status oproj_weights_json_i64(const json_t *object, const char *where, const char *key,
                                    int64_t min, int64_t max, int64_t *out);
oproj_status oproj_weights_json_i32(const json_t *object, const char *where, const char *key,
                                    int32_t min, int32_t max, int32_t *out);
/* A finite number, integer or not. */
oproj_status oproj_weights_json_double(const json_t *object, const char *where, const char *key,
                                       double min, double max, double *out);
/* The string lives as long as the object. */
oproj_status oproj_weights_json_string(const json_t *object, const char *where, const char *key,
                                       const char **out);
/* A nested object or array; *out is borrowed.  With `required` false an absent or null one gives
 * NULL. */
oproj_status oproj_weights_json_object(const json_t *object, const char *where, const char *key,
                                       bool required, const json_t **out);
oproj_status oproj_weights_json_array(const json_t *object, const char *where, const char *key,
                                      bool required, const json_t **out);

#endif /* OPROJ_WEIGHTS_JSON_H */
