/* check.h - holds what a case has computed against the backend ref, on a few of its tokens.
 *
 * Tokens do not depend on each other, so the reference computes only up to CHECK_ROWS of them, from
 * the first to the last, whatever their number. */
#ifndef OPROJ_BENCH_CHECK_H
#define OPROJ_BENCH_CHECK_H

#include "rig.h"

enum { CHECK_ROWS = 8 };

typedef enum check_stage { CHECK_WO_A, CHECK_WO_B, CHECK_FORWARD, CHECK_NAIVE } check_stage;

/* Counts the wrong values in `result`, device memory, that call number `call` by layer `layer` has
 * left: z [tokens, z_cols] of WO_A, else [tokens, hidden], or this rank's rows of it.  Where the
 * rig's calls sum over ranks the reference does too, and the call is COLLECTIVE.  A value is wrong
 * when it is further from the reference than 2^-7 of it and a part of the root mean square of all
 * of them: a 20th, since sums in another order flip a few codes of z; half of it for the naive
 * composition, whose BF16 activations lack the quantisation that the reference has. */
oproj_status check_values(bench_rig *rig, check_stage stage, int32_t tokens, int32_t call,
                          int32_t layer, const uint16_t *result, int64_t *wrong);

/* Codes and scales (OPROJ_SCALE_F32) must be the reference's own, bit for bit. */
oproj_status check_quantized(bench_rig *rig, int32_t tokens, int32_t call,
                             const oproj_quant *result, int64_t *wrong);

#endif /* OPROJ_BENCH_CHECK_H */
