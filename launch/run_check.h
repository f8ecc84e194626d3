/* run_check.h - `oproj run --check`: a result against the formula in double precision and against
 * one rank alone.  All of it runs on rank 0, from weights and input it reads itself. */
#ifndef OPROJ_LAUNCH_RUN_CHECK_H
#define OPROJ_LAUNCH_RUN_CHECK_H

#include <stdbool.h>

#include "run_input.h"

typedef struct run_check_result {
  double error; /* |y - y64| / |y64| over all finite elements, y64 in double from the same codes */
  double tolerance;         /* of error, by path and number of ranks */
  double one_rank_error;    /* |y - y1| / |y1|, y1 from one rank on the reference backend */
  int64_t one_rank_differs; /* elements that differ from y1; must be 0 on exact data */
  int64_t nan_differs;      /* elements that are NaN in one of y, y64 but not in the other */
  int64_t not_finite; /* elements of tokens with finite input that are not finite in y or y64 */
  int64_t compared;   /* elements that are finite in both: what `error` is made of */
  bool passed;
} run_check_result;

typedef struct run_check run_check;

/* For results of `ranks` ranks that reduced in that mode.  `whole` is the input with all heads.
 * The checkpoint, its model and `whole` are borrowed. */
oproj_status run_check_create(run_check **out, const oproj_checkpoint *checkpoint, int32_t ranks,
                              oproj_reduce reduce, const run_input *whole);
void run_check_destroy(run_check *check); /* NULL is allowed */

/* Holds y, bf16 [tokens, hidden] in host memory, of one layer against both; exact_path as in
 * oproj_path_choice.  cos_sin has cos_sin_rows rows. */
oproj_status run_check_layer(run_check *check, int32_t layer, bool exact_path, const float *cos_sin,
                             int64_t cos_sin_rows, const uint16_t *y, run_check_result *out);

#endif /* OPROJ_LAUNCH_RUN_CHECK_H */
