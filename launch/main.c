/* main.c - `oproj COMMAND ...`: finds the command. */
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "job.h"

static const struct {
  const char *name;
  const char *spelled; /* argv[0] of its messages */
  int (*run)(int argc, char **argv);
  const char *summary;
} commands[] = {
    {"info", "oproj info", cmd_info, "versions, backends, devices, what each rank may use"},
    {"synth", "oproj synth", cmd_synth, "make up a checkpoint of a released model's shape"},
    {"inspect", "oproj inspect", cmd_inspect,
     "dimensions, layers, dtypes and shares of a checkpoint"},
    {"split", "oproj split", cmd_split, "write one file per rank, with checksums"},
    {"run", "oproj run", cmd_run, "project an attention output through the layers of a checkpoint"},
};

enum { COMMANDS = sizeof commands / sizeof commands[0] };

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

int main(int argc, char **argv) {
  int speaks = job_launched_rank() <= 0;
  const char *name = argc > 1 ? argv[1] : "";
  for (int i = 0; i < COMMANDS; i++) {
    if (strcmp(name, commands[i].name) != 0) continue;
    argv[1] = (char *)commands[i].spelled;
    return commands[i].run(argc - 1, argv + 1);
  }
  if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0) {
    if (speaks) print_usage(stdout);
    return JOB_OK;
  }
  if (strcmp(name, "--version") == 0) {
    if (speaks)
      printf("oproj %d.%d.%d\n", OPROJ_VERSION_MAJOR, OPROJ_VERSION_MINOR, OPROJ_VERSION_PATCH);
    return JOB_OK;
  }
  if (speaks) {
    if (*name)
      fprintf(stderr, "oproj: \"%s\" is no command; `oproj --help` lists them\n", name);
    else
      print_usage(stderr);
  }
  return ARGS_EXIT_USAGE;
}
