/* cmd_split.c - `oproj split`: one file per rank, for contiguous reads at load time. */
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "job.h"
#include "oproj/checkpoint.h"
#include "report.h"

enum { KEY_TP = 256, KEY_OUT, KEY_UNEVEN };

static const struct argp_option options[] = {
    {"tp", KEY_TP, "N", 0, "ranks to split for (required)", 0},
    {"out", KEY_OUT, "DIR", 0, "folder to make; must not exist (required)", 0},
    {"uneven", KEY_UNEVEN, NULL, 0, "allow ranks that do not divide the groups", 0},
    {0}};

typedef struct split_args {
  const char *dir, *out;
  int32_t tp;
  bool has_tp;
  oproj_split split;
} split_args;

static error_t parse(int key, char *text, struct argp_state *state) {
  split_args *args = state->input;
  switch (key) {
    case KEY_TP:
      args->tp = (int32_t)args_integer(state, "--tp", text, INT32_MIN, INT32_MAX);
      args->has_tp = true;
      return 0;
    case KEY_OUT:
      args->out = text;
      return 0;
    case KEY_UNEVEN:
      args->split = OPROJ_SPLIT_UNEVEN;
      return 0;
    case ARGP_KEY_ARG:
      return args_take_dir(state, &args->dir, text);
    case ARGP_KEY_END:
      if (!args->dir) argp_error(state, "the checkpoint's folder is missing");
      if (!args->has_tp) argp_error(state, "--tp is missing");
      if (!args->out) argp_error(state, "--out is missing");
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

int cmd_split(int argc, char **argv) {
  static const struct argp argp = {options,
                                   parse,
                                   "DIR",
                                   "Writes one safetensors file per rank of the checkpoint in DIR, "
                                   "with a manifest of checksums.",
                                   NULL,
                                   NULL,
                                   NULL};
  split_args args = {.split = OPROJ_SPLIT_EVEN};
  args_parse(&argp, argc, argv, &args);

  oproj_checkpoint *checkpoint = NULL;
  oproj_status status = oproj_checkpoint_open(&checkpoint, args.dir);
  report_progress progress = {.what = "splitting", .shown_percent = -1};
  if (status == OPROJ_OK)
    status =
        oproj_checkpoint_split(checkpoint, args.out, args.split, args.tp, report_bytes, &progress);
  oproj_checkpoint_close(checkpoint);
  if (status != OPROJ_OK) return job_fail(status);
  printf("made %s for %d ranks\n", args.out, args.tp);
  return JOB_OK;
}
