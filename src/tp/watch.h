/* watch.h - what a communicator knows of its ranks while they work: who is where, and who is lost.
 *
 * Every rank has a thread that reports to rank 0 about once a second, and at once when the rank
 * enters another phase; rank 0 keeps the board (board.h), reports back, and tells all when one is
 * lost.  Its connections are its own (link.h): the thread calls neither MPI nor CUDA.  Without
 * connections a watch still keeps the deadline, the phase and the verdict of its own rank. */
#ifndef OPROJ_TP_WATCH_H
#define OPROJ_TP_WATCH_H

#include "oproj.h"
#include "tp/link.h"

typedef struct oproj_watch oproj_watch;

oproj_status oproj_watch_create(oproj_watch **out, int32_t rank, int32_t size);
void oproj_watch_destroy(oproj_watch *watch); /* NULL is allowed; says goodbye */

/* Connecting, in this order: rank 0 opens, its door reaches all ranks by other means, all meet. */
oproj_status oproj_watch_open(oproj_watch *watch, int32_t one_host, oproj_link_door *door);
oproj_status oproj_watch_meet(oproj_watch *watch, const oproj_link_door *door);

/* After a meeting that succeeded on all ranks: starts the thread.  After any other: gives the
 * connections up. */
oproj_status oproj_watch_start(oproj_watch *watch);
void oproj_watch_give_up(oproj_watch *watch);

/* ---- what this rank does: from any thread, NULL allowed -------------------------------------- */

/* From here it is in `phase`; peers wait for it however long where `patient`.  A note is where its
 * caller is, and ends the phase. */
void oproj_watch_enter(oproj_watch *watch, const char *phase, int32_t patient);
void oproj_watch_note(oproj_watch *watch, const char *note, int32_t patient);

/* It begins a collective call; it begins, or ends, to wait in it for others. */
void oproj_watch_step(oproj_watch *watch);
void oproj_watch_wait(oproj_watch *watch, int32_t waiting);

/* ---- verdicts -------------------------------------------------------------------------------- */

/* NULL, or the sentence about the rank that was lost: static from then on. */
const char *oproj_watch_lost(const oproj_watch *watch);

/* OPROJ_OK, or ERR_PEER with that sentence. */
oproj_status oproj_watch_check(const oproj_watch *watch);

/* Declares `rank` lost, to all ranks; the first verdict stands. */
void oproj_watch_declare(oproj_watch *watch, int32_t rank, const char *sentence);

int64_t oproj_watch_deadline_ms(const oproj_watch *watch); /* 0: none */
void oproj_watch_set_deadline(oproj_watch *watch, double seconds);

/* Whether nobody watches the others: then only a deadline of his own ends a wait. */
int oproj_watch_alone(const oproj_watch *watch);

/* Called when a rank is lost, at once where one is already; NULL takes it back, and returns when no
 * call is under way.  It is called on whichever thread comes to know, and must not call back. */
void oproj_watch_on_loss(oproj_watch *watch, oproj_loss_fn fn, void *user);

/* The same for the communicator built on top.  About once a second `count` says how many sums over
 * ranks this one's device has begun and ended (board.h), and `look` may write a sentence about this
 * rank's own trouble: nonzero declares it lost.  Each may be NULL. */
typedef struct oproj_watch_helper {
  void (*count)(void *user, uint64_t *begun, uint64_t *ended);
  int (*look)(void *user, char sentence[OPROJ_BOARD_SENTENCE]);
  void (*lost)(void *user);
  void *user;
} oproj_watch_helper;
void oproj_watch_help(oproj_watch *watch, const oproj_watch_helper *helper);

#endif /* OPROJ_TP_WATCH_H */
