/* stage.c - owns folders that appear complete or not at all: they are filled under the temporary
 * name dir.tmp-PID, flushed, and renamed. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "weights/weights.h"

struct oproj_weights_stage {
  char *dir, *temporary;
  bool made; /* the temporary folder exists */
};

static oproj_status fsync_dir(const char *dir) {
  int folder = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  REQUIRE(folder >= 0, OPROJ_ERR_IO, "%s: cannot be opened: %s", dir, strerror(errno));
  /* Some file systems know no fsync of folders and say EINVAL. */
  int failed = fsync(folder) != 0 && errno != EINVAL;
  int reason = errno;
  close(folder);
  REQUIRE(!failed, OPROJ_ERR_IO, "%s: flushing failed: %s", dir, strerror(reason));
  return OPROJ_OK;
}

static oproj_status begin(oproj_weights_stage *stage, const char *dir) {
  stage->dir = strdup(dir);
  REQUIRE(stage->dir, OPROJ_ERR_NOMEM, "%s: no memory for its name", dir);
  size_t length = strlen(stage->dir);
  while (length > 1 && stage->dir[length - 1] == '/') stage->dir[--length] = '\0';
  REQUIRE(length > 0, OPROJ_ERR_INVALID, "the name of the folder to make is empty");
  struct stat facts;
  REQUIRE(lstat(stage->dir, &facts) != 0, OPROJ_ERR_INVALID,
          "%s exists; a new folder's name is wanted", stage->dir);
  REQUIRE(asprintf(&stage->temporary, "%s.tmp-%ld", stage->dir, (long)getpid()) >= 0,
          OPROJ_ERR_NOMEM, "%s: no memory for its name", dir);
  REQUIRE(mkdir(stage->temporary, 0777) == 0, OPROJ_ERR_IO, "%s: cannot be made: %s",
          stage->temporary, strerror(errno));
  stage->made = true;
  return OPROJ_OK;
}

oproj_status oproj_weights_stage_begin(oproj_weights_stage **out, const char *dir) {
  oproj_weights_stage *stage = calloc(1, sizeof *stage);
  REQUIRE(stage, OPROJ_ERR_NOMEM, "%s: no memory to make it", dir);
  oproj_status status = begin(stage, dir);
  if (status == OPROJ_OK)
    *out = stage;
  else
    oproj_weights_stage_abandon(stage);
  return status;
}

const char *oproj_weights_stage_dir(const oproj_weights_stage *stage) {
  return stage->temporary;
}

oproj_status oproj_weights_stage_write(const oproj_weights_stage *stage, const char *name,
                                       const char *text, size_t bytes) {
  oproj_status status = OPROJ_OK;
  char *path = oproj_weights_join(stage->temporary, name);
  REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", stage->temporary);
  FILE *file = fopen(path, "we");
  REQUIRE_GOTO(file, status, out, OPROJ_ERR_IO, "%s: cannot be created: %s", path, strerror(errno));
  bool written =
      fwrite(text, 1, bytes, file) == bytes && fflush(file) == 0 && fsync(fileno(file)) == 0;
  int reason = errno;
  written &= fclose(file) == 0;
  REQUIRE_GOTO(written, status, out, OPROJ_ERR_IO, "%s: writing failed: %s", path,
               strerror(reason));
out:
  free(path);
  return status;
}

/* Gives the folder its name only if that is still free. */
static oproj_status rename_new(const char *from, const char *to) {
  int failed = renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE);
  /* Network file systems may not know the flag; a plain rename still refuses a folder with
   * files. */
  if (failed && (errno == EINVAL || errno == ENOSYS)) failed = rename(from, to);
  REQUIRE(!failed, errno == EEXIST || errno == ENOTEMPTY ? OPROJ_ERR_INVALID : OPROJ_ERR_IO,
          "%s: cannot be renamed to %s: %s", from, to, strerror(errno));
  return OPROJ_OK;
}

/* The parent's entry is what makes the new name last. */
static oproj_status fsync_parent(const char *dir) {
  const char *slash = strrchr(dir, '/');
  if (!slash) return fsync_dir(".");
  if (slash == dir) return fsync_dir("/");
  char *parent = strndup(dir, (size_t)(slash - dir));
  REQUIRE(parent, OPROJ_ERR_NOMEM, "%s: no memory for its parent's name", dir);
  oproj_status status = fsync_dir(parent);
  free(parent);
  return status;
}

oproj_status oproj_weights_stage_commit(oproj_weights_stage *stage) {
  oproj_status status;
  TRY_GOTO(fsync_dir(stage->temporary), status, out);
  TRY_GOTO(rename_new(stage->temporary, stage->dir), status, out);
  stage->made = false;
  TRY_GOTO(fsync_parent(stage->dir), status, out);
out:
  oproj_weights_stage_abandon(stage);
  return status;
}

/* Whatever fails here, there is an earlier error to report, and nobody to report this one to. */
static void remove_folder(const char *dir) {
  DIR *folder = opendir(dir);
  if (folder) {
    const struct dirent *entry;
    while ((entry = readdir(folder))) unlinkat(dirfd(folder), entry->d_name, 0);
    closedir(folder);
  }
  rmdir(dir);
}

void oproj_weights_stage_abandon(oproj_weights_stage *stage) {
  if (!stage) return;
  if (stage->made) remove_folder(stage->temporary);
  free(stage->temporary);
  free(stage->dir);
  free(stage);
}
