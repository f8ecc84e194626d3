/* run_args.h - the command line of `oproj run`. */
#ifndef OPROJ_LAUNCH_RUN_ARGS_H
#define OPROJ_LAUNCH_RUN_ARGS_H

#include "job/job.h"

enum { RUN_BACKEND_AUTO = 0, RUN_BACKEND_REF = 1 };

typedef struct run_args {
  const char *dir, *input, *output, *json;
  const char *layers;             /* as typed; NULL: not given */
  int32_t tokens;                 /* -1: not given */
  int32_t layer_begin, layer_end; /* end -1: the last */
  bool check;
  int64_t deadline; /* seconds to wait for a rank; -1: not given */
  uint64_t seed;
  int64_t load_bytes;   /* host memory of a load, on each rank */
  int64_t chunk_tokens; /* oproj_config's */
  int backend;          /* RUN_BACKEND_AUTO, or a place in run_backends */
  int comm;             /* CHOOSE_COMM_* (choose.h) */
  oproj_reduce reduce;
  oproj_split split;
} run_args;

/* The words of --backend. */
extern const char *const run_backends[];

/* As args_parse. */
bool run_args_parse(job_state *job, int argc, char **argv, run_args *out);

#endif /* OPROJ_LAUNCH_RUN_ARGS_H */
