/* test_cuda_push.c - the sum over ranks that push to one another's memory, with several ranks on
 * one GPU: a context, a mailbox and a stream each.  Their kernels are small enough to run side by
 * side. */
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "gpu/cuda_rig.h"
#include "support/expect.h"

enum { MOST_RANKS = OPROJ_KERNELS_PUSH_RANKS, CAPACITY = 8 * 4096 };

typedef struct rank {
  rig r;
  void *mailbox;
  oproj_kernels_push push;
  uint16_t *partial, *y; /* device memory [CAPACITY] */
  cudaStream_t stream;
} rank;

typedef struct ranks {
  int32_t size;
  rank at[MOST_RANKS];
} ranks;

static void *device_memory(const rig *r, size_t bytes) {
  void *memory;
  EXPECT_OK(r->ops->buffer_create(r->cuda, bytes, &memory));
  return memory;
}

static ranks ranks_open(int32_t size, int64_t patience_ms) {
  ranks all = {.size = size};
  for (int32_t i = 0; i < size; i++) {
    rank *a = &all.at[i];
    oproj_kernels_handle handle;
    a->r = rig_open(64, 1, 128, 2, 128, 128, 1);
    size_t bytes = a->r.ops->mailbox_bytes(size, CAPACITY);
    EXPECT_OK(a->r.ops->mailbox_create(a->r.cuda, bytes, &a->mailbox, &handle));
    a->partial = device_memory(&a->r, CAPACITY * sizeof *a->partial);
    a->y = device_memory(&a->r, CAPACITY * sizeof *a->y);
    ck_assert_int_eq(cudaStreamCreateWithFlags(&a->stream, cudaStreamNonBlocking), cudaSuccess);
    a->push = (oproj_kernels_push){
        .size = size, .rank = i, .capacity = CAPACITY, .patience_ms = patience_ms};
  }
  for (int32_t i = 0; i < size; i++)
    for (int32_t j = 0; j < size; j++) all.at[i].push.mailboxes[j] = all.at[j].mailbox;
  return all;
}

static void ranks_close(ranks *all) {
  ck_assert_int_eq(cudaDeviceSynchronize(), cudaSuccess);
  for (int32_t i = 0; i < all->size; i++) {
    rank *a = &all->at[i];
    a->r.ops->buffer_destroy(a->r.cuda, a->partial);
    a->r.ops->buffer_destroy(a->r.cuda, a->y);
    a->r.ops->mailbox_destroy(a->r.cuda, a->mailbox);
    cudaStreamDestroy(a->stream);
    rig_close(&a->r);
  }
}

/* Any bits at all now and then: infinities, NaN, -0 and subnormal values must get through. */
static uint16_t value_of(uint64_t stream, int64_t i) {
  return hash(stream, (uint64_t)i) % 16 ? oproj_bf16_from_f32(unit(stream + 1, (uint64_t)i))
                                        : (uint16_t)hash(stream + 2, (uint64_t)i);
}

static bool is_nan(uint16_t bf16) {
  return (bf16 & 0x7FFF) > 0x7F80;
}

static void sum_everywhere(const ranks *all, int64_t count, bool in_place) {
  for (int32_t i = 0; i < all->size; i++) {
    const rank *a = &all->at[i];
    EXPECT_OK(a->r.ops->sum_pushed(a->r.cuda, &a->push, count, a->partial,
                                   in_place ? a->partial : a->y, 0, a->stream));
  }
}

