/* checkpoints.c - the small hand-made checkpoint. */
#include "checkpoints.h"

#include <check.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/data.h"

const char small_config[] =
    "{\"model_type\": \"deepseek_v4\", \"hidden_size\": 200, \"num_attention_heads\": 3,\n"
    " \"head_dim\": 128, \"qk_rope_head_dim\": 64, \"o_groups\": 3, \"o_lora_rank\": 128,\n"
    " \"num_hidden_layers\": 2, \"rope_theta\": 10000, \"compress_rope_theta\": 160000,\n"
    " \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1,\n"
    "  \"original_max_position_embeddings\": 65536}, \"max_position_embeddings\": 1048576,\n"
    " \"compress_ratios\": [0, 4, 0],\n"
    " \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}}\n";

void small_fill(small_layer *layer, unsigned seed) {
  for (unsigned i = 0; i < sizeof layer->a; i++)
    layer->a[i] = (uint8_t)((i * 7 + i / SMALL_D * 13 + seed * 31) % 127);
  for (unsigned i = 0; i < sizeof layer->b; i++)
    layer->b[i] = (uint8_t)((i * 11 + i / SMALL_Z * 5 + seed * 17) % 127);
  for (unsigned i = 0; i < sizeof layer->a_scale; i++)
    layer->a_scale[i] = (uint8_t)(120 + seed + i);
  for (unsigned i = 0; i < sizeof layer->b_scale; i++)
    layer->b_scale[i] = (uint8_t)(100 + seed + i);
}

void small_tensors(const small_layer *layer, const char *base_a, const char *base_b,
                   const char *suffix, char names[SMALL_TENSORS][128],
                   files_tensor out[SMALL_TENSORS]) {
  snprintf(names[0], 128, "%s.weight", base_a);
  snprintf(names[1], 128, "%s%s", base_a, suffix);
  snprintf(names[2], 128, "%s.weight", base_b);
  snprintf(names[3], 128, "%s%s", base_b, suffix);
  out[0] = (files_tensor){names[0], "F8_E4M3", SMALL_Z, SMALL_D, layer->a};
  out[1] = (files_tensor){names[1], "F8_E8M0", 3, 1, layer->a_scale};
  out[2] = (files_tensor){names[2], "F8_E4M3", SMALL_HIDDEN, SMALL_Z, layer->b};
  out[3] = (files_tensor){names[3], "F8_E8M0", 2, 3, layer->b_scale};
}

void small_write(const char *dir, small_layer layers[SMALL_LAYERS]) {
  char names[2 * SMALL_TENSORS][128];
  files_tensor tensors[2 * SMALL_TENSORS];
  files_write_text(dir, "config.json", small_config);
  for (unsigned i = 0; i < SMALL_LAYERS; i++) small_fill(&layers[i], i);
  small_tensors(&layers[0], "layers.0.attn.wo_a", "layers.0.attn.wo_b", ".scale", names, tensors);
  small_tensors(&layers[1], "layers.1.attn.wo_a", "layers.1.attn.wo_b", ".scale",
                names + SMALL_TENSORS, tensors + SMALL_TENSORS);
  files_write_tensors(dir, "model.safetensors", tensors, 2 * SMALL_TENSORS, 1);
}

/* ---- for up to eight ranks ------------------------------------------------------------------ */

static const char wide_config[] =
    "{\"model_type\": \"deepseek_v4\", \"hidden_size\": 200, \"num_attention_heads\": 8,\n"
    " \"head_dim\": 128, \"qk_rope_head_dim\": 64, \"o_groups\": 8, \"o_lora_rank\": 128,\n"
    " \"num_hidden_layers\": 5, \"rope_theta\": 10000, \"compress_rope_theta\": 160000,\n"
    " \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1,\n"
    "  \"original_max_position_embeddings\": 65536}, \"max_position_embeddings\": 1048576,\n"
    " \"compress_ratios\": [0, 4, 0, 4, 128],\n"
    " \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}}\n";

static const struct {
  const char *module;
  int64_t rows, cols;
} wide_matrices[] = {{"wo_a", WIDE_Z, WIDE_D}, {"wo_b", WIDE_HIDDEN, WIDE_Z}};

/* Values of any dtype: codes below NaN, scales near one, bf16 near zero. */
static void *wide_values(const files_tensor *tensor, uint64_t stream) {
  int64_t count = tensor->rows * tensor->cols;
  uint8_t *values = malloc((size_t)count * 4);
  for (int64_t i = 0; i < count; i++) {
    uint64_t word = data_hash(stream, (uint64_t)i);
    uint16_t half = (uint16_t)(0x3C00 | (word & 0x81FF));
    float scale = 1.0f + (float)(word % 1000) / 1000.0f;
    if (strcmp(tensor->dtype, "F8_E4M3") == 0)
      values[i] = (uint8_t)(word % 127 | (word >> 8 & 128));
    if (strcmp(tensor->dtype, "F8_E8M0") == 0) values[i] = (uint8_t)(120 + word % 10);
    if (strcmp(tensor->dtype, "BF16") == 0) memcpy(values + 2 * i, &half, 2);
    if (strcmp(tensor->dtype, "F32") == 0) memcpy(values + 4 * i, &scale, 4);
  }
  return values;
}

/* Adds one matrix of a layer to the tensors of a file and to the index. */
static void wide_add(int layer, int matrix, unsigned seed, const char *file, FILE *index,
                     files_tensor *tensors, int *count) {
  bool bf16 = layer == 1 && matrix == 0;
  for (int part = 0; part < (bf16 ? 1 : 2); part++) {
    files_tensor *to = &tensors[(*count)++];
    char *name;
    ck_assert_int_gt(asprintf(&name, "layers.%d.attn.%s.%s", layer, wide_matrices[matrix].module,
                              part ? "scale" : "weight"),
                     0);
    to->name = name;
    to->dtype = part == 0 ? (bf16 ? "BF16" : "F8_E4M3") : layer == 2 ? "F32" : "F8_E8M0";
    to->rows = part ? (wide_matrices[matrix].rows + 127) / 128 : wide_matrices[matrix].rows;
    to->cols = part ? (wide_matrices[matrix].cols + 127) / 128 : wide_matrices[matrix].cols;
    to->data = wide_values(to, seed * 1000 + (unsigned)(layer * 4 + matrix * 2 + part));
    fprintf(index, "%s\"%s\": \"%s\"", ftell(index) > 20 ? ", " : "", name, file);
  }
}

void wide_write(const char *dir, unsigned seed) {
  static const char *const files[] = {"a.safetensors", "b.safetensors"};
  char *text;
  size_t bytes;
  FILE *index = open_memstream(&text, &bytes);
  fputs("{\"weight_map\": {", index);
  for (int f = 0; f < 2; f++) {
    files_tensor tensors[WIDE_LAYERS * 4];
    int count = 0;
    /* WO_A and WO_B of one layer lie in different files. */
    for (int layer = 0; layer < WIDE_LAYERS; layer++)
      wide_add(layer, (layer + f) % 2, seed, files[f], index, tensors, &count);
    files_write_tensors(dir, files[f], tensors, count, 1 + f);
    for (int i = 0; i < count; i++) {
      free((void *)(uintptr_t)tensors[i].name);
      free((void *)(uintptr_t)tensors[i].data);
    }
  }
  fputs("}}", index);
  fclose(index);
  files_write_text(dir, "config.json", wide_config);
  files_write_text(dir, "model.safetensors.index.json", text);
  free(text);
}
