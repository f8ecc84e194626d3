/* synth.c - owns the files of a made-up checkpoint: the released models' config.json, names,
 * shapes, dtypes and index (SPEC, released models), with the values of synth_values.c. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "weights/json.h"
#include "weights/weights.h"

enum { CHUNK_BYTES = 4 << 20, FILE_NAME_BYTES = 64, TENSORS_PER_LAYER = 4 };

typedef enum family { V4, V41, TINY } family;

static const struct model {
  const char *name;
  family kind;
  oproj_dims dims;
  int32_t layers, draft_layers;
  int32_t first_ratio; /* of layers 0 and 1, before the pattern begins */
} models[] = {
    {"v4-flash", V4, {4096, 64, 512, 64, 8, 1024, 128}, 43, 1, 0},
    {"v4-pro", V4, {7168, 128, 512, 64, 16, 1024, 128}, 61, 1, 128},
    {"v4.1-flash", V41, {5120, 64, 512, 64, 8, 1024, 32}, 40, 3, 0},
    {"tiny", TINY, {512, 16, 512, 64, 4, 256, 128}, 3, 1, 0},
};

typedef struct job {
  const struct model *model;
  const oproj_synth *asked;
  int32_t layers, draft_layers;
  oproj_weights_stage *stage;
  uint8_t *chunk;
  json_t *weight_map;
  oproj_progress_fn progress;
  void *user;
  int64_t done, total; /* bytes */
} job;

static int32_t layer_count(const job *work) {
  return work->layers + work->draft_layers;
}

/* ---- config.json --------------------------------------------------------------------------- */

/* The released pattern, continued or cut where the number of layers is another one. */
static int32_t ratio_of(const job *work, int32_t layer) {
  static const int32_t tiny[] = {0, 4, 128};
  if (work->model->kind == TINY) return tiny[layer % 3];
  if (layer < 2) return work->model->first_ratio;
  if (work->model->kind == V4) return layer % 2 == 0 ? 4 : 128;
  /* V4.1: of the 38 layers behind the first two, 18 have ratio 2 and the rest 1. */
  return layer - 2 < ((work->layers - 2) * 18 + 19) / 38 ? 2 : 1;
}

static json_t *ratio_list(const job *work) {
  json_t *list = json_array();
  for (int32_t i = 0; i < work->layers; i++)
    json_array_append_new(list, json_integer(ratio_of(work, i)));
  for (int32_t i = 0; i < work->draft_layers; i++) json_array_append_new(list, json_integer(0));
  return list;
}

/* Fields that V4.1 nests under text_config. */
static json_t *text_fields(const job *work) {
  const oproj_dims *dims = &work->model->dims;
  return json_pack(
      "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i,"
      " s:{s:s, s:i, s:i, s:i, s:i}, s:o}",
      "hidden_size", dims->hidden, "num_attention_heads", dims->heads, "num_key_value_heads", 1,
      "head_dim", dims->head_dim, "qk_rope_head_dim", dims->rope_dim, "o_groups", dims->groups,
      "o_lora_rank", dims->lora_rank, "num_hidden_layers", work->layers, "num_nextn_predict_layers",
      work->draft_layers, "rope_theta", 10000, "compress_rope_theta", 160000, "rope_scaling",
      "type", "yarn", "factor", 16, "beta_fast", 32, "beta_slow", 1,
      "original_max_position_embeddings", 65536, "compress_ratios", ratio_list(work));
}

static json_t *config_of(const job *work) {
  int32_t block = work->model->dims.quant_block;
  json_t *text = text_fields(work), *config = NULL;
  if (!text || json_object_set_new(text, "max_position_embeddings", json_integer(1048576)) != 0) {
    json_decref(text);
    return NULL;
  }
  json_t *quantization =
      json_pack("{s:s, s:s, s:s, s:s, s:[i,i]}", "quant_method", "fp8", "fmt", "e4m3", "scale_fmt",
                "ue8m0", "activation_scheme", "dynamic", "weight_block_size", block, block);
  if (work->model->kind == V41)
    config = json_pack("{s:s, s:s, s:o, s:o}", "model_type", "deepseek_v41", "torch_dtype",
                       "bfloat16", "text_config", text, "quantization_config", quantization);
  else {
    config = json_pack("{s:s, s:s, s:o}", "model_type", "deepseek_v4", "torch_dtype", "bfloat16",
                       "quantization_config", quantization);
    int failed = json_object_update(config, text);
    json_decref(text);
    if (failed) {
      json_decref(config);
      return NULL;
    }
  }
  if (work->asked->exact && json_object_set_new(config, "oproj_exact", json_true()) != 0) {
    json_decref(config);
    return NULL;
  }
  return config;
}

/* Takes over `value`, which may be NULL after a failed allocation. */
static oproj_status write_json(const job *work, const char *name, json_t *value) {
  char *text = value ? json_dumps(value, JSON_INDENT(2)) : NULL;
  oproj_status status = text ? oproj_weights_stage_write(work->stage, name, text, strlen(text))
                             : oproj_fail(OPROJ_ERR_NOMEM, "no memory to write %s", name);
  free(text);
  json_decref(value);
  return status;
}

