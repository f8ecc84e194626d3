/* config.c - owns what config.json may say and how it becomes an oproj_model. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "weights/json.h"
#include "weights/weights.h"

enum { MAX_CONFIG_BYTES = 16 << 20, MAX_EXTENT = 1 << 24, MAX_RATIO = 1 << 20 };

static const struct {
  const char *name;
  int32_t default_block;     /* where quantisation is not mentioned: a pure bf16 checkpoint */
  int32_t smallest_compress; /* ratios from here on mark a compressed layer */
} model_types[] = {
    {"deepseek_v4", 128, 2},
    {"deepseek_v41", 32, 1},
};

/* The file, split into the objects that hold values. */
typedef struct source {
  const char *path;
  const json_t *root;
  const json_t *values; /* text_config where there is one, else the root */
  int type;             /* row of model_types */
} source;

static int find_type(const char *name) {
  for (int i = 0; i < (int)(sizeof model_types / sizeof model_types[0]); i++)
    if (strcmp(model_types[i].name, name) == 0) return i;
  return -1;
}

bool oproj_weights_is_compressed(const oproj_model *model, int32_t compress_ratio) {
  return compress_ratio >= model_types[find_type(model->model_type)].smallest_compress;
}

static oproj_status read_type(source *from, oproj_model *model) {
  const char *type;
  TRY(oproj_weights_json_string(from->root, from->path, "model_type", &type));
  from->type = find_type(type);
  REQUIRE(from->type >= 0, OPROJ_ERR_UNSUPPORTED,
          "%s: model_type is \"%s\"; deepseek_v4 and deepseek_v41 are known", from->path, type);
  memcpy(model->model_type, type, strlen(type) + 1);
  TRY(oproj_weights_json_object(from->root, from->path, "text_config", false, &from->values));
  if (!from->values) from->values = from->root;
  return OPROJ_OK;
}

static oproj_status read_block(const source *from, int32_t *out) {
  const json_t *quantization, *sizes;
  TRY(oproj_weights_json_object(from->values, from->path, "quantization_config", false,
                                &quantization));
  if (!quantization)
    TRY(oproj_weights_json_object(from->root, from->path, "quantization_config", false,
                                  &quantization));
  *out = model_types[from->type].default_block;
  if (!quantization) return OPROJ_OK;
  TRY(oproj_weights_json_array(quantization, from->path, "weight_block_size", true, &sizes));
  const json_t *rows = json_array_get(sizes, 0), *cols = json_array_get(sizes, 1);
  json_int_t block = json_integer_value(rows);
  REQUIRE(json_array_size(sizes) == 2 && json_is_integer(cols) && (block == 32 || block == 128) &&
              json_integer_value(cols) == block,
          OPROJ_ERR_IO, "%s: weight_block_size must be [128, 128] or [32, 32]", from->path);
  *out = (int32_t)block;
  return OPROJ_OK;
}

/* The rules of oproj_dims, by the file's own field names. */
static oproj_status read_dims(const source *from, oproj_dims *dims) {
  const struct {
    const char *key;
    int32_t *out;
  } fields[] = {
      {"hidden_size", &dims->hidden}, {"num_attention_heads", &dims->heads},
      {"head_dim", &dims->head_dim},  {"qk_rope_head_dim", &dims->rope_dim},
      {"o_groups", &dims->groups},    {"o_lora_rank", &dims->lora_rank},
  };
  const char *path = from->path;
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
    TRY(oproj_weights_json_i32(from->values, path, fields[i].key, 1, MAX_EXTENT, fields[i].out));
  TRY(read_block(from, &dims->quant_block));
  REQUIRE(dims->heads % dims->groups == 0, OPROJ_ERR_SHAPE,
          "%s: o_groups %d does not divide num_attention_heads %d", path, dims->groups,
          dims->heads);
  REQUIRE(dims->rope_dim % 2 == 0 && dims->rope_dim <= dims->head_dim, OPROJ_ERR_SHAPE,
          "%s: qk_rope_head_dim %d must be even and at most head_dim %d", path, dims->rope_dim,
          dims->head_dim);
  REQUIRE(dims->head_dim % dims->quant_block == 0, OPROJ_ERR_SHAPE,
          "%s: head_dim %d is not a multiple of the block size %d", path, dims->head_dim,
          dims->quant_block);
  REQUIRE(dims->lora_rank % dims->quant_block == 0, OPROJ_ERR_SHAPE,
          "%s: o_lora_rank %d is not a multiple of the block size %d", path, dims->lora_rank,
          dims->quant_block);
  REQUIRE((int64_t)dims->heads * dims->head_dim <= INT32_MAX &&
              (int64_t)dims->groups * dims->lora_rank <= INT32_MAX,
          OPROJ_ERR_SHAPE,
          "%s: num_attention_heads %d * head_dim %d and o_groups %d * o_lora_rank %d must be below "
          "2^31",
          path, dims->heads, dims->head_dim, dims->groups, dims->lora_rank);
  return OPROJ_OK;
}

