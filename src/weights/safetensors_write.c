/* safetensors_write.c - owns the writing side of include/oproj/safetensors.h.
 *
 * The header is written first, from the list of tensors; data follows as it comes.  Until it is
 * complete the file has no name (or, where the file system cannot do that, a temporary one), so
 * that no reader ever sees half of one, and a killed writer leaves nothing. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/error.h"
#include "weights/json.h"
#include "weights/safetensors.h"

enum { LENGTH_BYTES = 8, HEADER_ALIGNMENT = 8, MAX_LINKS = 40 };

struct oproj_tensors_writer {
  char *path, *temporary;
  int descriptor; /* -1 until the file exists */
  bool named;     /* the file has its temporary name */
  json_t *header;
  size_t header_bytes;
  int64_t written, total; /* bytes of data */
};

/* ---- the file to replace ------------------------------------------------------------------- */

/* path's folder, in malloc'ed memory. */
static char *folder_of(const char *path) {
  const char *slash = strrchr(path, '/');
  if (!slash) return strdup(".");
  return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

/* Replaces *path, a symbolic link, by what it names. */
static oproj_status follow(char **path) {
  char link[4096], *folder = NULL, *next = NULL;
  oproj_status status = OPROJ_OK;
  ssize_t length = readlink(*path, link, sizeof link - 1);
  REQUIRE(length >= 0, OPROJ_ERR_IO, "%s: cannot be followed: %s", *path, strerror(errno));
  link[length] = '\0';
  folder = link[0] == '/' ? NULL : folder_of(*path);
  int made = folder ? asprintf(&next, "%s/%s", folder, link) : asprintf(&next, "%s", link);
  REQUIRE_GOTO(made >= 0, status, out, OPROJ_ERR_NOMEM, "%s: no memory to follow it", *path);
  free(*path);
  *path = next;
out:
  free(folder);
  return status;
}

static oproj_status follow_all(char **path) {
  struct stat facts;
  for (int links = 0; lstat(*path, &facts) == 0; links++) {
    REQUIRE(S_ISREG(facts.st_mode) || S_ISLNK(facts.st_mode), OPROJ_ERR_IO,
            "%s: is not a regular file and will not be replaced", *path);
    if (S_ISREG(facts.st_mode)) return OPROJ_OK;
    REQUIRE(links < MAX_LINKS, OPROJ_ERR_IO, "%s: too many symbolic links", *path);
    TRY(follow(path));
  }
  REQUIRE(errno == ENOENT, OPROJ_ERR_IO, "%s: cannot be written: %s", *path, strerror(errno));
  REQUIRE((*path)[strlen(*path) - 1] != '/', OPROJ_ERR_IO, "%s: names a folder, not a file", *path);
  return OPROJ_OK;
}

oproj_status oproj_tensors_target(const char *path, char **out) {
  REQUIRE(out && path && *path, OPROJ_ERR_INVALID, "the name of the file to write is empty");
  char *folder = NULL, *real = strdup(path);
  oproj_status status = OPROJ_OK;
  REQUIRE_GOTO(real, status, out, OPROJ_ERR_NOMEM, "%s: no memory for its name", path);
  TRY_GOTO(follow_all(&real), status, out);
  folder = folder_of(real);
  REQUIRE_GOTO(folder, status, out, OPROJ_ERR_NOMEM, "%s: no memory for its name", path);
  /* Creating and renaming both change the folder, not the file. */
  REQUIRE_GOTO(access(folder, W_OK | X_OK) == 0, status, out, OPROJ_ERR_IO,
               "%s: cannot be written: %s", real, strerror(errno));
  *out = real;
  real = NULL;
out:
  free(folder);
  free(real);
  return status;
}

/* ---- writing ------------------------------------------------------------------------------- */

static oproj_status write_all(const oproj_tensors_writer *writer, const void *data, size_t bytes,
                              int64_t at) {
  const char *from = data;
  while (bytes > 0) {
    ssize_t done = pwrite(writer->descriptor, from, bytes, (off_t)at);
    if (done < 0 && errno == EINTR) continue;
    REQUIRE(done > 0, OPROJ_ERR_IO, "%s: writing %zu bytes at %" PRId64 " failed: %s",
            writer->temporary, bytes, at, done < 0 ? strerror(errno) : "no progress");
    from += done;
    at += done;
    bytes -= (size_t)done;
  }
  return OPROJ_OK;
}

/* One entry of the header, and the running end of the data. */
static oproj_status add_tensor(oproj_tensors_writer *writer, const oproj_tensor *tensor) {
  const char *path = writer->path, *name = tensor->name;
  REQUIRE(name && strcmp(name, "__metadata__") != 0 && !json_object_get(writer->header, name),
          OPROJ_ERR_INVALID, "%s: tensor name %s is missing, reserved or given twice", path,
          name ? name : "NULL");
  REQUIRE(tensor->dtype && oproj_weights_dtype_bits(tensor->dtype) > 0, OPROJ_ERR_INVALID,
          "%s: tensor %s: dtype %s is unknown", path, name, tensor->dtype ? tensor->dtype : "NULL");
  REQUIRE(tensor->dimensions >= 0 && tensor->dimensions <= OPROJ_TENSOR_MAX_DIMENSIONS,
          OPROJ_ERR_INVALID, "%s: tensor %s: %d dimensions; at most %d are written", path, name,
          tensor->dimensions, OPROJ_TENSOR_MAX_DIMENSIONS);
  for (int32_t i = 0; i < tensor->dimensions; i++)
    REQUIRE(tensor->shape[i] >= 0, OPROJ_ERR_INVALID,
            "%s: tensor %s: shape[%d] is %" PRId64 "; it must not be negative", path, name, i,
            tensor->shape[i]);
  int64_t bytes, end;
  REQUIRE(
      oproj_weights_tensor_bytes(tensor, &bytes) && oproj_base_add_i64(writer->total, bytes, &end),
      OPROJ_ERR_INVALID, "%s: tensor %s: dtype and shape give no whole number of bytes", path,
      name);
  json_t *shape = json_array();
  for (int32_t i = 0; i < tensor->dimensions; i++)
    json_array_append_new(shape, json_integer(tensor->shape[i]));
  json_t *entry = json_pack("{s:s, s:o, s:[I,I]}", "dtype", tensor->dtype, "shape", shape,
                            "data_offsets", (json_int_t)writer->total, (json_int_t)end);
  REQUIRE(json_object_set_new(writer->header, name, entry) == 0, OPROJ_ERR_INVALID,
          "%s: tensor %s: no memory, or its name is not UTF-8", path, name);
  writer->total = end;
  return OPROJ_OK;
}

/* Length and header, padded with spaces so that the data begins at a multiple of eight. */
static oproj_status write_header(oproj_tensors_writer *writer) {
  char *text = json_dumps(writer->header, JSON_COMPACT);
  REQUIRE(text, OPROJ_ERR_NOMEM, "%s: no memory for its header", writer->path);
  size_t bytes = strlen(text);
  size_t padded = (bytes + HEADER_ALIGNMENT - 1) / HEADER_ALIGNMENT * HEADER_ALIGNMENT;
  char *block = malloc(LENGTH_BYTES + padded);
  oproj_status status;
  REQUIRE_GOTO(block, status, out, OPROJ_ERR_NOMEM, "%s: no memory for its header", writer->path);
  for (int i = 0; i < LENGTH_BYTES; i++) block[i] = (char)((uint64_t)padded >> 8 * i & 255);
  memcpy(block + LENGTH_BYTES, text, bytes);
  memset(block + LENGTH_BYTES + bytes, ' ', padded - bytes);
  status = write_all(writer, block, LENGTH_BYTES + padded, 0);
  writer->header_bytes = LENGTH_BYTES + padded;
out:
  free(block);
  free(text);
  return status;
}

/* Without a name where that works: it needs the file system, and /proc to give it one later. */
static oproj_status create_file(oproj_tensors_writer *writer) {
  char *folder = folder_of(writer->path);
  REQUIRE(folder, OPROJ_ERR_NOMEM, "%s: no memory for its name", writer->path);
  if (access("/proc/self/fd", X_OK) == 0)
    writer->descriptor = open(folder, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
  free(folder);
  if (writer->descriptor >= 0) return OPROJ_OK;
  writer->descriptor = open(writer->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  REQUIRE(writer->descriptor >= 0, OPROJ_ERR_IO, "%s: cannot be created: %s", writer->temporary,
          strerror(errno));
  writer->named = true;
  return OPROJ_OK;
}

/* A name to rename from: linking cannot replace a former file. */
static oproj_status name_file(oproj_tensors_writer *writer) {
  if (writer->named) return OPROJ_OK;
  char nameless[64];
  snprintf(nameless, sizeof nameless, "/proc/self/fd/%d", writer->descriptor);
  unlink(writer->temporary); /* of a killed process that had this number */
  REQUIRE(linkat(AT_FDCWD, nameless, AT_FDCWD, writer->temporary, AT_SYMLINK_FOLLOW) == 0,
          OPROJ_ERR_IO, "%s: cannot be created: %s", writer->temporary, strerror(errno));
  writer->named = true;
  return OPROJ_OK;
}

static oproj_status begin(oproj_tensors_writer *writer, const oproj_tensor *tensors, int32_t count,
                          const oproj_tensors_text *texts, int32_t text_count) {
  writer->header = json_object();
  REQUIRE(writer->header, OPROJ_ERR_NOMEM, "%s: no memory for its header", writer->path);
  if (text_count > 0) {
    json_t *metadata = json_object();
    for (int32_t i = 0; i < text_count; i++)
      json_object_set_new(metadata, texts[i].key, json_string(texts[i].value));
    bool complete = metadata && json_object_size(metadata) == (size_t)text_count;
    int set = json_object_set_new(writer->header, "__metadata__", metadata);
    REQUIRE(complete && set == 0, OPROJ_ERR_INVALID,
            "%s: __metadata__ must be distinct keys and texts in UTF-8", writer->path);
  }
  for (int32_t i = 0; i < count; i++) TRY(add_tensor(writer, &tensors[i]));
  REQUIRE(asprintf(&writer->temporary, "%s.tmp-%ld", writer->path, (long)getpid()) >= 0,
          OPROJ_ERR_NOMEM, "%s: no memory for its name", writer->path);
  TRY(create_file(writer));
  return write_header(writer);
}

oproj_status oproj_tensors_create(oproj_tensors_writer **out, const char *path,
                                  const oproj_tensor *tensors, int32_t count,
                                  const oproj_tensors_text *texts, int32_t text_count) {
  REQUIRE(out && path, OPROJ_ERR_INVALID, "oproj_tensors_create: out and path must not be NULL");
  *out = NULL;
  oproj_tensors_writer *writer = calloc(1, sizeof *writer);
  REQUIRE(writer, OPROJ_ERR_NOMEM, "%s: no memory to create it", path);
  writer->descriptor = -1;
  oproj_status status = oproj_tensors_target(path, &writer->path);
  if (status == OPROJ_OK) status = begin(writer, tensors, count, texts, text_count);
  if (status == OPROJ_OK)
    *out = writer;
  else
    oproj_tensors_abandon(writer);
  return status;
}

oproj_status oproj_tensors_write(oproj_tensors_writer *writer, const void *data, int64_t bytes) {
  REQUIRE(bytes >= 0 && bytes <= writer->total - writer->written, OPROJ_ERR_INVALID,
          "%s: %" PRId64 " bytes after %" PRId64 "; its tensors have %" PRId64, writer->path, bytes,
          writer->written, writer->total);
  TRY(write_all(writer, data, (size_t)bytes, (int64_t)writer->header_bytes + writer->written));
  writer->written += bytes;
  return OPROJ_OK;
}

oproj_status oproj_tensors_rewrite_text(oproj_tensors_writer *writer, const char *key,
                                        const char *value) {
  json_t *metadata = json_object_get(writer->header, "__metadata__");
  const char *former = json_string_value(json_object_get(metadata, key));
  REQUIRE(former && strlen(former) == strlen(value), OPROJ_ERR_INVALID,
          "%s: __metadata__.%s can only be replaced by a text of its length", writer->path, key);
  size_t bytes = writer->header_bytes;
  REQUIRE(json_object_set_new(metadata, key, json_string(value)) == 0, OPROJ_ERR_INVALID,
          "%s: __metadata__.%s: no memory, or not UTF-8", writer->path, key);
  TRY(write_header(writer));
  /* Only a text with characters that JSON escapes can change the header's length. */
  REQUIRE(writer->header_bytes == bytes, OPROJ_ERR_INVALID,
          "%s: __metadata__.%s: the new text takes another length in JSON", writer->path, key);
  return OPROJ_OK;
}

oproj_status oproj_tensors_finish(oproj_tensors_writer *writer) {
  oproj_status status = OPROJ_OK;
  REQUIRE_GOTO(writer->written == writer->total, status, out, OPROJ_ERR_INVALID,
               "%s: %" PRId64 " bytes were written; its tensors have %" PRId64, writer->path,
               writer->written, writer->total);
  REQUIRE_GOTO(fsync(writer->descriptor) == 0, status, out, OPROJ_ERR_IO, "%s: flushing failed: %s",
               writer->temporary, strerror(errno));
  TRY_GOTO(name_file(writer), status, out);
  REQUIRE_GOTO(rename(writer->temporary, writer->path) == 0, status, out, OPROJ_ERR_IO,
               "%s: cannot be renamed to %s: %s", writer->temporary, writer->path, strerror(errno));
  /* Nothing is left under the temporary name for abandon to remove. */
  close(writer->descriptor);
  writer->descriptor = -1;
out:
  oproj_tensors_abandon(writer);
  return status;
}

void oproj_tensors_abandon(oproj_tensors_writer *writer) {
  if (!writer) return;
  if (writer->descriptor >= 0) {
    close(writer->descriptor);
    if (writer->named) unlink(writer->temporary);
  }
  json_decref(writer->header);
  free(writer->temporary);
  free(writer->path);
  free(writer);
}
