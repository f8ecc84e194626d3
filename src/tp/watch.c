/* watch.c - owns the thread of the watch, and what it shares with the rank it speaks for.
 *
 * `lock` covers everything but the atomics.  Frames are sent under it, without waiting.  Callers'
 * functions run under `calling`, which is taken alone or first. */
#include "tp/watch.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/environment.h"
#include "base/error.h"
#include "base/log.h"

enum {
  LONGEST_BEAT_MS = 1000,
  SHORTEST_BEAT_MS = 20,
  MEET_MS = 5000,   /* for one connection */
  GOODBYE_MS = 200, /* for a connection that is full: a goodbye unheard is a loss */
  ASLEEP_MS = 1500  /* behind its beat: the process was stopped; no busy machine makes it that */
};

struct oproj_watch {
  int32_t rank, size;
  atomic_llong deadline_ms;
  atomic_ullong step;
  atomic_int waiting, alone;
  atomic_int lost; /* -1, or whom `sentence` is about */
  char sentence[OPROJ_BOARD_SENTENCE];

  pthread_mutex_t lock;
  oproj_board_report mine; /* its step and waiting are the atomics, its sums the thread's */
  int32_t phase_patient, note_patient;
  oproj_board_rank *board; /* [size]; others than rank 0 know only rank 0, then themselves */
  oproj_link *links;       /* [size]: rank 0 has one to each, others one to rank 0 */
  uint64_t token;

  pthread_mutex_t calling;
  oproj_loss_fn fn;
  void *user;
  oproj_watch_helper helper;
  int fn_called;

  int listener, wake; /* files, or -1 */
  int running;
  atomic_int stop;
  pthread_t thread;
};

static int64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void wake_thread(oproj_watch *w) {
  uint64_t one = 1;
  if (w->wake >= 0 && write(w->wake, &one, sizeof one) < 0) return; /* full: awake already */
}

/* ---- frames: under the lock ----------------------------------------------------------------- */

static void send_to_all(oproj_watch *w, const oproj_link_frame *frame, int within_ms) {
  for (int32_t r = 0; r < w->size; r++) oproj_link_send(&w->links[r], frame, within_ms);
}

/* Only rank 0 has a say in who keeps whom waiting on the host. */
static void hear_myself(oproj_watch *w) {
  oproj_board_report mine = w->mine;
  if (w->rank != 0) mine.waiting = 0, mine.patient = 1;
  oproj_board_hear(&w->board[w->rank], &mine, milliseconds());
}

static void send_report(oproj_watch *w) {
  w->mine.step = atomic_load(&w->step);
  w->mine.waiting = atomic_load(&w->waiting);
  w->mine.patient = w->phase_patient || w->note_patient;
  hear_myself(w);
  oproj_link_frame frame = {
      .token = w->token, .kind = OPROJ_LINK_REPORT, .rank = w->rank, .report = w->mine};
  send_to_all(w, &frame, 0);
}

static void send_verdict(oproj_watch *w) {
  oproj_link_frame frame = {
      .token = w->token, .kind = OPROJ_LINK_VERDICT, .rank = atomic_load(&w->lost)};
  memcpy(frame.sentence, w->sentence, sizeof frame.sentence);
  send_to_all(w, &frame, 0);
}

/* ---- what this rank does -------------------------------------------------------------------- */

void oproj_watch_enter(oproj_watch *watch, const char *phase, int32_t patient) {
  if (!watch) return;
  pthread_mutex_lock(&watch->lock);
  watch->phase_patient = patient;
  if (strcmp(watch->mine.phase, phase) != 0) {
    snprintf(watch->mine.phase, sizeof watch->mine.phase, "%s", phase);
    send_report(watch); /* now: a rank that dies next is to be remembered here */
  }
  pthread_mutex_unlock(&watch->lock);
}

void oproj_watch_note(oproj_watch *watch, const char *note, int32_t patient) {
  if (!watch) return;
  pthread_mutex_lock(&watch->lock);
  watch->note_patient = patient;
  watch->phase_patient = 0;
  watch->mine.phase[0] = '\0';
  snprintf(watch->mine.note, sizeof watch->mine.note, "%s", note);
  send_report(watch);
  pthread_mutex_unlock(&watch->lock);
}