/* ---- rope ---------------------------------------------------------------------------------- */

static oproj_status read_theta(const json_t *object, const char *where, const char *key,
                               double *out) {
  return oproj_weights_json_double(object, where, key, 1.0, 1e12, out);
}

/* YaRN's numbers, where the object asks for YaRN. */
static oproj_status read_yarn(const json_t *object, const char *where, oproj_rope *rope) {
  const char *kind = json_string_value(json_object_get(object, "rope_type"));
  if (!kind) kind = json_string_value(json_object_get(object, "type"));
  REQUIRE(kind, OPROJ_ERR_IO, "%s: neither rope_type nor type says how positions are scaled",
          where);
  if (strcmp(kind, "default") == 0) return OPROJ_OK;
  REQUIRE(strcmp(kind, "yarn") == 0, OPROJ_ERR_UNSUPPORTED,
          "%s: rope type is \"%s\"; yarn and default are known", where, kind);
  TRY(oproj_weights_json_double(object, where, "factor", 1.0, 1e6, &rope->factor));
  TRY(oproj_weights_json_double(object, where, "beta_fast", 1e-6, 1e6, &rope->beta_fast));
  TRY(oproj_weights_json_double(object, where, "beta_slow", 1e-6, 1e6, &rope->beta_slow));
  REQUIRE(rope->beta_fast > rope->beta_slow, OPROJ_ERR_IO,
          "%s: beta_fast %g must be above beta_slow %g", where, rope->beta_fast, rope->beta_slow);
  return oproj_weights_json_i64(object, where, "original_max_position_embeddings", 1, INT32_MAX,
                                &rope->original_max_position);
}

/* Plain layers never use YaRN, whatever the file's scaling says: it is meant for compressed
 * ones. */
static oproj_status read_rope(const source *from, oproj_model *model) {
  const oproj_rope none = {10000.0, 1.0, 32.0, 1.0, 65536};
  const json_t *nested, *scaling;
  const char *path = from->path;
  model->plain = model->compressed = none;
  TRY(oproj_weights_json_i64(from->values, path, "max_position_embeddings", 1, INT32_MAX,
                             &model->max_position));
  TRY(oproj_weights_json_object(from->values, path, "rope_parameters", false, &nested));
  if (nested) {
    const json_t *main_rope, *compress_rope;
    TRY(oproj_weights_json_object(nested, path, "main", true, &main_rope));
    TRY(oproj_weights_json_object(nested, path, "compress", true, &compress_rope));
    TRY(read_theta(main_rope, path, "rope_theta", &model->plain.theta));
    TRY(read_theta(compress_rope, path, "rope_theta", &model->compressed.theta));
    return read_yarn(compress_rope, path, &model->compressed);
  }
  TRY(read_theta(from->values, path, "rope_theta", &model->plain.theta));
  TRY(read_theta(from->values, path, "compress_rope_theta", &model->compressed.theta));
  TRY(oproj_weights_json_object(from->values, path, "rope_scaling", false, &scaling));
  return scaling ? read_yarn(scaling, path, &model->compressed) : OPROJ_OK;
}

/* ---- compress ratios ----------------------------------------------------------------------- */

