/* test_load.c - layers loaded by several ranks together: the right bytes, each read once, from
 * storage that is slow and breaks; and what a failed load leaves behind.  Started by mpirun at
 * several sizes; as in test_ranks.c, verdicts are agreed before they are asserted. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/ref/ref.h"
#include "oproj/checkpoint.h"
#include "oproj/mpi.h"
#include "support/checkpoints.h"
#include "support/expect.h"
#include "support/shim.h"
#include "support/together.h"
#include "tp/ctx.h"

static oproj_comm *comm;
static int32_t size, rank;

static const int32_t all[WIDE_LAYERS] = {0, 1, 2, 3, 4};

/* ---- folders that all ranks see -------------------------------------------------------------- */

/* Rank 0's new folder, on every rank; freed by the caller. */
static char *shared_dir(void) {
  char name[4096] = "";
  if (rank == 0) {
    char *dir = files_make_dir();
    snprintf(name, sizeof name, "%s", dir);
    free(dir);
  }
  MPI_Bcast(name, sizeof name, MPI_CHAR, 0, MPI_COMM_WORLD);
  return strdup(name);
}

static void drop_dir(char *dir) {
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0)
    files_remove(dir);
  else
    free(dir);
}

/* What most tests stand on: two checkpoints of other values, the first one also split. */
static char *dir, *other_dir, *split_dir;
static oproj_checkpoint *whole, *other, *split;
static oproj_ctx *ctx;

static oproj_split kind(void) {
  return WIDE_GROUPS % size == 0 ? OPROJ_SPLIT_EVEN : OPROJ_SPLIT_UNEVEN;
}

static void open_ctx(oproj_comm *ranks, const oproj_dims *dims) {
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = 1;
  config.split = kind();
  ALL_OK(oproj_ctx_create(&ctx, ranks, dims, &config));
}

static void setup(void) {
  memset(&shim, 0, sizeof shim);
  dir = shared_dir();
  other_dir = shared_dir();
  char *parent = shared_dir();
  if (rank == 0) {
    wide_write(dir, 1);
    wide_write(other_dir, 2);
  }
  ck_assert_int_gt(asprintf(&split_dir, "%s.split", parent), 0);
  drop_dir(parent);
  ALL_OK(oproj_checkpoint_open(&whole, dir));
  ALL_OK(oproj_checkpoint_open(&other, other_dir));
  ALL_OK(rank == 0 ? oproj_checkpoint_split(whole, split_dir, kind(), size, NULL, NULL) : OPROJ_OK);
  ALL_OK(oproj_checkpoint_open(&split, split_dir));
  open_ctx(comm, &oproj_checkpoint_model(whole)->dims);
  shim.calls = shim.bytes = 0;
}

static void teardown(void) {
  memset(&shim, 0, sizeof shim);
  oproj_ctx_destroy(ctx);
  oproj_checkpoint_close(split);
  oproj_checkpoint_close(other);
  oproj_checkpoint_close(whole);
  drop_dir(split_dir);
  drop_dir(other_dir);
  drop_dir(dir);
}

/* ---- what a layer holds ---------------------------------------------------------------------- */

static int same_matrix(const oproj_matrix *a, const oproj_matrix *b) {
  return a->dtype == b->dtype && a->rows == b->rows && a->cols == b->cols && a->block == b->block &&
         memcmp(a->data, b->data, oproj_kernels_data_bytes(a)) == 0 &&
         (!a->scales || memcmp(a->scales, b->scales, oproj_kernels_scale_bytes(a)) == 0);
}

/* Whether this rank's layer is what the rank-local reader finds for it. */
static int holds(const oproj_layer *layer, const oproj_checkpoint *checkpoint, int32_t index) {
  shim_state storm = shim;
  oproj_slices slices;
  memset(&shim, 0, sizeof shim);
  EXPECT_OK(oproj_checkpoint_read(checkpoint, index, oproj_ctx_shard(ctx), &slices));
  int same = same_matrix(&layer->weights->wo_a, &slices.wo_a) &&
             same_matrix(&layer->weights->wo_b, &slices.wo_b);
  oproj_slices_free(&slices);
  shim = storm;
  return same;
}

static void drop_layers(oproj_layer **layers) {
  for (int32_t i = 0; i < WIDE_LAYERS; i++) oproj_layer_destroy(layers[i]);
}

