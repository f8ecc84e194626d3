/* cmd_synth.c - `oproj synth`: a made-up checkpoint with real names, shapes and dtypes. */
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "job/job.h"
#include "oproj/checkpoint.h"
#include "report.h"

static const char *const models[] = {"v4-flash", "v4-pro", "v4.1-flash", "tiny", NULL};
static const char *const names[] = {"release", "hf", NULL};
static const char *const scale_dtypes[] = {"e8m0", "u8", "f32", NULL};

oproj_status cmd_synth(job_state *job, int argc, char **argv) {
  const char *out = NULL;
  int64_t layers = -1, draft_layers = -1, seed = 0, files = 1;
  int model = -1, name = 0, scale_dtype = 0;
  bool exact = false;
  const args_option options[] = {
      {"model", "NAME", "v4-flash, v4-pro, v4.1-flash or tiny (required)", .word = &model,
       .words = models},
      {"out", "DIR", "folder to make; must not exist (required)", .text = &out},
      {"layers", "N", "decoder layers (default: the model's)", .number = &layers, .least = 0,
       .most = 4096},
      {"mtp", "N", "draft layers (default: the model's)", .number = &draft_layers, .least = 0,
       .most = 64},
      {"seed", "S", "of the made-up values (default 0)", .number = &seed, .least = 0,
       .most = INT64_MAX},
      {"files", "K",
       "safetensors files to spread over, at most as many as layers and draft layers (default 1)",
       .number = &files, .least = 1, .most = 10000},
      {"names", "FORM", "tensor names: release or hf (default release)", .word = &name,
       .words = names},
      {"scale-dtype", "T", "e8m0, u8 or f32 (default e8m0)", .word = &scale_dtype,
       .words = scale_dtypes},
      {"exact", NULL,
       "values for which every sum is exact, so that results are bit-equal at any number of ranks",
       .on = &exact},
      {0}};
  const args_command command = {
      "oproj synth",
      "Makes up a checkpoint: config.json and safetensors with WO-A and WO-B of every layer.",
      options, NULL, NULL};
  if (!args_parse(job, &command, argc, argv)) return OPROJ_OK;
  if (model < 0 || !out) {
    args_wrong(job, command.name, "--%s is missing", model < 0 ? "model" : "out");
    return OPROJ_OK;
  }

  job_catch_interrupts();
  const oproj_synth synth = {.model = models[model],
                             .layers = (int32_t)layers,
                             .draft_layers = (int32_t)draft_layers,
                             .seed = (uint64_t)seed,
                             .files = (int32_t)files,
                             .names = (oproj_tensor_names)name,
                             .scale_dtype = (oproj_scale_dtype)scale_dtype,
                             .exact = exact};
  report_progress progress = {.what = "writing"};
  oproj_status status = oproj_checkpoint_synth(&synth, out, report_bytes, &progress);
  if (status == OPROJ_OK) printf("made %s\n", out);
  return status;
}
