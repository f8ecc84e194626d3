/* checkpoint.c - owns opening and closing, and what a layer consists of: its tensors found, and
 * their dtypes and shapes held against config.json. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checked.h"
#include "base/error.h"
#include "weights/weights.h"

static const char *const matrix_names[] = {"WO_A", "WO_B"};
static const char *const scale_dtypes[] = {"F8_E8M0", "U8", "F32", "BF16"};

char *oproj_weights_join(const char *dir, const char *name) {
  char *path;
  return asprintf(&path, "%s/%s", dir, name) < 0 ? NULL : path;
}

static oproj_status exists(const char *dir, const char *name, bool *out) {
  char *path = oproj_weights_join(dir, name);
  REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", dir);
  *out = access(path, F_OK) == 0;
  free(path);
  return OPROJ_OK;
}

static oproj_status read_config(oproj_checkpoint *checkpoint) {
  char *path = oproj_weights_join(checkpoint->dir, OPROJ_WEIGHTS_CONFIG_FILE);
  REQUIRE(path, OPROJ_ERR_NOMEM, "%s: no memory for a path", checkpoint->dir);
  oproj_status status = oproj_weights_config_read(path, &checkpoint->config);
  free(path);
  return status;
}

static oproj_status open_dir(oproj_checkpoint *checkpoint) {
  TRY(read_config(checkpoint));
  checkpoint->layers = calloc((size_t)checkpoint->config.model.layers + OPROJ_WEIGHTS_MAX_DRAFT,
                              sizeof *checkpoint->layers);
  REQUIRE(checkpoint->layers, OPROJ_ERR_NOMEM, "%s: no memory for %d layers", checkpoint->dir,
          checkpoint->config.model.layers);
  bool is_split = false;
  TRY(exists(checkpoint->dir, OPROJ_WEIGHTS_MANIFEST_FILE, &is_split));
  return is_split ? oproj_weights_split_open(checkpoint) : oproj_weights_index_open(checkpoint);
}

oproj_status oproj_checkpoint_open(oproj_checkpoint **out, const char *dir) {
  REQUIRE(out && dir, OPROJ_ERR_INVALID, "oproj_checkpoint_open: out and dir must not be NULL");
  *out = NULL;
  oproj_checkpoint *checkpoint = calloc(1, sizeof *checkpoint);
  REQUIRE(checkpoint, OPROJ_ERR_NOMEM, "%s: no memory to open it", dir);
  checkpoint->dir = strdup(dir);
  oproj_status status = checkpoint->dir
                            ? open_dir(checkpoint)
                            : oproj_fail(OPROJ_ERR_NOMEM, "%s: no memory to open it", dir);
  if (status == OPROJ_OK)
    *out = checkpoint;
  else
    oproj_checkpoint_close(checkpoint);
  return status;
}

void oproj_checkpoint_close(oproj_checkpoint *checkpoint) {
  if (!checkpoint) return;
  oproj_weights_split_free(checkpoint->split);
  free(checkpoint->layers);
  for (int32_t i = 0; i < checkpoint->file_count; i++) oproj_tensors_close(checkpoint->files[i]);
  free(checkpoint->files);
  oproj_weights_config_free(&checkpoint->config);
  free(checkpoint->dir);
  free(checkpoint);
}

const oproj_model *oproj_checkpoint_model(const oproj_checkpoint *checkpoint) {
  return &checkpoint->config.model;
}

int32_t oproj_checkpoint_split_size(const oproj_checkpoint *checkpoint) {
  return checkpoint->split ? oproj_weights_split_size(checkpoint->split) : 0;
}

oproj_split oproj_checkpoint_split_kind(const oproj_checkpoint *checkpoint) {
  return checkpoint->split ? oproj_weights_split_kind(checkpoint->split) : OPROJ_SPLIT_EVEN;
}

/* ---- tensors of a layer -------------------------------------------------------------------- */

/* The layer's number, draft layers behind the others. */
static int32_t layer_of(const oproj_model *model, const oproj_weights_name *name) {
  return name->draft ? model->layers + name->number : name->number;
}

