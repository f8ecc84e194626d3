/* job.c - MPI's start and end, who speaks, what interrupts, and what the process returns. */
#include "job/job.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "job/choose.h"
#include "job/guard.h"
#include "job/siblings.h"
#include "oproj/mpi.h"

const char *job_program = "oproj";

/* ---- start ---------------------------------------------------------------------------------- */

/* A whole number >= 0, or -1. */
static long count_in(const char *variable) {
  const char *text = getenv(variable);
  char *end;
  if (!text || *text < '0' || *text > '9') return -1;
  long value = strtol(text, &end, 10);
  return *end == '\0' ? value : -1;
}

/* This process's rank as its launcher (mpirun, srun) has set it in the environment; -1 when it was
 * started alone.  *size is how many were launched and *size_name the variable that says so; -1 and
 * NULL: unknown. */
static int launched_rank(int *size, const char **size_name) {
  /* A rank that lingers in somebody's environment must not make a process started alone wait for
   * others: it counts only with its `size` and with `witness`, where the launcher sets those. */
  static const struct {
    const char *rank, *size, *witness;
  } launchers[] = {{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", NULL},
                   {"PMIX_RANK", NULL, "PMIX_NAMESPACE"},
                   {"PMI_RANK", "PMI_SIZE", NULL},
                   {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID"}};
  long found = -1;
  for (size_t i = 0; i < sizeof launchers / sizeof launchers[0]; i++) {
    long rank = count_in(launchers[i].rank);
    if (rank < 0 || (launchers[i].size && rank >= count_in(launchers[i].size))) continue;
    if (launchers[i].witness && !getenv(launchers[i].witness)) continue;
    *size_name = launchers[i].size;
    *size = launchers[i].size ? (int)count_in(launchers[i].size) : -1;
    if (*size_name) return (int)rank;
    found = rank; /* a later one may know the size */
  }
  *size_name = NULL;
  *size = -1;
  return (int)found;
}

/* Word 0 is the program, wherever it was found. */
static const char *word_at(char **argv, int i) {
  return i == 0 ? job_program : argv[i];
}

/* All words, each with its NUL; *bytes is their length. */
static char *join_words(int argc, char **argv, int *bytes) {
  size_t length = 0;
  for (int i = 0; i < argc; i++) length += strlen(word_at(argv, i)) + 1;
  char *words = malloc(length + 1);
  char *to = words;
  for (int i = 0; words && i < argc; i++) to = stpcpy(to, word_at(argv, i)) + 1;
  *bytes = (int)length; /* the kernel takes no command line of 2 GB */
  return words;
}

static void quote_word(const char *word, char *text, size_t bytes) {
  if (word)
    snprintf(text, bytes, "\"%.200s\"", word);
  else
    snprintf(text, bytes, "missing");
}

/* Holds this rank's words against rank 0's. */
static oproj_status compare_words(int argc, char **argv, const char *first, int bytes) {
  const char *end = first + bytes;
  for (int i = 0; i < argc || first < end; i++) {
    const char *mine = i < argc ? word_at(argv, i) : NULL, *theirs = first < end ? first : NULL;
    if (!mine || !theirs || strcmp(mine, theirs) != 0) {
      char here[256], there[256];
      quote_word(mine, here, sizeof here);
      quote_word(theirs, there, sizeof there);
      return oproj_fail(OPROJ_ERR_INVALID,
                        "word %d of its command line is %s and rank 0's is %s; all ranks must be "
                        "started alike",
                        i, here, there);
    }
    first += strlen(first) + 1;
  }
  return OPROJ_OK;
}

static oproj_status agree_on_words(const job_state *job, int argc, char **argv) {
  int bytes;
  char *words = join_words(argc, argv, &bytes);
  MPI_Bcast(&bytes, 1, MPI_INT, 0, MPI_COMM_WORLD);
  if (words && job->rank != 0) {
    free(words);
    words = malloc((size_t)bytes + 1);
  }
  oproj_status status =
      words ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for a command line");
  status = oproj_comm_agree(job->comm, status);
  if (status == OPROJ_OK) {
    MPI_Bcast(words, bytes, MPI_CHAR, 0, MPI_COMM_WORLD);
    status = oproj_comm_agree(job->comm, compare_words(argc, argv, words, bytes));
  }
  free(words);
  return status;
}

/* A launcher of another MPI library starts processes that do not find each other. */
static oproj_status check_launch(int launched, const char *size_name) {
  int size;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (launched < 0 || launched == size) return OPROJ_OK;
  return oproj_fail(
      OPROJ_ERR_UNSUPPORTED,
      "the launcher has started %d ranks (%s) but MPI finds %d; it must belong to the "
      "MPI library that oproj is built with",
      launched, size_name, size);
}

static oproj_status meet(job_state *job, int argc, char **argv) {
  oproj_status status = oproj_comm_mpi(&job->comm, MPI_COMM_WORLD);
  if (status != OPROJ_OK) return status;
  oproj_comm_on_loss(job->comm, guard_lost, NULL);
  job->rank = oproj_comm_rank(job->comm);
  job->size = oproj_comm_size(job->comm);
  return agree_on_words(job, argc, argv);
}

static oproj_status start_mpi(job_state *job, int launched, const char *size_name, int argc,
                              char **argv) {
  int provided;
  job_catch_interrupts();
  guard_start(job->rank, launched > 0 ? launched : 1);
  guard_begin(GUARD_START, job->deadline);
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
    return oproj_fail(OPROJ_ERR_COMM, "MPI_Init_thread failed");
  job->mpi = true;
  oproj_status status = check_launch(launched, size_name);
  if (status == OPROJ_OK)
    status = meet(job, argc, argv);
  else if (siblings_lowest(job->rank, launched) == job->rank)
    job->rank = 0; /* it speaks: a variable may say rank 3 where no other rank is */
  guard_end();
  return status;
}

/* `wrong` is what is wrong with the environment's variables, or "".  They are taken out of it, so
 * that the library need not warn of them as well. */
static void take_wrong_variables(char *wrong, size_t bytes) {
  const char *name;
  wrong[0] = '\0';
  while (oproj_environment_check(&name) != OPROJ_OK) {
    if (!*wrong) snprintf(wrong, bytes, "%s", oproj_last_error());
    unsetenv(name);
  }
}

static void warn_of_unknown_variables(void) {
  char names[256], sentence[320];
  const char *level = getenv("OPROJ_LOG");
  oproj_environment_unknown(names, sizeof names);
  if (!*names || (level && strcmp(level, "error") == 0)) return;
  snprintf(sentence, sizeof sentence, "warning: oproj knows no variable %s", names);
  job_say(job_program, sentence);
}

/* All ranks come to the same verdict on what any of them found. */
static oproj_status judge_variables(job_state *job, const char *wrong) {
  oproj_status status =
      oproj_comm_agree(job->comm, *wrong ? oproj_fail(OPROJ_ERR_INVALID, "%s", wrong) : OPROJ_OK);
  if (job->rank == 0 && status == OPROJ_OK) warn_of_unknown_variables();
  if (status != OPROJ_ERR_INVALID) return status;
  if (job->rank == 0) guard_say(oproj_last_error());
  job->code = JOB_USAGE;
  return OPROJ_OK;
}

/* A file that is opened later must not get the number of a stream that came closed, or what is
 * printed would end up in it.  Opened for reading, so that writing still fails and is reported. */
static void reserve_streams(void) {
  int file = open("/dev/null", O_RDONLY);
  while (file >= 0 && file <= STDERR_FILENO) file = open("/dev/null", O_RDONLY);
  if (file >= 0) close(file);
}

oproj_status job_start(job_state *job, const char *program, bool alone, int argc, char **argv) {
  char wrong[512];
  int launched;
  const char *size_name;
  job_program = program;
  reserve_streams();
  signal(SIGXFSZ, SIG_IGN); /* a file that must not grow is a failed write, too */
  signal(SIGPIPE, SIG_IGN); /* a reader that went away is a failed write, which job_finish tells */
  take_wrong_variables(wrong, sizeof wrong);
  *job = (job_state){.size = 1, .code = JOB_OK, .deadline = oproj_deadline()};
  int rank = launched_rank(&launched, &size_name);
  oproj_status status;
  if (rank < 0 || (alone && launched == 1)) {
    status = oproj_comm_self(&job->comm);
  } else {
    job->rank = rank; /* who speaks until MPI says better */
    status = start_mpi(job, launched, size_name, argc, argv);
  }
  return status == OPROJ_OK ? judge_variables(job, wrong) : status;
}

oproj_status job_choose_comm(job_state *job, int choice, bool on_host) {
  oproj_status status = choose_comm(&job->comm, choice, on_host);
  if (status != OPROJ_OK || !job->mpi) return status;
  oproj_comm_on_loss(job->comm, guard_lost, NULL);
  oproj_comm_set_deadline(job->comm, job->deadline);
  return OPROJ_OK;
}

void job_set_deadline(job_state *job, double seconds) {
  job->deadline = seconds;
  oproj_comm_set_deadline(job->comm, seconds);
}

/* ---- interrupts ----------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted;

/* A launcher that ends a job wakes who was stopped and asks all to end.  Who then still came to
 * start MPI would meet a launcher on its way out: Open MPI's crashes or hangs over that. */
static void note_interrupt(int number) {
  (void)number;
  if (guard_woken_in_start()) _exit(JOB_FAILED);
  interrupted = 1;
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
  signal(SIGHUP, SIG_DFL);
}

void job_catch_interrupts(void) {
  static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
  for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
    struct sigaction action = {.sa_handler = note_interrupt, .sa_flags = SA_RESTART}, former;
    sigemptyset(&action.sa_mask);
    /* Whoever starts us in the background may have chosen to ignore it. */
    if (sigaction(signals[i], NULL, &former) == 0 && former.sa_handler != SIG_IGN)
      sigaction(signals[i], &action, NULL);
  }
}

bool job_interrupted(void) {
  return interrupted != 0;
}

oproj_status job_agree_to_go_on(const job_state *job) {
  return oproj_comm_agree(job->comm,
                          interrupted ? oproj_fail(OPROJ_ERR_COMM, "interrupted") : OPROJ_OK);
}

/* ---- end ------------------------------------------------------------------------------------ */

static int exit_code(oproj_status status) {
  switch (status) {
    case OPROJ_OK:
      return JOB_OK;
    case OPROJ_ERR_INVALID:
    case OPROJ_ERR_SHAPE:
    case OPROJ_ERR_UNSUPPORTED:
    case OPROJ_ERR_IO:
      return JOB_REFUSED;
    case OPROJ_ERR_NOMEM:
    case OPROJ_ERR_DEVICE:
    case OPROJ_ERR_COMM:
    case OPROJ_ERR_PEER:
      return JOB_FAILED;
  }
  return JOB_FAILED;
}

void job_say(const char *who, const char *sentence) {
  char line[2048];
  snprintf(line, sizeof line, "%s: %s", who, sentence);
  for (char *c = line; *c; c++)
    if ((unsigned char)*c < ' ' || *c == 127) *c = '?';
  /* On a terminal a bar may be unfinished. */
  fprintf(stderr, "%s%s\n", job_on_terminal() ? "\r\033[K" : "", line);
}

bool job_on_terminal(void) {
  const char *far = getenv("OPROJ_TERMINAL");
  return isatty(STDERR_FILENO) || (far && strcmp(far, "1") == 0);
}

void job_flush(job_state *job) {
  if (fflush(stdout) != 0 && job->output_error == 0) job->output_error = errno;
}

/* A library call that its progress function stopped says so in its own words; ours say why. */
static int fail(const job_state *job, oproj_status status) {
  const char *sentence = oproj_last_error();
  if (!*sentence) sentence = oproj_status_string(status);
  if (job->rank == 0) guard_say(interrupted ? "interrupted" : sentence);
  return interrupted ? JOB_FAILED : exit_code(status);
}

/* Whether the others are not there to end the job with. */
static bool is_broken(const job_state *job, oproj_status status) {
  return job->mpi && job->comm && (status == OPROJ_ERR_PEER || oproj_comm_check(job->comm));
}

/* Ends MPI under the eyes of the watch, then of the guard.  A rank that ends with a code may do so
 * while others still end, and is not lost: they say nothing of it.  `first_goes_on`: rank 0 comes
 * to its code later. */
static void stop_mpi(job_state *job, int code, bool first_goes_on) {
  guard_begin("shutdown", job->deadline);
  if (job->comm && job->size > 1) {
    oproj_comm_note(job->comm, "shutdown", 0);
    bool some_code = job_max(job, code) != 0;
    if (oproj_comm_check(job->comm) != OPROJ_OK) guard_leave();
    if (some_code || (first_goes_on && job->rank > 0)) guard_hush();
  }
  oproj_comm_destroy(job->comm);
  MPI_Finalize();
  guard_end();
}

oproj_status job_go_alone(job_state *job) {
  if (!job->mpi) return OPROJ_OK;
  stop_mpi(job, job->code, true);
  job->mpi = false;
  job->comm = NULL;
  job->size = 1;
  return oproj_comm_self(&job->comm);
}

int job_finish(job_state *job, oproj_status status) {
  if (is_broken(job, status)) {
    job_flush(job);
    if (!oproj_comm_check(job->comm)) _exit(fail(job, status)); /* nobody watches the ranks */
    guard_leave();
  }
  int code = status == OPROJ_OK ? job->code : fail(job, status);
  job_flush(job);
  if (job->output_error != 0 && (code == JOB_OK || code == JOB_CHECK_FAILED)) {
    char sentence[256];
    snprintf(sentence, sizeof sentence, "cannot write to standard output: %s",
             strerror(job->output_error));
    job_say(job_program, sentence);
    code = JOB_FAILED;
  }
  if (job->mpi)
    stop_mpi(job, code, false);
  else
    oproj_comm_destroy(job->comm);
  return code;
}

/* ---- over all ranks ------------------------------------------------------------------------- */

/* MPI's own calls wait without end, and out of the watch's sight: they begin when all have come.
 * False: somebody is lost, and the guard is about to end this process. */
static bool all_come(const job_state *job) {
  return job->mpi && oproj_comm_agree(job->comm, OPROJ_OK) == OPROJ_OK;
}

double job_max(const job_state *job, double mine) {
  double most = mine;
  if (all_come(job)) MPI_Allreduce(&mine, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return most;
}

int64_t job_sum(const job_state *job, int64_t mine) {
  int64_t sum = mine;
  if (all_come(job)) MPI_Allreduce(&mine, &sum, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  return sum;
}

void job_sum_values(const job_state *job, float *values, int32_t count) {
  if (all_come(job)) MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void job_gather_text(const job_state *job, const char *mine, char *all, int bytes) {
  if (!job->mpi)
    memcpy(all, mine, (size_t)bytes);
  else if (all_come(job))
    MPI_Gather(mine, bytes, MPI_CHAR, all, bytes, MPI_CHAR, 0, MPI_COMM_WORLD);
}

void job_gather_rows(const job_state *job, int32_t tokens, int32_t hidden, const uint16_t *rows,
                     uint16_t *y) {
  if (!job->mpi) {
    memcpy(y, rows, (size_t)tokens * (size_t)hidden * sizeof *y);
    return;
  }
  if (!all_come(job)) return;
  MPI_Datatype row;
  MPI_Type_contiguous(hidden, MPI_UINT16_T, &row);
  MPI_Type_commit(&row);
  int32_t begin, end;
  oproj_plan_rows(tokens, job->size, job->rank, &begin, &end);
  if (job->rank == 0) {
    memcpy(y, rows, (size_t)(end - begin) * (size_t)hidden * sizeof *y);
    for (int32_t from = 1; from < job->size; from++) {
      oproj_plan_rows(tokens, job->size, from, &begin, &end);
      MPI_Recv(y + (int64_t)begin * hidden, end - begin, row, from, 0, MPI_COMM_WORLD,
               MPI_STATUS_IGNORE);
    }
  } else {
    MPI_Send(rows, end - begin, row, 0, 0, MPI_COMM_WORLD);
  }
  MPI_Type_free(&row);
}

void job_describe_mpi(char *text, size_t bytes) {
  char name[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(name, &length);
  name[strcspn(name, ",\n")] = '\0';
  snprintf(text, bytes, "%s", name);
}
