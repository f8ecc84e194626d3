/* oproj/checkpoint.h - DeepSeek-V4-format checkpoints: open, look, load, split, make.
 *
 * A checkpoint is a folder with config.json and safetensors files (one, several, or several with
 * model.safetensors.index.json), or what oproj_checkpoint_split made of one.  Layers are numbered
 * 0 .. layers-1, then the draft layers `mtp.k` as layers + k. */
#ifndef OPROJ_CHECKPOINT_H
#define OPROJ_CHECKPOINT_H

#include "oproj.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct oproj_checkpoint oproj_checkpoint;

/* What config.json says, with the draft layers that the files hold. */
typedef struct oproj_model {
  char model_type[32]; /* "deepseek_v4" or "deepseek_v41" */
  oproj_dims dims;
  int32_t layers;       /* num_hidden_layers */
  int32_t draft_layers; /* mtp.0 .. the last found in the files; at most 64 */
  int64_t max_position; /* max_position_embeddings */
  oproj_rope plain;     /* layers without compression, and draft layers */
  oproj_rope compressed;
  int32_t exact; /* nonzero: made by oproj_checkpoint_synth with exact; inputs made the same
                           way, at position 0, keep every sum exact */
} oproj_model;

/* Reads config.json, the index and the headers of the files that hold WO_A, WO_B or their scales
 * (without an index: of every *.safetensors); no weights.  Refuses (ERR_IO, ERR_SHAPE) a header,
 * index or config that is malformed or contradicts itself, naming file and field;
 * ERR_UNSUPPORTED: an unknown model_type or rope type.  Of a split checkpoint the files of other
 * ranks may be absent: that is an error only when one of them is read. */
OPROJ_API oproj_status oproj_checkpoint_open(oproj_checkpoint **out, const char *dir);
OPROJ_API void oproj_checkpoint_close(oproj_checkpoint *checkpoint);

OPROJ_API const oproj_model *oproj_checkpoint_model(const oproj_checkpoint *checkpoint);

/* The number of ranks a split checkpoint was made for; 0 for a whole one. */
OPROJ_API int32_t oproj_checkpoint_split_size(const oproj_checkpoint *checkpoint);

/* How a split checkpoint's groups were dealt; OPROJ_SPLIT_EVEN for a whole one. */
OPROJ_API oproj_split oproj_checkpoint_split_kind(const oproj_checkpoint *checkpoint);

/* What tells one checkpoint from another, for ranks to compare: hosts may have other files at one
 * path.  Of a split checkpoint it covers config.json and, through the manifest's checksums, every
 * byte.  Of a whole one it covers the name, dtype, shape and place of every WO_A, WO_B and scale,
 * and 4 KB from the middle of each, which is what can be had without reading them: weights that
 * were trained on differ there, but a few bytes changed elsewhere do not show.  ERR_IO: unreadable.
 */
OPROJ_API oproj_status oproj_checkpoint_digest(const oproj_checkpoint *checkpoint, uint64_t *out);

typedef struct oproj_layer_info {
  char name[32]; /* "layers.7" or "mtp.0": how results are labelled */
  int32_t compress_ratio;
  int32_t compressed; /* nonzero: angles come from model.compressed, else from model.plain */
  oproj_dtype wo_a, wo_b;
  const char *wo_a_tensor, *wo_b_tensor;           /* full names in the files */
  const char *wo_a_scale_dtype, *wo_b_scale_dtype; /* "F8_E8M0", "U8", "F32" or "BF16"; "" for a
                                                      bf16 weight, which has no scale */
} oproj_layer_info;

/* Finds a layer's tensors and checks their shapes and dtypes without reading them.  Strings live as
 * long as the checkpoint.  ERR_INVALID: no such layer.  ERR_SHAPE / ERR_IO: a tensor missing, found
 * twice, of another shape or dtype, or an FP8 weight without its scale; always by name. */
OPROJ_API oproj_status oproj_checkpoint_layer(const oproj_checkpoint *checkpoint, int32_t layer,
                                              oproj_layer_info *out);

/* Bytes of weights and scales that `shard` holds of a layer, as stored. */
OPROJ_API oproj_status oproj_checkpoint_layer_bytes(const oproj_checkpoint *checkpoint,
                                                    int32_t layer, const oproj_shard *shard,
                                                    int64_t *out);

/* One layer's share, in host memory. */
typedef struct oproj_slices {
  oproj_matrix wo_a; /* [z_end-z_begin, hpg*head_dim] */
  oproj_matrix wo_b; /* [hidden, z_end-z_begin] */
} oproj_slices;

/* Reads the slices that `shard` holds.  Scales come as exact f32.  A split checkpoint serves only
 * the shards it was made for (ERR_SHAPE, naming both), and holds every tensor to its checksum
 * (ERR_IO).  ERR_IO also for a scale that is NaN or infinite (ue8m0 255), by name and block. */
OPROJ_API oproj_status oproj_checkpoint_read(const oproj_checkpoint *checkpoint, int32_t layer,
                                             const oproj_shard *shard, oproj_slices *out);
OPROJ_API void oproj_slices_free(oproj_slices *slices); /* a zeroed or freed one is allowed */

/* Reads the scales that `shard` holds of a layer, not its weights, and refuses what
 * oproj_checkpoint_read would refuse of them: cheap enough to ask of all layers before the first is
 * loaded. */
OPROJ_API oproj_status oproj_checkpoint_check_scales(const oproj_checkpoint *checkpoint,
                                                     int32_t layer, const oproj_shard *shard);

