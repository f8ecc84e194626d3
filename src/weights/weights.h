/* weights.h - the folder's contract: checkpoints on disk, and the slices a rank takes of them.
 *
 *   config.c             config.json -> oproj_model, compress ratios
 *   json.c               fields of JSON files, with errors that name them
 *   safetensors.c        header and reads        include/oproj/safetensors.h
 *   safetensors_write.c  writing
 *   names.c              every tensor name and scale suffix in use: the one list
 *   index.c              which files hold a layer's tensors
 *   checkpoint.c         open, close, what a layer consists of: shapes and dtypes checked
 *   digest.c             what tells one checkpoint from another
 *   slices.c             a shard's rows and columns, scales as f32
 *   source.h, source.c   where a shard's part of a tensor lies: what the loader of tp, which reads
 *                        by itself, knows of this folder
 *   split.c              writing one file per rank
 *   split_open.c         reading that form: manifest, identity, checksums
 *   stage.c              folders that appear complete or not at all
 *   synth.c              made-up checkpoints and inputs: files, names, config.json
 *   synth_values.c       the numbers in them
 *
 * The folder knows dims, shards and matrices from oproj.h, and nothing of ranks, devices or
 * communicators.  Whatever comes out of a file is checked once, where it enters, and trusted
 * after. */
#ifndef OPROJ_WEIGHTS_H
#define OPROJ_WEIGHTS_H

#include <jansson.h>
#include <stdbool.h>

#include "oproj/checkpoint.h"
#include "oproj/safetensors.h"
#include "weights/names.h"
#include "weights/source.h"

/* More draft layers than this are taken for a config.json that lies about num_hidden_layers. */
enum { OPROJ_WEIGHTS_MAX_LAYERS = 4096, OPROJ_WEIGHTS_MAX_DRAFT = 64 };

#define OPROJ_WEIGHTS_CONFIG_FILE "config.json"
#define OPROJ_WEIGHTS_INDEX_FILE "model.safetensors.index.json"
#define OPROJ_WEIGHTS_MANIFEST_FILE "oproj-split.json"

/* ---- config.c ------------------------------------------------------------------------------ */

typedef struct oproj_weights_config {
  oproj_model model;       /* draft_layers is 0: only the files know */
  int32_t *compress_ratio; /* [layers]; draft layers have none */
  char *text;              /* config.json as it is, for copies and identities */
  size_t text_bytes;
} oproj_weights_config;

/* Reads and checks `path`.  ERR_IO: a field is missing, of another type, out of range or
 * contradicts another.  ERR_UNSUPPORTED: a model_type that is not known. */
oproj_status oproj_weights_config_read(const char *path, oproj_weights_config *out);
/* The same of a text in malloc'ed memory, which the config then owns; freed on failure. */
oproj_status oproj_weights_config_parse(const char *path, char *text, size_t bytes,
                                        oproj_weights_config *out);
void oproj_weights_config_free(oproj_weights_config *config); /* a zeroed one is allowed */

/* Whether a layer of that ratio takes its angles from model.compressed. */
bool oproj_weights_is_compressed(const oproj_model *model, int32_t compress_ratio);

/* ---- a checkpoint -------------------------------------------------------------------------- */

/* A tensor where it was found.  In a split set `tensor` is the manifest's entry, whole, and file is
 * NULL: each rank's file holds its part under the same name. */
typedef struct oproj_weights_found {
  const oproj_tensor *tensor; /* NULL: not found */
  const oproj_tensors_file *file;
} oproj_weights_found;

/* One tensor of a layer.  A second match is remembered for the error that names both. */
typedef struct oproj_weights_slot {
  oproj_weights_found first, second;
} oproj_weights_slot;

/* slot[matrix][part] */
typedef struct oproj_weights_layer {
  oproj_weights_slot slot[OPROJ_WEIGHTS_MATRICES][OPROJ_WEIGHTS_PARTS];
} oproj_weights_layer;

typedef struct oproj_weights_split oproj_weights_split; /* split_open.c */

struct oproj_checkpoint {
  char *dir;
  oproj_weights_config config;
  oproj_tensors_file **files; /* [file_count]; a split set's missing files are NULL */
  int32_t file_count;
  oproj_weights_layer *layers; /* [config.model.layers + OPROJ_WEIGHTS_MAX_DRAFT] */
  oproj_weights_split *split;  /* NULL: a whole checkpoint */
};

/* dir/name; freed by the caller; NULL when out of memory. */
char *oproj_weights_join(const char *dir, const char *name);

/* Puts a tensor into its layer's slot if it is one of ours, and counts draft layers. */
oproj_status oproj_weights_add(oproj_checkpoint *checkpoint, const oproj_tensor *tensor,
                               const oproj_tensors_file *file);

/* The slots of a matrix of a layer, by part; NULL for a layer beyond any. */
const oproj_weights_slot *oproj_weights_slot_of(const oproj_checkpoint *checkpoint,
                                                const oproj_weights_name *name);

/* index.c: opens the files of a whole checkpoint and adds their tensors. */
oproj_status oproj_weights_index_open(oproj_checkpoint *checkpoint);

/* index.c: what an index says: weight_map, and the files that it names for our tensors, in order
 * and each once. */
typedef struct oproj_weights_index {
  json_t *root;
  json_t *map; /* inside root: name of tensor -> plain name of a file */
  char **files;
  size_t count, room;
} oproj_weights_index;

/* ERR_IO: malformed, or a file's name leads out of the folder. */
oproj_status oproj_weights_index_parse(const char *path, const char *text, size_t bytes,
                                       oproj_weights_index *out);
