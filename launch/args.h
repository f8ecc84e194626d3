/* args.h - the command line, strictly.
 *
 * A command lists its flags with the variables they fill.  Whatever is not understood (unknown or
 * abbreviated flags, words that are no whole numbers, missing or empty arguments) is one sentence
 * and exit code 2.  A flag given twice takes its last value. */
#ifndef OPROJ_LAUNCH_ARGS_H
#define OPROJ_LAUNCH_ARGS_H

#include "job/job.h"

/* One flag; exactly one of on, text, number and word is set and says what kind it is. */
typedef struct args_option {
  const char *name;  /* without its dashes; NULL ends a list */
  const char *value; /* what the help calls its value; NULL for a flag without one */
  const char *help;
  bool *on;
  const char **text; /* any text but "" */
  int64_t *number;   /* a whole number in [least, most] */
  int64_t least, most;
  int *word; /* the place of a word in words, which ends with NULL */
  const char *const *words;
} args_option;

typedef struct args_command {
  const char *name; /* "oproj run" */
  const char *summary;
  const args_option *options;
  const char *operand; /* what the help calls the one word that is no flag; NULL: there is none */
  const char **operand_text; /* must be given */
} args_command;

/* Parses argv[1..]; true: go on.  false: there was a mistake, or help was asked for; rank 0 has
 * printed it and job->code is what the process returns. */
bool args_parse(job_state *job, const args_command *command, int argc, char **argv);

/* Rank 0 prints one sentence as a usage error of `name`; sets job->code and returns false. */
bool args_wrong(job_state *job, const char *name, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* `text` as a whole number in [least, most]; `flag` names it in the usage error otherwise. */
bool args_integer(job_state *job, const char *name, const char *flag, const char *text,
                  int64_t least, int64_t most, int64_t *out);

#endif /* OPROJ_LAUNCH_ARGS_H */
