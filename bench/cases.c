/* cases.c - the list of cases, in the order of a forward call. */
#include "cases.h"

#include <string.h>

const bench_case *const bench_cases[] = {&case_inv_rope, &case_wo_a,   &case_wo_b, &case_forward,
                                         &case_layer,    &case_reduce, &case_load, NULL};

const bench_case *bench_case_find(const char *name) {
  for (const bench_case *const *c = bench_cases; *c; c++)
    if (strcmp((*c)->name, name) == 0) return *c;
  return NULL;
}
