/* safetensors.c - owns the reading side of include/oproj/safetensors.h: the header's rules, and
 * positioned reads.  A header is hostile input: every number is checked before it is used. */
#include "oproj/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/error.h"
#include "weights/json.h"
#include "weights/safetensors.h"
#include "weights/source.h"

enum { LENGTH_BYTES = 8, MAX_HEADER_BYTES = 32 << 20, MAX_NAME_BYTES = 512, MAX_DTYPE_BYTES = 32 };
static const size_t max_read_bytes = (size_t)1 << 30; /* one pread moves at most 2 GB */

/* Some dtypes are smaller than a byte; a tensor as a whole is not. */
static const struct {
  const char *name;
  int bits;
} dtypes[] = {
    {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"BOOL", 8},    {"U8", 8},
    {"I8", 8},   {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"U16", 16},
    {"I16", 16}, {"F16", 16},    {"BF16", 16},   {"U32", 32},    {"I32", 32},
    {"F32", 32}, {"U64", 64},    {"I64", 64},    {"F64", 64},    {"C64", 64},
};

struct oproj_tensors_file {
  char *path;
  int descriptor;
  int64_t data_begin, file_bytes;
  json_t *metadata; /* NULL: none */
  char *words;      /* of the tensors: their names and dtypes */
  oproj_tensor *tensors;
  int32_t count;
};

int oproj_weights_dtype_bits(const char *dtype) {
  for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++)
    if (strcmp(dtypes[i].name, dtype) == 0) return dtypes[i].bits;
  return 0;
}

bool oproj_weights_tensor_bytes(const oproj_tensor *tensor, int64_t *out) {
  int64_t bits = oproj_weights_dtype_bits(tensor->dtype);
  for (int32_t i = 0; i < tensor->dimensions; i++)
    if (tensor->shape[i] == 0) {
      *out = 0;
      return true;
    }
  for (int32_t i = 0; i < tensor->dimensions; i++)
    if (!oproj_base_mul_i64(bits, tensor->shape[i], &bits)) return false;
  *out = bits / 8;
  return bits % 8 == 0;
}

static oproj_status read_at(const char *path, int descriptor, int64_t offset, int64_t bytes,
                            void *out) {
  char *to = out;
  while (bytes > 0) {
    size_t wanted = (uint64_t)bytes < max_read_bytes ? (size_t)bytes : max_read_bytes;
    ssize_t got = pread(descriptor, to, wanted, (off_t)offset);
    if (got < 0 && errno == EINTR) continue;
    REQUIRE(got >= 0, OPROJ_ERR_IO, "%s: reading %" PRId64 " bytes at %" PRId64 " failed: %s", path,
            bytes, offset, strerror(errno));
    REQUIRE(got > 0, OPROJ_ERR_IO, "%s: ends at byte %" PRId64 "; %" PRId64 " more are needed",
            path, offset, bytes);
    to += got;
    offset += got;
    bytes -= got;
  }
  return OPROJ_OK;
}

static oproj_status parse_shape(const char *path, const json_t *shape, oproj_tensor *out) {
  size_t dimensions = json_array_size(shape);
  REQUIRE(json_is_array(shape), OPROJ_ERR_IO, "%s: tensor %s: shape is missing or no list", path,
          out->name);
  REQUIRE(dimensions <= OPROJ_TENSOR_MAX_DIMENSIONS, OPROJ_ERR_IO,
          "%s: tensor %s: shape has %zu dimensions; at most %d are read", path, out->name,
          dimensions, OPROJ_TENSOR_MAX_DIMENSIONS);
  for (size_t i = 0; i < dimensions; i++) {
    const json_t *extent = json_array_get(shape, i);
    REQUIRE(json_is_integer(extent) && json_integer_value(extent) >= 0, OPROJ_ERR_IO,
            "%s: tensor %s: shape[%zu] is not an integer >= 0", path, out->name, i);
    out->shape[i] = json_integer_value(extent);
  }
  out->dimensions = (int32_t)dimensions;
  return OPROJ_OK;
}

