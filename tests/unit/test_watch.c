/* test_watch.c - when a rank counts as lost, on a clock of the test's own; and the watch itself,
 * its ranks being threads of this process. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "support/expect.h"
#include "tp/board.h"
#include "tp/watch.h"

/* ---- the board ------------------------------------------------------------------------------ */

enum { DEADLINE = 1000, RANKS = 4 };

static oproj_board_rank board[RANKS];
static char sentence[OPROJ_BOARD_SENTENCE];

static void hear(int32_t rank, uint64_t step, int waiting, int patient, int64_t now) {
  oproj_board_report report = {.step = step, .waiting = waiting, .patient = patient};
  snprintf(report.phase, sizeof report.phase, "forward");
  snprintf(report.note, sizeof report.note, "layers.%d", rank);
  oproj_board_hear(&board[rank], &report, now);
}

static void hear_all(uint64_t step, int64_t now) {
  memset(board, 0, sizeof board);
  for (int32_t r = 0; r < RANKS; r++) hear(r, step, 0, 0, now);
}

static int32_t judge(int64_t now) {
  return oproj_board_judge(board, RANKS, now, DEADLINE, sentence);
}

START_TEST(silence_is_a_loss_after_the_deadline) {
  hear_all(1, 0);
  for (int32_t r = 0; r < RANKS; r++)
    if (r != 2) hear(r, 1, 0, 0, 900);
  ck_assert_int_eq(judge(1000), -1);
  ck_assert_int_eq(judge(1001), 2);
  ck_assert_str_eq(sentence,
                   "rank 2 has been silent for 1.0 s; it was last heard of in forward of layers.2");
  ck_assert_int_eq(oproj_board_judge(board, RANKS, 1001, 0, sentence), -1);
}
END_TEST

/* Nobody who does not wait is in a hurry; nobody waits for those who are as far. */
START_TEST(being_late_is_a_loss_where_others_wait) {
  hear_all(1, 0);
  for (int64_t now = 0; now <= 5000; now += 500) {
    hear_all(1, 0);
    for (int32_t r = 0; r < RANKS; r++) hear(r, 1, 0, 0, now);
    ck_assert_int_eq(judge(now), -1);
  }
  hear_all(1, 0);
  for (int64_t now = 100; now <= 1100; now += 500)
    for (int32_t r = 0; r < RANKS; r++) hear(r, r == 3 ? 1 : 2, r != 3, 0, now);
  ck_assert_int_eq(judge(1100), -1); /* others have waited since 100 */
  ck_assert_int_eq(judge(1101), 3);
  ck_assert_str_eq(sentence,
                   "rank 3 has kept others waiting for 1.0 s; it is in forward of layers.3");
}
END_TEST

/* As after a pause of this process: everybody has a whole deadline again. */
START_TEST(excuses_begin_the_deadlines_anew) {
  hear_all(1, 0);
  for (int32_t r = 0; r < RANKS; r++) hear(r, r == 3 ? 1 : 2, r != 3, 0, 100);
  ck_assert_int_ge(judge(9000), 0);
  oproj_board_excuse(board, RANKS, 9000);
  ck_assert_int_eq(judge(10000), -1);
  ck_assert_int_eq(judge(10001), 0); /* nobody was heard of since */
  for (int32_t r = 0; r < RANKS; r++) hear(r, r == 3 ? 1 : 2, r != 3, 0, 10000);
  ck_assert_int_eq(judge(10001), 3);
}
END_TEST

START_TEST(patience_and_progress_are_no_loss) {
  hear_all(1, 0);
  for (int64_t now = 100; now <= 9100; now += 500)
    for (int32_t r = 0; r < RANKS; r++) hear(r, r == 3 ? 1 : 2, r != 3, r == 3, now);
  ck_assert_int_eq(judge(9500), -1);
  hear(3, 1, 0, 0, 9200); /* its patience ends, and with it that of the others */
  ck_assert_int_eq(judge(9500), 3);
  oproj_board_report other = board[3].report;
  snprintf(other.phase, sizeof other.phase, "load");
  oproj_board_hear(&board[3], &other, 9300); /* it moves */
  ck_assert_int_eq(judge(9500), -1);
}
END_TEST

