/* checkpoints.c - the small hand-made checkpoint. */
#include "checkpoints.h"

#include <stdio.h>
#include <string.h>

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
