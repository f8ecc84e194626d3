/* board.h - what is known of every rank, and the judgement of it.  It has no clock, thread or
 * socket: times come from the caller, in milliseconds that only grow.
 *
 * A rank is lost when it
 *
 *   vanished   its connection ended without a goodbye: its process is gone
 *   is silent  nothing was heard of it for the deadline: its process is stopped, or its host is cut
 *              off
 *   is stuck   others have waited for it in a collective call for the deadline, or their GPUs in a
 *              sum that its own has not begun, and as long it has moved from no phase, call or sum
 *              to another, unless it asked for patience
 *   hangs      its GPU has been for the deadline in a sum that all GPUs have begun
 *   has left   it said goodbye, and others have waited for it as long */
#ifndef OPROJ_TP_BOARD_H
#define OPROJ_TP_BOARD_H

#include <stddef.h>
#include <stdint.h>

enum { OPROJ_BOARD_PHASE = 24, OPROJ_BOARD_NOTE = 48, OPROJ_BOARD_SENTENCE = 256 };

/* What a rank says of itself. */
typedef struct oproj_board_report {
  uint64_t step;       /* collective calls begun */
  int32_t waiting;     /* inside the last of them, for others */
  int32_t patient;     /* its work may take as long as its process lives */
  uint64_t sums_begun; /* over ranks, by its GPU: more than have ended while it is in
                                    one */
  uint64_t sums_ended;
  char phase[OPROJ_BOARD_PHASE]; /* what of the library it is in: "load" */
  char note[OPROJ_BOARD_NOTE];   /* where its caller is: "layers.7"; may be empty */
} oproj_board_report;

typedef struct oproj_board_rank {
  oproj_board_report report;
  int64_t heard_ms; /* when the last report came */
  int64_t moved_ms; /* since when it is in the same phase, call and note */
  int64_t sums_ms;  /* since when its GPU has begun and ended as many sums */
  int32_t watched;  /* its connection is there */
  int32_t left;     /* it has said goodbye: silence is no sign any more */
} oproj_board_rank;

/* Takes a report that came, or a goodbye said, at `now_ms`. */
void oproj_board_hear(oproj_board_rank *rank, const oproj_board_report *report, int64_t now_ms);
void oproj_board_leave(oproj_board_rank *rank, int64_t now_ms);

/* Begins every deadline anew. */
void oproj_board_excuse(oproj_board_rank *ranks, int32_t size, int64_t now_ms);

/* The lowest lost rank, with `sentence` saying why, or -1.  A deadline of 0 judges nobody. */
int32_t oproj_board_judge(const oproj_board_rank *ranks, int32_t size, int64_t now_ms,
                          int64_t deadline_ms, char sentence[OPROJ_BOARD_SENTENCE]);

/* The same of sums on GPUs, in which no host waits: the GPUs' own counts tell who is missing.  For
 * whoever hears of all ranks. */
int32_t oproj_board_judge_sums(const oproj_board_rank *ranks, int32_t size, int64_t now_ms,
                               int64_t deadline_ms, char sentence[OPROJ_BOARD_SENTENCE]);

/* "rank 3 was lost in forward of layers.7" */
void oproj_board_vanished(const oproj_board_rank *ranks, int32_t rank,
                          char sentence[OPROJ_BOARD_SENTENCE]);

#endif /* OPROJ_TP_BOARD_H */
