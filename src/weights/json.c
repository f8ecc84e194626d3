/* json.c - owns how JSON text becomes checked values. */
#include "weights/json.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

oproj_status oproj_weights_read_text(const char *path, size_t max_bytes, char **out,
                                     size_t *bytes) {
  char *text = NULL;
  oproj_status status = OPROJ_OK;
  int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a fifo is refused, not waited for */
  REQUIRE(file >= 0, OPROJ_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
  struct stat facts;
  REQUIRE_GOTO(fstat(file, &facts) == 0, status, out, OPROJ_ERR_IO, "%s: cannot be examined: %s",
               path, strerror(errno));
  REQUIRE_GOTO(S_ISREG(facts.st_mode), status, out, OPROJ_ERR_IO, "%s: is not a regular file",
               path);
  REQUIRE_GOTO((uintmax_t)facts.st_size <= max_bytes, status, out, OPROJ_ERR_IO,
               "%s: has %jd bytes; at most %zu are read", path, (intmax_t)facts.st_size, max_bytes);
  size_t size = (size_t)facts.st_size, done = 0;
  text = malloc(size + 1);
  REQUIRE_GOTO(text, status, out, OPROJ_ERR_NOMEM, "%s: no memory for %zu bytes", path, size);
  while (done < size) {
    ssize_t got = read(file, text + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    REQUIRE_GOTO(got >= 0, status, out, OPROJ_ERR_IO, "%s: read failed: %s", path, strerror(errno));
    if (got == 0) break;
    done += (size_t)got;
  }
  text[done] = '\0';
  *bytes = done;
  *out = text;
  text = NULL;
out:
  free(text);
  close(file);
  return status;
}

/* Three characters of text may take 250 bytes once parsed, so what takes memory is counted first:
 * commas, lists and objects.  A header of 10^5 tensors has 10^6 of them. */
enum { MAX_ITEMS = 2 << 20 };

static size_t count_items(const char *text, size_t bytes) {
  size_t count = 0;
  bool quoted = false;
  for (size_t i = 0; i < bytes; i++) {
    if (text[i] == '"')
      quoted = !quoted;
    else if (quoted)
      i += text[i] == '\\';
    else
      count += text[i] == ',' || text[i] == '[' || text[i] == '{';
  }
  return count;
}

oproj_status oproj_weights_json_parse(const char *where, const char *text, size_t bytes,
                                      json_t **out) {
  json_error_t error;
  size_t items = count_items(text, bytes);
  REQUIRE(items <= MAX_ITEMS, OPROJ_ERR_IO, "%s: JSON of %zu items; at most %d are read", where,
          items, MAX_ITEMS);
  json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
  REQUIRE(root, OPROJ_ERR_IO, "%s: not valid JSON at line %d, column %d: %s", where, error.line,
          error.column, error.text);
  if (!json_is_object(root)) {
    json_decref(root);
    return oproj_fail(OPROJ_ERR_IO, "%s: must hold one JSON object", where);
  }
  *out = root;
  return OPROJ_OK;
}

/* The field, or the sentence that it is missing. */
static oproj_status find(const json_t *object, const char *where, const char *key,
                         const json_t **out) {
  *out = json_object_get(object, key);
  REQUIRE(*out, OPROJ_ERR_IO, "%s: field %s is missing", where, key);
  return OPROJ_OK;
}

oproj_status oproj_weights_json_i64(const json_t *object, const char *where, const char *key,
                                    int64_t min, int64_t max, int64_t *out) {
  const json_t *field;
  TRY(find(object, where, key, &field));
  REQUIRE(json_is_integer(field), OPROJ_ERR_IO, "%s: %s is not an integer", where, key);
  int64_t value = json_integer_value(field);
  REQUIRE(value >= min && value <= max, OPROJ_ERR_IO,
          "%s: %s is %" PRId64 "; it must be in [%" PRId64 ", %" PRId64 "]", where, key, value, min,
          max);
  *out = value;
  return OPROJ_OK;
}

oproj_status oproj_weights_json_i32(const json_t *object, const char *where, const char *key,
                                    int32_t min, int32_t max, int32_t *out) {
  int64_t value;
  TRY(oproj_weights_json_i64(object, where, key, min, max, &value));
  *out = (int32_t)value;
  return OPROJ_OK;
}

oproj_status oproj_weights_json_double(const json_t *object, const char *where, const char *key,
                                       double min, double max, double *out) {
  const json_t *field;
  TRY(find(object, where, key, &field));
  REQUIRE(json_is_number(field), OPROJ_ERR_IO, "%s: %s is not a number", where, key);
  double value = json_number_value(field);
  REQUIRE(isfinite(value) && value >= min && value <= max, OPROJ_ERR_IO,
          "%s: %s is %g; it must be in [%g, %g]", where, key, value, min, max);
  *out = value;
  return OPROJ_OK;
}

oproj_status oproj_weights_json_string(const json_t *object, const char *where, const char *key,
                                       const char **out) {
  const json_t *field;
  TRY(find(object, where, key, &field));
  REQUIRE(json_is_string(field), OPROJ_ERR_IO, "%s: %s is not a string", where, key);
  *out = json_string_value(field);
  return OPROJ_OK;
}

static oproj_status find_container(const json_t *object, const char *where, const char *key,
                                   bool required, json_type type, const json_t **out) {
  const json_t *field = json_object_get(object, key);
  *out = NULL;
  if (!required && (!field || json_is_null(field))) return OPROJ_OK;
  REQUIRE(field, OPROJ_ERR_IO, "%s: field %s is missing", where, key);
  REQUIRE(json_typeof(field) == type, OPROJ_ERR_IO, "%s: %s is not %s", where, key,
          type == JSON_OBJECT ? "an object" : "a list");
  *out = field;
  return OPROJ_OK;
}

oproj_status oproj_weights_json_object(const json_t *object, const char *where, const char *key,
                                       bool required, const json_t **out) {
  return find_container(object, where, key, required, JSON_OBJECT, out);
}

oproj_status oproj_weights_json_array(const json_t *object, const char *where, const char *key,
                                      bool required, const json_t **out) {
  return find_container(object, where, key, required, JSON_ARRAY, out);
}
