/* table.c - see table.h. */
#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "job/choose.h"
#include "job/json_text.h"

static bool speaks(const bench_table *t) {
  return t->rig->job->rank == 0;
}

static const device_facts *facts_of(const bench_rig *rig) {
  return rig->device ? device_describe(rig->device) : NULL;
}

oproj_status table_open(bench_table *t, const bench_rig *rig, const bench_case *which,
                        const job_state *job, const bench_args *args, const char *command) {
  *t = (bench_table){.rig = rig, .which = which, .command = command, .json = -1};
  t->json_path = args->json;
  if (job->rank != 0 || !args->json) return OPROJ_OK;
  /* A fifo that nobody reads is refused, not waited for. */
  t->json = open(args->json, O_WRONLY | O_APPEND | O_CREAT | O_NONBLOCK | O_CLOEXEC, 0666);
  if (t->json < 0)
    return oproj_fail(OPROJ_ERR_IO, "cannot write %s: %s", args->json, strerror(errno));
  return OPROJ_OK;
}

oproj_status table_close(bench_table *t) {
  int failed = t->json >= 0 ? close(t->json) : 0;
  t->json = -1;
  if (failed) return oproj_fail(OPROJ_ERR_IO, "cannot write %s: %s", t->json_path, strerror(errno));
  return OPROJ_OK;
}

/* ---- derived numbers ----------------------------------------------------------------------- */

/* The host's bandwidth is nobody's result: 0 keeps it out of tables and files.  That of its storage
 * is one. */
static double gb_per_s(const bench_table *t, const table_row *row) {
  return t->rig->device || t->which->loads ? row->cost.bytes / row->p50_us * 1e-3 : 0.0;
}

static double tflop_per_s(const bench_table *t, const table_row *row) {
  return t->rig->device ? row->cost.flops / row->p50_us * 1e-6 : 0.0;
}

/* The least time that the device's measured ceilings allow, in us; 0: no ceilings known, or a case
 * that they do not bound. */
static double floor_us(const bench_table *t, const table_row *row) {
  const device_facts *facts = facts_of(t->rig);
  if (!facts || facts->bytes_per_s == 0.0 || t->which->eager || !rig_enqueues(t->rig)) return 0.0;
  double bytes = row->cost.bytes / facts->bytes_per_s, flops = row->cost.flops / facts->flops_per_s;
  double link = row->cost.link_bytes / facts->link_bytes_per_s,
         most = bytes > flops ? bytes : flops;
  return (link > most ? link : most) * 1e6;
}

/* ---- prose --------------------------------------------------------------------------------- */

static void describe_versions(const bench_table *t, char *text, size_t bytes) {
  char mpi[128], gpu[160];
  unsigned version = oproj_version();
  snprintf(mpi, sizeof mpi, "no MPI");
  if (t->rig->job->mpi) job_describe_mpi(mpi, sizeof mpi);
  oproj_versions_describe(gpu, sizeof gpu);
  snprintf(text, bytes, "oproj %u.%u.%u, %s%s%s", version / 10000, version / 100 % 100,
           version % 100, t->rig->device ? gpu : "", t->rig->device ? ", " : "", mpi);
}

