/* choose.h - the words of --comm and --reduce, and what --comm chooses. */
#ifndef OPROJ_JOB_CHOOSE_H
#define OPROJ_JOB_CHOOSE_H

#include <stdbool.h>

#include "oproj.h"

/* Places in choose_comms; those in choose_reduces are an oproj_reduce.  Both lists end with
 * NULL. */
enum { CHOOSE_COMM_AUTO, CHOOSE_COMM_MPI, CHOOSE_COMM_NCCL };
extern const char *const choose_comms[], *const choose_reduces[];

/* COLLECTIVE.  Replaces *comm, over all of MPI's ranks or one process alone, by one over NCCL where
 * `choice` asks for that, or leaves it open and it can be done; `on_host`: the backend ref was
 * asked for.  On error *comm stays as it was. */
oproj_status choose_comm(oproj_comm **comm, int choice, bool on_host);

#endif /* OPROJ_JOB_CHOOSE_H */