static void load_and_compare(const oproj_checkpoint *checkpoint, const oproj_load_config *config) {
  oproj_layer *layers[WIDE_LAYERS];
  ALL_OK(oproj_layers_load(layers, ctx, checkpoint, all, WIDE_LAYERS, config, NULL));
  for (int32_t i = 0; i < WIDE_LAYERS; i++)
    ALL_ASSERT(holds(layers[i], whole, i), "layer %d has other values", i);
  drop_layers(layers);
}

/* The least memory that a load of these layers takes on this rank. */
static int64_t least_memory(const oproj_checkpoint *checkpoint) {
  oproj_layer *layers[WIDE_LAYERS];
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  config.memory_bytes = 1;
  oproj_status status = oproj_layers_load(layers, ctx, checkpoint, all, WIDE_LAYERS, &config, NULL);
  const char *at = strstr(oproj_last_error(), "at least ");
  int right = status == OPROJ_ERR_INVALID && at && !layers[0];
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  return strtoll(at + strlen("at least "), NULL, 10);
}

/* ---- right bytes ---------------------------------------------------------------------------- */

START_TEST(every_form_at_every_memory) {
  const oproj_checkpoint *checkpoint = _i ? split : whole;
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  int64_t least = least_memory(checkpoint);
  load_and_compare(checkpoint, NULL);
  for (config.memory_bytes = least; config.memory_bytes < 3 * least; config.memory_bytes *= 1.7)
    load_and_compare(checkpoint, &config);
}
END_TEST

/* Any order, twice the same, and none. */
START_TEST(chosen_layers) {
  const int32_t chosen[] = {3, 1, 3};
  oproj_layer *layers[3];
  oproj_load_report report;
  ALL_OK(oproj_layers_load(layers, ctx, whole, chosen, 3, NULL, &report));
  for (int i = 0; i < 3; i++) {
    ALL_ASSERT(holds(layers[i], whole, chosen[i]), "layer %d has other values", chosen[i]);
    oproj_layer_destroy(layers[i]);
  }
  ALL_OK(oproj_layers_load(NULL, ctx, whole, NULL, 0, NULL, &report));
  ALL_ASSERT(report.needed_bytes == 0 && report.read_bytes == 0, "%ld bytes",
             (long)report.read_bytes);
}
END_TEST