void table_heading(const bench_table *t, int32_t calls, int32_t warmups, int32_t replays,
                   bool graph) {
  if (!speaks(t)) return;
  const bench_rig *rig = t->rig;
  const device_facts *facts = facts_of(rig);
  const oproj_dims *d = &rig->dims;
  char versions[512];
  describe_versions(t, versions, sizeof versions);
  printf("# %s\n# %s\n", t->command, versions);
  if (facts) printf("# device %d: %s, %s\n", facts->ordinal, facts->name, facts->text);
  printf(
      "# %s: hidden %d, %d heads, %d groups, o_lora_rank %d, blocks of %d; %d rank%s, backend "
      "%s\n",
      t->which->name, d->hidden, d->heads, d->groups, d->lora_rank, d->quant_block, rig->job->size,
      rig->job->size == 1 ? "" : "s", oproj_ctx_backend(rig->ctx));
  if (rig->reduces)
    printf("# communicator %s, reduction %s\n", oproj_comm_name(rig->job->comm),
           choose_reduces[rig->args->reduce]);
  printf("# %d calls per %s, %d warm-up and %d timed replays", calls,
         graph ? "CUDA graph" : "replay", warmups, replays);
  if (rig->layer_count) printf(", %d layer%s", rig->layer_count, rig->layer_count == 1 ? "" : "s");
  printf("\n");
  if (facts && facts->bytes_per_s > 0.0)
    printf(
        "# floor: the longest of compulsory bytes at %.2f TB/s, flops at %.0f TFLOP/s and bytes "
        "to other ranks at %.0f GB/s\n",
        facts->bytes_per_s * 1e-12, facts->flops_per_s * 1e-12, facts->link_bytes_per_s * 1e-9);
  printf("#%9s %10s %10s %9s %9s %7s %7s %6s %6s %7s  %s\n", "size", "p50", "p99", "bw", "rate",
         "floor", "naive", "clock", "power", "#wrong", "path");
  printf("#%9s %10s %10s %9s %9s %7s %7s %6s %6s %7s\n", "tokens", "us", "us", "GB/s", "TFLOP/s",
         "%", "x", "MHz", "W", "");
  job_flush(t->rig->job);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static void put_number(int width, int digits, double value) {
  if (value > 0.0)
    printf(" %*.*f", width, digits, value);
  else
    printf(" %*s", width, "-");
}

static void print_row(const bench_table *t, const table_row *row) {
  if (t->which->loads)
    printf(" %9s", "-");
  else
    printf(" %9d", row->tokens);
  put_number(10, 2, row->p50_us);
  put_number(10, 2, row->p99_us);
  put_number(9, 1, gb_per_s(t, row));
  put_number(9, 2, tflop_per_s(t, row));
  put_number(7, 1, 100.0 * floor_us(t, row) / row->p50_us);
  put_number(7, 2, row->naive_us / row->p50_us);
  put_number(6, 0, row->load.sm_mhz);
  put_number(6, 0, row->load.watts);
  if (row->wrong < 0)
    printf(" %7s", "-");
  else
    printf(" %7lld", (long long)row->wrong);
  printf("  %s\n", row->path);
  job_flush(t->rig->job);
}

/* A number where there is one, else null. */
static json_t *known(double value) {
  return value > 0.0 ? json_real(value) : json_null();
}

static json_t *setting(const bench_table *t) {
  const bench_rig *rig = t->rig;
  const device_facts *facts = facts_of(rig);
  char versions[512], host[256] = "", date[32] = "";
  time_t now = time(NULL);
  struct tm utc;
  describe_versions(t, versions, sizeof versions);
  gethostname(host, sizeof host - 1);
  if (gmtime_r(&now, &utc)) strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
  const char *push = getenv("OPROJ_PUSH");
  return json_pack(
      "{s:s, s:o, s:I, s:i, s:s, s:s?, s:I, s:b, s:s, s:b, s:s, s:s, s:s, s:o, s:s, s:o}", "case",
      t->which->name, "model",
      job_json_text(t->which->loads ? rig->args->dir : rig_model_names[rig->args->model]), "share",
      (json_int_t)rig->args->share, "ranks", rig->job->size, "comm",
      oproj_comm_name(rig->job->comm), "reduce",
      rig->reduces ? choose_reduces[rig->args->reduce] : NULL, "chunk",
      (json_int_t)rig->args->chunk, "push", push && strcmp(push, "1") == 0, "backend",
      oproj_ctx_backend(rig->ctx), "warm", rig->args->warm, "device", facts ? facts->name : "host",
      "device_text", facts ? facts->text : "", "versions", versions, "host", job_json_text(host),
      "date", date, "command", job_json_text(t->command));
}

/* A whole line or none. */
static oproj_status append_line(const bench_table *t, const char *text) {
  struct stat before;
  char *line;
  int bytes = asprintf(&line, "%s\n", text);
  if (bytes < 0) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for a row as JSON");
  bool regular = fstat(t->json, &before) == 0 && S_ISREG(before.st_mode);
  ssize_t got = 1;
  int written = 0;
  for (; written < bytes && got > 0; written += (int)got)
    got = write(t->json, line + written, (size_t)(bytes - written));
  int error = errno;
  free(line);
  if (got > 0) return OPROJ_OK;
  if (regular && ftruncate(t->json, before.st_size) != 0) error = errno;
  return oproj_fail(OPROJ_ERR_IO, "cannot write %s: %s", t->json_path, strerror(error));
}

static oproj_status write_json(const bench_table *t, const table_row *row) {
  json_t *line = setting(t);
  json_t *numbers = json_pack(
      "{s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:b, s:f, s:f, s:f, s:f, s:o, s:o, s:o, s:o, s:o, s:o, "
      "s:o}",
      "rung", row->rung, "path", row->path, "tokens", row->tokens, "calls", row->calls, "warmups",
      row->warmups, "replays", row->replays, "layers", row->layers, "graph", row->graph, "p50_us",
      row->p50_us, "p99_us", row->p99_us, "bytes", row->cost.bytes, "flops", row->cost.flops,
      "gb_per_s", known(gb_per_s(t, row)), "tflop_per_s", known(tflop_per_s(t, row)), "floor_us",
      known(floor_us(t, row)), "naive_ratio", known(row->naive_us / row->p50_us), "sm_mhz",
      known(row->load.sm_mhz), "watts", known(row->load.watts), "wrong",
      row->wrong < 0 ? json_null() : json_integer(row->wrong));
  char *text = NULL;
  if (line && numbers && json_object_update(line, numbers) == 0)
    text = json_dumps(line, JSON_COMPACT);
  oproj_status status =
      text ? append_line(t, text) : oproj_fail(OPROJ_ERR_NOMEM, "no memory for a row as JSON");
  free(text);
  json_decref(numbers);
  json_decref(line);
  return status;
}

oproj_status table_put(const bench_table *t, const table_row *row) {
  if (!speaks(t)) return OPROJ_OK;
  print_row(t, row);
  return t->json >= 0 ? write_json(t, row) : OPROJ_OK;
}
