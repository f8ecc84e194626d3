/* cases.h - what a case tells the engine, and the list of them: one file each, case_*.c. */
#ifndef OPROJ_BENCH_CASES_H
#define OPROJ_BENCH_CASES_H

#include <stdbool.h>

#include "rig.h"

/* What one call must move and compute, each byte counted once. */
typedef struct bench_cost {
  double bytes, flops; /* 0: none worth naming */
  double link_bytes;   /* from each rank to others */
} bench_cost;

struct bench_table; /* table.h */

typedef struct bench_case {
  const char *name, *summary;
  bool naive;    /* the BF16 composition does the same work and is timed beside it */
  bool eager;    /* waits on the host inside a call, so that no graph can hold it; cases that sum
                   over ranks do so where those sum through the host (rig_enqueues) */
  bool chain;    /* of a rank, all of it: what a path is chosen for */
  bool loads;    /* of a checkpoint: not sized in tokens */
  bool reduces;  /* over the ranks; the others stop at this rank's partial sum */
  bool overlaps; /* computes beside its sums, in chunks */

  /* COLLECTIVE.  Dimensions from elsewhere than args; NULL: none. */
  oproj_status (*dims)(job_state *job, const bench_args *args, oproj_dims *out);

  /* COLLECTIVE.  Makes what the calls need; all of it is sized for rig->max_tokens. */
  oproj_status (*open)(bench_rig *rig);
  void (*close)(bench_rig *rig); /* NULL: nothing to do; also after a failure before */

  /* COLLECTIVE.  Times and puts all rows by itself, in place of what follows; NULL: the engine
   * does. */
  oproj_status (*rows)(bench_rig *rig, const struct bench_table *table, int32_t replays);

  oproj_status (*call)(bench_rig *rig, int32_t tokens, int32_t call, void *stream);
  bench_cost (*cost)(const bench_rig *rig, int32_t tokens);

  /* Poisons the output before the timed calls; NULL where check is. */
  oproj_status (*poison)(bench_rig *rig, int32_t tokens);
  /* Counts this rank's wrong values in what call number `call` has left; NULL: nothing to hold. */
  oproj_status (*check)(bench_rig *rig, int32_t tokens, int32_t call, int64_t *wrong);
} bench_case;

extern const bench_case case_forward, case_inv_rope, case_layer, case_load, case_reduce, case_wo_a,
    case_wo_b;

extern const bench_case *const bench_cases[]; /* ends with NULL */
const bench_case *bench_case_find(const char *name);

#endif /* OPROJ_BENCH_CASES_H */
