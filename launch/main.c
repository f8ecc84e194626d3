/* main.c - `oproj COMMAND ...`: finds the command. */
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "job/job.h"

typedef struct command {
  const char *name;
  oproj_status (*run)(job_state *job, int argc, char **argv);
  bool alone; /* work of one process: under mpirun all ranks meet, and then rank 0 does it */
  const char *summary;
} command;

static const command commands[] = {
    {"info", cmd_info, false, "versions, backends, devices, what each rank may use"},
    {"synth", cmd_synth, true, "make up a checkpoint of a released model's shape"},
    {"inspect", cmd_inspect, true, "dimensions, layers, dtypes and shares of a checkpoint"},
    {"split", cmd_split, true, "write one file per rank, with checksums"},
    {"run", cmd_run, false, "project an attention output through the layers of a checkpoint"},
};

enum { COMMANDS = sizeof commands / sizeof commands[0] };

static const command *find_command(const char *name) {
  for (int i = 0; i < COMMANDS; i++)
    if (strcmp(name, commands[i].name) == 0) return &commands[i];
  return NULL;
}

static void print_usage(FILE *to) {
  fprintf(to,
          "Usage: oproj COMMAND [OPTION...]\n"
          "Tensor-parallel attention output projection of DeepSeek-V4 and V4.1.\n\n");
  for (int i = 0; i < COMMANDS; i++)
    fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].summary);
  fprintf(to,
          "\n`oproj COMMAND --help` tells more.  `mpirun -n N oproj run ...` uses N ranks;\n"
          "`oproj-run -n N ...` adds the flags of mpirun that a machine needs.\n"
          "Exit codes: 0 ok, 1 a check failed, 2 usage, 3 input refused, 4 run-time failure.\n");
}

static oproj_status help(job_state *job, int argc, char **argv) {
  char flag[] = "--help";
  const command *about = argc > 2 ? find_command(argv[2]) : NULL;
  if (argc > 3 || (argc == 3 && !about))
    args_wrong(job, "oproj", "\"%s\" is no command to help with", argv[argc - 1]);
  else if (about)
    return about->run(job, 2, (char *[]){argv[2], flag, NULL});
  else if (job->rank == 0)
    print_usage(stdout);
  return OPROJ_OK;
}

/* Whatever is no command: help, the version, or a mistake. */
static oproj_status without_command(job_state *job, int argc, char **argv) {
  const char *word = argc > 1 ? argv[1] : "";
  if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0)
    return help(job, argc, argv);
  if (argc < 2) {
    if (job->rank == 0) print_usage(stderr);
    job->code = JOB_USAGE;
  } else if (strcmp(word, "--version") != 0) {
    args_wrong(job, "oproj", "\"%s\" is no command; `oproj --help` lists them", word);
  } else if (argc > 2) {
    args_wrong(job, "oproj", "\"%s\" is one argument too many", argv[2]);
  } else if (job->rank == 0) {
    printf("oproj %d.%d.%d\n", OPROJ_VERSION_MAJOR, OPROJ_VERSION_MINOR, OPROJ_VERSION_PATCH);
  }
  return OPROJ_OK;
}

int main(int argc, char **argv) {
  const command *chosen = argc > 1 ? find_command(argv[1]) : NULL;
  bool alone = chosen && chosen->alone;
  job_state job;
  oproj_status status = job_start(&job, "oproj", alone, argc, argv);
  if (status == OPROJ_OK && alone) status = job_go_alone(&job);
  bool idle = job.code != JOB_OK || (alone && job.rank > 0);
  if (status == OPROJ_OK && !idle)
    status = chosen ? chosen->run(&job, argc - 1, argv + 1) : without_command(&job, argc, argv);
  return job_finish(&job, status);
}
