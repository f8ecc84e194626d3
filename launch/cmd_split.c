/* cmd_split.c - `oproj split`: one file per rank, for contiguous reads at load time. */
#include <stdio.h>

#include "args.h"
#include "commands.h"
#include "job/job.h"
#include "oproj/checkpoint.h"
#include "report.h"

/* A layer that is missing altogether would be missed only when the ranks come for it. */
static oproj_status check_complete(const oproj_checkpoint *checkpoint) {
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  oproj_status status = OPROJ_OK;
  oproj_layer_info info;
  for (int32_t i = 0; i < model->layers + model->draft_layers && status == OPROJ_OK; i++)
    status = oproj_checkpoint_layer(checkpoint, i, &info);
  return status;
}

oproj_status cmd_split(job_state *job, int argc, char **argv) {
  const char *dir = NULL, *out = NULL;
  int64_t none = INT64_MIN, tp = none;
  bool uneven = false;
  const args_option options[] = {
      {"tp", "N", "ranks to split for (required)", .number = &tp, .least = INT32_MIN,
       .most = INT32_MAX},
      {"out", "DIR", "folder to make; must not exist (required)", .text = &out},
      {"uneven", NULL, "allow ranks that do not divide the groups", .on = &uneven},
      {0}};
  const args_command command = {"oproj split",
                                "Writes one safetensors file per rank of the checkpoint in DIR, "
                                "with a manifest of checksums.",
                                options, "DIR", &dir};
  if (!args_parse(job, &command, argc, argv)) return OPROJ_OK;
  if (tp == none || !out) {
    args_wrong(job, command.name, "--%s is missing", tp == none ? "tp" : "out");
    return OPROJ_OK;
  }

  job_catch_interrupts();
  oproj_checkpoint *checkpoint = NULL;
  oproj_status status = oproj_checkpoint_open(&checkpoint, dir);
  if (status == OPROJ_OK) status = check_complete(checkpoint);
  report_progress progress = {.what = "splitting"};
  if (status == OPROJ_OK)
    status = oproj_checkpoint_split(checkpoint, out, uneven ? OPROJ_SPLIT_UNEVEN : OPROJ_SPLIT_EVEN,
                                    (int32_t)tp, report_bytes, &progress);
  oproj_checkpoint_close(checkpoint);
  if (status == OPROJ_OK) printf("made %s for %lld ranks\n", out, (long long)tp);
  return status;
}