static int64_t sum(int64_t mine) {
  int64_t out;
  MPI_Allreduce(&mine, &out, 1, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
  return out;
}

/* A layer of real size, from opening the folder on: all ranks here, as one node, read hardly more
 * than what they need, and take no more memory than they may. */
START_TEST(each_byte_is_read_once) {
  enum { MEMORY = 64 << 20, SLACK = 24 << 20 };
  char *real = shared_dir(), *made;
  oproj_synth synth = OPROJ_SYNTH_INIT;
  synth.model = "v4-flash";
  synth.layers = 1;
  synth.draft_layers = 0;
  ck_assert_int_gt(asprintf(&made, "%s/real", real), 0);
  ALL_OK(rank == 0 ? oproj_checkpoint_synth(&synth, made, NULL, NULL) : OPROJ_OK);
  oproj_ctx_destroy(ctx);
  oproj_checkpoint *checkpoint;
  shim.bytes = 0;
  ALL_OK(oproj_checkpoint_open(&checkpoint, made));
  open_ctx(comm, &oproj_checkpoint_model(checkpoint)->dims);

  struct rusage before, after;
  oproj_layer *layer;
  oproj_load_report report;
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  config.memory_bytes = size == 1 ? 2 * MEMORY : MEMORY;
  getrusage(RUSAGE_SELF, &before);
  ALL_OK(oproj_layers_load(&layer, ctx, checkpoint, all, 1, &config, &report));
  getrusage(RUSAGE_SELF, &after);
  int64_t needed = sum(report.needed_bytes), counted = sum(shim.bytes);
  int64_t grown = (after.ru_maxrss - before.ru_maxrss) * 1024;
  if (rank == 0)
    printf("n = %d: %.5f x the bytes needed were read\n", size, (double)counted / (double)needed);
  ALL_ASSERT(sum(report.read_bytes) == needed, "read %ld of %ld", (long)report.read_bytes,
             (long)needed);
  ALL_ASSERT(counted <= needed + needed / 50, "%ld bytes read for %ld needed", (long)counted,
             (long)needed);
  int in_bounds = grown <= report.needed_bytes + config.memory_bytes + SLACK;
  ALL_ASSERT(in_bounds || getenv("OPROJ_TEST_ANY_MEMORY"), "grown by %ld bytes", (long)grown);
  ALL_ASSERT(holds(layer, checkpoint, 0), "other values");
  oproj_layer_destroy(layer);
  oproj_checkpoint_close(checkpoint);
  free(made);
  drop_dir(real);
}
END_TEST

/* ---- bad storage ---------------------------------------------------------------------------- */

START_TEST(slow_short_and_interrupted_reads) {
  shim.latency_us = 1000;
  shim.short_every = 2;
  shim.eintr_every = 3;
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  config.memory_bytes = 2 * least_memory(whole);
  load_and_compare(whole, &config);
  load_and_compare(split, NULL);
}
END_TEST

/* All ranks fail with the words of one, and none keeps a layer. */
static void expect_failed_load(const oproj_checkpoint *checkpoint, oproj_status wanted,
                               const char *words) {
  oproj_layer *layers[WIDE_LAYERS];
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  oproj_status status = oproj_layers_load(layers, ctx, checkpoint, all, WIDE_LAYERS, &config, NULL);
  int none = 1;
  for (int i = 0; i < WIDE_LAYERS; i++) none &= !layers[i];
  ALL_ASSERT(status == wanted && strstr(oproj_last_error(), words), "status %d: %s", (int)status,
             oproj_last_error());
  ALL_ASSERT(none, "a layer was left");
}

/* One read of one rank fails, each in turn. */
START_TEST(one_failed_read_fails_all) {
  const oproj_checkpoint *checkpoint = _i ? split : whole;
  shim.calls = 0;
  load_and_compare(checkpoint, NULL);
  int64_t reads = shim.calls;
  for (int32_t bad = 0; bad<size; bad += size> 4 ? 3 : 1)
    for (int64_t at = 1; at <= 13; at += 6) {
      shim.calls = 0;
      shim.eio_call = rank == bad ? (at < reads ? at : reads) : 0;
      expect_failed_load(checkpoint, OPROJ_ERR_IO, "Input/output error");
    }
  shim.eio_call = 0;
  load_and_compare(checkpoint, NULL);
}
END_TEST

static const char *victim; /* a file that changes under the load */
static off_t victim_bytes;

/* While the last rank reads for the third time. */
static void change_size(int64_t call) {
  if (call == 3) (void)!truncate(victim, victim_bytes);
}

START_TEST(files_that_change_their_size) {
  static const struct {
    off_t by;
    const char *words;
  } changes[] = {{1, "bytes now and had"}, {-1, ""}, {-4096, ""}, {-1000000, ""}};
  char path[4096];
  struct shim_state quiet = shim;
  snprintf(path, sizeof path, "%s/b.safetensors", dir);
  for (size_t i = 0; i < sizeof changes / sizeof changes[0]; i++) {
    size_t bytes;
    char *content = files_read(dir, "b.safetensors", &bytes);
    off_t wanted = (off_t)bytes + changes[i].by;
    victim = path;
    victim_bytes = wanted > 8 ? wanted : 8;
    shim.calls = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == size - 1) shim.before = change_size;
    expect_failed_load(whole, OPROJ_ERR_IO, changes[i].words);
    shim = quiet;
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) { /* in place: it stays open */
      int file = open(path, O_WRONLY | O_TRUNC);
      ck_assert_int_eq(pwrite(file, content, bytes, 0), (ssize_t)bytes);
      close(file);
    }
    free(content);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  load_and_compare(whole, NULL);
}
END_TEST

START_TEST(damaged_split_set_fails_all) {
  char name[64];
  snprintf(name, sizeof name, "rank-%05d-of-%05d.safetensors", size - 1, size);
  if (rank == 0) files_flip(split_dir, name, -5);
  MPI_Barrier(MPI_COMM_WORLD);
  expect_failed_load(split, OPROJ_ERR_IO, "checksum");
}
END_TEST

/* ---- ranks that differ ---------------------------------------------------------------------- */