/* The span of a tensor is what its dtype and shape ask for. */
static oproj_status check_bytes(const char *path, const oproj_tensor *tensor) {
  int64_t needed;
  REQUIRE(oproj_weights_tensor_bytes(tensor, &needed), OPROJ_ERR_IO,
          "%s: tensor %s: dtype and shape give no whole number of bytes", path, tensor->name);
  REQUIRE(tensor->bytes == needed, OPROJ_ERR_IO,
          "%s: tensor %s: data_offsets span %" PRId64 " bytes; dtype and shape need %" PRId64, path,
          tensor->name, tensor->bytes, needed);
  return OPROJ_OK;
}

static oproj_status parse_tensor(const oproj_tensors_file *file, const char *name,
                                 const json_t *entry, oproj_tensor *out) {
  const char *path = file->path;
  memset(out, 0, sizeof *out);
  out->name = name;
  REQUIRE(strlen(name) <= MAX_NAME_BYTES, OPROJ_ERR_IO,
          "%s: a tensor's name has %zu bytes; at most %d are read", path, strlen(name),
          MAX_NAME_BYTES);
  REQUIRE(json_is_object(entry), OPROJ_ERR_IO, "%s: tensor %s is not an object", path, name);
  out->dtype = json_string_value(json_object_get(entry, "dtype"));
  REQUIRE(out->dtype, OPROJ_ERR_IO, "%s: tensor %s: dtype is missing or no string", path, name);
  REQUIRE(strlen(out->dtype) <= MAX_DTYPE_BYTES, OPROJ_ERR_IO,
          "%s: tensor %s: dtype has %zu bytes; at most %d are read", path, name, strlen(out->dtype),
          MAX_DTYPE_BYTES);
  TRY(parse_shape(path, json_object_get(entry, "shape"), out));
  const json_t *offsets = json_object_get(entry, "data_offsets");
  const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
  REQUIRE(json_array_size(offsets) == 2 && json_is_integer(first) && json_is_integer(last),
          OPROJ_ERR_IO, "%s: tensor %s: data_offsets is not a list of two integers", path, name);
  int64_t begin = json_integer_value(first), end = json_integer_value(last);
  int64_t data_bytes = file->file_bytes - file->data_begin;
  REQUIRE(begin >= 0 && begin <= end && end <= data_bytes, OPROJ_ERR_IO,
          "%s: tensor %s: data_offsets [%" PRId64 ", %" PRId64 "] are not inside the %" PRId64
          " bytes of data",
          path, name, begin, end, data_bytes);
  out->bytes = end - begin;
  if (oproj_weights_dtype_bits(out->dtype) > 0) TRY(check_bytes(path, out));
  out->offset = file->data_begin + begin;
  return OPROJ_OK;
}

static int by_name(const void *a, const void *b) {
  return strcmp(((const oproj_tensor *)a)->name, ((const oproj_tensor *)b)->name);
}