void oproj_watch_step(oproj_watch *watch) {
  if (watch) atomic_fetch_add(&watch->step, 1);
}

void oproj_watch_wait(oproj_watch *watch, int32_t waiting) {
  if (watch) atomic_store(&watch->waiting, waiting);
}

/* ---- verdicts ------------------------------------------------------------------------------- */

const char *oproj_watch_lost(const oproj_watch *watch) {
  return watch && atomic_load(&watch->lost) >= 0 ? watch->sentence : NULL;
}

oproj_status oproj_watch_check(const oproj_watch *watch) {
  const char *sentence = oproj_watch_lost(watch);
  REQUIRE(!sentence, OPROJ_ERR_PEER, "%s", sentence);
  return OPROJ_OK;
}

static void call_out(oproj_watch *w) {
  pthread_mutex_lock(&w->calling);
  if (w->helper.lost) w->helper.lost(w->helper.user);
  w->helper.lost = NULL;
  w->helper.look = NULL; /* what it looked at is being given up */
  if (w->fn && !w->fn_called) {
    w->fn_called = 1;
    w->fn(w->user, atomic_load(&w->lost), w->sentence);
  }
  pthread_mutex_unlock(&w->calling);
}

void oproj_watch_declare(oproj_watch *watch, int32_t rank, const char *sentence) {
  pthread_mutex_lock(&watch->lock);
  int first = atomic_load(&watch->lost) < 0;
  if (first) {
    snprintf(watch->sentence, sizeof watch->sentence, "%s", sentence);
    atomic_store(&watch->lost, rank);
    send_verdict(watch);
  }
  pthread_mutex_unlock(&watch->lock);
  if (!first) return;
  oproj_base_log(OPROJ_LOG_INFO, "%s", sentence);
  call_out(watch);
}

void oproj_watch_on_loss(oproj_watch *watch, oproj_loss_fn fn, void *user) {
  if (!watch) return;
  pthread_mutex_lock(&watch->calling);
  watch->fn = fn;
  watch->user = user;
  pthread_mutex_unlock(&watch->calling);
  if (fn && oproj_watch_lost(watch)) call_out(watch);
}

void oproj_watch_help(oproj_watch *watch, const oproj_watch_helper *helper) {
  if (!watch) return;
  pthread_mutex_lock(&watch->calling);
  watch->helper = helper ? *helper : (oproj_watch_helper){0};
  pthread_mutex_unlock(&watch->calling);
  if (helper && oproj_watch_lost(watch)) call_out(watch);
}

int64_t oproj_watch_deadline_ms(const oproj_watch *watch) {
  return watch ? atomic_load(&watch->deadline_ms) : 0;
}

void oproj_watch_set_deadline(oproj_watch *watch, double seconds) {
  if (!watch) return;
  atomic_store(&watch->deadline_ms, (long long)(seconds * 1e3));
  wake_thread(watch);
}

int oproj_watch_alone(const oproj_watch *watch) {
  return atomic_load(&watch->alone);
}

/* ---- the thread ----------------------------------------------------------------------------- */

static int64_t beat_ms(const oproj_watch *w) {
  int64_t quarter = oproj_watch_deadline_ms(w) / 4;
  if (quarter == 0 || quarter > LONGEST_BEAT_MS) return LONGEST_BEAT_MS;
  return quarter < SHORTEST_BEAT_MS ? SHORTEST_BEAT_MS : quarter;
}

/* The connection to rank r has ended; under the lock.  Nonzero: `sentence` says that it is lost. */
static int end_link(oproj_watch *w, int32_t r, char sentence[OPROJ_BOARD_SENTENCE]) {
  int vanished = w->board[r].watched;
  oproj_link_close(&w->links[r]);
  w->board[r].watched = 0;
  if (r == 0) atomic_store(&w->alone, 1);
  if (vanished) oproj_board_vanished(w->board, r, sentence);
  return vanished;
}

