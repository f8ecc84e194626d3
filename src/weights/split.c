/* split.c - owns writing a split set: every rank's part of every layer, one safetensors file per
 * rank, and the manifest that describes them (its form: split_open.c).
 *
 * A part keeps its dtype and gets the released model's name.  The identity depends on all
 * checksums, so rank files are begun with zeros in its place, which are overwritten before the
 * files get their names. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "weights/json.h"
#include "weights/safetensors.h"
#include "weights/weights.h"

typedef struct entry {
  oproj_weights_found found;
  oproj_weights_matrix matrix;
  oproj_weights_part part;
  char name[OPROJ_WEIGHTS_NAME_BYTES];
} entry;

typedef struct job {
  const oproj_checkpoint *source;
  oproj_split kind;
  int32_t size;
  entry *entries;
  int32_t count;
  uint64_t *checksums;            /* [size, count] */
  oproj_tensors_writer **writers; /* [size] */
  oproj_weights_stage *stage;
  oproj_progress_fn progress;
  void *user;
  int64_t done, total; /* bytes */
} job;

/* ---- what is written ----------------------------------------------------------------------- */

static bool is_absent(const oproj_weights_layer *layer) {
  for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++)
    for (int part = 0; part < OPROJ_WEIGHTS_PARTS; part++)
      if (layer->slot[matrix][part].first.tensor) return false;
  return true;
}

static void add_entry(job *work, const oproj_weights_found *found, oproj_weights_name name) {
  entry *to = &work->entries[work->count++];
  *to = (entry){.found = *found, .matrix = name.matrix, .part = name.part};
  oproj_weights_name_format(&name, false, to->name);
  work->total += found->tensor->bytes;
}

static oproj_status choose_entries(job *work) {
  const oproj_model *model = &work->source->config.model;
  int32_t layers = model->layers + model->draft_layers;
  work->entries =
      calloc((size_t)layers * OPROJ_WEIGHTS_MATRICES * OPROJ_WEIGHTS_PARTS, sizeof *work->entries);
  REQUIRE(work->entries, OPROJ_ERR_NOMEM, "no memory to split %d layers", layers);
  for (int32_t layer = 0; layer < layers; layer++) {
    if (is_absent(&work->source->layers[layer])) continue;
    bool draft = layer >= model->layers;
    for (int matrix = 0; matrix < OPROJ_WEIGHTS_MATRICES; matrix++) {
      oproj_weights_matrix_info info;
      oproj_weights_name name = {draft, draft ? layer - model->layers : layer,
                                 (oproj_weights_matrix)matrix, OPROJ_WEIGHTS_WEIGHT};
      TRY(oproj_weights_matrix_find(work->source, layer, name.matrix, &info));
      add_entry(work, &info.weight, name);
      name.part = OPROJ_WEIGHTS_SCALE;
      if (info.scale.tensor) add_entry(work, &info.scale, name);
    }
  }
  REQUIRE(work->count > 0, OPROJ_ERR_SHAPE, "%s: no layer has WO_A and WO_B", work->source->dir);
  return OPROJ_OK;
}

/* A scale that no rank could load is refused before anything is written. */
static oproj_status check_scales(const job *work) {
  const oproj_model *model = &work->source->config.model;
  oproj_shard whole;
  TRY(oproj_plan_shard(&model->dims, OPROJ_SPLIT_EVEN, 1, 0, &whole));
  for (int32_t layer = 0; layer < model->layers + model->draft_layers; layer++)
    if (!is_absent(&work->source->layers[layer]))
      TRY(oproj_checkpoint_check_scales(work->source, layer, &whole));
  return OPROJ_OK;
}

static oproj_status region_of(const job *work, const entry *from, int32_t rank,
                              oproj_weights_region *out) {
  const oproj_dims *dims = &work->source->config.model.dims;
  oproj_shard shard;
  TRY(oproj_plan_shard(dims, work->kind, work->size, rank, &shard));
  *out = oproj_weights_region_of(dims, from->matrix, from->part, shard.z_begin, shard.z_end);
  return OPROJ_OK;
}

/* ---- rank files ---------------------------------------------------------------------------- */

