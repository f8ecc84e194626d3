/* engine.h - runs one case over all sizes: times, checks, tabulates. */
#ifndef OPROJ_BENCH_ENGINE_H
#define OPROJ_BENCH_ENGINE_H

#include "cases.h"

/* COLLECTIVE.  *wrong is the number of wrong values over all sizes and ranks. */
oproj_status engine_run(const bench_case *which, const bench_args *args, job_state *job,
                        const char *command, int64_t *wrong);

#endif /* OPROJ_BENCH_ENGINE_H */