/* ---- tensors ------------------------------------------------------------------------------- */

typedef struct planned {
  char name[OPROJ_WEIGHTS_NAME_BYTES];
  oproj_weights_fill fill;
  oproj_weights_part part;
  int64_t rows, cols;
  int32_t element; /* bytes */
} planned;

static int64_t bytes_of(const planned *tensor) {
  return tensor->rows * tensor->cols * tensor->element;
}

static planned plan_tensor(const job *work, int32_t layer, int32_t ordinal) {
  bool draft = layer >= work->layers, hf = work->asked->names == OPROJ_NAMES_HF;
  int32_t number = draft ? layer - work->layers : layer;
  oproj_weights_matrix matrix = ordinal < 2 ? OPROJ_WEIGHTS_A : OPROJ_WEIGHTS_B;
  oproj_weights_part part = ordinal % 2 == 0 ? OPROJ_WEIGHTS_WEIGHT : OPROJ_WEIGHTS_SCALE;
  oproj_weights_name name = {draft, hf ? layer : number, matrix, part};
  oproj_weights_region whole = oproj_weights_region_of(&work->model->dims, matrix, part, 0, 0);
  bool wide = part == OPROJ_WEIGHTS_SCALE && work->asked->scale_dtype == OPROJ_SCALE_DTYPE_F32;
  planned out = {.fill = {oproj_weights_fill_key(work->asked->seed, draft, number, matrix), matrix,
                          &work->model->dims, work->asked->exact != 0, work->asked->scale_dtype},
                 .part = part,
                 .rows = whole.rows,
                 .cols = whole.cols,
                 .element = wide ? 4 : 1};
  oproj_weights_name_format(&name, hf, out.name);
  return out;
}

static const char *dtype_of(const job *work, const planned *tensor) {
  static const char *const scales[] = {"F8_E8M0", "U8", "F32"};
  return tensor->part == OPROJ_WEIGHTS_WEIGHT ? "F8_E4M3" : scales[work->asked->scale_dtype];
}

static oproj_status write_data(job *work, oproj_tensors_writer *writer, const void *data,
                               int64_t bytes) {
  TRY(oproj_tensors_write(writer, data, bytes));
  work->done += bytes;
  REQUIRE(!work->progress || work->progress(work->user, work->done, work->total) == 0,
          OPROJ_ERR_INVALID, "stopped by the caller after %" PRId64 " of %" PRId64 " bytes",
          work->done, work->total);
  return OPROJ_OK;
}

static oproj_status write_tensor(job *work, oproj_tensors_writer *writer, const planned *tensor) {
  if (tensor->part == OPROJ_WEIGHTS_SCALE) {
    oproj_weights_fill_scales(&tensor->fill, work->chunk); /* 160 KB in the largest model */
    return write_data(work, writer, work->chunk, bytes_of(tensor));
  }
  int64_t step = CHUNK_BYTES / tensor->cols;
  for (int64_t row = 0; row < tensor->rows; row += step) {
    int64_t end = row + step < tensor->rows ? row + step : tensor->rows;
    oproj_weights_fill_codes(&tensor->fill, row, end, work->chunk);
    TRY(write_data(work, writer, work->chunk, (end - row) * tensor->cols));
  }
  return OPROJ_OK;
}

/* ---- files --------------------------------------------------------------------------------- */

static void file_name(const job *work, int32_t file, char out[FILE_NAME_BYTES]) {
  if (work->asked->files == 1)
    snprintf(out, FILE_NAME_BYTES, "model.safetensors");
  else
    snprintf(out, FILE_NAME_BYTES, "model-%05d-of-%05d.safetensors", file + 1, work->asked->files);
}

static int32_t first_layer(const job *work, int32_t file) {
  return (int32_t)((int64_t)file * layer_count(work) / work->asked->files);
}

static oproj_status write_planned(job *work, const char *path, const planned *plan, int32_t count) {
  oproj_tensors_writer *writer = NULL;
  oproj_tensor *tensors = calloc((size_t)count, sizeof *tensors);
  REQUIRE(tensors, OPROJ_ERR_NOMEM, "%s: no memory for %d tensors", path, count);
  for (int32_t i = 0; i < count; i++)
    tensors[i] = (oproj_tensor){.name = plan[i].name,
                                .dtype = dtype_of(work, &plan[i]),
                                .dimensions = 2,
                                .shape = {plan[i].rows, plan[i].cols}};
  const oproj_tensors_text text = {"format", "pt"};
  oproj_status status;
  TRY_GOTO(oproj_tensors_create(&writer, path, tensors, count, &text, 1), status, out);
  for (int32_t i = 0; i < count; i++) TRY_GOTO(write_tensor(work, writer, &plan[i]), status, out);
  status = oproj_tensors_finish(writer);
  writer = NULL; /* finish freed it */
out:
  oproj_tensors_abandon(writer);
  free(tensors);
  return status;
}

