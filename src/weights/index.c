/* index.c - owns which files of a whole checkpoint are opened.
 *
 * With model.safetensors.index.json only the files that it lists for WO_A, WO_B or their scales are
 * opened: a user may keep no others.  Each of these must be there and hold what is listed for it.
 * Without an index every *.safetensors file is opened.  From an opened file all of our tensors
 * count, listed or not, so that a second copy never goes unnoticed. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "weights/json.h"
#include "weights/weights.h"

enum { MAX_INDEX_BYTES = 256 << 20 };

typedef struct name_list {
  char **names;
  size_t count, room;
} name_list;

static void list_free(name_list *list) {
  for (size_t i = 0; i < list->count; i++) free(list->names[i]);
  free(list->names);
}

static oproj_status list_add(name_list *list, const char *name) {
  if (list->count == list->room) {
    size_t room = list->room ? 2 * list->room : 16;
    char **names = realloc(list->names, room * sizeof *names);
    REQUIRE(names, OPROJ_ERR_NOMEM, "no memory for %zu file names", room);
    list->names = names;
    list->room = room;
  }
  char *copy = strdup(name);
  REQUIRE(copy, OPROJ_ERR_NOMEM, "no memory for file name %s", name);
  list->names[list->count++] = copy;
  return OPROJ_OK;
}

static int by_text(const void *a, const void *b) {
  return strcmp(*(char *const *)a, *(char *const *)b);
}

static void list_sort_unique(name_list *list) {
  size_t kept = 0;
  if (list->count > 1) qsort(list->names, list->count, sizeof *list->names, by_text);
  for (size_t i = 0; i < list->count; i++)
    if (kept > 0 && strcmp(list->names[kept - 1], list->names[i]) == 0)
      free(list->names[i]);
    else
      list->names[kept++] = list->names[i];
  list->count = kept;
}

static bool is_plain(const char *name) {
  return name[0] != '\0' && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && !strchr(name, '/');
}

/* The files that the index names for our tensors. */
static oproj_status list_indexed(const char *path, json_t *map, name_list *out) {
  const char *tensor;
  json_t *value;
  json_object_foreach(map, tensor, value) {
    oproj_weights_name name;
    const char *file = json_string_value(value);
    REQUIRE(file && is_plain(file), OPROJ_ERR_IO,
            "%s: weight_map.%s is \"%s\"; it must be the plain name of a file in this folder", path,
            tensor, file ? file : "no text");
    if (oproj_weights_name_parse(tensor, &name)) TRY(list_add(out, file));
  }
  return OPROJ_OK;
}

static oproj_status list_folder(const char *dir, name_list *out) {
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
      status = list_add(out, entry->d_name);
  }
  closedir(folder);
  if (status == OPROJ_OK && out->count == 0)
    status = oproj_fail(OPROJ_ERR_IO, "%s: holds no *.safetensors file", dir);
  return status;
}

static oproj_status open_files(oproj_checkpoint *checkpoint, const name_list *list) {
  checkpoint->files = calloc(list->count + 1, sizeof *checkpoint->files);
  REQUIRE(checkpoint->files, OPROJ_ERR_NOMEM, "%s: no memory for %zu files", checkpoint->dir,
          list->count);
  for (size_t i = 0; i < list->count; i++) {
    char *path = oproj_weights_join(checkpoint->dir, list->names[i]);
    REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", checkpoint->dir);
    oproj_status status = oproj_tensors_open(&checkpoint->files[i], path);
    free(path);
    TRY(status);
    checkpoint->file_count++;
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

/* What the index lists must be where it says; `list` is in the order of checkpoint->files. */
static oproj_status check_listed(const oproj_checkpoint *checkpoint, const char *path, json_t *map,
                                 const name_list *list) {
  const char *tensor;
  json_t *value;
  json_object_foreach(map, tensor, value) {
    oproj_weights_name name;
    if (!oproj_weights_name_parse(tensor, &name)) continue;
    const char *file = json_string_value(value);
    char **found = bsearch(&file, list->names, list->count, sizeof *list->names, by_text);
    bool held = found && oproj_tensors_find(checkpoint->files[found - list->names], tensor);
    REQUIRE(held || is_needless(checkpoint, &name), OPROJ_ERR_IO,
            "%s: tensor %s is listed for %s, which does not hold it", path, tensor, file);
  }
  return OPROJ_OK;
}

static oproj_status open_indexed(oproj_checkpoint *checkpoint, const char *path) {
  char *text = NULL;
  size_t bytes;
  json_t *root = NULL;
  const json_t *map;
  name_list list = {0};
  oproj_status status;
  TRY_GOTO(oproj_weights_read_text(path, MAX_INDEX_BYTES, &text, &bytes), status, out);
  TRY_GOTO(oproj_weights_json_parse(path, text, bytes, &root), status, out);
  TRY_GOTO(oproj_weights_json_object(root, path, "weight_map", true, &map), status, out);
  TRY_GOTO(list_indexed(path, json_object_get(root, "weight_map"), &list), status, out);
  list_sort_unique(&list);
  TRY_GOTO(open_files(checkpoint, &list), status, out);
  TRY_GOTO(add_tensors(checkpoint), status, out);
  TRY_GOTO(check_listed(checkpoint, path, json_object_get(root, "weight_map"), &list), status, out);
out:
  list_free(&list);
  json_decref(root);
  free(text);
  return status;
}

static oproj_status open_all(oproj_checkpoint *checkpoint) {
  name_list list = {0};
  oproj_status status = list_folder(checkpoint->dir, &list);
  list_sort_unique(&list); /* an order that does not depend on the file system */
  if (status == OPROJ_OK) status = open_files(checkpoint, &list);
  if (status == OPROJ_OK) status = add_tensors(checkpoint);
  list_free(&list);
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