START_TEST(who_has_left_is_missed_by_those_who_wait) {
  hear_all(1, 0);
  oproj_board_leave(&board[1], 0);
  for (int64_t now = 500; now <= 3000; now += 500)
    for (int32_t r = 0; r < RANKS; r++)
      if (r != 1) hear(r, 1, 0, 0, now);
  ck_assert_int_eq(judge(3000), -1);
  for (int64_t now = 3000; now <= 5000; now += 500)
    for (int32_t r = 0; r < RANKS; r++)
      if (r != 1) hear(r, 2, r == 0, 0, now);
  ck_assert_int_eq(judge(5000), 1);
  ck_assert_ptr_nonnull(
      strstr(sentence, "rank 1 has kept others waiting for 1.0 s; it left after"));
}
END_TEST

/* ---- sums on GPUs ---------------------------------------------------------------------------- */

/* What a rank's GPU has begun and ended, its host being where it was. */
static void hear_sums(int32_t rank, uint64_t begun, uint64_t ended, int64_t now) {
  oproj_board_report report = board[rank].report;
  report.sums_begun = begun;
  report.sums_ended = ended;
  oproj_board_hear(&board[rank], &report, now);
}

static void hear_all_sums(uint64_t begun, uint64_t ended, int64_t now) {
  for (int32_t r = 0; r < RANKS; r++) hear_sums(r, begun, ended, now);
}

static int32_t judge_sums(int64_t now) {
  return oproj_board_judge_sums(board, RANKS, now, DEADLINE, sentence);
}

START_TEST(a_sum_that_hangs_is_a_loss_after_the_deadline) {
  hear_all(1, 0);
  hear_all_sums(56, 56, 0);
  for (int64_t now = 100; now <= 1100; now += 250)
    for (int32_t r = 0; r < RANKS; r++) hear_sums(r, 57, r == 0 ? 57 : 56, now);
  ck_assert_int_eq(judge_sums(1100), -1); /* since 100 */
  ck_assert_int_eq(oproj_board_judge_sums(board, RANKS, 1101, 0, sentence), -1);
  ck_assert_int_eq(judge_sums(1101), 1);
  ck_assert_str_eq(sentence,
                   "rank 1's GPU has waited for 1.0 s in a sum over ranks that all have begun; it "
                   "is in forward of layers.1");
  ck_assert_int_eq(judge(1101), -1); /* no host waits */
}
END_TEST

/* However long there is always some sum under way, and however long there is none. */
START_TEST(sums_that_go_on_are_no_loss) {
  hear_all(1, 0);
  for (int64_t now = 0; now <= 9000; now += 500) {
    hear_all_sums((uint64_t)now + 1, (uint64_t)now, now);
    ck_assert_int_eq(judge_sums(now + 499), -1);
  }
  hear_all_sums(10000, 10000, 9500);
  ck_assert_int_eq(judge_sums(90000), -1);
}
END_TEST

START_TEST(a_gpu_that_does_not_come_is_missed) {
  hear_all(1, 0);
  hear_all_sums(56, 56, 0);
  for (int64_t now = 100; now <= 1100; now += 250)
    for (int32_t r = 0; r < RANKS; r++)
      if (r != 2) hear_sums(r, 57, 56, now);
  ck_assert_int_eq(judge_sums(1100), -1);
  ck_assert_int_eq(judge_sums(1101), 2);
  ck_assert_str_eq(sentence,
                   "rank 2 has kept the GPUs of others waiting for 1.0 s in a sum over ranks; it "
                   "is in forward of layers.2");
  board[2].report.patient = 1; /* its host does something long, and has said so */
  ck_assert_int_eq(judge_sums(1101), -1);
  board[2].report.patient = 0;
  hear(2, 2, 0, 0, 1000); /* or moves on */
  hear_sums(2, 56, 56, 1000);
  ck_assert_int_eq(judge_sums(1101), -1);
  oproj_board_leave(&board[2], 1000);
  ck_assert_int_eq(judge_sums(2000), -1);
  ck_assert_int_eq(judge_sums(2001), 2);
  ck_assert_ptr_nonnull(strstr(sentence, "it left after forward of layers.2"));
}
END_TEST

