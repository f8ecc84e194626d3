/* names.h - the one list of tensor names in use (SPEC, released models). */
#ifndef OPROJ_WEIGHTS_NAMES_H
#define OPROJ_WEIGHTS_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum oproj_weights_matrix {
  OPROJ_WEIGHTS_A, /* WO_A [groups*lora_rank, hpg*head_dim] */
  OPROJ_WEIGHTS_B, /* WO_B [hidden, groups*lora_rank] */
  OPROJ_WEIGHTS_MATRICES
} oproj_weights_matrix;

typedef enum oproj_weights_part {
  OPROJ_WEIGHTS_WEIGHT,
  OPROJ_WEIGHTS_SCALE,
  OPROJ_WEIGHTS_PARTS
} oproj_weights_part;

/* What a name says.  A draft layer may be counted as mtp.k or, behind the others, as layers.L+k:
 * then `draft` is false and number >= L. */
typedef struct oproj_weights_name {
  bool draft;
  int32_t number;
  oproj_weights_matrix matrix;
  oproj_weights_part part;
} oproj_weights_name;

/* Whether `name` is a WO_A or WO_B tensor in any form in use, and which. */
bool oproj_weights_name_parse(const char *name, oproj_weights_name *out);

/* Writes the name that released files (hf: Hugging Face files) have for a tensor.  hf has no form
 * of its own for draft layers: they are numbered behind the others, so `number` is layers + k
 * there. */
enum { OPROJ_WEIGHTS_NAME_BYTES = 96 };
void oproj_weights_name_format(const oproj_weights_name *name, bool hf,
                               char out[OPROJ_WEIGHTS_NAME_BYTES]);

#endif /* OPROJ_WEIGHTS_NAMES_H */
