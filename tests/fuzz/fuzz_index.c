/* fuzz_index.c - model.safetensors.index.json. */
#include "fuzz.h"
#include "weights/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  oproj_weights_index index;
  if (oproj_weights_index_parse("fuzz", (const char *)data, size, &index) == OPROJ_OK)
    oproj_weights_index_free(&index);
  return 0;
}
