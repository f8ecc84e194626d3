/* split_open.c - owns reading a split set: the manifest oproj-split.json, the identity that ties it
 * to its rank files, and the checksum of every tensor read.
 *
 *   {"format": "oproj-split", "version": 1, "size": n, "split": "even" | "uneven",
 *    "identity": 16 hex digits,
 *    "tensors": [{"name": .., "dtype": .., "shape": [rows, cols]}, ..],     whole, not per rank
 *    "ranks": [{"file": .., "checksums": {name: 16 hex digits of XXH3-64, ..}}, ..]}
 *
 * A node may hold only the files of its own ranks: a missing file is an error when it is read. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/error.h"
#include "weights/json.h"
#include "weights/safetensors.h"
#include "weights/weights.h"

enum { MAX_MANIFEST_BYTES = 48 << 20, HEX_DIGITS = 16 };

struct oproj_weights_split {
  int32_t size;
  oproj_split kind;
  uint64_t identity;
  json_t *manifest; /* owns the names */
  oproj_tensor *tensors;
  int32_t count;
  uint64_t *checksums; /* [size, count] */
};

/* ---- identity ------------------------------------------------------------------------------ */

struct oproj_weights_identity {
  XXH3_state_t *state;
};

static void add_i64(oproj_weights_identity *identity, int64_t value) {
  uint8_t bytes[8]; /* little-endian on every machine */
  for (int i = 0; i < 8; i++) bytes[i] = (uint8_t)((uint64_t)value >> 8 * i);
  XXH3_64bits_update(identity->state, bytes, sizeof bytes);
}

static void add_text(oproj_weights_identity *identity, const char *text, size_t bytes) {
  add_i64(identity, (int64_t)bytes);
  XXH3_64bits_update(identity->state, text, bytes);
}

oproj_status oproj_weights_identity_begin(oproj_weights_identity **out,
                                          const oproj_weights_config *config, oproj_split split,
                                          int32_t size) {
  oproj_weights_identity *identity = calloc(1, sizeof *identity);
  if (identity) identity->state = XXH3_createState();
  if (!identity || !identity->state) {
    free(identity);
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a checksum");
  }
  XXH3_64bits_reset(identity->state);
  add_text(identity, config->text, config->text_bytes);
  add_i64(identity, split);
  add_i64(identity, size);
  *out = identity;
  return OPROJ_OK;
}

void oproj_weights_identity_tensor(oproj_weights_identity *identity, const oproj_tensor *tensor) {
  add_text(identity, tensor->name, strlen(tensor->name));
  add_text(identity, tensor->dtype, strlen(tensor->dtype));
  for (int32_t i = 0; i < tensor->dimensions; i++) add_i64(identity, tensor->shape[i]);
}

void oproj_weights_identity_checksum(oproj_weights_identity *identity, uint64_t checksum) {
  add_i64(identity, (int64_t)checksum);
}

uint64_t oproj_weights_identity_value(const oproj_weights_identity *identity) {
  return XXH3_64bits_digest(identity->state);
}

void oproj_weights_identity_end(oproj_weights_identity *identity) {
  if (!identity) return;
  XXH3_freeState(identity->state);
  free(identity);
}