const oproj_weights_slot *oproj_weights_slot_of(const oproj_checkpoint *checkpoint,
                                                const oproj_weights_name *name) {
  const oproj_model *model = &checkpoint->config.model;
  int32_t layer = layer_of(model, name);
  if (layer >= model->layers + OPROJ_WEIGHTS_MAX_DRAFT) return NULL;
  return checkpoint->layers[layer].slot[name->matrix];
}

oproj_status oproj_weights_add(oproj_checkpoint *checkpoint, const oproj_tensor *tensor,
                               const oproj_tensors_file *file) {
  oproj_weights_name name;
  oproj_model *model = &checkpoint->config.model;
  if (!oproj_weights_name_parse(tensor->name, &name)) return OPROJ_OK;
  int32_t layer = layer_of(model, &name);
  REQUIRE(layer < model->layers + OPROJ_WEIGHTS_MAX_DRAFT, OPROJ_ERR_SHAPE,
          "%s: tensor %s lies beyond num_hidden_layers %d and %d draft layers", checkpoint->dir,
          tensor->name, model->layers, OPROJ_WEIGHTS_MAX_DRAFT);
  if (layer - model->layers >= model->draft_layers) model->draft_layers = layer - model->layers + 1;
  oproj_weights_slot *slot = &checkpoint->layers[layer].slot[name.matrix][name.part];
  oproj_weights_found found = {tensor, file};
  if (!slot->first.tensor)
    slot->first = found;
  else
    slot->second = found;
  return OPROJ_OK;
}

static void label(const oproj_model *model, int32_t layer, char out[32]) {
  if (layer < model->layers)
    snprintf(out, 32, "layers.%d", layer);
  else
    snprintf(out, 32, "mtp.%d", layer - model->layers);
}

static const char *file_of(const oproj_checkpoint *checkpoint, const oproj_weights_found *found) {
  return found->file ? oproj_tensors_path(found->file) : checkpoint->dir;
}

static oproj_status check_single(const oproj_checkpoint *checkpoint,
                                 const oproj_weights_slot *slot) {
  REQUIRE(!slot->second.tensor, OPROJ_ERR_SHAPE,
          "two tensors for one: %s in %s, and %s in %s; only one of them may be there",
          slot->first.tensor->name, file_of(checkpoint, &slot->first), slot->second.tensor->name,
          file_of(checkpoint, &slot->second));
  return OPROJ_OK;
}

static oproj_status check_shape(const oproj_checkpoint *checkpoint,
                                const oproj_weights_found *found, oproj_weights_matrix matrix,
                                oproj_weights_part part) {
  const oproj_dims *dims = &checkpoint->config.model.dims;
  oproj_weights_region whole = oproj_weights_region_of(dims, matrix, part, 0, 0);
  const oproj_tensor *tensor = found->tensor;
  const char *path = file_of(checkpoint, found);
  REQUIRE(tensor->dimensions == 2, OPROJ_ERR_SHAPE,
          "%s: tensor %s has %d dimensions; [%" PRId64 ", %" PRId64 "] is wanted", path,
          tensor->name, tensor->dimensions, whole.rows, whole.cols);
  REQUIRE(tensor->shape[0] == whole.rows && tensor->shape[1] == whole.cols, OPROJ_ERR_SHAPE,
          "%s: tensor %s is [%" PRId64 ", %" PRId64 "]; config.json wants [%" PRId64 ", %" PRId64
          "]",
          path, tensor->name, tensor->shape[0], tensor->shape[1], whole.rows, whole.cols);
  return OPROJ_OK;
}

