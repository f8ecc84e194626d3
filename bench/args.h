/* args.h - the command line of oproj-bench, strictly: nccl-tests' letters, sizes in tokens. */
#ifndef OPROJ_BENCH_ARGS_H
#define OPROJ_BENCH_ARGS_H

#include <stdbool.h>
#include <stdint.h>

enum { ARGS_BACKEND_AUTO, ARGS_BACKEND_CUDA, ARGS_BACKEND_REF };

typedef struct bench_args {
  const char *which; /* the case's name; must be given */
  int64_t begin, end, factor;
  int64_t iterations, warmups, replays; /* 0: the backend's default */
  int64_t share;
  int64_t chunk; /* tokens of a chunk of the case layer; 0: the library's choice */
  int model;     /* place in rig_models */
  int backend;
  int comm;   /* CHOOSE_COMM_* (job/choose.h) */
  int reduce; /* an oproj_reduce; of cases that sum over ranks */
  int path;   /* an oproj_path, forced where not AUTO; of cases that time the whole chain */
  bool check, warm, eager, no_naive;
  const char *json, *dir; /* NULL: none */
} bench_args;

typedef enum args_verdict { ARGS_GO, ARGS_HELP, ARGS_WRONG } args_verdict;

/* Parses argv[1..].  Prints the help, or one sentence on stderr, where `speak` is set. */
args_verdict args_parse(bench_args *args, int argc, char **argv, bool speak);

#endif /* OPROJ_BENCH_ARGS_H */