static oproj_status read_ratio_list(const source *from, const json_t *list, int32_t layers,
                                    int32_t *out) {
  REQUIRE(json_array_size(list) >= (size_t)layers, OPROJ_ERR_IO,
          "%s: compress_ratios has %zu entries; num_hidden_layers is %d", from->path,
          json_array_size(list), layers);
  for (int32_t i = 0; i < layers; i++) {
    const json_t *entry = json_array_get(list, (size_t)i);
    REQUIRE(json_is_integer(entry) && json_integer_value(entry) >= 0 &&
                json_integer_value(entry) <= MAX_RATIO,
            OPROJ_ERR_IO, "%s: compress_ratios[%d] is not an integer in [0, %d]", from->path, i,
            MAX_RATIO);
    out[i] = (int32_t)json_integer_value(entry);
  }
  return OPROJ_OK;
}

/* A type without a rate (sliding_attention) is a layer without compression. */
static oproj_status read_layer_types(const source *from, const json_t *types, const json_t *rates,
                                     int32_t layers, int32_t *out) {
  REQUIRE(json_array_size(types) >= (size_t)layers, OPROJ_ERR_IO,
          "%s: layer_types has %zu entries; num_hidden_layers is %d", from->path,
          json_array_size(types), layers);
  for (int32_t i = 0; i < layers; i++) {
    const char *type = json_string_value(json_array_get(types, (size_t)i));
    REQUIRE(type, OPROJ_ERR_IO, "%s: layer_types[%d] is not a string", from->path, i);
    out[i] = 0;
    if (strcmp(type, "sliding_attention") != 0 && json_object_get(rates, type))
      TRY(oproj_weights_json_i32(rates, from->path, type, 0, MAX_RATIO, &out[i]));
  }
  return OPROJ_OK;
}

static oproj_status read_ratios(const source *from, oproj_weights_config *config) {
  const json_t *list, *types, *rates;
  const char *path = from->path;
  int32_t layers = config->model.layers;
  TRY(oproj_weights_json_array(from->values, path, "compress_ratios", false, &list));
  TRY(oproj_weights_json_array(from->values, path, "layer_types", false, &types));
  TRY(oproj_weights_json_object(from->values, path, "compress_rates", false, &rates));
  REQUIRE(list || (types && rates), OPROJ_ERR_IO,
          "%s: neither compress_ratios nor layer_types with compress_rates says which layers are "
          "compressed",
          path);
  config->compress_ratio = calloc((size_t)layers, sizeof *config->compress_ratio);
  REQUIRE(config->compress_ratio, OPROJ_ERR_NOMEM, "%s: no memory for %d layers", path, layers);
  return list ? read_ratio_list(from, list, layers, config->compress_ratio)
              : read_layer_types(from, types, rates, layers, config->compress_ratio);
}

static oproj_status parse(const char *path, const json_t *root, oproj_weights_config *out) {
  source from = {path, root, root, 0};
  TRY(read_type(&from, &out->model));
  TRY(read_dims(&from, &out->model.dims));
  TRY(oproj_weights_json_i32(from.values, path, "num_hidden_layers", 1, OPROJ_WEIGHTS_MAX_LAYERS,
                             &out->model.layers));
  TRY(read_rope(&from, &out->model));
  TRY(read_ratios(&from, out));
  out->model.exact = json_is_true(json_object_get(root, "oproj_exact"));
  return OPROJ_OK;
}

oproj_status oproj_weights_config_parse(const char *path, char *text, size_t bytes,
                                        oproj_weights_config *out) {
  json_t *root = NULL;
  *out = (oproj_weights_config){.text = text, .text_bytes = bytes};
  oproj_status status = oproj_weights_json_parse(path, text, bytes, &root);
  if (status == OPROJ_OK) status = parse(path, root, out);
  json_decref(root);
  if (status != OPROJ_OK) oproj_weights_config_free(out);
  return status;
}

oproj_status oproj_weights_config_read(const char *path, oproj_weights_config *out) {
  char *text;
  size_t bytes;
  memset(out, 0, sizeof *out);
  TRY(oproj_weights_read_text(path, MAX_CONFIG_BYTES, &text, &bytes));
  return oproj_weights_config_parse(path, text, bytes, out);
}

void oproj_weights_config_free(oproj_weights_config *config) {
  free(config->compress_ratio);
  free(config->text);
  memset(config, 0, sizeof *config);
}