static int by_offset(const void *a, const void *b) {
  const oproj_tensor *x = a, *y = b;
  if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
  return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* Every byte behind the header belongs to exactly one tensor.  Sorts by offset on the way. */
static oproj_status check_layout(const oproj_tensors_file *file) {
  int64_t expected = file->data_begin;
  if (file->count > 1) qsort(file->tensors, (size_t)file->count, sizeof(oproj_tensor), by_offset);
  for (int32_t i = 0; i < file->count; i++) {
    const oproj_tensor *tensor = &file->tensors[i];
    REQUIRE(tensor->offset >= expected, OPROJ_ERR_IO, "%s: tensors %s and %s overlap", file->path,
            file->tensors[i - 1].name, tensor->name);
    REQUIRE(tensor->offset == expected, OPROJ_ERR_IO,
            "%s: %" PRId64 " bytes before tensor %s belong to no tensor", file->path,
            tensor->offset - expected, tensor->name);
    expected += tensor->bytes;
  }
  REQUIRE(expected == file->file_bytes, OPROJ_ERR_IO,
          "%s: the tensors end at byte %" PRId64 "; the file has %" PRId64, file->path, expected,
          file->file_bytes);
  return OPROJ_OK;
}

static oproj_status check_metadata(const oproj_tensors_file *file, json_t *metadata) {
  const char *key;
  json_t *value;
  REQUIRE(json_is_object(metadata), OPROJ_ERR_IO, "%s: __metadata__ is not an object", file->path);
  json_object_foreach(metadata, key, value) REQUIRE(
      json_is_string(value), OPROJ_ERR_IO, "%s: __metadata__.%s is not a string", file->path, key);
  return OPROJ_OK;
}

/* Copies what the tensors' words point to: parsed text takes several times the memory. */
static oproj_status keep_words(oproj_tensors_file *file) {
  size_t bytes = 1;
  for (int32_t i = 0; i < file->count; i++)
    bytes += strlen(file->tensors[i].name) + strlen(file->tensors[i].dtype) + 2;
  char *to = file->words = malloc(bytes);
  REQUIRE(to, OPROJ_ERR_NOMEM, "%s: no memory for the names of %d tensors", file->path,
          file->count);
  for (int32_t i = 0; i < file->count; i++) {
    const char **words[] = {&file->tensors[i].name, &file->tensors[i].dtype};
    for (int k = 0; k < 2; k++) {
      size_t length = strlen(*words[k]) + 1;
      *words[k] = memcpy(to, *words[k], length);
      to += length;
    }
  }
  return OPROJ_OK;
}

static oproj_status parse_header(oproj_tensors_file *file, json_t *header) {
  const char *name;
  json_t *entry;
  file->tensors = calloc(json_object_size(header) + 1, sizeof *file->tensors);
  REQUIRE(file->tensors, OPROJ_ERR_NOMEM, "%s: no memory for %zu tensors", file->path,
          json_object_size(header));
  json_object_foreach(header, name, entry) {
    if (strcmp(name, "__metadata__") == 0) {
      TRY(check_metadata(file, entry));
      file->metadata = json_incref(entry);
      continue;
    }
    TRY(parse_tensor(file, name, entry, &file->tensors[file->count]));
    file->count++;
  }
  TRY(check_layout(file));
  if (file->count > 1) qsort(file->tensors, (size_t)file->count, sizeof(oproj_tensor), by_name);
  return keep_words(file);
}

/* The header's length, from the first LENGTH_BYTES of the file. */
static oproj_status read_length(const oproj_tensors_file *file, const uint8_t *image,
                                int64_t *out) {
  const char *path = file->path;
  REQUIRE(file->file_bytes >= LENGTH_BYTES, OPROJ_ERR_IO,
          "%s: has %" PRId64 " bytes; a safetensors file has at least %d", path, file->file_bytes,
          LENGTH_BYTES);
  uint64_t length = 0;
  for (int i = LENGTH_BYTES - 1; i >= 0; i--) length = length << 8 | image[i];
  REQUIRE(length <= MAX_HEADER_BYTES, OPROJ_ERR_IO,
          "%s: header of %" PRIu64 " bytes; at most %d are read (is it a safetensors file?)", path,
          length, MAX_HEADER_BYTES);
  REQUIRE((int64_t)length <= file->file_bytes - LENGTH_BYTES, OPROJ_ERR_IO,
          "%s: header of %" PRIu64 " bytes in a file of %" PRId64, path, length, file->file_bytes);
  *out = (int64_t)length;
  return OPROJ_OK;
}

static oproj_status take_header(oproj_tensors_file *file, const void *text, int64_t bytes) {
  json_t *header = NULL;
  file->data_begin = LENGTH_BYTES + bytes;
  TRY(oproj_weights_json_parse(file->path, text, (size_t)bytes, &header));
  oproj_status status = parse_header(file, header);
  json_decref(header);
  return status;
}

static oproj_status load_header(oproj_tensors_file *file) {
  struct stat facts;
  const char *path = file->path;
  uint8_t image[LENGTH_BYTES] = {0};
  int64_t length;
  REQUIRE(fstat(file->descriptor, &facts) == 0, OPROJ_ERR_IO, "%s: cannot be examined: %s", path,
          strerror(errno));
  REQUIRE(S_ISREG(facts.st_mode), OPROJ_ERR_IO, "%s: is not a regular file", path);
  file->file_bytes = facts.st_size;
  if (file->file_bytes >= LENGTH_BYTES)
    TRY(read_at(path, file->descriptor, 0, LENGTH_BYTES, image));
  TRY(read_length(file, image, &length));
  char *text = malloc((size_t)length + 1);
  REQUIRE(text, OPROJ_ERR_NOMEM, "%s: no memory for a header of %" PRId64 " bytes", path, length);
  oproj_status status = read_at(path, file->descriptor, LENGTH_BYTES, length, text);
  if (status == OPROJ_OK) status = take_header(file, text, length);
  free(text);
  return status;
}

static oproj_status create(oproj_tensors_file **out, const char *path) {
  *out = NULL;
  oproj_tensors_file *file = calloc(1, sizeof *file);
  if (file) file->path = strdup(path);
  if (!file || !file->path) {
    free(file);
    return oproj_fail(OPROJ_ERR_NOMEM, "%s: no memory to open it", path);
  }
  file->descriptor = -1;
  *out = file;
  return OPROJ_OK;
}

static oproj_status open_file(oproj_tensors_file *file) {
  /* A fifo would block here for ever; load_header refuses it. */
  file->descriptor = open(file->path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  REQUIRE(file->descriptor >= 0, OPROJ_ERR_IO, "%s: cannot be opened: %s", file->path,
          strerror(errno));
  return load_header(file);
}

oproj_status oproj_tensors_open(oproj_tensors_file **out, const char *path) {
  REQUIRE(out && path, OPROJ_ERR_INVALID, "oproj_tensors_open: out and path must not be NULL");
  TRY(create(out, path));
  oproj_status status = open_file(*out);
  if (status != OPROJ_OK) {
    oproj_tensors_close(*out);
    *out = NULL;
  }
  return status;
}

oproj_status oproj_weights_tensors_check(const char *path, const uint8_t *image, size_t bytes) {
  oproj_tensors_file *file;
  int64_t length;
  TRY(create(&file, path));
  file->file_bytes = (int64_t)bytes;
  oproj_status status = read_length(file, image, &length);
  if (status == OPROJ_OK) status = take_header(file, image + LENGTH_BYTES, length);
  oproj_tensors_close(file);
  return status;
}

void oproj_tensors_close(oproj_tensors_file *file) {
  if (!file) return;
  free(file->tensors);
  free(file->words);
  json_decref(file->metadata);
  if (file->descriptor >= 0) close(file->descriptor);
  free(file->path);
  free(file);
}

const char *oproj_tensors_path(const oproj_tensors_file *file) {
  return file->path;
}

int32_t oproj_tensors_count(const oproj_tensors_file *file) {
  return file->count;
}

const oproj_tensor *oproj_tensors_at(const oproj_tensors_file *file, int32_t index) {
  return index >= 0 && index < file->count ? &file->tensors[index] : NULL;
}

const oproj_tensor *oproj_tensors_find(const oproj_tensors_file *file, const char *name) {
  oproj_tensor wanted = {.name = name};
  if (file->count == 0) return NULL;
  return bsearch(&wanted, file->tensors, (size_t)file->count, sizeof wanted, by_name);
}

const char *oproj_tensors_metadata(const oproj_tensors_file *file, const char *key) {
  return json_string_value(json_object_get(file->metadata, key));
}

oproj_status oproj_tensors_read(const oproj_tensors_file *file, const oproj_tensor *tensor,
                                int64_t begin, int64_t bytes, void *out) {
  REQUIRE(begin >= 0 && bytes >= 0 && begin <= tensor->bytes && bytes <= tensor->bytes - begin,
          OPROJ_ERR_INVALID,
          "%s: tensor %s has %" PRId64 " bytes; %" PRId64 " at %" PRId64 " were asked for",
          file->path, tensor->name, tensor->bytes, bytes, begin);
  return read_at(file->path, file->descriptor, tensor->offset + begin, bytes, out);
}

int64_t oproj_weights_header_bytes(const oproj_tensors_file *file) {
  return file->data_begin;
}

oproj_status oproj_weights_check_size(const oproj_tensors_file *file) {
  struct stat facts;
  REQUIRE(fstat(file->descriptor, &facts) == 0, OPROJ_ERR_IO, "%s: cannot be examined: %s",
          file->path, strerror(errno));
  REQUIRE(facts.st_size == file->file_bytes, OPROJ_ERR_IO,
          "%s: has %" PRId64 " bytes now and had %" PRId64 " when it was opened", file->path,
          (int64_t)facts.st_size, file->file_bytes);
  return OPROJ_OK;
}