void oproj_weights_index_free(oproj_weights_index *index); /* a zeroed one is allowed */

/* ---- a layer's tensors --------------------------------------------------------------------- */

/* One matrix of a layer, its tensors checked against dims. */
typedef struct oproj_weights_matrix_info {
  oproj_dtype dtype;
  oproj_weights_found weight, scale; /* scale.tensor is NULL for bf16 */
} oproj_weights_matrix_info;

/* ERR_INVALID: no such layer; the rest as oproj_checkpoint_layer. */
oproj_status oproj_weights_matrix_find(const oproj_checkpoint *checkpoint, int32_t layer,
                                       oproj_weights_matrix matrix, oproj_weights_matrix_info *out);

/* Refuses a shard that breaks its own rules or, for a split set, is not one of the set's. */
oproj_status oproj_weights_check_shard(const oproj_checkpoint *checkpoint,
                                       const oproj_shard *shard);

/* slices.c: reads a region's elements as stored, row-major and contiguous, into out. */
oproj_status oproj_weights_read_region(const oproj_weights_found *found,
                                       const oproj_weights_region *region, void *out);

/* ---- split sets (split_open.c) ------------------------------------------------------------- */

/* What the identity of a set is made of, hashed in this order: config.json, then every tensor's
 * name, dtype and shape, then every rank's checksums. */
typedef struct oproj_weights_identity oproj_weights_identity;
oproj_status oproj_weights_identity_begin(oproj_weights_identity **out,
                                          const oproj_weights_config *config, oproj_split split,
                                          int32_t size);
void oproj_weights_identity_tensor(oproj_weights_identity *identity, const oproj_tensor *tensor);
void oproj_weights_identity_checksum(oproj_weights_identity *identity, uint64_t checksum);
uint64_t oproj_weights_identity_value(const oproj_weights_identity *identity);
void oproj_weights_identity_end(oproj_weights_identity *identity);

/* XXH3-64 of bytes, and its 16 digits as files hold them. */
uint64_t oproj_weights_checksum(const void *data, size_t bytes);
void oproj_weights_hex(uint64_t value, char out[17]);

/* __metadata__ of a rank file: the set's identity, and the rank in decimal. */
#define OPROJ_WEIGHTS_IDENTITY_KEY "oproj_split_identity"
#define OPROJ_WEIGHTS_RANK_KEY "oproj_split_rank"
enum { OPROJ_WEIGHTS_MANIFEST_VERSION = 1, OPROJ_WEIGHTS_MAX_RANKS = 1024 };

/* The file name of a rank's part. */
void oproj_weights_rank_file(int32_t rank, int32_t size, char out[64]);

/* The manifest's text, for a checkpoint whose config.json has been read. */
oproj_status oproj_weights_split_parse(const char *path, const char *text, size_t bytes,
                                       const oproj_weights_config *config,
                                       oproj_weights_split **out);

/* Opens what split.c wrote; the manifest is known to exist. */
oproj_status oproj_weights_split_open(oproj_checkpoint *checkpoint);
void oproj_weights_split_free(oproj_weights_split *split); /* NULL is allowed */
int32_t oproj_weights_split_size(const oproj_weights_split *split);
oproj_split oproj_weights_split_kind(const oproj_weights_split *split);
uint64_t oproj_weights_split_identity(const oproj_weights_split *split);

/* Finds a rank's part of a tensor of the manifest; it must have the region's extents.  part->tensor
 * and part->file are the rank file's. */
oproj_status oproj_weights_split_find(const oproj_checkpoint *checkpoint, int32_t rank,
                                      const oproj_tensor *tensor,
                                      const oproj_weights_region *region,
                                      oproj_weights_found *part);

/* Holds the bytes of a rank's part, by the tensor's name, to the checksum of the manifest. */
oproj_status oproj_weights_split_verify(const oproj_checkpoint *checkpoint, int32_t rank,
                                        const oproj_tensor *part, const void *stored);

/* ---- folders that appear at once (stage.c) ------------------------------------------------- */

typedef struct oproj_weights_stage oproj_weights_stage;

/* Makes an empty folder beside `dir`, which must not exist (ERR_INVALID). */
oproj_status oproj_weights_stage_begin(oproj_weights_stage **out, const char *dir);
const char *oproj_weights_stage_dir(const oproj_weights_stage *stage);
oproj_status oproj_weights_stage_write(const oproj_weights_stage *stage, const char *name,
                                       const char *text, size_t bytes);
/* Flushes the folder and gives it its name; frees the stage, on failure too, and then removes the
 * folder with all files in it. */
oproj_status oproj_weights_stage_commit(oproj_weights_stage *stage);
void oproj_weights_stage_abandon(oproj_weights_stage *stage); /* NULL is allowed */

/* ---- made-up values (synth_values.c) ------------------------------------------------------- */

/* One matrix to be made up.  Every value depends on the key and its own position alone. */
typedef struct oproj_weights_fill {
  uint64_t key; /* of seed, layer and matrix */
  oproj_weights_matrix matrix;
  const oproj_dims *dims;
  bool exact;
  oproj_scale_dtype scale_dtype;
} oproj_weights_fill;

uint64_t oproj_weights_fill_key(uint64_t seed, bool draft, int32_t number,
                                oproj_weights_matrix matrix);

/* e4m3 codes of rows [begin, end), [end-begin, cols]. */
void oproj_weights_fill_codes(const oproj_weights_fill *fill, int64_t begin, int64_t end,
                              uint8_t *out);

/* All scales of the matrix, as bytes of the chosen dtype. */
void oproj_weights_fill_scales(const oproj_weights_fill *fill, void *out);

#endif /* OPROJ_WEIGHTS_H */