START_TEST(ranks_must_want_the_same) {
  oproj_layer *layers[2] = {NULL, NULL};
  int32_t mine[] = {0, rank == size - 1 ? 1 : 0}; /* layer 1 has a BF16 matrix */
  oproj_status status = oproj_layers_load(layers, ctx, whole, mine, 2, NULL, NULL);
  int right = size == 1 ? status == OPROJ_OK
                        : status == OPROJ_ERR_INVALID &&
                              strstr(oproj_last_error(), "different layers") && !layers[0];
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  for (int i = 0; i < 2; i++) oproj_layer_destroy(layers[i]);

  mine[1] = rank == size - 1 ? 2 : 0; /* of the same shapes and dtypes */
  status = oproj_layers_load(layers, ctx, whole, mine, 2, NULL, NULL);
  right = size == 1 ? status == OPROJ_OK
                    : status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "different layers");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  for (int i = 0; i < 2; i++) oproj_layer_destroy(layers[i]);

  /* Nothing of a split set is dealt. */
  mine[1] = 0;
  status = oproj_layers_load(layers, ctx, rank == size - 1 ? split : whole, mine, 2, NULL, NULL);
  right = size == 1
              ? status == OPROJ_OK
              : status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "different checkpoints");
  ALL_ASSERT(right, "status %d: %s", (int)status, oproj_last_error());
  for (int i = 0; i < 2; i++) oproj_layer_destroy(layers[i]);

  mine[1] = rank == size - 1 ? 77 : 0;
  status = oproj_layers_load(layers, ctx, whole, mine, 2, NULL, NULL);
  ALL_ASSERT(status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "layer 77"), "status %d: %s",
             (int)status, oproj_last_error());
}
END_TEST

START_TEST(memory_of_the_least_rank) {
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  config.memory_bytes = least_memory(whole) + (rank == size - 1 ? 5000 : 1000000);
  load_and_compare(whole, &config);
  config.struct_size = 1;
  oproj_layer *layer;
  oproj_status status = oproj_layers_load(&layer, ctx, whole, all, 1, &config, NULL);
  ALL_ASSERT(status == OPROJ_ERR_INVALID, "status %d", (int)status);
}
END_TEST

/* ---- progress ------------------------------------------------------------------------------- */

typedef struct watch {
  int64_t last, total, stop_at; /* stop_at 0: never */
  int calls, backwards;
} watch;

static int see(void *user, int64_t done, int64_t total) {
  watch *w = user;
  w->calls++;
  w->backwards += done < w->last || done > total;
  w->last = done;
  w->total = total;
  return w->stop_at > 0 && done >= w->stop_at;
}

START_TEST(progress_is_told_and_obeyed) {
  const oproj_checkpoint *checkpoint = _i ? split : whole;
  oproj_layer *layers[WIDE_LAYERS];
  watch w = {0};
  oproj_load_config config = OPROJ_LOAD_CONFIG_INIT;
  oproj_load_report report;
  config.progress = see;
  config.user = &w;
  ALL_OK(oproj_layers_load(layers, ctx, checkpoint, all, WIDE_LAYERS, &config, &report));
  drop_layers(layers);
  ALL_ASSERT(w.backwards == 0 && w.calls > WIDE_LAYERS, "%d of %d calls", w.backwards, w.calls);
  int64_t needed = sum(report.needed_bytes);
  ALL_ASSERT(w.last == w.total && w.total == needed, "%ld of %ld", (long)w.last, (long)w.total);

  if (rank == size - 1) w.stop_at = w.total / 2;
  w.last = 0;
  oproj_status status = oproj_layers_load(layers, ctx, checkpoint, all, WIDE_LAYERS, &config, NULL);
  ALL_ASSERT(status == OPROJ_ERR_INVALID && strstr(oproj_last_error(), "stopped") && !layers[0],
             "status %d: %s", (int)status, oproj_last_error());
}
END_TEST

/* ---- reload --------------------------------------------------------------------------------- */

typedef struct addresses {
  const void *a, *a_scales, *b, *b_scales;
} addresses;

static addresses addresses_of(const oproj_layer *layer) {
  const oproj_kernels_weights *w = layer->weights;
  return (addresses){w->wo_a.data, w->wo_a.scales, w->wo_b.data, w->wo_b.scales};
}

START_TEST(reload_keeps_addresses) {
  oproj_layer *layer;
  ALL_OK(oproj_layer_load(&layer, ctx, split, 3));
  addresses before = addresses_of(layer);
  ALL_OK(oproj_layer_reload(layer, other, 3));
  ALL_ASSERT(holds(layer, other, 3) && !holds(layer, whole, 3), "not the new values");
  ALL_OK(oproj_layer_reload(layer, whole, 4));
  addresses after = addresses_of(layer);
  ALL_ASSERT(holds(layer, whole, 4), "not the new values");
  ALL_ASSERT(memcmp(&before, &after, sizeof before) == 0, "other addresses");
  oproj_layer_destroy(layer);
}
END_TEST

