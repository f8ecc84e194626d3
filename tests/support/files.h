/* files.h - what tests of file formats need: folders that vanish, and files made byte by byte,
 * without the library's own writer.  Everything here ends the test (ck_abort) when it fails. */
#ifndef TESTS_SUPPORT_FILES_H
#define TESTS_SUPPORT_FILES_H

#include <stddef.h>
#include <stdint.h>

/* A new empty folder under $TMPDIR (or /tmp).  files_remove deletes it with all it holds. */
char *files_make_dir(void);
void files_remove(char *dir);

/* dir/name, in one of a few static buffers: good until the fourth next call. */
const char *files_path(const char *dir, const char *name);

int files_exists(const char *dir, const char *name);
int files_count(const char *dir); /* entries besides . and .. */

void files_write(const char *dir, const char *name, const void *data, size_t bytes);
void files_write_text(const char *dir, const char *name, const char *text);

/* The whole file, with an extra NUL; freed by the caller. */
char *files_read(const char *dir, const char *name, size_t *bytes);

/* Turns over one bit of the file's byte at `offset` (negative: from the end). */
void files_flip(const char *dir, const char *name, long offset);

/* Replaces the first `from` in a text file, which must be there. */
void files_replace(const char *dir, const char *name, const char *from, const char *to);

/* A safetensors file: the header's length, the header, the data. */
void files_write_raw_tensors(const char *dir, const char *name, const char *header,
                             const void *data, size_t bytes);

/* A matrix for files_write_tensors. */
typedef struct files_tensor {
  const char *name, *dtype;
  int64_t rows, cols;
  const void *data; /* [rows, cols] elements of the dtype */
} files_tensor;

/* The same with a header made from the list (dtypes of 1, 2 and 4 bytes).  `pad` spaces lengthen
 * the header, so that data may begin at odd bytes. */
void files_write_tensors(const char *dir, const char *name, const files_tensor *tensors, int count,
                         int pad);

#endif /* TESTS_SUPPORT_FILES_H */
