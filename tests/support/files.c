/* files.c - temporary folders and hand-made files. */
#include "files.h"

#include <check.h>
#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *files_make_dir(void) {
  const char *parent = getenv("TMPDIR");
  char *dir;
  ck_assert_int_gt(asprintf(&dir, "%s/oproj-test-XXXXXX", parent ? parent : "/tmp"), 0);
  ck_assert_msg(mkdtemp(dir) != NULL, "no temporary folder %s", dir);
  return dir;
}

static void remove_tree(const char *dir) {
  DIR *folder = opendir(dir);
  if (!folder) return;
  struct dirent *entry;
  while ((entry = readdir(folder))) {
    if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
    char *path;
    struct stat facts;
    ck_assert_int_gt(asprintf(&path, "%s/%s", dir, entry->d_name), 0);
    if (lstat(path, &facts) == 0 && S_ISDIR(facts.st_mode)) remove_tree(path);
    remove(path);
    free(path);
  }
  closedir(folder);
}

void files_remove(char *dir) {
  remove_tree(dir);
  rmdir(dir);
  free(dir);
}

const char *files_path(const char *dir, const char *name) {
  static char buffers[4][4096];
  static int next;
  char *out = buffers[next++ % 4];
  ck_assert_int_lt(snprintf(out, sizeof buffers[0], "%s/%s", dir, name), sizeof buffers[0]);
  return out;
}

int files_exists(const char *dir, const char *name) {
  return access(files_path(dir, name), F_OK) == 0;
}

int files_count(const char *dir) {
  DIR *folder = opendir(dir);
  ck_assert_ptr_nonnull(folder);
  int count = -2;
  while (readdir(folder)) count++;
  closedir(folder);
  return count;
}

void files_write(const char *dir, const char *name, const void *data, size_t bytes) {
  FILE *file = fopen(files_path(dir, name), "wb");
  ck_assert_msg(file != NULL, "cannot create %s/%s", dir, name);
  ck_assert_uint_eq(bytes ? fwrite(data, 1, bytes, file) : 0, bytes);
  ck_assert_int_eq(fclose(file), 0);
}

void files_write_text(const char *dir, const char *name, const char *text) {
  files_write(dir, name, text, strlen(text));
}

char *files_read(const char *dir, const char *name, size_t *bytes) {
  FILE *file = fopen(files_path(dir, name), "rb");
  ck_assert_msg(file != NULL, "cannot open %s/%s", dir, name);
  ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
  size_t size = (size_t)ftell(file);
  rewind(file);
  char *data = malloc(size + 1);
  ck_assert_ptr_nonnull(data);
  ck_assert_uint_eq(fread(data, 1, size, file), size);
  data[size] = '\0';
  fclose(file);
  if (bytes) *bytes = size;
  return data;
}

void files_flip(const char *dir, const char *name, long offset) {
  size_t bytes;
  char *data = files_read(dir, name, &bytes);
  data[offset < 0 ? (long)bytes + offset : offset] ^= 4;
  files_write(dir, name, data, bytes);
  free(data);
}

void files_replace(const char *dir, const char *name, const char *from, const char *to) {
  size_t bytes;
  char *text = files_read(dir, name, &bytes);
  char *at = strstr(text, from), *changed;
  ck_assert_msg(at != NULL, "%s/%s does not hold %s", dir, name, from);
  ck_assert_int_gt(asprintf(&changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)),
                   0);
  files_write_text(dir, name, changed);
  free(changed);
  free(text);
}

void files_write_raw_tensors(const char *dir, const char *name, const char *header,
                             const void *data, size_t bytes) {
  FILE *file = fopen(files_path(dir, name), "wb");
  ck_assert_msg(file != NULL, "cannot create %s/%s", dir, name);
  for (int i = 0; i < 8; i++) fputc((int)(strlen(header) >> 8 * i & 255), file);
  fputs(header, file);
  ck_assert_uint_eq(bytes ? fwrite(data, 1, bytes, file) : 0, bytes);
  ck_assert_int_eq(fclose(file), 0);
}

static int64_t bytes_of(const files_tensor *tensor) {
  int64_t element = strcmp(tensor->dtype, "BF16") == 0                                       ? 2
                    : strcmp(tensor->dtype, "F32") == 0 || strcmp(tensor->dtype, "I32") == 0 ? 4
                                                                                             : 1;
  return tensor->rows * tensor->cols * element;
}

void files_write_tensors(const char *dir, const char *name, const files_tensor *tensors, int count,
                         int pad) {
  char *header, *data;
  size_t header_bytes, data_bytes;
  FILE *text = open_memstream(&header, &header_bytes);
  FILE *body = open_memstream(&data, &data_bytes);
  int64_t offset = 0;
  fputc('{', text);
  for (int i = 0; i < count; i++) {
    int64_t bytes = bytes_of(&tensors[i]);
    fprintf(text,
            "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%" PRId64 ",%" PRId64
            "],\"data_offsets\":[%" PRId64 ",%" PRId64 "]}",
            i ? "," : "", tensors[i].name, tensors[i].dtype, tensors[i].rows, tensors[i].cols,
            offset, offset + bytes);
    fwrite(tensors[i].data, 1, (size_t)bytes, body);
    offset += bytes;
  }
  fprintf(text, "}%*s", pad, "");
  fclose(text);
  fclose(body);
  files_write_raw_tensors(dir, name, header, data, data_bytes);
  free(header);
  free(data);
}
