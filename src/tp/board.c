/* board.c - owns the rules by which a rank counts as lost, and the sentences that say so. */
#include "tp/board.h"

#include <stdio.h>
#include <string.h>

void oproj_board_hear(oproj_board_rank *rank, const oproj_board_report *report, int64_t now_ms) {
  int moved = !rank->watched || rank->report.step != report->step ||
              strcmp(rank->report.phase, report->phase) != 0 ||
              strcmp(rank->report.note, report->note) != 0;
  int counted = !rank->watched || rank->report.sums_begun != report->sums_begun ||
                rank->report.sums_ended != report->sums_ended;
  if (moved) rank->moved_ms = now_ms;
  if (counted) rank->sums_ms = now_ms;
  rank->heard_ms = now_ms;
  rank->report = *report;
  rank->watched = 1;
}

void oproj_board_leave(oproj_board_rank *rank, int64_t now_ms) {
  rank->watched = 0;
  rank->left = 1;
  rank->moved_ms = now_ms;
}

void oproj_board_excuse(oproj_board_rank *ranks, int32_t size, int64_t now_ms) {
  for (int32_t r = 0; r < size; r++)
    ranks[r].heard_ms = ranks[r].moved_ms = ranks[r].sums_ms = now_ms;
}

/* "forward of layers.7" */
static const char *where(const oproj_board_rank *rank, char text[96]) {
  const oproj_board_report *r = &rank->report;
  if (!*r->phase && !*r->note) return "start";
  snprintf(text, 96, "%s%s%s", r->phase, *r->phase && *r->note ? " of " : "", r->note);
  return text;
}

void oproj_board_vanished(const oproj_board_rank *ranks, int32_t rank,
                          char sentence[OPROJ_BOARD_SENTENCE]) {
  char text[96];
  snprintf(sentence, OPROJ_BOARD_SENTENCE, "rank %d was lost in %s", rank,
           where(&ranks[rank], text));
}

/* Whether somebody has waited for `late` since the deadline. */
static int kept_waiting(const oproj_board_rank *ranks, int32_t size, const oproj_board_rank *late,
                        int64_t since_ms) {
  for (int32_t r = 0; r < size; r++) {
    const oproj_board_rank *other = &ranks[r];
    if (other->watched && other->report.waiting && other->report.step > late->report.step &&
        other->moved_ms < since_ms)
      return 1;
  }
  return 0;
}

int32_t oproj_board_judge(const oproj_board_rank *ranks, int32_t size, int64_t now_ms,
                          int64_t deadline_ms, char sentence[OPROJ_BOARD_SENTENCE]) {
  if (deadline_ms <= 0) return -1;
  char text[96];
  int64_t since_ms = now_ms - deadline_ms;
  for (int32_t r = 0; r < size; r++) {
    const oproj_board_rank *rank = &ranks[r];
    if (rank->watched && rank->heard_ms < since_ms) {
      snprintf(sentence, OPROJ_BOARD_SENTENCE,
               "rank %d has been silent for %.1f s; it was last heard of in %s", r,
               (double)(now_ms - rank->heard_ms) * 1e-3, where(rank, text));
      return r;
    }
    int stands = rank->left || (rank->watched && !rank->report.patient);
    if (stands && rank->moved_ms < since_ms && kept_waiting(ranks, size, rank, since_ms)) {
      snprintf(sentence, OPROJ_BOARD_SENTENCE,
               "rank %d has kept others waiting for %.1f s; it %s %s", r,
               (double)deadline_ms * 1e-3, rank->left ? "left after" : "is in", where(rank, text));
      return r;
    }
  }
  return -1;
}

/* The lowest rank whose GPU has been in the same sum since the deadline, or -1. */
static int32_t longest_in_sum(const oproj_board_rank *ranks, int32_t size, int64_t since_ms) {
  for (int32_t r = 0; r < size; r++) {
    const oproj_board_report *report = &ranks[r].report;
    if (ranks[r].watched && report->sums_begun != report->sums_ended && ranks[r].sums_ms < since_ms)
      return r;
  }
  return -1;
}

int32_t oproj_board_judge_sums(const oproj_board_rank *ranks, int32_t size, int64_t now_ms,
                               int64_t deadline_ms, char sentence[OPROJ_BOARD_SENTENCE]) {
  char text[96];
  int64_t since_ms = now_ms - deadline_ms;
  int32_t waits = deadline_ms > 0 ? longest_in_sum(ranks, size, since_ms) : -1, missing = 0;
  if (waits < 0) return -1;
  for (int32_t r = 0; r < size; r++) {
    const oproj_board_rank *rank = &ranks[r];
    if (!rank->watched && !rank->left) continue;
    if (rank->report.sums_begun >= ranks[waits].report.sums_begun) continue;
    missing = 1;
    if (!rank->left && (rank->report.patient || rank->sums_ms >= since_ms)) continue;
    if (rank->moved_ms >= since_ms) continue;
    snprintf(sentence, OPROJ_BOARD_SENTENCE,
             "rank %d has kept the GPUs of others waiting for %.1f s in a sum over ranks; it %s %s",
             r, (double)deadline_ms * 1e-3, rank->left ? "left after" : "is in", where(rank, text));
    return r;
  }
  if (missing) return -1;
  snprintf(sentence, OPROJ_BOARD_SENTENCE,
           "rank %d's GPU has waited for %.1f s in a sum over ranks that all have begun; it is in "
           "%s",
           waits, (double)(now_ms - ranks[waits].sums_ms) * 1e-3, where(&ranks[waits], text));
  return waits;
}
