/* cmd_info.c - `oproj info`: what this build and this machine offer, rank by rank. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "job/job.h"
#include "job/json_text.h"
#include "report.h"
#include "target.h"

enum { LINE_BYTES = 512 };

static void show_versions(json_t *result) {
  char mpi[128];
  job_describe_mpi(mpi, sizeof mpi);
  unsigned version = oproj_version();
  char oproj[32];
  snprintf(oproj, sizeof oproj, "%u.%u.%u", version / 10000, version / 100 % 100, version % 100);
  char gpu[160];
  oproj_versions_describe(gpu, sizeof gpu);
  printf("oproj       %s\nmpi         %s\ngpu         %s\n", oproj, mpi, gpu);
  json_object_set_new(result, "oproj", json_string(oproj));
  json_object_set_new(result, "mpi", json_string(mpi));
  json_object_set_new(result, "gpu", json_string(gpu));
}

/* Of rank 0's host. */
static void show_devices(json_t *result) {
  json_t *devices = json_array();
  for (int32_t device = 0; device < oproj_device_count(); device++) {
    char text[LINE_BYTES / 2];
    if (oproj_device_describe(device, text, sizeof text) != OPROJ_OK)
      snprintf(text, sizeof text, "%.200s", oproj_last_error());
    printf("device %-4d %s\n", device, text);
    json_array_append_new(devices, job_json_text(text));
  }
  json_object_set_new(result, "devices", devices);
}

static void show_backends(json_t *result) {
  static const char *const names[] = {"ref", "cuda"};
  json_t *backends = json_object();
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const char *missing = oproj_backend_missing(names[i]);
    printf("backend     %-5s %s\n", names[i], missing ? missing : "can run");
    json_object_set_new(backends, names[i], json_string(missing ? missing : "can run"));
  }
  json_object_set_new(result, "backends", backends);
}

static void show_environment(json_t *result) {
  static const char *const names[] = {"OPROJ_LOG",           "OPROJ_BIND", "OPROJ_DEADLINE",
                                      "OPROJ_PUSH",          "OPROJ_PDL",  "OMP_NUM_THREADS",
                                      "CUDA_VISIBLE_DEVICES"};
  json_t *environment = json_object();
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const char *value = getenv(names[i]);
    printf("environment %s%s%s\n", names[i], value ? "=" : " is not set", value ? value : "");
    json_object_set_new(environment, names[i], value ? job_json_text(value) : json_null());
  }
  json_object_set_new(result, "environment", environment);
}

static void show_ranks(const job_state *job, const char *lines, json_t *result) {
  json_t *ranks = json_array();
  for (int rank = 0; rank < job->size; rank++) {
    const char *line = lines + (size_t)rank * LINE_BYTES;
    printf("rank %-6d %s\n", rank, line);
    json_array_append_new(ranks, job_json_text(line));
  }
  json_object_set_new(result, "ranks", ranks);
}

/* Host, CPUs and memory nodes of this rank, as it has them in a run, and its GPU. */
static void describe(const job_state *job, char line[LINE_BYTES]) {
  int32_t device = oproj_comm_device(job->comm);
  char gpu[LINE_BYTES / 4 + 64] = "no GPU", text[LINE_BYTES / 4];
  if (device >= 0 && oproj_device_describe(device, text, sizeof text) == OPROJ_OK)
    snprintf(gpu, sizeof gpu, "GPU %d (%s)", device, text);
  char place[LINE_BYTES / 2] = "unknown", host[128] = "";
  gethostname(host, sizeof host - 1);
  if (oproj_place_rank(job->comm) != OPROJ_OK ||
      oproj_place_describe(place, sizeof place) != OPROJ_OK)
    snprintf(place, sizeof place, "%.200s", oproj_last_error());
  snprintf(line, LINE_BYTES, "%s: %.160s, %s", host, place, gpu);
}

/* Rank 0's part; `lines` are those of all ranks. */
static oproj_status show(const job_state *job, const char *lines, const char *json_path) {
  json_t *result = json_object();
  show_versions(result);
  show_backends(result);
  show_devices(result);
  show_environment(result);
  show_ranks(job, lines, result);
  if (json_path) return report_json(json_path, result);
  json_decref(result);
  return OPROJ_OK;
}

static oproj_status prepare(const job_state *job, const char *json_path, char **lines) {
  if (job->rank != 0) return OPROJ_OK;
  oproj_status status = target_check("--json", json_path, NULL, NULL);
  if (status != OPROJ_OK) return status;
  *lines = calloc((size_t)job->size, LINE_BYTES);
  return *lines ? OPROJ_OK : oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d lines", job->size);
}

oproj_status cmd_info(job_state *job, int argc, char **argv) {
  const char *json_path = NULL;
  const args_option options[] = {{"json", "FILE", "write the same as JSON", .text = &json_path},
                                 {0}};
  const args_command command = {"oproj info",
                                "Shows versions, backends, GPUs, the environment read, and each "
                                "rank's CPUs and GPU in a run.",
                                options, NULL, NULL};
  if (!args_parse(job, &command, argc, argv)) return OPROJ_OK;

  char line[LINE_BYTES] = "", *lines = NULL;
  oproj_status status = oproj_comm_agree(job->comm, prepare(job, json_path, &lines));
  if (status == OPROJ_OK) {
    describe(job, line);
    job_gather_text(job, line, lines, LINE_BYTES);
    status = oproj_comm_agree(job->comm, job->rank == 0 ? show(job, lines, json_path) : OPROJ_OK);
  }
  free(lines);
  return status;
}