static oproj_status write_file(job *work, int32_t file) {
  char name[FILE_NAME_BYTES];
  int32_t begin = first_layer(work, file), end = first_layer(work, file + 1), count = 0;
  file_name(work, file, name);
  oproj_status status = OPROJ_OK;
  planned *plan = calloc((size_t)(end - begin) * TENSORS_PER_LAYER, sizeof *plan);
  char *path = oproj_weights_join(oproj_weights_stage_dir(work->stage), name);
  REQUIRE_GOTO(plan && path, status, out, OPROJ_ERR_NOMEM, "%s: no memory to plan it", name);
  for (int32_t layer = begin; layer < end; layer++)
    for (int32_t ordinal = 0; ordinal < TENSORS_PER_LAYER; ordinal++) {
      plan[count] = plan_tensor(work, layer, ordinal);
      REQUIRE_GOTO(json_object_set_new(work->weight_map, plan[count].name, json_string(name)) == 0,
                   status, out, OPROJ_ERR_NOMEM, "%s: no memory for the index", name);
      count++;
    }
  TRY_GOTO(write_planned(work, path, plan, count), status, out);
out:
  free(path);
  free(plan);
  return status;
}

static oproj_status write_index(const job *work) {
  if (work->asked->files == 1) return OPROJ_OK;
  return write_json(work, OPROJ_WEIGHTS_INDEX_FILE,
                    json_pack("{s:{s:I}, s:O}", "metadata", "total_size", (json_int_t)work->total,
                              "weight_map", work->weight_map));
}

/* ---- the job ------------------------------------------------------------------------------- */

static const struct model *find_model(const char *name) {
  for (size_t i = 0; i < sizeof models / sizeof models[0]; i++)
    if (strcmp(models[i].name, name) == 0) return &models[i];
  return NULL;
}

static oproj_status check_asked(job *work) {
  const oproj_synth *asked = work->asked;
  REQUIRE(asked->model, OPROJ_ERR_INVALID, "synth: no model is named");
  work->model = find_model(asked->model);
  REQUIRE(work->model, OPROJ_ERR_INVALID,
          "synth: model \"%s\" is unknown; v4-flash, v4-pro, v4.1-flash and tiny are known",
          asked->model);
  work->layers = asked->layers == -1 ? work->model->layers : asked->layers;
  work->draft_layers = asked->draft_layers == -1 ? work->model->draft_layers : asked->draft_layers;
  REQUIRE(work->layers >= 1 && work->layers <= OPROJ_WEIGHTS_MAX_LAYERS, OPROJ_ERR_INVALID,
          "synth: %d layers; it must be in [1, %d]", work->layers, OPROJ_WEIGHTS_MAX_LAYERS);
  REQUIRE(work->draft_layers >= 0 && work->draft_layers <= OPROJ_WEIGHTS_MAX_DRAFT,
          OPROJ_ERR_INVALID, "synth: %d draft layers; it must be in [0, %d]", work->draft_layers,
          OPROJ_WEIGHTS_MAX_DRAFT);
  REQUIRE(asked->files >= 1 && asked->files <= layer_count(work), OPROJ_ERR_INVALID,
          "synth: %d files; it must be in [1, %d], the number of layers", asked->files,
          layer_count(work));
  REQUIRE(asked->names == OPROJ_NAMES_RELEASE || asked->names == OPROJ_NAMES_HF, OPROJ_ERR_INVALID,
          "synth: names %d are unknown", (int)asked->names);
  REQUIRE((unsigned)asked->scale_dtype <= OPROJ_SCALE_DTYPE_F32, OPROJ_ERR_INVALID,
          "synth: scale dtype %d is unknown", (int)asked->scale_dtype);
  return OPROJ_OK;
}

static oproj_status write_checkpoint(job *work) {
  for (int32_t ordinal = 0; ordinal < TENSORS_PER_LAYER; ordinal++) {
    planned tensor = plan_tensor(work, 0, ordinal);
    work->total += layer_count(work) * bytes_of(&tensor);
  }
  work->chunk = malloc(CHUNK_BYTES);
  work->weight_map = json_object();
  REQUIRE(work->chunk && work->weight_map, OPROJ_ERR_NOMEM, "synth: no memory to begin");
  TRY(write_json(work, OPROJ_WEIGHTS_CONFIG_FILE, config_of(work)));
  for (int32_t file = 0; file < work->asked->files; file++) TRY(write_file(work, file));
  return write_index(work);
}

oproj_status oproj_checkpoint_synth(const oproj_synth *synth, const char *dir,
                                    oproj_progress_fn progress, void *user) {
  job work = {.asked = synth, .progress = progress, .user = user};
  oproj_status status;
  TRY(check_asked(&work));
  TRY_GOTO(oproj_weights_stage_begin(&work.stage, dir), status, out);
  TRY_GOTO(write_checkpoint(&work), status, out);
  status = oproj_weights_stage_commit(work.stage);
  work.stage = NULL; /* commit freed it */
out:
  oproj_weights_stage_abandon(work.stage);
  json_decref(work.weight_map);
  free(work.chunk);
  return status;
}