static void check_sum(const ranks *all, uint64_t stream, int64_t count, bool in_place) {
  uint16_t *values = malloc(sizeof *values * CAPACITY), *wanted = malloc(sizeof *wanted * CAPACITY);
  float *sums = calloc(CAPACITY, sizeof *sums);
  for (int64_t k = 0; k < count; k++) sums[k] = -0.0f;
  for (int32_t i = 0; i < all->size; i++) {
    const rank *a = &all->at[i];
    for (int64_t k = 0; k < count; k++) {
      values[k] = value_of(stream + 3 * (uint64_t)i, k);
      sums[k] += oproj_bf16_to_f32(values[k]);
    }
    EXPECT_OK(a->r.ops->buffer_write(a->r.cuda, a->partial, values, (size_t)count * 2, a->stream));
  }
  for (int64_t k = 0; k < count; k++) wanted[k] = oproj_bf16_from_f32(sums[k]);
  sum_everywhere(all, count, in_place);
  for (int32_t i = 0; i < all->size; i++) {
    const rank *a = &all->at[i];
    EXPECT_OK(a->r.ops->buffer_read(a->r.cuda, values, in_place ? a->partial : a->y,
                                    (size_t)count * 2, a->stream));
    for (int64_t k = 0; k < count; k++)
      if (values[k] != wanted[k] && !(is_nan(values[k]) && is_nan(wanted[k])))
        ck_abort_msg("rank %d of %d, %lld elements: sum %lld is %04x, wanted %04x", i, all->size,
                     (long long)count, (long long)k, values[k], wanted[k]);
  }
  free(values);
  free(wanted);
  free(sums);
}

static const int32_t sizes[] = {1, 2, 3, 4, 7, 8};

START_TEST(ranks_get_the_same_sum) {
  static const int64_t counts[] = {1, 4, 5, 7168, 255, CAPACITY, 1022, 0, 4096 * 3, CAPACITY - 1};
  ranks all = ranks_open(sizes[_i], 20000);
  for (uint64_t round = 0; round < 4; round++)
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
      check_sum(&all, 100 * round + 10 * i, counts[i], (round + i) % 2);
  ranks_close(&all);
}
END_TEST

/* The same small integers over and over, so that one wrong word of an earlier sum shows; sizes that
 * change from sum to sum, in one graph on every rank, and the graphs again and again. */
