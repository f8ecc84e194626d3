/* cuda_run.h - a context with layers and batches, through the public API: the same on the
 * backends cuda and ref, each path forced in turn.
 *
 * Batches hold NaN wherever nothing may be read: behind each head, behind each token and in the
 * rows behind the last one.  y lies between guards of poison. */
#ifndef TESTS_GPU_CUDA_RUN_H
#define TESTS_GPU_CUDA_RUN_H

#include <cuda_runtime_api.h>

#include "support/data.h"
#include "support/expect.h"

#define CUDA_OK(call)                                                                            \
  do {                                                                                           \
    cudaError_t cuda_error_ = (call);                                                            \
    ck_assert_msg(cuda_error_ == cudaSuccess, "%s: %s", #call, cudaGetErrorString(cuda_error_)); \
  } while (0)

enum { RUN_RECIPES = 2, RUN_PATHS = 6, RUN_MOST_LAYERS = 2 };

/* Dimensions that every path takes, in blocks of 128 and of 32. */
extern const oproj_dims run_recipes[RUN_RECIPES];

/* The paths of one GPU, AUTO first, and the token counts that each serves of these dimensions. */
typedef struct run_path {
  oproj_path path;
  const char *name;
  int32_t least, most;
  int32_t block; /* the only one it serves, or 0 */
} run_path;

extern const run_path run_paths[RUN_PATHS];

/* Whether the current device has such a path at all: some are SM90's own. */
int run_has(oproj_path path);
int run_serves(const run_path *path, const oproj_dims *dims, int32_t tokens);

typedef struct run {
  oproj_comm *comm;
  oproj_ctx *ctx;
  oproj_layer *layers[RUN_MOST_LAYERS];
  int layer_count;
} run;

/* One layer for each of `data`, which have the same dimensions. */
run run_open(const char *backend, oproj_path path, int32_t max_tokens, const data_layer *data,
             int layers);
void run_close(run *r);

typedef struct batch {
  oproj_io io;
  void *attn_out, *positions, *cos_sin, *y_base;
  size_t y_count; /* elements */
} batch;

/* Tokens [first, first + tokens) of the data; `pad` elements of NaN behind each head and each
 * token, and 4 rows of NaN behind the last token. */
batch batch_open(const run *r, const data_layer *data, int32_t first, int32_t tokens, int32_t pad);
void batch_close(const run *r, batch *b);
/* Fewer or more of its tokens, up to those it was opened with. */
void batch_set_tokens(batch *b, const data_layer *data, int32_t tokens);

/* y of one call of layer `which` over poison: in host memory, to be freed; fails the test where a
 * guard changed. */
uint16_t *run_forward(const run *r, int which, const batch *b);

/* Makes every byte of the workspace 0xFF, a NaN in codes and scales alike; enqueued on `stream`, so
 * that a graph can capture it.  Backend cuda. */
void run_poison_workspace(const run *r, cudaStream_t stream);

#endif /* TESTS_GPU_CUDA_RUN_H */