/* Called during long work with the bytes done so far and in all; nonzero stops it (ERR_INVALID). */
typedef int (*oproj_progress_fn)(void *user, int64_t done_bytes, int64_t total_bytes);

typedef struct oproj_load_config {
  size_t struct_size;   /* set by OPROJ_LOAD_CONFIG_INIT */
  int64_t memory_bytes; /* host memory that a load may take on this rank while it runs, beside the
                           layers themselves: room for one layer's share, or better for two, and
                           three rows of WO_B, or better 24 MB */
  oproj_progress_fn progress; /* NULL, or called on this rank with the bytes of all ranks; it may be
                                 set on one rank alone, and stops all */
  void *user;
} oproj_load_config;
#define OPROJ_LOAD_CONFIG_INIT \
  { sizeof(oproj_load_config), INT64_C(1) << 30, NULL, NULL }

/* What a load has done on this rank. Of all ranks together read equals needed: each byte is read
 * once, by the rank that needs it or by one that hands it on. */
typedef struct oproj_load_report {
  int64_t needed_bytes;   /* this rank's share, as stored */
  int64_t read_bytes;     /* from the files, less headers */
  int64_t received_bytes; /* from other ranks */
  double seconds;
} oproj_load_report;

/* COLLECTIVE.  Loads layers[0 .. count) in one pass; out[count].  All ranks must ask for the same
 * layers, of copies of one checkpoint (oproj_checkpoint_digest).  Either every rank has all layers,
 * or all get the same error and none a layer: errors of oproj_checkpoint_read and
 * oproj_layer_create, ERR_IO where a file has changed its size meanwhile, ERR_INVALID where
 * memory_bytes is too small or progress stopped it.  `config` NULL: the defaults; `report` NULL:
 * none.  Two threads of the load's own read and copy to the device; MPI is called from the calling
 * thread alone. */
OPROJ_API oproj_status oproj_layers_load(oproj_layer **out, oproj_ctx *ctx,
                                         const oproj_checkpoint *checkpoint, const int32_t *layers,
                                         int32_t count, const oproj_load_config *config,
                                         oproj_load_report *report);

/* COLLECTIVE.  The same for one layer, with the defaults. */
OPROJ_API oproj_status oproj_layer_load(oproj_layer **out, oproj_ctx *ctx,
                                        const oproj_checkpoint *checkpoint, int32_t layer);

/* COLLECTIVE.  oproj_layer_replace by what a checkpoint holds for layer `index`: device addresses
 * stay.  Nothing is overwritten before every rank has read and checked all of its new values, so
 * that on an error of the files or of a rank the old ones keep serving. */
OPROJ_API oproj_status oproj_layer_reload(oproj_layer *layer, const oproj_checkpoint *checkpoint,
                                          int32_t index);

/* Writes one safetensors file per rank, a copy of config.json and, last, the manifest
 * oproj-split.json (format version, plan, identity of the source, checksum of every tensor), all
 * under a temporary folder name that is renamed when complete.  `dir` must not exist.  All layers
 * of the checkpoint that have WO_A and WO_B are written; one with only a part of them is refused.
 * ERR_INVALID: dir exists, the checkpoint is split already, or progress stopped it. */
OPROJ_API oproj_status oproj_checkpoint_split(const oproj_checkpoint *checkpoint, const char *dir,
                                              oproj_split split, int32_t size,
                                              oproj_progress_fn progress, void *user);

typedef enum oproj_tensor_names { OPROJ_NAMES_RELEASE, OPROJ_NAMES_HF } oproj_tensor_names;
typedef enum oproj_scale_dtype {
  OPROJ_SCALE_DTYPE_E8M0,
  OPROJ_SCALE_DTYPE_U8,
  OPROJ_SCALE_DTYPE_F32
} oproj_scale_dtype;

typedef struct oproj_synth {
  const char *model;    /* "v4-flash", "v4-pro", "v4.1-flash" or "tiny" */
  int32_t layers;       /* -1 = the model's own */
  int32_t draft_layers; /* -1 = the model's own */
  uint64_t seed;
  int32_t files; /* safetensors files to spread over; more than one gets an index */
  oproj_tensor_names names;
  oproj_scale_dtype scale_dtype;
  int32_t exact; /* nonzero: small integers and power-of-two scales chosen so that every sum
                           on the way to y is exact in f32 and bf16 for the input of
                           oproj_synth_input(exact), at every number of ranks */
} oproj_synth;
#define OPROJ_SYNTH_INIT \
  { "tiny", -1, -1, 0, 1, OPROJ_NAMES_RELEASE, OPROJ_SCALE_DTYPE_E8M0, 0 }

/* Writes a checkpoint of a released model's names, shapes and dtypes with made-up values (WO_A and
 * WO_B only).  `dir` must not exist; it appears complete or not at all. */
OPROJ_API oproj_status oproj_checkpoint_synth(const oproj_synth *synth, const char *dir,
                                              oproj_progress_fn progress, void *user);

/* A made-up attention output for heads [head_begin, head_end): attn_out bf16 [tokens, those heads,
 * head_dim].  The values depend on seed, token and head alone, not on how heads are dealt to ranks.
 * exact: values for a checkpoint made with exact. */
OPROJ_API void oproj_synth_input(const oproj_dims *dims, uint64_t seed, int32_t exact,
                                 int32_t tokens, int32_t head_begin, int32_t head_end,
                                 uint16_t *attn_out);

#ifdef __cplusplus
}
#endif
#endif /* OPROJ_CHECKPOINT_H */
