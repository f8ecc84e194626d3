/* cmd_synth.c - `oproj synth`: a made-up checkpoint with real names, shapes and dtypes. */
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "job.h"
#include "oproj/checkpoint.h"
#include "report.h"

enum {
  KEY_MODEL = 256,
  KEY_OUT,
  KEY_LAYERS,
  KEY_MTP,
  KEY_SEED,
  KEY_FILES,
  KEY_NAMES,
  KEY_SCALE,
  KEY_EXACT
};

static const struct argp_option options[] = {
    {"model", KEY_MODEL, "NAME", 0, "v4-flash, v4-pro, v4.1-flash or tiny (required)", 0},
    {"out", KEY_OUT, "DIR", 0, "folder to make; must not exist (required)", 0},
    {"layers", KEY_LAYERS, "N", 0, "decoder layers (default: the model's)", 0},
    {"mtp", KEY_MTP, "N", 0, "draft layers (default: the model's)", 0},
    {"seed", KEY_SEED, "S", 0, "of the made-up values (default 0)", 0},
    {"files", KEY_FILES, "K", 0, "safetensors files to spread over (default 1)", 0},
    {"names", KEY_NAMES, "FORM", 0, "tensor names: release or hf (default release)", 0},
    {"scale-dtype", KEY_SCALE, "T", 0, "e8m0, u8 or f32 (default e8m0)", 0},
    {"exact", KEY_EXACT, NULL, 0,
     "values for which every sum is exact, so that results are bit-equal at any number of ranks",
     0},
    {0}};

typedef struct synth_args {
  oproj_synth synth;
  const char *out;
} synth_args;

static error_t parse(int key, char *text, struct argp_state *state) {
  static const char *const models[] = {"v4-flash", "v4-pro", "v4.1-flash", "tiny", NULL};
  static const char *const names[] = {"release", "hf", NULL};
  static const char *const scale_dtypes[] = {"e8m0", "u8", "f32", NULL};
  synth_args *args = state->input;
  oproj_synth *s = &args->synth;
  switch (key) {
    case KEY_MODEL:
      s->model = models[args_word(state, "--model", text, models)];
      return 0;
    case KEY_OUT:
      args->out = text;
      return 0;
    case KEY_LAYERS:
      s->layers = (int32_t)args_integer(state, "--layers", text, 0, 4096);
      return 0;
    case KEY_MTP:
      s->draft_layers = (int32_t)args_integer(state, "--mtp", text, 0, 64);
      return 0;
    case KEY_SEED:
      s->seed = (uint64_t)args_integer(state, "--seed", text, 0, INT64_MAX);
      return 0;
    case KEY_FILES:
      s->files = (int32_t)args_integer(state, "--files", text, 1, 10000);
      return 0;
    case KEY_NAMES:
      s->names = (oproj_tensor_names)args_word(state, "--names", text, names);
      return 0;
    case KEY_SCALE:
      s->scale_dtype = (oproj_scale_dtype)args_word(state, "--scale-dtype", text, scale_dtypes);
      return 0;
    case KEY_EXACT:
      s->exact = 1;
      return 0;
    case ARGP_KEY_ARG:
      argp_error(state, "\"%s\" is one argument too many", text);
      return 0;
    case ARGP_KEY_END:
      if (!s->model) argp_error(state, "--model is missing");
      if (!args->out) argp_error(state, "--out is missing");
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

int cmd_synth(int argc, char **argv) {
  static const struct argp argp = {
      options,
      parse,
      NULL,
      "Makes up a checkpoint: config.json and safetensors with WO-A and WO-B of every layer.",
      NULL,
      NULL,
      NULL};
  synth_args args = {.synth = OPROJ_SYNTH_INIT};
  args.synth.model = NULL;
  args_parse(&argp, argc, argv, &args);
  report_progress progress = {.what = "writing", .shown_percent = -1};
  oproj_status status = oproj_checkpoint_synth(&args.synth, args.out, report_bytes, &progress);
  if (status != OPROJ_OK) return job_fail(status);
  printf("made %s\n", args.out);
  return JOB_OK;
}
