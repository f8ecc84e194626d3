/* index.c - owns which files of a whole checkpoint are opened.
 *
 * With model.safetensors.index.json only the files that it lists for WO_A, WO_B or their scales
 * are opened: a user may keep no others. Each of these must be there, hold what is listed for
 * it, and hold nothing of ours that is not listed. Without an index every *.safetensors file is
 * opened, and all of our tensors in them count, so that a second copy never goes unnoticed. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "weights/json.h"
#include "weights/safetensors.h"
#include "weights/weights.h"

/* Several times what the largest released checkpoints have; more would take seconds and hundreds of
 * megabytes on every rank. */
enum { MAX_INDEX_BYTES = 48 << 20, MAX_HEADERS_BYTES = 80 << 20 };

static oproj_status add(oproj_weights_index *index, const char *file) {
  if (index->count == index->room) {
    size_t room = index->room ? 2 * index->room : 16;
    char **files = realloc(index->files, room * sizeof *files);
    REQUIRE(files, OPROJ_ERR_NOMEM, "no memory for %zu file names", room);
    index->files = files;
    index->room = room;
  }
  char *copy = strdup(file);
  REQUIRE(copy, OPROJ_ERR_NOMEM, "no memory for file name %s", file);
  index->files[index->count++] = copy;
  return OPROJ_OK;
}