/* Whatever goes wrong, and on whichever rank: all keep what they had. */
START_TEST(failed_reload_changes_nothing) {
  oproj_layer *layer;
  ALL_OK(oproj_layer_load(&layer, ctx, whole, 3));
  for (int32_t bad = 0; bad < size; bad++)
    for (int64_t at = 1; at <= 4; at++) {
      shim.calls = 0;
      shim.eio_call = rank == bad ? at : 0;
      oproj_status status = oproj_layer_reload(layer, split, 4);
      ALL_ASSERT(status == OPROJ_ERR_IO, "status %d", (int)status);
      ALL_ASSERT(holds(layer, whole, 3), "values have changed");
    }
  shim.eio_call = 0;

  oproj_status status = oproj_layer_reload(layer, other, 1); /* WO_A in BF16 */
  ALL_ASSERT(status == OPROJ_ERR_SHAPE, "status %d", (int)status);
  ALL_ASSERT(holds(layer, whole, 3), "values have changed");

  char name[64];
  snprintf(name, sizeof name, "rank-%05d-of-%05d.safetensors", size - 1, size);
  if (rank == 0) files_flip(split_dir, name, -5);
  MPI_Barrier(MPI_COMM_WORLD);
  status = oproj_layer_reload(layer, split, 4); /* the damaged byte is its last */
  ALL_ASSERT(status == OPROJ_ERR_IO && strstr(oproj_last_error(), "checksum"), "status %d",
             (int)status);
  ALL_ASSERT(holds(layer, whole, 3), "values have changed");
  oproj_layer_destroy(layer);
}
END_TEST

/* Who waits for storage is waited for; who has what he came for is late like anybody. */
START_TEST(patience_ends_with_the_load) {
  if (size == 1) return;
  oproj_layer *layer;
  oproj_comm *ranks;
  oproj_ctx_destroy(ctx);
  ALL_OK(oproj_comm_mpi(&ranks, MPI_COMM_WORLD));
  open_ctx(ranks, &oproj_checkpoint_model(whole)->dims);
  ALL_OK(oproj_layer_load(&layer, ctx, whole, 0));
  oproj_comm_set_deadline(ranks, 0.4);
  if (rank == size - 1) usleep(2000000);
  oproj_status status = oproj_comm_agree(ranks, OPROJ_OK);
  ALL_ASSERT(status == OPROJ_ERR_PEER && strstr(oproj_last_error(), "has kept others waiting"),
             "status %d: %s", (int)status, oproj_last_error());
  oproj_layer_destroy(layer);
  oproj_ctx_destroy(ctx);
  oproj_comm_destroy(ranks);
  open_ctx(comm, &oproj_checkpoint_model(whole)->dims);
}
END_TEST

static Suite *load_suite(void) {
  Suite *suite = suite_create("load");
  TCase *tc = tcase_create("load");
  tcase_add_checked_fixture(tc, setup, teardown);
  tcase_add_loop_test(tc, every_form_at_every_memory, 0, 2);
  tcase_add_test(tc, chosen_layers);
  tcase_add_test(tc, each_byte_is_read_once);
  tcase_add_test(tc, slow_short_and_interrupted_reads);
  tcase_add_loop_test(tc, one_failed_read_fails_all, 0, 2);
  tcase_add_test(tc, files_that_change_their_size);
  tcase_add_test(tc, damaged_split_set_fails_all);
  tcase_add_test(tc, ranks_must_want_the_same);
  tcase_add_test(tc, memory_of_the_least_rank);
  tcase_add_loop_test(tc, progress_is_told_and_obeyed, 0, 2);
  tcase_add_test(tc, reload_keeps_addresses);
  tcase_add_test(tc, failed_reload_changes_nothing);
  tcase_add_test(tc, patience_ends_with_the_load);
  suite_add_tcase(suite, tc);
  return suite;
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  if (oproj_comm_mpi(&comm, MPI_COMM_WORLD) != OPROJ_OK) {
    fprintf(stderr, "%s\n", oproj_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  size = oproj_comm_size(comm);
  rank = oproj_comm_rank(comm);
  int failed = together_run(load_suite(), rank);
  oproj_comm_destroy(comm);
  MPI_Finalize();
  return failed;
}
