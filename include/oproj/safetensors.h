/* oproj/safetensors.h - safetensors files, read and written as streams.
 *
 * A file is an 8-byte little-endian length, that many bytes of JSON
 *   {"__metadata__": {key: text}, name: {"dtype": .., "shape": [..], "data_offsets": [begin, end]}}
 * and the tensors' bytes.  The reader holds a file to the format: every byte belongs to exactly one
 * tensor, and a tensor's bytes are what its dtype and shape ask for; a dtype that it does not know
 * passes, since nobody may want that tensor.  Data may begin at any byte:
 * no alignment is assumed.  Nothing is mapped; reads are pread, safe from several threads at
 * once. */
#ifndef OPROJ_SAFETENSORS_H
#define OPROJ_SAFETENSORS_H

#include "oproj.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OPROJ_TENSOR_MAX_DIMENSIONS = 8 };

/* One tensor: what a header says of it, or what a writer is asked for. */
typedef struct oproj_tensor {
  const char *name;   /* UTF-8 */
  const char *dtype;  /* "BF16", "F8_E4M3", "F8_E8M0", "F32", "I64", ...: the format's words */
  int32_t dimensions; /* 0 (a scalar) .. OPROJ_TENSOR_MAX_DIMENSIONS */
  int64_t shape[OPROJ_TENSOR_MAX_DIMENSIONS];
  int64_t bytes;  /* all elements; a writer computes it itself */
  int64_t offset; /* of the first byte in the file; a writer computes it itself */
} oproj_tensor;

/* ---- reading ------------------------------------------------------------------------------- */

typedef struct oproj_tensors_file oproj_tensors_file;

/* Opens a file and checks its whole header.  ERR_IO, naming the file and the tensor or field: not
 * readable, shorter than its header says, a header above 32 MiB or malformed, a duplicate name,
 * tensors that overlap or leave bytes between or behind them unused. */
OPROJ_API oproj_status oproj_tensors_open(oproj_tensors_file **out, const char *path);
OPROJ_API void oproj_tensors_close(oproj_tensors_file *file); /* NULL is allowed */

OPROJ_API const char *oproj_tensors_path(const oproj_tensors_file *file);

/* Tensors by number, in order of name.  Both live as long as the file is open. */
OPROJ_API int32_t oproj_tensors_count(const oproj_tensors_file *file);
OPROJ_API const oproj_tensor *oproj_tensors_at(const oproj_tensors_file *file, int32_t index);

/* The tensor of that name, or NULL. */
OPROJ_API const oproj_tensor *oproj_tensors_find(const oproj_tensors_file *file, const char *name);

/* An entry of __metadata__, or NULL. */
OPROJ_API const char *oproj_tensors_metadata(const oproj_tensors_file *file, const char *key);

/* Bytes [begin, begin+bytes) of a tensor of this file, into out.  ERR_INVALID: not inside it.
 * ERR_IO: the read failed, or the file has become shorter. */
OPROJ_API oproj_status oproj_tensors_read(const oproj_tensors_file *file,
                                          const oproj_tensor *tensor, int64_t begin, int64_t bytes,
                                          void *out);

/* ---- writing ------------------------------------------------------------------------------- */

typedef struct oproj_tensors_writer oproj_tensors_writer;

/* Text that goes into __metadata__. */
typedef struct oproj_tensors_text {
  const char *key, *value;
} oproj_tensors_text;

/* The file that writing to `path` creates or replaces, in malloc'ed memory: `path` itself, or what
 * it names as a symbolic link.  ERR_IO: it is there and no regular file, or its folder is not there
 * or not writable.  For callers that write other files by the same rule. */
OPROJ_API oproj_status oproj_tensors_target(const char *path, char **out);

/* Begins a file of these tensors, laid out in the order given, beside the target of `path`,
 * which must be one for oproj_tensors_target; it has no name (where the file system cannot do that,
 * a temporary one) until it is finished.  Names must be distinct and dtypes
 * known (ERR_INVALID).  Nothing is borrowed after the call. */
OPROJ_API oproj_status oproj_tensors_create(oproj_tensors_writer **out, const char *path,
                                            const oproj_tensor *tensors, int32_t count,
                                            const oproj_tensors_text *texts, int32_t text_count);

/* Appends bytes: all tensors' data, one after the other.  ERR_INVALID: more than was announced. */
OPROJ_API oproj_status oproj_tensors_write(oproj_tensors_writer *writer, const void *data,
                                           int64_t bytes);

/* Changes a text given to create to one of the same length, for what is known only at the end. */
OPROJ_API oproj_status oproj_tensors_rewrite_text(oproj_tensors_writer *writer, const char *key,
                                                  const char *value);

/* Flushes to the disk and gives the file its name, replacing a former file; frees the writer, on
 * failure too, and then leaves nothing behind.  ERR_INVALID: bytes are missing. */
OPROJ_API oproj_status oproj_tensors_finish(oproj_tensors_writer *writer);

/* Gives up: removes the file and frees the writer.  NULL is allowed. */
OPROJ_API void oproj_tensors_abandon(oproj_tensors_writer *writer);

#ifdef __cplusplus
}
#endif
#endif /* OPROJ_SAFETENSORS_H */