static oproj_status check_scale(const oproj_checkpoint *checkpoint,
                                const oproj_weights_matrix_info *info,
                                oproj_weights_matrix matrix) {
  const oproj_tensor *weight = info->weight.tensor, *scale = info->scale.tensor;
  if (info->dtype == OPROJ_DTYPE_BF16) {
    REQUIRE(!scale, OPROJ_ERR_IO, "%s: tensor %s is BF16, and yet there is a scale %s",
            file_of(checkpoint, &info->weight), weight->name, scale->name);
    return OPROJ_OK;
  }
  REQUIRE(scale, OPROJ_ERR_IO, "%s: tensor %s is F8_E4M3 and has no scale",
          file_of(checkpoint, &info->weight), weight->name);
  bool known = false;
  for (size_t i = 0; i < sizeof scale_dtypes / sizeof scale_dtypes[0]; i++)
    known |= strcmp(scale->dtype, scale_dtypes[i]) == 0;
  REQUIRE(known, OPROJ_ERR_SHAPE, "%s: scale %s is %s; F8_E8M0, U8, F32 or BF16 is wanted",
          file_of(checkpoint, &info->scale), scale->name, scale->dtype);
  return check_shape(checkpoint, &info->scale, matrix, OPROJ_WEIGHTS_SCALE);
}

oproj_status oproj_weights_matrix_find(const oproj_checkpoint *checkpoint, int32_t layer,
                                       oproj_weights_matrix matrix,
                                       oproj_weights_matrix_info *out) {
  const oproj_model *model = &checkpoint->config.model;
  REQUIRE(layer >= 0 && layer < model->layers + model->draft_layers, OPROJ_ERR_INVALID,
          "layer %d: %s has layers 0 to %d", layer, checkpoint->dir,
          model->layers + model->draft_layers - 1);
  const oproj_weights_slot *slot = checkpoint->layers[layer].slot[matrix];
  oproj_weights_name name = {layer >= model->layers,
                             layer >= model->layers ? layer - model->layers : layer, matrix,
                             OPROJ_WEIGHTS_WEIGHT};
  char wanted[OPROJ_WEIGHTS_NAME_BYTES];
  oproj_weights_name_format(&name, false, wanted);
  REQUIRE(slot[OPROJ_WEIGHTS_WEIGHT].first.tensor, OPROJ_ERR_SHAPE,
          "%s: %s is missing: no tensor %s, under none of the names in use", checkpoint->dir,
          matrix_names[matrix], wanted);
  for (int part = 0; part < OPROJ_WEIGHTS_PARTS; part++) TRY(check_single(checkpoint, &slot[part]));
  out->weight = slot[OPROJ_WEIGHTS_WEIGHT].first;
  out->scale = slot[OPROJ_WEIGHTS_SCALE].first;
  const oproj_tensor *weight = out->weight.tensor;
  bool is_fp8 = strcmp(weight->dtype, "F8_E4M3") == 0;
  REQUIRE(is_fp8 || strcmp(weight->dtype, "BF16") == 0, OPROJ_ERR_SHAPE,
          "%s: tensor %s is %s; F8_E4M3 or BF16 is wanted", file_of(checkpoint, &out->weight),
          weight->name, weight->dtype);
  out->dtype = is_fp8 ? OPROJ_DTYPE_E4M3 : OPROJ_DTYPE_BF16;
  TRY(check_shape(checkpoint, &out->weight, matrix, OPROJ_WEIGHTS_WEIGHT));
  return check_scale(checkpoint, out, matrix);
}

oproj_status oproj_checkpoint_layer(const oproj_checkpoint *checkpoint, int32_t layer,
                                    oproj_layer_info *out) {
  oproj_weights_matrix_info a, b;
  const oproj_model *model = &checkpoint->config.model;
  TRY(oproj_weights_matrix_find(checkpoint, layer, OPROJ_WEIGHTS_A, &a));
  TRY(oproj_weights_matrix_find(checkpoint, layer, OPROJ_WEIGHTS_B, &b));
  memset(out, 0, sizeof *out);
  label(model, layer, out->name);
  /* Draft layers attend without compression. */
  if (layer < model->layers) out->compress_ratio = checkpoint->config.compress_ratio[layer];
  out->compressed = oproj_weights_is_compressed(model, out->compress_ratio);
  out->wo_a = a.dtype;
  out->wo_b = b.dtype;
  out->wo_a_tensor = a.weight.tensor->name;
  out->wo_b_tensor = b.weight.tensor->name;
  out->wo_a_scale_dtype = a.scale.tensor ? a.scale.tensor->dtype : "";
  out->wo_b_scale_dtype = b.scale.tensor ? b.scale.tensor->dtype : "";
  return OPROJ_OK;
}