/* Takes what has come from rank r.  Nonzero: rank *lost is lost, as `sentence` says. */
static int take_frames(oproj_watch *w, int32_t r, int32_t *lost,
                       char sentence[OPROJ_BOARD_SENTENCE]) {
  oproj_link *link = &w->links[r];
  int got;
  *lost = r;
  while ((got = oproj_link_receive(link)) == 1) {
    if (link->in.kind == OPROJ_LINK_REPORT) {
      oproj_board_hear(&w->board[r], &link->in.report, milliseconds());
    } else if (link->in.kind == OPROJ_LINK_GOODBYE) {
      oproj_board_leave(&w->board[r], milliseconds());
    } else if (link->in.kind == OPROJ_LINK_VERDICT) {
      *lost = link->in.rank;
      snprintf(sentence, OPROJ_BOARD_SENTENCE, "%.255s", link->in.sentence);
      return 1;
    }
  }
  return got < 0 ? end_link(w, r, sentence) : 0;
}

static void read_links(oproj_watch *w) {
  char sentence[OPROJ_BOARD_SENTENCE];
  for (int32_t r = 0; r < w->size; r++) {
    int32_t lost;
    pthread_mutex_lock(&w->lock);
    int found = w->links[r].file >= 0 && take_frames(w, r, &lost, sentence);
    pthread_mutex_unlock(&w->lock);
    if (found) oproj_watch_declare(w, lost, sentence);
  }
}

static void count_sums(oproj_watch *w) {
  uint64_t begun = 0, ended = 0;
  pthread_mutex_lock(&w->calling);
  if (w->helper.count) w->helper.count(w->helper.user, &begun, &ended);
  pthread_mutex_unlock(&w->calling);
  pthread_mutex_lock(&w->lock);
  w->mine.sums_begun = begun;
  w->mine.sums_ended = ended;
  pthread_mutex_unlock(&w->lock);
}

/* Under the lock.  What GPUs do is for rank 0 to judge, or for whoever it has left alone. */
static int32_t judge(oproj_watch *w, char sentence[OPROJ_BOARD_SENTENCE]) {
  int64_t now = milliseconds(), deadline = oproj_watch_deadline_ms(w);
  int32_t lost = oproj_board_judge(w->board, w->size, now, deadline, sentence);
  if (lost >= 0 || (w->rank != 0 && !atomic_load(&w->alone))) return lost;
  return oproj_board_judge_sums(w->board, w->size, now, deadline, sentence);
}

static void beat(oproj_watch *w) {
  char sentence[OPROJ_BOARD_SENTENCE];
  count_sums(w);
  pthread_mutex_lock(&w->lock);
  send_report(w);
  if (atomic_load(&w->lost) >= 0) send_verdict(w); /* a full connection may have dropped it */
  int32_t lost = judge(w, sentence);
  pthread_mutex_unlock(&w->lock);
  if (lost >= 0) oproj_watch_declare(w, lost, sentence);

  pthread_mutex_lock(&w->calling);
  int trouble = w->helper.look && w->helper.look(w->helper.user, sentence);
  pthread_mutex_unlock(&w->calling);
  if (trouble) oproj_watch_declare(w, w->rank, sentence);
}

static int list_files(oproj_watch *w, struct pollfd *files) {
  int count = 0;
  files[count++] = (struct pollfd){.fd = w->wake, .events = POLLIN};
  pthread_mutex_lock(&w->lock);
  for (int32_t r = 0; r < w->size; r++)
    if (w->links[r].file >= 0)
      files[count++] = (struct pollfd){.fd = w->links[r].file, .events = POLLIN};
  pthread_mutex_unlock(&w->lock);
  return count;
}

/* This process was stopped: others may have been as well, so all of them get a whole deadline. */
static void excuse_all(oproj_watch *w) {
  pthread_mutex_lock(&w->lock);
  oproj_board_excuse(w->board, w->size, milliseconds());
  pthread_mutex_unlock(&w->lock);
}

static void *keep_watch(void *argument) {
  oproj_watch *w = argument;
  struct pollfd *files = calloc((size_t)w->size + 1, sizeof *files);
  int64_t next = milliseconds();
  while (files && !atomic_load(&w->stop)) {
    int64_t now = milliseconds();
    if (now >= next) {
      /* A process that was stopped must not judge others by what it could not hear meanwhile. */
      read_links(w);
      if (now - next > ASLEEP_MS) excuse_all(w);
      beat(w);
      next = now + beat_ms(w);
    }
    int count = list_files(w, files);
    if (poll(files, (nfds_t)count, (int)(next - now > 0 ? next - now : 0)) <= 0) continue;
    uint64_t woken;
    if (files[0].revents && read(w->wake, &woken, sizeof woken) > 0) next = milliseconds();
    read_links(w);
  }
  free(files);
  return NULL;
}