uint64_t oproj_weights_checksum(const void *data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

void oproj_weights_hex(uint64_t value, char out[17]) {
  snprintf(out, HEX_DIGITS + 1, "%016" PRIx64, value);
}

/* ---- manifest ------------------------------------------------------------------------------ */

static oproj_status parse_hex(const json_t *object, const char *where, const char *key,
                              uint64_t *out) {
  const char *text;
  TRY(oproj_weights_json_string(object, where, key, &text));
  REQUIRE(strlen(text) == HEX_DIGITS && strspn(text, "0123456789abcdef") == HEX_DIGITS,
          OPROJ_ERR_IO, "%s: %s is \"%s\"; %d hexadecimal digits are wanted", where, key, text,
          HEX_DIGITS);
  *out = strtoull(text, NULL, 16);
  return OPROJ_OK;
}

static oproj_status parse_head(oproj_weights_split *split, const char *path) {
  const char *format, *kind;
  int32_t version;
  TRY(oproj_weights_json_string(split->manifest, path, "format", &format));
  REQUIRE(strcmp(format, "oproj-split") == 0, OPROJ_ERR_IO,
          "%s: format is \"%s\"; \"oproj-split\" is wanted", path, format);
  TRY(oproj_weights_json_i32(split->manifest, path, "version", OPROJ_WEIGHTS_MANIFEST_VERSION,
                             OPROJ_WEIGHTS_MANIFEST_VERSION, &version));
  TRY(oproj_weights_json_i32(split->manifest, path, "size", 1, OPROJ_WEIGHTS_MAX_RANKS,
                             &split->size));
  TRY(oproj_weights_json_string(split->manifest, path, "split", &kind));
  REQUIRE(strcmp(kind, "even") == 0 || strcmp(kind, "uneven") == 0, OPROJ_ERR_IO,
          "%s: split is \"%s\"; \"even\" or \"uneven\" is wanted", path, kind);
  split->kind = strcmp(kind, "even") == 0 ? OPROJ_SPLIT_EVEN : OPROJ_SPLIT_UNEVEN;
  return parse_hex(split->manifest, path, "identity", &split->identity);
}

static oproj_status parse_tensor(const char *path, const json_t *entry, oproj_tensor *out) {
  const json_t *shape;
  TRY(oproj_weights_json_string(entry, path, "name", &out->name));
  TRY(oproj_weights_json_string(entry, path, "dtype", &out->dtype));
  TRY(oproj_weights_json_array(entry, path, "shape", true, &shape));
  const json_t *rows = json_array_get(shape, 0), *cols = json_array_get(shape, 1);
  out->dimensions = 2;
  out->shape[0] = json_integer_value(rows);
  out->shape[1] = json_integer_value(cols);
  REQUIRE(json_array_size(shape) == 2 && out->shape[0] > 0 && out->shape[1] > 0, OPROJ_ERR_IO,
          "%s: tensor %s: shape is not a list of two positive integers", path, out->name);
  REQUIRE(oproj_weights_dtype_bits(out->dtype) >= 8 && oproj_weights_tensor_bytes(out, &out->bytes),
          OPROJ_ERR_IO, "%s: tensor %s: dtype %s is unknown, or the shape too large", path,
          out->name, out->dtype);
  return OPROJ_OK;
}

static oproj_status parse_tensors(oproj_weights_split *split, const char *path) {
  const json_t *list;
  TRY(oproj_weights_json_array(split->manifest, path, "tensors", true, &list));
  size_t count = json_array_size(list);
  split->tensors = calloc(count + 1, sizeof *split->tensors);
  REQUIRE(split->tensors, OPROJ_ERR_NOMEM, "%s: no memory for %zu tensors", path, count);
  for (size_t i = 0; i < count; i++)
    TRY(parse_tensor(path, json_array_get(list, i), &split->tensors[i]));
  split->count = (int32_t)count;
  return OPROJ_OK;
}

/* The rank's entry; its file name is checked to be the one that split.c gives. */
static oproj_status find_rank(const oproj_weights_split *split, const char *path, int32_t rank,
                              const char **file, const json_t **checksums) {
  char expected[64];
  const json_t *ranks;
  TRY(oproj_weights_json_array(split->manifest, path, "ranks", true, &ranks));
  REQUIRE(json_array_size(ranks) == (size_t)split->size, OPROJ_ERR_IO,
          "%s: ranks has %zu entries; size is %d", path, json_array_size(ranks), split->size);
  const json_t *entry = json_array_get(ranks, (size_t)rank);
  TRY(oproj_weights_json_string(entry, path, "file", file));
  oproj_weights_rank_file(rank, split->size, expected);
  REQUIRE(strcmp(*file, expected) == 0, OPROJ_ERR_IO,
          "%s: the file of rank %d is \"%s\"; \"%s\" is wanted", path, rank, *file, expected);
  return oproj_weights_json_object(entry, path, "checksums", true, checksums);
}

static oproj_status parse_ranks(oproj_weights_split *split, const char *path) {
  split->checksums =
      calloc((size_t)split->size * (size_t)split->count + 1, sizeof *split->checksums);
  REQUIRE(split->checksums, OPROJ_ERR_NOMEM, "%s: no memory for its checksums", path);
  for (int32_t rank = 0; rank < split->size; rank++) {
    const char *file;
    const json_t *checksums;
    TRY(find_rank(split, path, rank, &file, &checksums));
    for (int32_t i = 0; i < split->count; i++)
      TRY(parse_hex(checksums, path, split->tensors[i].name,
                    &split->checksums[(int64_t)rank * split->count + i]));
  }
  return OPROJ_OK;
}

/* The manifest and config.json still are what was written together. */
static oproj_status check_identity(const oproj_weights_split *split,
                                   const oproj_weights_config *config, const char *path) {
  oproj_weights_identity *identity;
  TRY(oproj_weights_identity_begin(&identity, config, split->kind, split->size));
  for (int32_t i = 0; i < split->count; i++)
    oproj_weights_identity_tensor(identity, &split->tensors[i]);
  for (int64_t i = 0; i < (int64_t)split->size * split->count; i++)
    oproj_weights_identity_checksum(identity, split->checksums[i]);
  uint64_t found = oproj_weights_identity_value(identity);
  oproj_weights_identity_end(identity);
  REQUIRE(found == split->identity, OPROJ_ERR_IO,
          "%s: identity is %016" PRIx64 ", but config.json and this manifest give %016" PRIx64
          "; one of them was changed",
          path, split->identity, found);
  return OPROJ_OK;
}

static oproj_status parse_manifest(oproj_weights_split *split, const char *path,
                                   const oproj_weights_config *config) {
  oproj_shard shard;
  TRY(parse_head(split, path));
  oproj_status status = oproj_plan_shard(&config->model.dims, split->kind, split->size, 0, &shard);
  if (status != OPROJ_OK) return oproj_base_fail_in(status, "%s", path);
  TRY(parse_tensors(split, path));
  TRY(parse_ranks(split, path));
  return check_identity(split, config, path);
}

oproj_status oproj_weights_split_parse(const char *path, const char *text, size_t bytes,
                                       const oproj_weights_config *config,
                                       oproj_weights_split **out) {
  oproj_weights_split *split = calloc(1, sizeof *split);
  REQUIRE(split, OPROJ_ERR_NOMEM, "%s: no memory for it", path);
  oproj_status status = oproj_weights_json_parse(path, text, bytes, &split->manifest);
  if (status == OPROJ_OK) status = parse_manifest(split, path, config);
  if (status == OPROJ_OK)
    *out = split;
  else
    oproj_weights_split_free(split);
  return status;
}

static oproj_status read_manifest(oproj_checkpoint *checkpoint, const char *path) {
  char *text;
  size_t bytes;
  TRY(oproj_weights_read_text(path, MAX_MANIFEST_BYTES, &text, &bytes));
  oproj_status status =
      oproj_weights_split_parse(path, text, bytes, &checkpoint->config, &checkpoint->split);
  free(text);
  return status;
}

/* ---- rank files ---------------------------------------------------------------------------- */

/* A rank file belongs to this manifest and to this rank. */
static oproj_status check_file(const oproj_weights_split *split, const oproj_tensors_file *file,
                               int32_t rank) {
  char identity[17], number[16];
  const char *path = oproj_tensors_path(file);
  const char *found = oproj_tensors_metadata(file, OPROJ_WEIGHTS_IDENTITY_KEY);
  const char *found_rank = oproj_tensors_metadata(file, OPROJ_WEIGHTS_RANK_KEY);
  oproj_weights_hex(split->identity, identity);
  snprintf(number, sizeof number, "%d", rank);
  REQUIRE(found && strcmp(found, identity) == 0, OPROJ_ERR_IO,
          "%s: belongs to the split set %s; the manifest beside it is of %s", path,
          found ? found : "of no name", identity);
  REQUIRE(found_rank && strcmp(found_rank, number) == 0, OPROJ_ERR_IO,
          "%s: holds rank %s; rank %d is wanted", path, found_rank ? found_rank : "unknown", rank);
  return OPROJ_OK;
}

static oproj_status open_rank(oproj_checkpoint *checkpoint, int32_t rank) {
  char name[64];
  oproj_weights_rank_file(rank, checkpoint->split->size, name);
  char *path = oproj_weights_join(checkpoint->dir, name);
  REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", checkpoint->dir);
  oproj_status status = OPROJ_OK;
  if (access(path, F_OK) == 0) {
    status = oproj_tensors_open(&checkpoint->files[rank], path);
    if (status == OPROJ_OK) status = check_file(checkpoint->split, checkpoint->files[rank], rank);
  }
  free(path);
  return status;
}

oproj_status oproj_weights_split_open(oproj_checkpoint *checkpoint) {
  char *path = oproj_weights_join(checkpoint->dir, OPROJ_WEIGHTS_MANIFEST_FILE);
  REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", checkpoint->dir);
  oproj_status status = read_manifest(checkpoint, path);
  free(path);
  TRY(status);
  const oproj_weights_split *split = checkpoint->split;
  checkpoint->files = calloc((size_t)split->size, sizeof *checkpoint->files);
  REQUIRE(checkpoint->files, OPROJ_ERR_NOMEM, "%s: no memory for %d files", checkpoint->dir,
          split->size);
  checkpoint->file_count = split->size;
  for (int32_t rank = 0; rank < split->size; rank++) TRY(open_rank(checkpoint, rank));
  for (int32_t i = 0; i < split->count; i++)
    TRY(oproj_weights_add(checkpoint, &split->tensors[i], NULL));
  return OPROJ_OK;
}

void oproj_weights_split_free(oproj_weights_split *split) {
  if (!split) return;
  json_decref(split->manifest);
  free(split->tensors);
  free(split->checksums);
  free(split);
}

int32_t oproj_weights_split_size(const oproj_weights_split *split) {
  return split->size;
}

oproj_split oproj_weights_split_kind(const oproj_weights_split *split) {
  return split->kind;
}

uint64_t oproj_weights_split_identity(const oproj_weights_split *split) {
  return split->identity;
}

void oproj_weights_rank_file(int32_t rank, int32_t size, char out[64]) {
  snprintf(out, 64, "rank-%05d-of-%05d.safetensors", rank, size);
}

oproj_status oproj_weights_split_find(const oproj_checkpoint *checkpoint, int32_t rank,
                                      const oproj_tensor *tensor,
                                      const oproj_weights_region *region,
                                      oproj_weights_found *part) {
  const oproj_tensors_file *file = checkpoint->files[rank];
  char name[64];
  oproj_weights_rank_file(rank, checkpoint->split->size, name);
  REQUIRE(file, OPROJ_ERR_IO, "%s/%s: the file of rank %d is missing", checkpoint->dir, name, rank);
  const oproj_tensor *found = oproj_tensors_find(file, tensor->name);
  REQUIRE(found, OPROJ_ERR_IO, "%s/%s: tensor %s is missing", checkpoint->dir, name, tensor->name);
  int64_t rows = region->row_end - region->row_begin, cols = region->col_end - region->col_begin;
  REQUIRE(strcmp(found->dtype, tensor->dtype) == 0 && found->dimensions == 2 &&
              found->shape[0] == rows && found->shape[1] == cols,
          OPROJ_ERR_SHAPE,
          "%s/%s: tensor %s is %s [%" PRId64 ", %" PRId64 "]; %s [%" PRId64 ", %" PRId64
          "] is wanted",
          checkpoint->dir, name, tensor->name, found->dtype, found->shape[0], found->shape[1],
          tensor->dtype, rows, cols);
  *part = (oproj_weights_found){found, file};
  return OPROJ_OK;
}

/* The manifest's number of a tensor. */
static int32_t number_of(const oproj_weights_split *split, const char *name) {
  int32_t i = 0;
  while (i < split->count - 1 && strcmp(split->tensors[i].name, name) != 0) i++;
  return i;
}

oproj_status oproj_weights_split_verify(const oproj_checkpoint *checkpoint, int32_t rank,
                                        const oproj_tensor *part, const void *stored) {
  const oproj_weights_split *split = checkpoint->split;
  uint64_t found = oproj_weights_checksum(stored, (size_t)part->bytes);
  int64_t index = (int64_t)rank * split->count + number_of(split, part->name);
  uint64_t wanted = split->checksums[index];
  REQUIRE(found == wanted, OPROJ_ERR_IO,
          "%s: tensor %s has checksum %016" PRIx64 "; the manifest has %016" PRIx64,
          oproj_tensors_path(checkpoint->files[rank]), part->name, found, wanted);
  return OPROJ_OK;
}
