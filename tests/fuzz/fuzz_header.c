/* fuzz_header.c - a safetensors file.  The bytes are taken twice: as a whole file, and, since few
 * changes keep its length field right, as a header's text with as many bytes of data behind it as
 * their first one says. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "weights/safetensors.h"

enum { LENGTH_BYTES = 8 };

static void check_text(size_t data_bytes, const uint8_t *text, size_t size) {
  uint8_t *image = calloc(LENGTH_BYTES + size + data_bytes, 1);
  if (!image) abort();
  for (int i = 0; i < LENGTH_BYTES; i++) image[i] = (uint8_t)(size >> 8 * i);
  memcpy(image + LENGTH_BYTES, text, size);
  oproj_weights_tensors_check("fuzz", image, LENGTH_BYTES + size + data_bytes);
  free(image);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  oproj_weights_tensors_check("fuzz", data, size);
  if (size > 0) check_text(data[0], data + 1, size - 1);
  return 0;
}