/* ---- the watch ------------------------------------------------------------------------------ */

static oproj_watch *watches[RANKS];
static oproj_link_door door;

static void *meet(void *watch) {
  return (void *)(intptr_t)oproj_watch_meet(watch, &door);
}

/* All ranks meet; those of `silent` have connections but no thread. */
static void open_watches(int32_t one_host, double deadline, int32_t silent) {
  pthread_t threads[RANKS];
  for (int32_t r = 0; r < RANKS; r++) {
    EXPECT_OK(oproj_watch_create(&watches[r], r, RANKS));
    oproj_watch_set_deadline(watches[r], deadline);
  }
  EXPECT_OK(oproj_watch_open(watches[0], one_host, &door));
  for (int32_t r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, meet, watches[r]);
  for (int32_t r = 0; r < RANKS; r++) {
    void *status;
    pthread_join(threads[r], &status);
    ck_assert_msg(!status, "rank %d: status %d", r, (int)(intptr_t)status);
  }
  for (int32_t r = 0; r < RANKS; r++)
    if (r != silent) EXPECT_OK(oproj_watch_start(watches[r]));
}

static void close_watches(void) {
  for (int32_t r = 0; r < RANKS; r++) oproj_watch_destroy(watches[r]);
}

static void rest(int milliseconds) {
  nanosleep(
      &(struct timespec){.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000L},
      NULL);
}

/* Every rank but `except` comes to know `words` within 5 s. */
static void expect_loss(int32_t except, const char *words) {
  for (int32_t r = 0; r < RANKS; r++) {
    if (r == except) continue;
    for (int tries = 0; tries < 500 && !oproj_watch_lost(watches[r]); tries++) rest(10);
    EXPECT_FAIL(oproj_watch_check(watches[r]), OPROJ_ERR_PEER, words);
  }
}

static int nobody_lost(void) {
  for (int32_t r = 0; r < RANKS; r++)
    if (oproj_watch_lost(watches[r])) return 0;
  return 1;
}

/* At peace ranks work for longer than the deadline, wait for each other, and part in any order. */
START_TEST(ranks_that_live_are_left_alone) {
  open_watches(_i == 0, 0.2, -1);
  for (int step = 0; step < 10; step++) {
    for (int32_t r = 0; r < RANKS; r++) {
      oproj_watch_enter(watches[r], "forward", step == 5);
      oproj_watch_step(watches[r]);
      oproj_watch_wait(watches[r], 1);
    }
    rest(50);
    for (int32_t r = 0; r < RANKS; r++) oproj_watch_wait(watches[r], 0);
  }
  ck_assert(nobody_lost());
  for (int32_t r = 0; r < RANKS; r++) ck_assert(!oproj_watch_alone(watches[r]));
  int32_t first = _i == 0 ? 0 : RANKS - 1;
  oproj_watch_destroy(watches[first]);
  watches[first] = NULL;
  rest(500);
  ck_assert(nobody_lost());
  if (first == 0) ck_assert(oproj_watch_alone(watches[1]));
  close_watches();
}
END_TEST

START_TEST(a_process_that_ends_is_missed_at_once) {
  int32_t victim = _i == 0 ? 0 : 2;
  open_watches(1, 60, victim);
  oproj_watch_note(watches[victim], "layers.7", 0);
  oproj_watch_enter(watches[victim], "forward", 0);
  rest(100);
  ck_assert(nobody_lost());
  oproj_watch_give_up(watches[victim]);
  char words[64];
  snprintf(words, sizeof words, "rank %d was lost in forward of layers.7", victim);
  expect_loss(victim, words);
  close_watches();
}
END_TEST

START_TEST(a_silent_rank_is_missed_at_the_deadline) {
  int32_t victim = _i == 0 ? 0 : 3;
  open_watches(_i != 0, 0.3, victim);
  rest(150);
  ck_assert(nobody_lost());
  char words[64];
  snprintf(words, sizeof words, "rank %d has been silent for 0.", victim);
  expect_loss(victim, words);
  close_watches();
}
END_TEST

