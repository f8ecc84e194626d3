/* main.c - the program oproj-bench: times one part of the projection over a range of token counts.
 *
 * Exit codes: 0 ok, 1 a check failed, 2 usage, 3 input refused, 4 run-time failure. */
#include <stdio.h>
#include <string.h>

#include "engine.h"
#include "launch/choose.h"

enum { OK = 0, CHECK_FAILED = 1, USAGE = 2, REFUSED = 3, FAILED = 4 };

static int exit_code(oproj_status status) {
  switch (status) {
    case OPROJ_OK:
      return OK;
    case OPROJ_ERR_INVALID:
    case OPROJ_ERR_SHAPE:
    case OPROJ_ERR_UNSUPPORTED:
    case OPROJ_ERR_IO:
      return REFUSED;
    case OPROJ_ERR_NOMEM:
    case OPROJ_ERR_DEVICE:
    case OPROJ_ERR_COMM:
    case OPROJ_ERR_PEER:
      return FAILED;
  }
  return FAILED;
}

/* All ranks hold the same status; one says so. */
static int fail(const bench_ranks *ranks, oproj_status status) {
  const char *sentence = oproj_last_error();
  if (ranks->rank == 0)
    fprintf(stderr, "oproj-bench: %s\n", *sentence ? sentence : oproj_status_string(status));
  return exit_code(status);
}

static void join_words(int argc, char **argv, char *text, size_t bytes) {
  size_t used = (size_t)snprintf(text, bytes, "oproj-bench");
  for (int i = 1; i < argc && used < bytes; i++)
    used += (size_t)snprintf(text + used, bytes - used, " %s", argv[i]);
}

static int run(bench_ranks *ranks, int argc, char **argv) {
  bench_args args;
  switch (args_parse(&args, argc, argv, ranks->rank == 0)) {
    case ARGS_HELP:
      return OK;
    case ARGS_WRONG:
      return USAGE;
    case ARGS_GO:
      break;
  }
  char command[1024];
  int64_t wrong = 0;
  join_words(argc, argv, command, sizeof command);
  oproj_status status = oproj_comm_agree(ranks->comm, oproj_environment_check(NULL));
  if (status == OPROJ_ERR_INVALID) {
    fail(ranks, status);
    return USAGE;
  }
  if (status == OPROJ_OK)
    status = choose_comm(&ranks->comm, args.comm, args.backend == ARGS_BACKEND_REF);
  if (status == OPROJ_OK)
    status = engine_run(bench_case_find(args.which), &args, ranks, command, &wrong);
  if (status != OPROJ_OK) return fail(ranks, status);
  return wrong > 0 ? CHECK_FAILED : OK;
}

int main(int argc, char **argv) {
  bench_ranks ranks;
  oproj_status status = ranks_open(&ranks);
  int code = status == OPROJ_OK ? run(&ranks, argc, argv) : fail(&ranks, status);
  ranks_close(&ranks);
  return code;
}
