/* fuzz_manifest.c - the manifest of a split set, beside a config.json of four groups. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "weights/weights.h"

static const char text[] =
    "{\"model_type\": \"deepseek_v4\", \"hidden_size\": 256, \"num_attention_heads\": 4,\n"
    " \"head_dim\": 128, \"qk_rope_head_dim\": 64, \"o_groups\": 4, \"o_lora_rank\": 128,\n"
    " \"num_hidden_layers\": 1, \"rope_theta\": 10000, \"compress_rope_theta\": 160000,\n"
    " \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 16, \"beta_fast\": 32, \"beta_slow\": 1,\n"
    "  \"original_max_position_embeddings\": 65536}, \"max_position_embeddings\": 1048576,\n"
    " \"compress_ratios\": [0],\n"
    " \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}}\n";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  static oproj_weights_config config;
  oproj_weights_split *split;
  if (!config.text &&
      oproj_weights_config_parse("fuzz", strdup(text), strlen(text), &config) != OPROJ_OK)
    abort();
  if (oproj_weights_split_parse("fuzz", (const char *)data, size, &config, &split) == OPROJ_OK)
    oproj_weights_split_free(split);
  return 0;
}
