/* guard.c - owns the thread that ends the process, and who of the ranks says why. */
#include "job/guard.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "job/job.h"
#include "job/siblings.h"

enum {
  TICK_MS = 20,
  INTERRUPTED_MS = 30000, /* for the work to come to where it stops */
  ASLEEP_MS = 1500,       /* between ticks: no busy machine makes it that long */
  GRACE_MS = 800,  /* for the main thread to release what it holds; launchers kill after 1 s */
  LOOK_MS = 1000,  /* for all ranks to look at each other before the first of them leaves */
  FIRST_MS = 20,   /* after a loss: whoever is being killed as well has no time to speak */
  SECOND_MS = 200, /* after a loss: whether who is to speak was lost as well */
  SPOKEN_MS = 500, /* who has spoken is still there then */
  ALONE_MS = 1500, /* or then, where ranks find out by themselves, up to a second apart */
  OTHERS_MS = 5000 /* the launcher ends the others when the speaker has left; mpirun of Open MPI 4
                         crashes where many leave at once */
};

static struct {
  int32_t rank, size;
  atomic_llong tick_ms;  /* when the guard last looked */
  atomic_llong woken_ms; /* when it last found this process to have been stopped; 0: never */
  pthread_mutex_t lock;
  const char *phase; /* NULL: none */
  double deadline;
  int64_t begun_ms;
  int64_t late_ms;      /* when a phase was judged late; 0: none was */
  atomic_llong lost_ms; /* 0: nobody was lost */
  atomic_bool speaks;   /* written before lost_ms, as are the next two */
  int32_t lost;
  char sentence[512];
  bool looked;        /* the guard's own: for a second speaker */
  atomic_bool starts; /* the phase is the start */
  atomic_bool parked, spoken;
} guard = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int64_t milliseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void leave(void) {
  _exit(JOB_FAILED); /* not exit: its handlers, MPI's among them, might wait for lost ranks */
}

void guard_begin(const char *phase, double deadline) {
  pthread_mutex_lock(&guard.lock);
  guard.phase = phase;
  guard.deadline = deadline;
  guard.begun_ms = milliseconds();
  atomic_store(&guard.starts, phase && strcmp(phase, GUARD_START) == 0);
  bool late = guard.late_ms != 0;
  pthread_mutex_unlock(&guard.lock);
  if (late) guard_leave();
}

void guard_end(void) {
  guard_begin(NULL, 0);
}

void guard_say(const char *sentence) {
  if (!atomic_exchange(&guard.spoken, true)) job_say(job_program, sentence);
}

void guard_hush(void) {
  atomic_store(&guard.spoken, true);
}

/* Everybody has to come to the same rank. */
static int32_t speaker_after(int32_t lost) {
  return lost == 0 ? 1 : 0;
}

/* A launcher that ends a job wakes those who were stopped; what they find then is no news. */
static bool just_woken(void) {
  int64_t now = milliseconds(), woken = atomic_load(&guard.woken_ms);
  return now - atomic_load(&guard.tick_ms) > ASLEEP_MS || (woken && now - woken < OTHERS_MS);
}

bool guard_woken_in_start(void) {
  return atomic_load(&guard.starts) && just_woken();
}

void guard_lost(void *user, int32_t rank, const char *sentence) {
  (void)user;
  guard.lost = rank;
  snprintf(guard.sentence, sizeof guard.sentence, "%s", sentence);
  guard.speaks = guard.rank == speaker_after(rank) && !just_woken();
  atomic_store(&guard.lost_ms, milliseconds());
}

void guard_leave(void) {
  atomic_store(&guard.parked, true);
  for (;;) pause();
}

/* Prints `sentence` about the ranks in `state`, if there are any and this one is the lowest of the
 * others.  False: there are none. */
static bool blame(sibling state, const char *before, const char *after) {
  sibling *ranks = calloc((size_t)guard.size, sizeof *ranks);
  if (!ranks) return false;
  siblings_look(ranks, guard.size);
  char list[256] = "", sentence[512];
  size_t used = 0;
  int32_t count = 0, speaker = -1;
  for (int32_t r = 0; r < guard.size; r++) {
    if (ranks[r] == state) {
      count++;
      if (used < sizeof list)
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", r);
    } else if (speaker < 0 && ranks[r] == SIBLING_RUNS) {
      speaker = r;
    }
  }
  bool sees = ranks[guard.rank] == SIBLING_RUNS; /* else /proc shows nobody */
  free(ranks);
  if (count == 0 || !sees) return false;
  snprintf(sentence, sizeof sentence, "%srank%s %s %s %s", before, count == 1 ? "" : "s", list,
           count == 1 ? "was" : "were", after);
  guard.speaks = guard.rank == speaker;
  if (guard.speaks) guard_say(sentence);
  guard_hush(); /* what the others make of this rank's end is not to be told */
  return true;
}