START_TEST(a_rank_that_keeps_others_waiting_is_told) {
  open_watches(1, 0.3, -1);
  for (int32_t r = 0; r < RANKS; r++) {
    oproj_watch_enter(watches[r], r == 1 ? "load" : "forward", r == 1);
    if (r == 1) continue;
    oproj_watch_step(watches[r]);
    oproj_watch_wait(watches[r], 1);
  }
  rest(600);
  ck_assert(nobody_lost()); /* it loads, patiently */
  oproj_watch_enter(watches[1], "load", 0);
  expect_loss(-1, "rank 1 has kept others waiting for 0.3 s; it is in load");
  close_watches();
}
END_TEST

static atomic_int told;

static void tell(void *user, int32_t rank, const char *words) {
  (void)words;
  atomic_fetch_add(&told, rank == *(int32_t *)user ? 1 : 100);
}

static int fail_once(void *user, char words[OPROJ_BOARD_SENTENCE]) {
  snprintf(words, OPROJ_BOARD_SENTENCE, "rank 2 has trouble of its own");
  return atomic_exchange((atomic_int *)user, 0);
}

static void count_loss(void *user) {
  (void)user;
  atomic_fetch_add(&told, 1);
}

START_TEST(callers_are_called_once) {
  open_watches(1, 60, -1);
  int32_t expected = 2;
  atomic_int trouble = 1;
  atomic_store(&told, 0);
  for (int32_t r = 0; r < RANKS - 1; r++) oproj_watch_on_loss(watches[r], tell, &expected);
  oproj_watch_help(watches[2],
                   &(oproj_watch_helper){.look = fail_once, .lost = count_loss, .user = &trouble});
  oproj_watch_set_deadline(watches[2], 0.2); /* looks soon */
  expect_loss(-1, "rank 2 has trouble of its own");
  oproj_watch_declare(watches[0], 1, "another verdict");
  oproj_watch_on_loss(watches[RANKS - 1], tell, &expected); /* late, and told at once */
  for (int tries = 0; tries < 100 && atomic_load(&told) < RANKS + 1; tries++) rest(10);
  rest(50);
  ck_assert_int_eq(atomic_load(&told), RANKS + 1);
  ck_assert_str_eq(oproj_watch_lost(watches[0]), "rank 2 has trouble of its own");
  for (int32_t r = 0; r < RANKS; r++) oproj_watch_on_loss(watches[r], NULL, NULL);
  oproj_watch_help(watches[2], NULL);
  close_watches();
}
END_TEST

typedef struct counts {
  atomic_ullong begun, ended;
} counts;

static void count(void *user, uint64_t *begun, uint64_t *ended) {
  counts *c = user;
  *ended = atomic_load(&c->ended);
  *begun = atomic_load(&c->begun);
}

/* Sums go on for longer than the deadline; then one hangs, or a rank begins none. */
START_TEST(gpus_are_watched) {
  open_watches(_i != 0, 0.3, -1);
  counts all[RANKS] = {0};
  for (int32_t r = 0; r < RANKS; r++) {
    oproj_watch_enter(watches[r], "forward", 0);
    oproj_watch_help(watches[r], &(oproj_watch_helper){.count = count, .user = &all[r]});
  }
  for (int sum = 1; sum <= 100; sum++) {
    for (int32_t r = 0; r < RANKS; r++) {
      atomic_store(&all[r].begun, (unsigned)sum);
      atomic_store(&all[r].ended, (unsigned)sum - 1);
    }
    rest(6);
  }
  ck_assert(nobody_lost());
  for (int32_t r = 0; r < RANKS; r++) atomic_store(&all[r].ended, 100);
  rest(500);
  ck_assert(nobody_lost());
  int32_t missing = _i == 0 ? -1 : _i == 1 ? 0 : 3;
  for (int32_t r = 0; r < RANKS; r++)
    if (r != missing) atomic_store(&all[r].begun, 101);
  char words[80];
  snprintf(words, sizeof words, "rank %d has kept the GPUs of others waiting for 0.3 s", missing);
  expect_loss(-1, missing < 0 ? "'s GPU has waited for 0." : words);
  for (int32_t r = 0; r < RANKS; r++) oproj_watch_help(watches[r], NULL);
  close_watches();
}
END_TEST

