/* facts.h - what ranks must have in common: collected in words, packed, compared.
 *
 * Every rank packs its facts into one sheet; all ranks get all sheets and come to the same verdict
 * by themselves. */
#ifndef OPROJ_TP_FACTS_H
#define OPROJ_TP_FACTS_H

#include <stddef.h>

#include "oproj.h"

enum {
  OPROJ_FACTS_MOST = 64,
  OPROJ_FACTS_TEXT = 128, /* bytes of a name or a value, with its NUL */
  OPROJ_FACTS_SHEET = 8192
};

/* A list under construction. */
typedef struct oproj_facts {
  int32_t count;
  oproj_fact list[OPROJ_FACTS_MOST];
  char values[OPROJ_FACTS_MOST][OPROJ_FACTS_TEXT];
} oproj_facts;

/* Appends one, its value formatted; `name` is borrowed.  What exceeds the list is left out. */
void oproj_facts_add(oproj_facts *facts, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* name, NUL, value, NUL for each; the rest of the sheet zero.  ERR_INVALID: they do not fit. */
oproj_status oproj_facts_pack(const oproj_fact *facts, int32_t count,
                              char sheet[OPROJ_FACTS_SHEET]);

/* Holds the sheets of `size` ranks against each other; the sentence is the same on every rank. */
oproj_status oproj_facts_judge(const char *sheets, int32_t size);

#endif /* OPROJ_TP_FACTS_H */