/* ---- life ----------------------------------------------------------------------------------- */

double oproj_deadline(void) {
  return oproj_base_seconds(OPROJ_ENVIRONMENT_DEADLINE);
}

oproj_status oproj_watch_create(oproj_watch **out, int32_t rank, int32_t size) {
  oproj_watch *w = calloc(1, sizeof *w);
  REQUIRE(w, OPROJ_ERR_NOMEM, "no memory for a watch");
  w->rank = rank;
  w->size = size;
  w->listener = w->wake = -1;
  pthread_mutex_init(&w->lock, NULL);
  pthread_mutex_init(&w->calling, NULL);
  atomic_store(&w->lost, -1);
  atomic_store(&w->alone, 1);
  oproj_watch_set_deadline(w, oproj_deadline());
  w->board = calloc((size_t)size, sizeof *w->board);
  w->links = calloc((size_t)size, sizeof *w->links);
  for (int32_t r = 0; w->links && r < size; r++) w->links[r].file = -1;
  if (!w->board || !w->links) {
    oproj_watch_destroy(w);
    return oproj_fail(OPROJ_ERR_NOMEM, "no memory to watch %d ranks", size);
  }
  *out = w;
  return OPROJ_OK;
}

oproj_status oproj_watch_open(oproj_watch *watch, int32_t one_host, oproj_link_door *door) {
  return oproj_link_open_door(one_host, door, &watch->listener);
}

oproj_status oproj_watch_meet(oproj_watch *watch, const oproj_link_door *door) {
  watch->token = door->token;
  if (watch->rank != 0) return oproj_link_enter(door, watch->rank, MEET_MS, &watch->links[0]);
  for (int32_t missing = watch->size - 1; missing > 0; missing--) {
    oproj_link link;
    int32_t rank;
    TRY(oproj_link_admit(watch->listener, door, MEET_MS, &link, &rank));
    if (rank <= 0 || rank >= watch->size || watch->links[rank].file >= 0) {
      oproj_link_close(&link);
      return oproj_fail(OPROJ_ERR_COMM, "rank %d came twice, or is none", rank);
    }
    watch->links[rank] = link;
  }
  return OPROJ_OK;
}

static void close_files(oproj_watch *w) {
  for (int32_t r = 0; w->links && r < w->size; r++) oproj_link_close(&w->links[r]);
  if (w->listener >= 0) close(w->listener);
  if (w->wake >= 0) close(w->wake);
  w->listener = w->wake = -1;
}

void oproj_watch_give_up(oproj_watch *watch) {
  close_files(watch);
}

/* Whom this rank will judge, as of now. */
static void begin_board(oproj_watch *w) {
  for (int32_t r = 0; r < w->size; r++)
    if (w->links[r].file >= 0) oproj_board_hear(&w->board[r], &w->mine, milliseconds());
}

/* Signals are the program's own: they go to threads that expect them. */
static int start_quietly(pthread_t *thread, void *(*run)(void *), void *argument) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(thread, NULL, run, argument);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return error;
}

oproj_status oproj_watch_start(oproj_watch *watch) {
  if (watch->listener >= 0) close(watch->listener);
  watch->listener = -1;
  begin_board(watch);
  watch->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  REQUIRE(watch->wake >= 0, OPROJ_ERR_COMM, "no event for the watch: %s", strerror(errno));
  int error = start_quietly(&watch->thread, keep_watch, watch);
  REQUIRE(error == 0, OPROJ_ERR_COMM, "no thread for the watch: %s", strerror(error));
  watch->running = 1;
  atomic_store(&watch->alone, 0);
  return OPROJ_OK;
}

void oproj_watch_destroy(oproj_watch *watch) {
  if (!watch) return;
  if (watch->running) {
    atomic_store(&watch->stop, 1);
    wake_thread(watch);
    pthread_join(watch->thread, NULL);
    send_to_all(
        watch,
        &(oproj_link_frame){.token = watch->token, .kind = OPROJ_LINK_GOODBYE, .rank = watch->rank},
        GOODBYE_MS);
  }
  close_files(watch);
  pthread_mutex_destroy(&watch->calling);
  pthread_mutex_destroy(&watch->lock);
  free(watch->board);
  free(watch->links);
  free(watch);
}
