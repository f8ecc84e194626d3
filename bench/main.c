/* main.c - the program oproj-bench: times one part of the projection over a range of token counts.
 *
 * Exit codes: 0 ok, 1 a check failed, 2 usage, 3 input refused, 4 run-time failure. */
#include <stdio.h>

#include "engine.h"
#include "job/job.h"

static void join_words(int argc, char **argv, char *text, size_t bytes) {
  size_t used = (size_t)snprintf(text, bytes, "%s", job_program);
  for (int i = 1; i < argc && used < bytes; i++)
    used += (size_t)snprintf(text + used, bytes - used, " %s", argv[i]);
}

static oproj_status run(job_state *job, int argc, char **argv) {
  bench_args args;
  args_verdict verdict = args_parse(&args, argc, argv, job->rank == 0);
  if (verdict == ARGS_WRONG) job->code = JOB_USAGE;
  if (verdict != ARGS_GO) return OPROJ_OK;
  char command[1024];
  int64_t wrong = 0;
  join_words(argc, argv, command, sizeof command);
  oproj_status status = job_choose_comm(job, args.comm, args.backend == ARGS_BACKEND_REF);
  if (status == OPROJ_OK)
    status = engine_run(bench_case_find(args.which), &args, job, command, &wrong);
  if (wrong > 0) job->code = JOB_CHECK_FAILED;
  return status;
}

int main(int argc, char **argv) {
  job_state job;
  oproj_status status = job_start(&job, "oproj-bench", false, argc, argv);
  job_catch_interrupts();
  if (status == OPROJ_OK && job.code == JOB_OK) status = run(&job, argc, argv);
  return job_finish(&job, status);
}
