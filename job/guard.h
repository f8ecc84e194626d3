/* guard.h - what ends this process where it cannot end itself: while MPI starts or stops without
 * all ranks, when a rank is lost, when a signal asks for it.
 *
 * One sentence is printed for a job, by the lowest rank that is there to print it; then the process
 * leaves with JOB_FAILED, and its launcher ends the other ranks.  Where several are lost at once it
 * names one of them; where all are, only the launcher is left to say so.  On several hosts nobody
 * can see that who should speak was lost as well: then there is no sentence. */
#ifndef OPROJ_JOB_GUARD_H
#define OPROJ_JOB_GUARD_H

#include <stdbool.h>
#include <stdint.h>

#define GUARD_START "start" /* the phase in which MPI starts */

/* Starts the guard's thread; `rank` and `size` are as the launcher says.  Without a thread (false)
 * the job can run, unguarded. */
bool guard_start(int32_t rank, int32_t size);

/* From here `phase` (static text) must end within the deadline, in seconds; 0: no deadline.
 * Neither returns once a phase was found to be late: the process ends with that. */
void guard_begin(const char *phase, double deadline);
void guard_end(void);

/* Prints the sentence unless this process has printed one. */
void guard_say(const char *sentence);

/* From here this process prints no sentence: the job has come to its end. */
void guard_hush(void);

/* Whether this process was stopped for a while before it had started MPI.  For signal handlers. */
bool guard_woken_in_start(void);

/* An oproj_loss_fn. */
void guard_lost(void *user, int32_t rank, const char *sentence);

/* Waits for the guard to end the process.  For the main thread, when it has released what must not
 * be left behind after a rank was lost. */
void guard_leave(void) __attribute__((noreturn));

#endif /* OPROJ_JOB_GUARD_H */
