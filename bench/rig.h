/* rig.h - what every case stands on: one rank's context, its layers, its inputs and outputs.
 *
 * All memory is sized once, for the largest token count.  Call i of a run uses layer i modulo their
 * number and one of several inputs, so that neither comes from the cache by accident. */
#ifndef OPROJ_BENCH_RIG_H
#define OPROJ_BENCH_RIG_H

#include "args.h"
#include "data.h"
#include "device.h"
#include "job/job.h"

extern const char *const rig_model_names[]; /* ends with NULL; v4-pro comes first */

/* Which weights a case reads: these must not fit a cache. */
enum { RIG_WO_A = 1, RIG_WO_B = 2 };

enum { RIG_ROPE_ROWS = 8192, RIG_LAYERS_LEAST = 4 };
#define RIG_COLD_BYTES 600e6 /* all layers together are at least this large */

typedef struct bench_rig {
  const bench_args *args;
  job_state *job;
  bench_device *device; /* NULL: the host */
  oproj_ctx *ctx;
  oproj_dims dims; /* after --share, before mpirun's ranks */
  int32_t max_tokens;
  bool reduces; /* calls end in the sum over ranks */

  /* This rank's share. */
  int32_t groups, heads, z_cols, group_cols;

  bench_data *data;
  int32_t layer_count;
  oproj_layer **layers;

  /* On the device. */
  uint16_t *attn_out; /* bf16, room for rig_inputs(max_tokens) inputs */
  int64_t attn_elements;
  int64_t *positions; /* [max_tokens] */
  float *cos_sin;     /* [RIG_ROPE_ROWS, rope_dim] */
  uint16_t *z;        /* bf16 [max_tokens, z_cols] */
  uint16_t *y;        /* bf16 [max_tokens, hidden] */
} bench_rig;

/* COLLECTIVE.  Chooses the backend and makes the context, with `dims` or, where that is NULL, the
 * dims of the model and share that args ask for.  A zeroed rig may be closed. */
oproj_status rig_open(bench_rig *rig, const bench_args *args, job_state *job,
                      const oproj_dims *dims, bool reduces);
void rig_close(bench_rig *rig);

/* Of a context on the rig's device for its token counts. */
oproj_config rig_config(const bench_rig *rig, oproj_reduce reduce);

/* Whether calls only enqueue on the device's stream: not those whose sum goes through the host. */
bool rig_enqueues(const bench_rig *rig);

/* COLLECTIVE.  Makes as many layers as `touches` (RIG_WO_A | RIG_WO_B) asks for. */
oproj_status rig_make_layers(bench_rig *rig, int touches);
oproj_status rig_make_inputs(bench_rig *rig);  /* attn_out, positions, cos_sin */
oproj_status rig_make_outputs(bench_rig *rig); /* z with random values, y */

/* The weights of layer `index`, in host memory; borrowed. */
void rig_matrices(const bench_rig *rig, int32_t index, oproj_matrix *wo_a, oproj_matrix *wo_b);

oproj_layer *rig_layer(const bench_rig *rig, int32_t call);
oproj_io rig_io(const bench_rig *rig, int32_t tokens, int32_t call);

/* A device buffer with random bf16 values. */
oproj_status rig_random_buffer(bench_rig *rig, uint64_t seed, int64_t count, uint16_t **out);

/* Overwrites device memory with 0xFF: NaN as bf16 and as e4m3, so that nothing stale can pass. */
oproj_status rig_poison(bench_rig *rig, void *buffer, size_t bytes);

/* Bytes of one matrix with its f32 scales. */
double rig_matrix_bytes(int64_t rows, int64_t cols, int32_t block);
double rig_wo_a_bytes(const bench_rig *rig);
double rig_wo_b_bytes(const bench_rig *rig);
double rig_input_bytes(const bench_rig *rig, int32_t tokens);

/* What each rank must send to others for the sum, by whichever way; 0 where nothing goes over
 * links. */
double rig_link_bytes(const bench_rig *rig, int32_t tokens);

#endif /* OPROJ_BENCH_RIG_H */