START_TEST(graphs_number_their_sums) {
  /* All sums of a graph may start early and wait in their turn: those of all ranks together must
   * fit on the one device, or one rank's would keep another's from starting. */
  enum { SUMS = 16, REPLAYS = 4000 };
  int32_t size = sizes[1 + _i];
  int replays = test_is_short() ? 3 : REPLAYS;
  ranks all = ranks_open(size, 20000);
  cudaGraphExec_t graphs[MOST_RANKS];
  int64_t most = 0;
  for (int32_t i = 0; i < size; i++) {
    const rank *a = &all.at[i];
    cudaGraph_t graph;
    uint16_t one = oproj_bf16_from_f32((float)(i + 1)), *ones = malloc(CAPACITY * sizeof *ones);
    for (int64_t k = 0; k < CAPACITY; k++) ones[k] = one;
    EXPECT_OK(a->r.ops->buffer_write(a->r.cuda, a->partial, ones, CAPACITY * 2, a->stream));
    free(ones);
    ck_assert_int_eq(cudaStreamBeginCapture(a->stream, cudaStreamCaptureModeThreadLocal),
                     cudaSuccess);
    for (int s = 0; s < SUMS; s++) {
      int64_t count = (int64_t)(hash(7, (uint64_t)s) % 64) * 113;
      most = count > most ? count : most;
      EXPECT_OK(a->r.ops->sum_pushed(a->r.cuda, &a->push, count, a->partial, a->y, 0, a->stream));
    }
    ck_assert_int_eq(cudaStreamEndCapture(a->stream, &graph), cudaSuccess);
    ck_assert_int_eq(cudaGraphInstantiate(&graphs[i], graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  uint16_t wanted = oproj_bf16_from_f32((float)(size * (size + 1) / 2));
  uint16_t *y = malloc((size_t)most * sizeof *y);
  for (int round = 0; round < replays; round++) {
    bool look = round % 100 == 0 || round == replays - 1;
    for (int32_t i = 0; i < size; i++) {
      if (look)
        ck_assert_int_eq(cudaMemsetAsync(all.at[i].y, 0xAA, (size_t)most * 2, all.at[i].stream),
                         cudaSuccess);
      ck_assert_int_eq(cudaGraphLaunch(graphs[i], all.at[i].stream), cudaSuccess);
    }
    for (int32_t i = 0; look && i < size; i++) {
      const rank *a = &all.at[i];
      EXPECT_OK(a->r.ops->buffer_read(a->r.cuda, y, a->y, (size_t)most * 2, a->stream));
      for (int64_t k = 0; k < most; k++) ck_assert_uint_eq(y[k], wanted);
    }
  }
  free(y);
  for (int32_t i = 0; i < size; i++) cudaGraphExecDestroy(graphs[i]);
  ranks_close(&all);
}
END_TEST

/* ---- forward as the sender ----------------------------------------------------------------- */

/* A rank's forward pushes its partial, and the sum finds it there: the bits of a sum that pushes
 * for itself.  Forward waits for no other rank, so the ranks run one after the other. */
START_TEST(forward_pushes_what_it_finishes) {
  enum { SIZE = 3, TOKENS = 7, HIDDEN = 640, COUNT = TOKENS * HIDDEN, ROUNDS = 3 };
  ranks all = ranks_open(SIZE, 20000);
  rig model = rig_open(HIDDEN, 2, 512, 2, 256, _i ? 128 : 32, TOKENS);
  input in = input_open(&model, TOKENS, 0, OPROJ_POSITION_I64, DATA_RANDOM);
  uint16_t wanted[COUNT], found[COUNT];
  layer layers[SIZE];
  for (int32_t i = 0; i < SIZE; i++)
    layers[i] = layer_open(&model, OPROJ_DTYPE_E4M3, DATA_RANDOM, 60 + (uint64_t)i);
  for (int round = 0; round < ROUNDS; round++) {
    for (int sent = 0; sent < 2; sent++) {
      for (int32_t i = 0; i < SIZE; i++) {
        const rank *a = &all.at[i];
        oproj_kernels_out out = {.sink = sent ? &a->push : NULL};
        ck_assert(!sent || model.ops->can_push(layers[i].cuda, TOKENS, &out));
        EXPECT_OK(rig_forward(model.ops, layers[i].cuda, &in.device, &out, a->partial, a->stream));
        ck_assert_int_eq(cudaStreamSynchronize(a->stream), cudaSuccess);
      }
      for (int32_t i = 0; i < SIZE; i++) {
        const rank *a = &all.at[i];
        EXPECT_OK(
            a->r.ops->sum_pushed(a->r.cuda, &a->push, COUNT, a->partial, a->y, sent, a->stream));
      }
      for (int32_t i = 0; i < SIZE; i++) {
        const rank *a = &all.at[i];
        EXPECT_OK(a->r.ops->buffer_read(a->r.cuda, found, a->y, sizeof found, a->stream));
        if (!sent && i == 0) memcpy(wanted, found, sizeof wanted);
        expect_same(sent ? "pushed by forward" : "pushed by the sum", found, wanted, COUNT);
      }
    }
  }
  for (int32_t i = 0; i < SIZE; i++) layer_close(&model, &layers[i]);
  input_close(&model, &in);
  rig_close(&model);
  ranks_close(&all);
}
END_TEST

/* The last rank does not call: the others' sum is NaN, and they say who is missing. */
START_TEST(a_missing_rank_is_named) {
  enum { COUNT = 1000 };
  int32_t size = sizes[1 + _i];
  char words[80];
  snprintf(words, sizeof words, "rank %d did not send its part", size - 1);
  ranks all = ranks_open(size, 50);
  ranks present = all;
  present.size = size - 1;
  for (int round = 0; round < 2; round++) { /* and so it stays */
    sum_everywhere(&present, COUNT, false);
    for (int32_t i = 0; i < present.size; i++) {
      const rank *a = &all.at[i];
      uint16_t y[COUNT];
      EXPECT_FAIL(a->r.ops->buffer_read(a->r.cuda, y, a->y, sizeof y, a->stream), OPROJ_ERR_COMM,
                  words);
      for (int k = 0; k < COUNT; k++) ck_assert(is_nan(y[k]));
    }
  }
  ranks_close(&all);
}
END_TEST

int main(void) {
  /* Streams that share a queue of the device wait for one another: here that would never end. */
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  Suite *suite = suite_create("cuda_push");
  TCase *tests = tcase_create("push");
  tcase_add_loop_test(tests, ranks_get_the_same_sum, 0, 6);
  tcase_add_loop_test(tests, graphs_number_their_sums, 0, 5);
  tcase_add_loop_test(tests, a_missing_rank_is_named, 0, 5);
  if (oproj_device_capability(0) == 90)
    tcase_add_loop_test(tests, forward_pushes_what_it_finishes, 0, 2);
  return run_gpu_suite(suite, tests);
}
