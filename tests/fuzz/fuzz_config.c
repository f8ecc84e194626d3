/* fuzz_config.c - config.json, and the plan of the dimensions that it gives. */
#include "fuzz.h"
#include "weights/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  oproj_weights_config config;
  oproj_shard shard;
  if (oproj_weights_config_parse("fuzz", fuzz_text(data, size), size, &config) != OPROJ_OK)
    return 0;
  oproj_plan_shard(&config.model.dims, OPROJ_SPLIT_UNEVEN, 3, 2, &shard);
  oproj_weights_config_free(&config);
  return 0;
}
