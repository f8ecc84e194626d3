/* target.c - owns what may be written over: nothing that the same command reads. */
#include "target.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "oproj/safetensors.h"

static bool same_inode(const struct stat *a, const struct stat *b) {
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static bool ends_with(const char *text, const char *ending) {
  size_t length = strlen(text), tail = strlen(ending);
  return length >= tail && strcmp(text + length - tail, ending) == 0;
}

/* Whether one of the files that make a checkpoint is `file`: its JSON files and its tensors. */
static bool is_part_of(const char *dir, const struct stat *file) {
  DIR *folder = opendir(dir);
  if (!folder) return false; /* opening the checkpoint will say what is wrong with it */
  bool found = false;
  const struct dirent *entry;
  while (!found && (entry = readdir(folder))) {
    const char *name = entry->d_name;
    struct stat facts;
    found = (ends_with(name, ".safetensors") || ends_with(name, ".safetensors.index.json") ||
             strcmp(name, "config.json") == 0 || strcmp(name, "oproj-split.json") == 0) &&
            fstatat(dirfd(folder), name, &facts, 0) == 0 && same_inode(&facts, file);
  }
  closedir(folder);
  return found;
}

oproj_status target_check(const char *flag, const char *path, const char *input, const char *dir) {
  if (!path) return OPROJ_OK;
  char *real;
  struct stat target, other;
  oproj_status status = oproj_tensors_target(path, &real);
  if (status != OPROJ_OK) return status;
  if (stat(real, &target) == 0) {
    if (input && stat(input, &other) == 0 && same_inode(&target, &other))
      status = oproj_fail(OPROJ_ERR_INVALID, "%s %s is the file to read as --input", flag, path);
    else if (dir && is_part_of(dir, &target))
      status =
          oproj_fail(OPROJ_ERR_INVALID, "%s %s is a file of the checkpoint %s", flag, path, dir);
  }
  free(real);
  return status;
}

/* What tells a file that need not exist: its folder and the name in it. */
static bool place_of(const char *real, struct stat *folder, const char **name) {
  const char *slash = strrchr(real, '/');
  *name = slash ? slash + 1 : real;
  char *parent = slash ? strndup(real, (size_t)(*name - real)) : strdup(".");
  bool known = parent && stat(parent, folder) == 0;
  free(parent);
  return known;
}

int target_same(const char *a, const char *b) {
  char *real_a = NULL, *real_b = NULL;
  const char *name_a, *name_b;
  struct stat folder_a, folder_b;
  bool same = oproj_tensors_target(a, &real_a) == OPROJ_OK &&
              oproj_tensors_target(b, &real_b) == OPROJ_OK &&
              place_of(real_a, &folder_a, &name_a) && place_of(real_b, &folder_b, &name_b) &&
              same_inode(&folder_a, &folder_b) && strcmp(name_a, name_b) == 0;
  free(real_a);
  free(real_b);
  return same;
}
