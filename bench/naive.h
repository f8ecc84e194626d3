/* naive.h - the naive rung: what one writes in an afternoon from existing parts, for the same work.
 *
 * Inverse RoPE to BF16 by a kernel of its own, one strided-batched BF16 GEMM for WO-A and one BF16
 * GEMM for WO-B, both by cuBLASLt, on weights dequantised to BF16; where the case sums over ranks,
 * the communicator library's own all-reduce after them.  It is timed in the same run as
 * the case, so that a speed-up is a ratio of two numbers of one machine in one state.
 *
 * naive_cuda.c or, in builds without CUDA, naive_absent.c. */
#ifndef OPROJ_BENCH_NAIVE_H
#define OPROJ_BENCH_NAIVE_H

#include "rig.h"

typedef struct bench_naive bench_naive;

/* COLLECTIVE where the rig's calls sum over ranks, like naive_destroy: what *out holds after an
 * error is to be destroyed too.  Dequantises as many layers as keep the weights out of the cache,
 * of the rig's own values. */
oproj_status naive_create(bench_naive **out, bench_rig *rig);
void naive_destroy(bench_naive *naive); /* NULL is allowed */

int32_t naive_layers(const bench_naive *naive);

/* Chooses the fastest algorithm that cuBLASLt offers for this size, by timing them. */
oproj_status naive_prepare(bench_naive *naive, int32_t tokens);

/* y of call number `call` with its input and layer, enqueued on `stream`. */
oproj_status naive_call(bench_naive *naive, int32_t tokens, int32_t call, void *stream);

#endif /* OPROJ_BENCH_NAIVE_H */
