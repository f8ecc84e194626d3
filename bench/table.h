/* table.h - what a run prints and writes: prose, heading, rows, JSON lines. */
#ifndef OPROJ_BENCH_TABLE_H
#define OPROJ_BENCH_TABLE_H

#include "cases.h"

/* How one row was measured. */
typedef struct table_row {
  const char *rung; /* "oproj", "naive", or another way of the case load */
  const char *path; /* which of the library's ways ran */
  int32_t tokens;
  int32_t calls, warmups, replays; /* calls per replay */
  int32_t layers;                  /* that the calls went round */
  bool graph;
  double p50_us, p99_us; /* per call, the slowest rank's */
  double naive_us;       /* p50 of the naive rung; 0: none */
  device_load load;      /* this rank's device */
  bench_cost cost;
  int64_t wrong; /* over all ranks; -1: not checked */
} table_row;

typedef struct bench_table {
  const bench_rig *rig;
  const bench_case *which;
  const char *command;
  const char *json_path;
  int json; /* the file, open; or -1 */
} bench_table;

/* Rank 0 opens and prints; others get a table that stays silent.  `rig` is described by rows, and
 * need not be open before the heading. */
oproj_status table_open(bench_table *table, const bench_rig *rig, const bench_case *which,
                        const job_state *job, const bench_args *args, const char *command);
void table_heading(const bench_table *table, int32_t calls, int32_t warmups, int32_t replays,
                   bool graph);
oproj_status table_put(const bench_table *table, const table_row *row);
oproj_status table_close(bench_table *table); /* ERR_IO where something could not be written */

#endif /* OPROJ_BENCH_TABLE_H */
