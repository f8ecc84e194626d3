/* fault.c - preloaded into ranks of oproj: strikes some of them down, or pauses them, in a call.
 *
 *   FAULT_RANK   the victims, as Open MPI's mpirun numbers them: "3" or "0,1"
 *   FAULT_KIND   kill | stop | exit | abort | SECONDS (a pause, which the process survives)
 *   FAULT_CALL   the library's or MPI's call: MPI_Init_thread, oproj_ctx_create, oproj_layers_load,
 *                oproj_forward, MPI_Finalize; "end": behind MPI_Finalize; "replays": a second after
 *                the first oproj_forward, wherever the process is then
 *   FAULT_COUNT  in which of them, from 1 on
 *
 * Inside a call of oproj it strikes when that waits for other ranks the first time, so in the midst
 * of it; a call of MPI it strikes before. */
#include <dlfcn.h>
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "oproj/checkpoint.h"

#define SHOWN __attribute__((visibility("default")))

static bool armed;

static void strike(void) {
  const char *kind = getenv("FAULT_KIND");
  armed = false;
  if (!kind) return;
  if (strcmp(kind, "kill") == 0) raise(SIGKILL);
  if (strcmp(kind, "stop") == 0) raise(SIGSTOP);
  if (strcmp(kind, "exit") == 0) exit(3);
  if (strcmp(kind, "abort") == 0) abort();
  double seconds = strtod(kind, NULL);
  struct timespec left = {.tv_sec = (time_t)seconds};
  left.tv_nsec = (long)((seconds - (double)left.tv_sec) * 1e9);
  while (nanosleep(&left, &left) != 0) continue; /* signals do not cut it short */
}

static bool is_among(const char *rank, const char *victims) {
  size_t length = strlen(rank);
  for (const char *at = victims; at; at = strchr(at, ',')) {
    at += *at == ',';
    if (strncmp(at, rank, length) == 0 && (at[length] == '\0' || at[length] == ',')) return true;
  }
  return false;
}

/* Whether this is the call to strike in. */
static bool is_due(const char *call) {
  static int calls;
  const char *wanted = getenv("FAULT_CALL"), *victims = getenv("FAULT_RANK"),
             *count = getenv("FAULT_COUNT"), *rank = getenv("OMPI_COMM_WORLD_RANK");
  if (!wanted || !victims || !rank || strcmp(wanted, call) != 0 || !is_among(rank, victims))
    return false;
  return ++calls == (count ? atoi(count) : 1);
}

static void *strike_later(void *unused) {
  sleep(1);
  strike();
  return unused;
}

/* The call behind ours, as a pointer of its type. */
#define REAL(type, name)                 \
  type real;                             \
  void *found_ = dlsym(RTLD_NEXT, name); \
  memcpy(&real, &found_, sizeof real)

typedef int (*init_fn)(int *, char ***, int, int *);
typedef int (*finalize_fn)(void);
typedef int (*test_fn)(MPI_Request *, int *, MPI_Status *);
typedef oproj_status (*create_fn)(oproj_ctx **, oproj_comm *, const oproj_dims *,
                                  const oproj_config *);
typedef oproj_status (*load_fn)(oproj_layer **, oproj_ctx *, const oproj_checkpoint *,
                                const int32_t *, int32_t, const oproj_load_config *,
                                oproj_load_report *);
typedef oproj_status (*forward_fn)(oproj_layer *, const oproj_io *, void *);

SHOWN int MPI_Init_thread(int *argc, char ***argv, int wanted, int *provided) {
  REAL(init_fn, "MPI_Init_thread");
  if (is_due("MPI_Init_thread")) strike();
  return real(argc, argv, wanted, provided);
}

SHOWN int MPI_Finalize(void) {
  REAL(finalize_fn, "MPI_Finalize");
  if (is_due("MPI_Finalize")) strike();
  int result = real();
  if (is_due("end")) strike();
  return result;
}

SHOWN int MPI_Test(MPI_Request *request, int *done, MPI_Status *status) {
  static test_fn real;
  if (!real) {
    void *found = dlsym(RTLD_NEXT, "MPI_Test");
    memcpy(&real, &found, sizeof real);
  }
  if (armed) strike();
  return real(request, done, status);
}

SHOWN oproj_status oproj_ctx_create(oproj_ctx **out, oproj_comm *comm, const oproj_dims *dims,
                                    const oproj_config *config) {
  REAL(create_fn, "oproj_ctx_create");
  armed = is_due("oproj_ctx_create");
  return real(out, comm, dims, config);
}

SHOWN oproj_status oproj_layers_load(oproj_layer **out, oproj_ctx *ctx,
                                     const oproj_checkpoint *checkpoint, const int32_t *layers,
                                     int32_t count, const oproj_load_config *config,
                                     oproj_load_report *report) {
  REAL(load_fn, "oproj_layers_load");
  armed = is_due("oproj_layers_load");
  return real(out, ctx, checkpoint, layers, count, config, report);
}

SHOWN oproj_status oproj_forward(oproj_layer *layer, const oproj_io *io, void *stream) {
  REAL(forward_fn, "oproj_forward");
  armed = is_due("oproj_forward");
  pthread_t thread;
  if (is_due("replays")) pthread_create(&thread, NULL, strike_later, NULL);
  return real(layer, io, stream);
}
