/* environment.h - the variables of oproj's own: which there are, what they may hold, what they do.
 *
 * A value that is none of the legal ones reads as if the variable were not set, and a warning says
 * so once in a process.  Programs refuse it instead (oproj_environment_check). */
#ifndef OPROJ_BASE_ENVIRONMENT_H
#define OPROJ_BASE_ENVIRONMENT_H

#include "oproj.h"

typedef enum oproj_base_variable {
  OPROJ_ENVIRONMENT_BIND,     /* 0 or 1 (default): whether ranks may be bound to CPUs */
  OPROJ_ENVIRONMENT_DEADLINE, /* seconds to wait for a rank, default 30 */
  OPROJ_ENVIRONMENT_LOG,      /* error, warn (default), info or debug: 0 to 3 */
  OPROJ_ENVIRONMENT_PDL,      /* 0 or 1 (default): whether kernels may start before others end */
  OPROJ_ENVIRONMENT_PUSH,     /* 0 (default) or 1: whether GPUs write to one another's memory */
  OPROJ_ENVIRONMENT_TERMINAL, /* 0 (default) or 1: programs draw bars */
  OPROJ_ENVIRONMENT_COUNT
} oproj_base_variable;

/* The number of the word that the variable holds; of one that holds words. */
int oproj_base_word(oproj_base_variable variable);

/* Of one that holds seconds. */
double oproj_base_seconds(oproj_base_variable variable);

#endif /* OPROJ_BASE_ENVIRONMENT_H */
