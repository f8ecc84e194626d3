/* job.h - one run of a program (`oproj`, `oproj-bench`) over all ranks: start, agree, report, end.
 *
 * Exit codes: 0 ok, 1 a check failed, 2 usage, 3 input refused, 4 run-time failure. */
#ifndef OPROJ_JOB_H
#define OPROJ_JOB_H

#include <stdbool.h>
#include <stddef.h>

#include "oproj.h"

extern const char *job_program; /* what its sentences begin with; set by job_start */

enum { JOB_OK = 0, JOB_CHECK_FAILED = 1, JOB_USAGE = 2, JOB_REFUSED = 3, JOB_FAILED = 4 };

typedef struct job_state {
  oproj_comm *comm; /* MPI where a launcher started us, else one rank alone */
  int32_t rank, size;
  bool mpi;
  int code;         /* what the process returns if nothing fails: JOB_OK until a command sets it */
  double deadline;  /* seconds to wait for a rank; 0: none */
  int output_error; /* errno of the first write to stdout that failed; 0: none has */
} job_state;

/* COLLECTIVE.  Starts MPI, and the guard (guard.h) first, where a launcher is there; for work that
 * one process does `alone`, only where there are several.  Refuses ranks whose command lines differ
 * (ERR_INVALID: each would make its own way to another collective call) and a launcher of another
 * MPI (ERR_UNSUPPORTED).  After it all ranks are known to come to the same verdict on their words,
 * so rank 0 alone speaks about them.  A variable of oproj's with a value that it cannot have is
 * said, and leaves job->code JOB_USAGE: nothing more is to be done then.  The standard streams'
 * numbers are taken by then, and a write that cannot be done is an error instead of a signal. */
oproj_status job_start(job_state *job, const char *program, bool alone, int argc, char **argv);

/* COLLECTIVE.  From here on rank 0 works alone, and the others are to end: MPI has ended. */
oproj_status job_go_alone(job_state *job);

/* COLLECTIVE.  From here on sums go as --comm says (choose_comm in choose.h).  On error the job is
 * as it was. */
oproj_status job_choose_comm(job_state *job, int choice, bool on_host);

/* How long this rank waits for others from here on.  To be called alike by all ranks. */
void job_set_deadline(job_state *job, double seconds);

/* COLLECTIVE.  Prints the sentence of a failure (all ranks hold the same status) once, flushes
 * stdout, ends MPI and returns the exit code: the status's own, or job->code on success; JOB_FAILED
 * where stdout could not be written.  After a lost rank it does not return: MPI would wait
 * for it. */
int job_finish(job_state *job, oproj_status status);

/* Writes out what stdout holds, so that a row shows when it is ready. */
void job_flush(job_state *job);

/* "who: sentence" as one line on stderr; control bytes, from paths, become '?'. */
void job_say(const char *who, const char *sentence);

/* Whether somebody watches stderr on a terminal.  A launcher hands its ranks a pipe; oproj-run says
 * with OPROJ_TERMINAL=1 that a terminal is at its other end. */
bool job_on_terminal(void);

/* From here on the first SIGINT, SIGTERM or SIGHUP only makes job_interrupted true, for the work to
 * stop where it leaves nothing behind; a second one ends the process.  job_finish then says so. */
void job_catch_interrupts(void);
bool job_interrupted(void);

/* COLLECTIVE.  ERR_COMM on every rank when any of them was interrupted. */
oproj_status job_agree_to_go_on(const job_state *job);

/* COLLECTIVE.  The largest of all ranks' values, on every rank. */
double job_max(const job_state *job, double mine);

/* COLLECTIVE.  The sum of all ranks' values, on every rank. */
int64_t job_sum(const job_state *job, int64_t mine);

/* COLLECTIVE.  values[0 .. count) become their sums over all ranks, on every rank. */
void job_sum_values(const job_state *job, float *values, int32_t count);

/* COLLECTIVE.  Rank 0 receives everybody's text, [size][bytes]; others leave `all` untouched. */
void job_gather_text(const job_state *job, const char *mine, char *all, int bytes);

/* COLLECTIVE.  Rank 0 receives y [tokens, hidden] from the rows that each rank holds under
 * OPROJ_REDUCE_SCATTER; host memory. */
void job_gather_rows(const job_state *job, int32_t tokens, int32_t hidden, const uint16_t *rows,
                     uint16_t *y);

/* The MPI library's name and version. */
void job_describe_mpi(char *text, size_t bytes);

#endif /* OPROJ_JOB_H */