/* Many phases at once from all ranks: frames neither tear nor pile up. */
static void *hurry(void *argument) {
  oproj_watch *watch = argument;
  for (int i = 0; i < 3000; i++) {
    oproj_watch_enter(watch, i % 2 ? "load" : "forward", i % 3 == 0);
    oproj_watch_step(watch);
    oproj_watch_wait(watch, i % 5 == 0);
    if (oproj_watch_lost(watch)) break;
  }
  return NULL;
}

START_TEST(ranks_report_while_they_work) {
  open_watches(_i == 0, 5, -1);
  pthread_t threads[RANKS];
  for (int32_t r = 0; r < RANKS; r++) pthread_create(&threads[r], NULL, hurry, watches[r]);
  for (int32_t r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
  for (int32_t r = 0; r < RANKS; r++)
    ck_assert_msg(!oproj_watch_lost(watches[r]), "%s", oproj_watch_lost(watches[r]));
  oproj_watch_declare(watches[3], 3, "the end");
  expect_loss(-1, "the end");
  close_watches();
}
END_TEST

START_TEST(nobody_to_meet_is_an_error) {
  oproj_watch *late;
  EXPECT_OK(oproj_watch_create(&late, 1, 2));
  door = (oproj_link_door){.token = 12345, .one_host = 1};
  EXPECT_FAIL(oproj_watch_meet(late, &door), OPROJ_ERR_COMM, "does not answer");
  oproj_watch_destroy(late);
}
END_TEST

START_TEST(the_environment_sets_the_deadline) {
  oproj_watch *watch;
  unsetenv("OPROJ_DEADLINE");
  ck_assert(oproj_deadline() == 30);
  setenv("OPROJ_DEADLINE", "2.5", 1);
  EXPECT_OK(oproj_watch_create(&watch, 0, 1));
  ck_assert_int_eq(oproj_watch_deadline_ms(watch), 2500);
  oproj_watch_destroy(watch);
  setenv("OPROJ_DEADLINE", "soon", 1);
  ck_assert(oproj_deadline() == 30);
  setenv("OPROJ_DEADLINE", "0", 1);
  ck_assert(oproj_deadline() == 0);
}
END_TEST

int main(void) {
  Suite *suite = suite_create("watch");
  TCase *rules = tcase_create("board"), *tc = tcase_create("watch");
  tcase_add_test(rules, silence_is_a_loss_after_the_deadline);
  tcase_add_test(rules, being_late_is_a_loss_where_others_wait);
  tcase_add_test(rules, excuses_begin_the_deadlines_anew);
  tcase_add_test(rules, patience_and_progress_are_no_loss);
  tcase_add_test(rules, who_has_left_is_missed_by_those_who_wait);
  tcase_add_test(rules, a_sum_that_hangs_is_a_loss_after_the_deadline);
  tcase_add_test(rules, sums_that_go_on_are_no_loss);
  tcase_add_test(rules, a_gpu_that_does_not_come_is_missed);
  tcase_add_loop_test(tc, ranks_that_live_are_left_alone, 0, 2);
  tcase_add_loop_test(tc, a_process_that_ends_is_missed_at_once, 0, 2);
  tcase_add_loop_test(tc, a_silent_rank_is_missed_at_the_deadline, 0, 2);
  tcase_add_test(tc, a_rank_that_keeps_others_waiting_is_told);
  tcase_add_test(tc, callers_are_called_once);
  tcase_add_loop_test(tc, gpus_are_watched, 0, 3);
  tcase_add_loop_test(tc, ranks_report_while_they_work, 0, 2);
  tcase_add_test(tc, nobody_to_meet_is_an_error);
  tcase_add_test(tc, the_environment_sets_the_deadline);
  tcase_set_timeout(tc, 60);
  suite_add_tcase(suite, rules);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