static int by_text(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

/* An order that does not depend on the file system, and each name once. */
static void sort(oproj_weights_index *index) {
  size_t kept = 0;
  if (index->count > 1) qsort(index->files, index->count, sizeof *index->files, by_text);
  for (size_t i = 0; i < index->count; i++)
    if (kept > 0 && strcmp(index->files[kept - 1], index->files[i]) == 0)
      free(index->files[i]);
    else
      index->files[kept++] = index->files[i];
  index->count = kept;
}

void oproj_weights_index_free(oproj_weights_index *index) {
  for (size_t i = 0; i < index->count; i++) free(index->files[i]);
  free(index->files);
  json_decref(index->root);
  *index = (oproj_weights_index){0};
}

static bool is_plain(const char *name) {
  return name[0] != '\0' && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strchr(name, '/');
}

static oproj_status read_map(const char *path, oproj_weights_index *index) {
  const json_t *map;
  const char *tensor;
  json_t *value;
  TRY(oproj_weights_json_object(index->root, path, "weight_map", true, &map));
  index->map = json_object_get(index->root, "weight_map");
  json_object_foreach(index->map, tensor, value) {
    oproj_weights_name name;
    const char *file = json_string_value(value);
    REQUIRE(file && is_plain(file), OPROJ_ERR_IO,
            "%s: weight_map.%s is \"%s\"; it must be the plain name of a file in this folder", path,
            tensor, file ? file : "no text");
    if (oproj_weights_name_parse(tensor, &name)) TRY(add(index, file));
  }
  sort(index);
  return OPROJ_OK;
}

oproj_status oproj_weights_index_parse(const char *path, const char *text, size_t bytes,
                                       oproj_weights_index *out) {
  *out = (oproj_weights_index){0};
  oproj_status status = oproj_weights_json_parse(path, text, bytes, &out->root);
  if (status == OPROJ_OK) status = read_map(path, out);
  if (status != OPROJ_OK) oproj_weights_index_free(out);
  return status;
}

static oproj_status list_folder(const char *dir, oproj_weights_index *out) {
  static const char ending[] = ".safetensors";
  const size_t ending_length = sizeof ending - 1;
  DIR *folder = opendir(dir);
  REQUIRE(folder, OPROJ_ERR_IO, "%s: cannot be listed: %s", dir, strerror(errno));
  oproj_status status = OPROJ_OK;
  const struct dirent *entry;
  while (status == OPROJ_OK && (entry = readdir(folder))) {
    size_t length = strlen(entry->d_name);
    if (entry->d_name[0] != '.' && length > ending_length &&
        strcmp(entry->d_name + length - ending_length, ending) == 0)
      status = add(out, entry->d_name);
  }
  closedir(folder);
  if (status == OPROJ_OK && out->count == 0)
    status = oproj_fail(OPROJ_ERR_IO, "%s: holds no *.safetensors file", dir);
  return status;
}

static oproj_status open_files(oproj_checkpoint *checkpoint, const oproj_weights_index *index) {
  int64_t headers = 0;
  checkpoint->files = calloc(index->count + 1, sizeof *checkpoint->files);
  REQUIRE(checkpoint->files, OPROJ_ERR_NOMEM, "%s: no memory for %zu files", checkpoint->dir,
          index->count);
  for (size_t i = 0; i < index->count; i++) {
    char *path = oproj_weights_join(checkpoint->dir, index->files[i]);
    REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", checkpoint->dir);
    oproj_status status = oproj_tensors_open(&checkpoint->files[i], path);
    free(path);
    TRY(status);
    headers += oproj_weights_header_bytes(checkpoint->files[i]);
    checkpoint->file_count++;
    REQUIRE(!oproj_tensors_metadata(checkpoint->files[i], OPROJ_WEIGHTS_RANK_KEY), OPROJ_ERR_IO,
            "%s: is one rank's part of a split checkpoint, whose manifest is missing",
            oproj_tensors_path(checkpoint->files[i]));
    REQUIRE(headers <= MAX_HEADERS_BYTES, OPROJ_ERR_IO,
            "%s: the headers of the first %zu files have %" PRId64
            " bytes together; at most %d are "
            "read",
            checkpoint->dir, i + 1, headers, MAX_HEADERS_BYTES);
  }
  return OPROJ_OK;
}

static oproj_status add_tensors(oproj_checkpoint *checkpoint) {
  for (int32_t i = 0; i < checkpoint->file_count; i++)
    for (int32_t t = 0; t < oproj_tensors_count(checkpoint->files[i]); t++)
      TRY(oproj_weights_add(checkpoint, oproj_tensors_at(checkpoint->files[i], t),
                            checkpoint->files[i]));
  return OPROJ_OK;
}

/* Whether a listed scale may be absent: some repacks of BF16 weights keep the index of the FP8
 * ones. */
static bool is_needless(const oproj_checkpoint *checkpoint, const oproj_weights_name *name) {
  const oproj_weights_slot *slots = oproj_weights_slot_of(checkpoint, name);
  const oproj_tensor *weight = slots ? slots[OPROJ_WEIGHTS_WEIGHT].first.tensor : NULL;
  return name->part == OPROJ_WEIGHTS_SCALE && weight && strcmp(weight->dtype, "BF16") == 0;
}

/* What the index lists must be where it says; index->files is in the order of checkpoint->files. */
static oproj_status check_listed(const oproj_checkpoint *checkpoint, const char *path,
                                 const oproj_weights_index *index) {
  const char *tensor;
  json_t *value;
  json_object_foreach(index->map, tensor, value) {
    oproj_weights_name name;
    if (!oproj_weights_name_parse(tensor, &name)) continue;
    const char *file = json_string_value(value);
    char **found = bsearch(&file, index->files, index->count, sizeof *index->files, by_text);
    bool held = found && oproj_tensors_find(checkpoint->files[found - index->files], tensor);
    REQUIRE(held || is_needless(checkpoint, &name), OPROJ_ERR_IO,
            "%s: tensor %s is listed for %s, which does not hold it", path, tensor, file);
  }
  return OPROJ_OK;
}

/* And what the files hold of ours must be listed: else it may be what is left of something
 * older. */
static oproj_status check_held(const oproj_checkpoint *checkpoint, const char *path,
                               const oproj_weights_index *index) {
  for (int32_t i = 0; i < checkpoint->file_count; i++)
    for (int32_t t = 0; t < oproj_tensors_count(checkpoint->files[i]); t++) {
      oproj_weights_name name;
      const char *tensor = oproj_tensors_at(checkpoint->files[i], t)->name;
      REQUIRE(!oproj_weights_name_parse(tensor, &name) || json_object_get(index->map, tensor),
              OPROJ_ERR_IO, "%s: does not list tensor %s, which %s holds", path, tensor,
              index->files[i]);
    }
  return OPROJ_OK;
}

static oproj_status open_indexed(oproj_checkpoint *checkpoint, const char *path) {
  char *text;
  size_t bytes;
  oproj_weights_index index;
  TRY(oproj_weights_read_text(path, MAX_INDEX_BYTES, &text, &bytes));
  oproj_status status = oproj_weights_index_parse(path, text, bytes, &index);
  free(text);
  TRY(status);
  TRY_GOTO(open_files(checkpoint, &index), status, out);
  TRY_GOTO(add_tensors(checkpoint), status, out);
  TRY_GOTO(check_listed(checkpoint, path, &index), status, out);
  TRY_GOTO(check_held(checkpoint, path, &index), status, out);
out:
  oproj_weights_index_free(&index);
  return status;
}

static oproj_status open_all(oproj_checkpoint *checkpoint) {
  oproj_weights_index folder = {0};
  oproj_status status = list_folder(checkpoint->dir, &folder);
  sort(&folder);
  if (status == OPROJ_OK) status = open_files(checkpoint, &folder);
  if (status == OPROJ_OK) status = add_tensors(checkpoint);
  oproj_weights_index_free(&folder);
  return status;
}

oproj_status oproj_weights_index_open(oproj_checkpoint *checkpoint) {
  char *path = oproj_weights_join(checkpoint->dir, OPROJ_WEIGHTS_INDEX_FILE);
  REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", checkpoint->dir);
  oproj_status status =
      access(path, F_OK) == 0 ? open_indexed(checkpoint, path) : open_all(checkpoint);
  free(path);
  return status;
}