static oproj_status create_rank(job *work, int32_t rank) {
  char file[64], number[16];
  oproj_status status = OPROJ_OK;
  oproj_tensor *tensors = calloc((size_t)work->count, sizeof *tensors);
  oproj_weights_rank_file(rank, work->size, file);
  snprintf(number, sizeof number, "%d", rank);
  char *path = oproj_weights_join(oproj_weights_stage_dir(work->stage), file);
  REQUIRE_GOTO(tensors && path, status, out, OPROJ_ERR_NOMEM, "no memory to begin %s", file);
  for (int32_t i = 0; i < work->count; i++) {
    oproj_weights_region region;
    TRY_GOTO(region_of(work, &work->entries[i], rank, &region), status, out);
    tensors[i] = (oproj_tensor){
        .name = work->entries[i].name,
        .dtype = work->entries[i].found.tensor->dtype,
        .dimensions = 2,
        .shape = {region.row_end - region.row_begin, region.col_end - region.col_begin}};
  }
  const oproj_tensors_text texts[] = {{"format", "pt"},
                                      {OPROJ_WEIGHTS_RANK_KEY, number},
                                      {OPROJ_WEIGHTS_IDENTITY_KEY, "0000000000000000"}};
  TRY_GOTO(oproj_tensors_create(&work->writers[rank], path, tensors, work->count, texts,
                                sizeof texts / sizeof texts[0]),
           status, out);
out:
  free(path);
  free(tensors);
  return status;
}

static oproj_status write_part(job *work, int32_t rank, int32_t index) {
  const entry *from = &work->entries[index];
  oproj_weights_region region;
  TRY(region_of(work, from, rank, &region));
  int64_t bytes = (region.row_end - region.row_begin) * (region.col_end - region.col_begin) *
                  (oproj_weights_dtype_bits(from->found.tensor->dtype) / 8);
  void *data = malloc((size_t)bytes);
  REQUIRE(data, OPROJ_ERR_NOMEM, "tensor %s: no memory for %" PRId64 " bytes", from->name, bytes);
  oproj_status status;
  TRY_GOTO(oproj_weights_read_region(&from->found, &region, data), status, out);
  work->checksums[(int64_t)rank * work->count + index] =
      oproj_weights_checksum(data, (size_t)bytes);
  TRY_GOTO(oproj_tensors_write(work->writers[rank], data, bytes), status, out);
  work->done += bytes;
  REQUIRE_GOTO(!work->progress || work->progress(work->user, work->done, work->total) == 0, status,
               out, OPROJ_ERR_INVALID,
               "stopped by the caller after %" PRId64 " of %" PRId64 " bytes", work->done,
               work->total);
out:
  free(data);
  return status;
}

/* ---- identity and manifest ----------------------------------------------------------------- */

/* An entry as the manifest has it: the whole tensor under its new name. */
static oproj_tensor described(const entry *from) {
  oproj_tensor tensor = *from->found.tensor;
  tensor.name = from->name;
  return tensor;
}

static oproj_status find_identity(const job *work, char out[17]) {
  oproj_weights_identity *identity;
  TRY(oproj_weights_identity_begin(&identity, &work->source->config, work->kind, work->size));
  for (int32_t i = 0; i < work->count; i++) {
    oproj_tensor tensor = described(&work->entries[i]);
    oproj_weights_identity_tensor(identity, &tensor);
  }
  for (int64_t i = 0; i < (int64_t)work->size * work->count; i++)
    oproj_weights_identity_checksum(identity, work->checksums[i]);
  oproj_weights_hex(oproj_weights_identity_value(identity), out);
  oproj_weights_identity_end(identity);
  return OPROJ_OK;
}

/* jansson's setters refuse NULL, so an allocation that fails anywhere below ends as a missing
 * value; that is what the sum of `failed` tells. */
static json_t *build_manifest(const job *work, const char *identity) {
  int failed = 0;
  json_t *tensors = json_array(), *ranks = json_array();
  for (int32_t i = 0; i < work->count; i++) {
    oproj_tensor tensor = described(&work->entries[i]);
    failed |= json_array_append_new(
        tensors, json_pack("{s:s, s:s, s:[I,I]}", "name", tensor.name, "dtype", tensor.dtype,
                           "shape", (json_int_t)tensor.shape[0], (json_int_t)tensor.shape[1]));
  }
  for (int32_t rank = 0; rank < work->size; rank++) {
    char file[64], hex[17];
    json_t *checksums = json_object();
    for (int32_t i = 0; i < work->count; i++) {
      oproj_weights_hex(work->checksums[(int64_t)rank * work->count + i], hex);
      failed |= json_object_set_new(checksums, work->entries[i].name, json_string(hex));
    }
    oproj_weights_rank_file(rank, work->size, file);
    failed |=
        json_array_append_new(ranks, json_pack("{s:s, s:o}", "file", file, "checksums", checksums));
  }
  json_t *manifest = json_pack("{s:s, s:i, s:i, s:s, s:s, s:o, s:o}", "format", "oproj-split",
                               "version", OPROJ_WEIGHTS_MANIFEST_VERSION, "size", work->size,
                               "split", work->kind == OPROJ_SPLIT_EVEN ? "even" : "uneven",
                               "identity", identity, "tensors", tensors, "ranks", ranks);
  if (failed == 0) return manifest;
  json_decref(manifest);
  return NULL;
}

