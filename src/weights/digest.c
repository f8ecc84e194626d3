/* digest.c - owns what tells one checkpoint from another without reading it: of a split set the
 * identity, which covers every byte; of a whole checkpoint what the headers say of our tensors, and
 * a sample from the middle of each. */
#include <string.h>
#include <xxhash.h>

#include "base/error.h"
#include "weights/weights.h"

enum { SAMPLE_BYTES = 4096 };

static void add_text(XXH3_state_t *state, const char *text) {
  XXH3_64bits_update(state, text, strlen(text) + 1);
}

/* Its place in its file too: two copies of a checkpoint agree on that. */
static oproj_status add_tensor(XXH3_state_t *state, const oproj_weights_found *found) {
  const oproj_tensor *t = found->tensor;
  uint8_t sample[SAMPLE_BYTES];
  int64_t bytes = t->bytes < SAMPLE_BYTES ? t->bytes : SAMPLE_BYTES;
  add_text(state, strrchr(oproj_tensors_path(found->file), '/'));
  add_text(state, t->name);
  add_text(state, t->dtype);
  XXH3_64bits_update(state, t->shape, (size_t)t->dimensions * sizeof *t->shape);
  XXH3_64bits_update(state, &t->offset, sizeof t->offset);
  TRY(oproj_tensors_read(found->file, t, (t->bytes - bytes) / 2, bytes, sample));
  XXH3_64bits_update(state, sample, (size_t)bytes);
  return OPROJ_OK;
}

static oproj_status add_layer(XXH3_state_t *state, const oproj_weights_layer *layer) {
  for (int m = 0; m < OPROJ_WEIGHTS_MATRICES; m++)
    for (int p = 0; p < OPROJ_WEIGHTS_PARTS; p++)
      if (layer->slot[m][p].first.tensor) TRY(add_tensor(state, &layer->slot[m][p].first));
  return OPROJ_OK;
}

oproj_status oproj_checkpoint_digest(const oproj_checkpoint *checkpoint, uint64_t *out) {
  REQUIRE(checkpoint && out, OPROJ_ERR_INVALID, "checkpoint and out must not be NULL");
  if (checkpoint->split) {
    *out = oproj_weights_split_identity(checkpoint->split);
    return OPROJ_OK;
  }
  const oproj_model *model = &checkpoint->config.model;
  oproj_status status = OPROJ_OK;
  XXH3_state_t *state = XXH3_createState();
  REQUIRE(state, OPROJ_ERR_NOMEM, "no memory for a checksum");
  XXH3_64bits_reset(state);
  for (int32_t i = 0; i < model->layers + model->draft_layers && status == OPROJ_OK; i++)
    status = add_layer(state, &checkpoint->layers[i]);
  *out = XXH3_64bits_digest(state);
  XXH3_freeState(state);
  return status;
}
