/* names.c - owns the table of tensor names: prefix, layer number, module, and what follows it. */
#include "weights/names.h"

#include <stdio.h>
#include <string.h>

enum { MAX_DIGITS = 6 };

enum { RELEASE, RELEASE_DRAFT, HF }; /* rows of `forms` that are also written */

static const struct {
  const char *prefix; /* before the number */
  bool draft;         /* the number counts draft layers alone */
  const char *module[OPROJ_WEIGHTS_MATRICES];
} forms[] = {
    [RELEASE] = {"layers.", false, {".attn.wo_a", ".attn.wo_b"}},
    [RELEASE_DRAFT] = {"mtp.", true, {".attn.wo_a", ".attn.wo_b"}},
    [HF] = {"model.layers.", false, {".self_attn.o_a_proj", ".self_attn.o_b_proj"}},
    {"model.layers.", false, {".attn.wo_a", ".attn.wo_b"}},
    {"model.mtp.", true, {".attn.wo_a", ".attn.wo_b"}},
};

enum { SUFFIX_WEIGHT, SUFFIX_SCALE, SUFFIX_SCALE_INV };

static const struct {
  const char *text;
  oproj_weights_part part;
} suffixes[] = {
    [SUFFIX_WEIGHT] = {".weight", OPROJ_WEIGHTS_WEIGHT},
    [SUFFIX_SCALE] = {".scale", OPROJ_WEIGHTS_SCALE},
    [SUFFIX_SCALE_INV] = {".weight_scale_inv", OPROJ_WEIGHTS_SCALE},
    {".weight_scale", OPROJ_WEIGHTS_SCALE},
};

/* The text behind `prefix`, or NULL. */
static const char *after(const char *text, const char *prefix) {
  size_t length = strlen(prefix);
  return strncmp(text, prefix, length) == 0 ? text + length : NULL;
}

/* A decimal number as a name has it: no sign, no leading zero; NULL if there is none. */
static const char *parse_number(const char *text, int32_t *out) {
  int32_t value = 0, digits = 0;
  while (text[digits] >= '0' && text[digits] <= '9') {
    if (digits == MAX_DIGITS || (digits == 1 && text[0] == '0')) return NULL;
    value = value * 10 + (text[digits++] - '0');
  }
  *out = value;
  return digits > 0 ? text + digits : NULL;
}

bool oproj_weights_name_parse(const char *name, oproj_weights_name *out) {
  for (size_t f = 0; f < sizeof forms / sizeof forms[0]; f++) {
    int32_t number;
    const char *rest = after(name, forms[f].prefix);
    if (rest) rest = parse_number(rest, &number);
    if (!rest) continue;
    for (int m = 0; m < OPROJ_WEIGHTS_MATRICES; m++) {
      const char *tail = after(rest, forms[f].module[m]);
      if (!tail) continue;
      for (size_t s = 0; s < sizeof suffixes / sizeof suffixes[0]; s++)
        if (strcmp(tail, suffixes[s].text) == 0) {
          *out = (oproj_weights_name){forms[f].draft, number, (oproj_weights_matrix)m,
                                      suffixes[s].part};
          return true;
        }
    }
  }
  return false;
}

void oproj_weights_name_format(const oproj_weights_name *name, bool hf,
                               char out[OPROJ_WEIGHTS_NAME_BYTES]) {
  int form = hf ? HF : name->draft ? RELEASE_DRAFT : RELEASE;
  int suffix = name->part == OPROJ_WEIGHTS_WEIGHT ? SUFFIX_WEIGHT
               : hf                               ? SUFFIX_SCALE_INV
                                                  : SUFFIX_SCALE;
  snprintf(out, OPROJ_WEIGHTS_NAME_BYTES, "%s%d%s%s", forms[form].prefix, name->number,
           forms[form].module[name->matrix], suffixes[suffix].text);
}