static oproj_status write_manifest(const job *work, const char *identity) {
  json_t *manifest = build_manifest(work, identity);
  char *text = manifest ? json_dumps(manifest, JSON_INDENT(1)) : NULL;
  oproj_status status =
      text ? oproj_weights_stage_write(work->stage, OPROJ_WEIGHTS_MANIFEST_FILE, text, strlen(text))
           : oproj_fail(OPROJ_ERR_NOMEM, "no memory for the manifest of %s",
                        oproj_weights_stage_dir(work->stage));
  free(text);
  json_decref(manifest);
  return status;
}

static oproj_status finish_ranks(job *work, const char *identity) {
  for (int32_t rank = 0; rank < work->size; rank++) {
    TRY(oproj_tensors_rewrite_text(work->writers[rank], OPROJ_WEIGHTS_IDENTITY_KEY, identity));
    oproj_tensors_writer *writer = work->writers[rank];
    work->writers[rank] = NULL; /* finish frees it, whatever comes */
    TRY(oproj_tensors_finish(writer));
  }
  return OPROJ_OK;
}

static oproj_status write_set(job *work) {
  const oproj_weights_config *config = &work->source->config;
  char identity[17];
  for (int32_t rank = 0; rank < work->size; rank++) TRY(create_rank(work, rank));
  /* Tensor by tensor, so that a tensor of the source is read for all ranks while it is cached. */
  for (int32_t i = 0; i < work->count; i++)
    for (int32_t rank = 0; rank < work->size; rank++) TRY(write_part(work, rank, i));
  TRY(find_identity(work, identity));
  TRY(finish_ranks(work, identity));
  TRY(oproj_weights_stage_write(work->stage, OPROJ_WEIGHTS_CONFIG_FILE, config->text,
                                config->text_bytes));
  return write_manifest(work, identity);
}

oproj_status oproj_checkpoint_split(const oproj_checkpoint *checkpoint, const char *dir,
                                    oproj_split split, int32_t size, oproj_progress_fn progress,
                                    void *user) {
  job work = {
      .source = checkpoint, .kind = split, .size = size, .progress = progress, .user = user};
  oproj_shard shard;
  oproj_status status;
  REQUIRE(!checkpoint->split, OPROJ_ERR_INVALID,
          "%s is split already, for %d ranks; the whole checkpoint is wanted", checkpoint->dir,
          oproj_checkpoint_split_size(checkpoint));
  TRY(oproj_plan_shard(&checkpoint->config.model.dims, split, size, 0, &shard));
  REQUIRE(size <= OPROJ_WEIGHTS_MAX_RANKS, OPROJ_ERR_SHAPE, "%d ranks; at most %d are written",
          size, OPROJ_WEIGHTS_MAX_RANKS);
  TRY_GOTO(choose_entries(&work), status, out);
  TRY_GOTO(check_scales(&work), status, out);
  work.checksums = calloc((size_t)size * (size_t)work.count, sizeof *work.checksums);
  work.writers = calloc((size_t)size, sizeof *work.writers);
  REQUIRE_GOTO(work.checksums && work.writers, status, out, OPROJ_ERR_NOMEM,
               "no memory to split %s", checkpoint->dir);
  TRY_GOTO(oproj_weights_stage_begin(&work.stage, dir), status, out);
  TRY_GOTO(write_set(&work), status, out);
  status = oproj_weights_stage_commit(work.stage);
  work.stage = NULL; /* commit freed it */
out:
  for (int32_t rank = 0; work.writers && rank < size; rank++)
    oproj_tensors_abandon(work.writers[rank]);
  oproj_weights_stage_abandon(work.stage);
  free(work.writers);
  free(work.checksums);
  free(work.entries);
  return status;
}