/* Some rank has not come; which, only the machine can tell. */
static void end_late_phase(const char *phase, double deadline) {
  char before[128];
  snprintf(before, sizeof before, "%s has not ended within %g s: ", phase, deadline);
  if (blame(SIBLING_STOPPED, before, "stopped")) return;
  if (siblings_all_here(guard.size) && blame(SIBLING_UNSEEN, before, "not there")) return;
  strncat(before, "some rank has not come", sizeof before - strlen(before) - 1);
  guard.speaks = guard.rank == 0;
  if (guard.speaks) guard_say(before);
  guard_hush();
}

/* A verdict stands, even where the phase ends after it: it has been told. */
static void check_phase(void) {
  int64_t now = milliseconds();
  if (guard.late_ms != 0) {
    if (now - guard.late_ms > (guard.speaks ? LOOK_MS : OTHERS_MS)) leave();
    return;
  }
  pthread_mutex_lock(&guard.lock);
  const char *phase = guard.phase;
  double deadline = guard.deadline, late = (double)(now - guard.begun_ms) * 1e-3;
  if (phase && deadline > 0 && late >= deadline) guard.late_ms = now;
  pthread_mutex_unlock(&guard.lock);
  if (guard.late_ms != 0) end_late_phase(phase, deadline);
}

/* Several ranks may have been lost at once, who should have spoken among them: the lowest one that
 * is left does. */
static void look_for_a_speaker(void) {
  int32_t speaker = speaker_after(guard.lost), left = 0;
  guard.looked = true;
  if (guard.speaks || just_woken() || speaker >= guard.size) return;
  if (!siblings_all_here(guard.size)) return;
  sibling *ranks = calloc((size_t)guard.size, sizeof *ranks);
  if (!ranks) return;
  siblings_look(ranks, guard.size);
  while (left < guard.size && (left == guard.lost || ranks[left] != SIBLING_RUNS)) left++;
  guard.speaks = ranks[speaker] != SIBLING_RUNS && left == guard.rank;
  free(ranks);
}

static void check_loss(void) {
  int64_t lost = atomic_load(&guard.lost_ms);
  if (lost == 0) return;
  int64_t since = milliseconds() - lost;
  if (since > SECOND_MS && !guard.looked) look_for_a_speaker();
  if (since > FIRST_MS && guard.speaks) guard_say(guard.sentence);
  bool ready = since > (guard.lost == 0 ? ALONE_MS : SPOKEN_MS) &&
               (since > GRACE_MS || atomic_load(&guard.parked));
  if (guard.speaks ? ready : since > OTHERS_MS) leave();
}

/* Launchers end all ranks with a signal, too, when one has died: that is then the better reason,
 * which the watch knows, or, while there is none, the machine. */
static void check_interrupt(int64_t *since_ms) {
  if (!job_interrupted() || atomic_load(&guard.lost_ms) != 0) return;
  pthread_mutex_lock(&guard.lock);
  const char *phase = guard.phase;
  pthread_mutex_unlock(&guard.lock);
  if (*since_ms == 0) {
    *since_ms = milliseconds();
    char after[64];
    snprintf(after, sizeof after, "lost in %s", phase ? phase : "");
    if (phase && !atomic_load(&guard.woken_ms) && siblings_all_here(guard.size))
      blame(SIBLING_UNSEEN, "", after);
  }
  int64_t since = milliseconds() - *since_ms;
  if (since > GRACE_MS && guard.rank == 0 && !atomic_load(&guard.woken_ms))
    guard_say("interrupted");
  if (since > INTERRUPTED_MS) leave();
}

/* A process that was stopped itself has no say in who was late meanwhile, and time begins anew. */
static void notice_sleep(void) {
  int64_t now = milliseconds();
  if (now - atomic_load(&guard.tick_ms) > ASLEEP_MS) {
    atomic_store(&guard.woken_ms, now);
    pthread_mutex_lock(&guard.lock);
    guard.begun_ms = now;
    pthread_mutex_unlock(&guard.lock);
  }
  atomic_store(&guard.tick_ms, now);
}

static void *stand_guard(void *unused) {
  (void)unused;
  int64_t interrupted_ms = 0;
  for (;;) {
    nanosleep(&(struct timespec){.tv_nsec = TICK_MS * 1000000}, NULL);
    notice_sleep();
    check_loss();
    check_phase();
    check_interrupt(&interrupted_ms);
  }
  return NULL;
}

bool guard_start(int32_t rank, int32_t size) {
  pthread_t thread;
  sigset_t all, before;
  guard.rank = rank;
  guard.size = size;
  atomic_store(&guard.tick_ms, milliseconds());
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&thread, NULL, stand_guard, NULL);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0) pthread_detach(thread);
  return error == 0;
}
