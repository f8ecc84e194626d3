/* cmd_info.c - `oproj info`: what this build and this machine offer, rank by rank. */
#include <jansson.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "job.h"
#include "report.h"

enum { KEY_JSON = 256, LINE_BYTES = 512 };

static const struct argp_option options[] = {
    {"json", KEY_JSON, "FILE", 0, "write the same as JSON", 0}, {0}};

static error_t parse(int key, char *text, struct argp_state *state) {
  const char **json = state->input;
  switch (key) {
    case KEY_JSON:
      *json = text;
      return 0;
    case ARGP_KEY_ARG:
      argp_error(state, "\"%s\" is one argument too many", text);
      return 0;
    default:
      return ARGP_ERR_UNKNOWN;
  }
}

static void show_versions(json_t *result) {
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(mpi, &length);
  mpi[strcspn(mpi, ",\n")] = '\0';
  unsigned version = oproj_version();
  char oproj[32];
  snprintf(oproj, sizeof oproj, "%u.%u.%u", version / 10000, version / 100 % 100, version % 100);
  printf("oproj       %s\nmpi         %s\n", oproj, mpi);
  json_object_set_new(result, "oproj", json_string(oproj));
  json_object_set_new(result, "mpi", json_string(mpi));
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
  static const char *const names[] = {"OPROJ_LOG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"};
  json_t *environment = json_object();
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const char *value = getenv(names[i]);
    printf("environment %s%s%s\n", names[i], value ? "=" : " is not set", value ? value : "");
    json_object_set_new(environment, names[i], value ? json_string(value) : json_null());
  }
  json_object_set_new(result, "environment", environment);
}

static void show_ranks(const job_state *job, const char *lines, json_t *result) {
  json_t *ranks = json_array();
  for (int rank = 0; rank < job->size; rank++) {
    const char *line = lines + (size_t)rank * LINE_BYTES;
    printf("rank %-6d %s\n", rank, line);
    json_array_append_new(ranks, json_string(line));
  }
  json_object_set_new(result, "ranks", ranks);
}

int cmd_info(int argc, char **argv) {
  static const struct argp argp = {
      options, parse,
      NULL,    "Shows versions, backends, the environment read, and the CPUs of each rank.",
      NULL,    NULL,
      NULL};
  const char *json_path = NULL;
  args_parse(&argp, argc, argv, &json_path);

  job_state job;
  oproj_status status = job_start(&job);
  if (status != OPROJ_OK) return job_finish(&job, status, JOB_OK);
  char line[LINE_BYTES] = "", place[LINE_BYTES / 2] = "unknown", host[128] = "";
  gethostname(host, sizeof host - 1);
  if (oproj_place_describe(place, sizeof place) != OPROJ_OK)
    snprintf(place, sizeof place, "%.200s", oproj_last_error());
  snprintf(line, sizeof line, "%s: %s", host, place);
  char *lines = job.rank == 0 ? calloc((size_t)job.size, LINE_BYTES) : NULL;
  if (job.rank == 0 && !lines)
    status = oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d lines", job.size);
  status = oproj_comm_agree(job.comm, status);
  if (status == OPROJ_OK) {
    job_gather_text(&job, line, lines, LINE_BYTES);
    if (job.rank == 0) {
      json_t *result = json_object();
      show_versions(result);
      show_backends(result);
      show_environment(result);
      show_ranks(&job, lines, result);
      if (json_path) status = report_json(json_path, json_incref(result));
      json_decref(result);
    }
    status = oproj_comm_agree(job.comm, status);
  }
  free(lines);
  return job_finish(&job, status, JOB_OK);
}