/* ---- shards -------------------------------------------------------------------------------- */

oproj_weights_region oproj_weights_region_of(const oproj_dims *dims, oproj_weights_matrix matrix,
                                             oproj_weights_part part, int64_t z_begin,
                                             int64_t z_end) {
  int64_t unit = part == OPROJ_WEIGHTS_SCALE ? dims->quant_block : 1;
  int64_t z = (int64_t)dims->groups * dims->lora_rank / unit;
  z_begin /= unit;
  z_end /= unit;
  if (matrix == OPROJ_WEIGHTS_A) {
    int64_t cols = (int64_t)(dims->heads / dims->groups) * dims->head_dim / unit;
    return (oproj_weights_region){z, cols, z_begin, z_end, 0, cols};
  }
  int64_t rows = oproj_base_ceil_div(dims->hidden, unit);
  return (oproj_weights_region){rows, z, 0, rows, z_begin, z_end};
}

oproj_status oproj_weights_check_shard(const oproj_checkpoint *checkpoint,
                                       const oproj_shard *shard) {
  const oproj_dims *dims = &checkpoint->config.model.dims;
  REQUIRE(shard->size >= 1 && shard->rank >= 0 && shard->rank < shard->size, OPROJ_ERR_INVALID,
          "shard of rank %d of %d: the rank must be in [0, size)", shard->rank, shard->size);
  REQUIRE(shard->group_begin >= 0 && shard->group_begin < shard->group_end &&
              shard->group_end <= dims->groups &&
              shard->z_begin == shard->group_begin * dims->lora_rank &&
              shard->z_end == shard->group_end * dims->lora_rank,
          OPROJ_ERR_INVALID,
          "shard of rank %d of %d: groups [%d, %d) and z columns [%d, %d) do not fit %d groups of "
          "%d columns",
          shard->rank, shard->size, shard->group_begin, shard->group_end, shard->z_begin,
          shard->z_end, dims->groups, dims->lora_rank);
  if (!checkpoint->split) return OPROJ_OK;
  int32_t size = oproj_weights_split_size(checkpoint->split);
  oproj_split kind = oproj_weights_split_kind(checkpoint->split);
  const char *word = kind == OPROJ_SPLIT_EVEN ? "even" : "uneven";
  REQUIRE(shard->size == size, OPROJ_ERR_SHAPE,
          "%s is split for %d ranks (%s); rank %d of %d was asked for", checkpoint->dir, size, word,
          shard->rank, shard->size);
  oproj_shard planned;
  TRY(oproj_plan_shard(dims, kind, size, shard->rank, &planned));
  REQUIRE(
      shard->z_begin == planned.z_begin && shard->z_end == planned.z_end, OPROJ_ERR_SHAPE,
      "%s is split for %d ranks (%s): rank %d holds z columns [%d, %d); [%d, %d) were asked for",
      checkpoint->dir, size, word, shard->rank, planned.z_begin, planned.z_end, shard->z_begin,
      shard->z_end);
  return OPROJ_OK;
}

oproj_status oproj_checkpoint_layer_bytes(const oproj_checkpoint *checkpoint, int32_t layer,
                                          const oproj_shard *shard, int64_t *out) {
  const oproj_dims *dims = &checkpoint->config.model.dims;
  TRY(oproj_weights_check_shard(checkpoint, shard));
  /* Every tensor is cut along z at whole blocks, so it falls into equal parts, one per block. */
  int64_t blocks = (int64_t)dims->groups * dims->lora_rank / dims->quant_block;
  int64_t held = (shard->z_end - shard->z_begin) / dims->quant_block;
  *out = 0;
  for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++) {
    oproj_weights_matrix_info info;
    TRY(oproj_weights_matrix_find(checkpoint, layer, (oproj_weights_matrix)matrix, &info));
    *out += info.weight.tensor->bytes / blocks * held;
    if (info.scale.tensor) *out += info.scale.tensor->bytes / blocks * held;
  }
  return OPROJ_OK;
}
