/* test_place.c - which GPU a rank gets and where it runs beside it, on a recorded machine: two NUMA
 * nodes, CPUs 0-3 and 4-7, each with four GPUs. */
#include <stdio.h>

#include "support/expect.h"
#include "tp/place.h"

#define FIRST_GPU "0000:1b:00.0" /* node 0 */
#define LAST_GPU "0000:CB:00.0"  /* node 1, as CUDA spells it */

static hwloc_topology_t machine;

static void load_machine(void) {
  const char *path = OPROJ_TEST_DATA "/machines/2-nodes-8-gpus.xml";
  ck_assert_int_eq(hwloc_topology_init(&machine), 0);
  ck_assert_int_eq(hwloc_topology_set_io_types_filter(machine, HWLOC_TYPE_FILTER_KEEP_IMPORTANT),
                   0);
  ck_assert_int_eq(hwloc_topology_set_xml(machine, path), 0);
  ck_assert_int_eq(hwloc_topology_load(machine), 0);
}

static void unload_machine(void) {
  hwloc_topology_destroy(machine);
}

START_TEST(ranks_get_gpus_in_order) {
  for (int32_t rank = 0; rank < 8; rank++) {
    ck_assert_int_eq(oproj_place_device(rank, 8), rank);
    ck_assert_int_eq(oproj_place_device(rank, 9), rank);
    ck_assert_int_eq(oproj_place_device(rank, 3), rank % 3);
    ck_assert_int_eq(oproj_place_device(rank, 1), 0);
    ck_assert_int_eq(oproj_place_device(rank, 0), -1);
  }
}
END_TEST

START_TEST(gpus_have_nodes) {
  ck_assert_int_eq(oproj_place_node_in(machine, FIRST_GPU), 0);
  ck_assert_int_eq(oproj_place_node_in(machine, LAST_GPU), 1);
  ck_assert_int_eq(oproj_place_node_in(machine, "0000:01:00.0"), -1);
  ck_assert_int_eq(oproj_place_node_in(machine, "no bus"), -1);
}
END_TEST

/* The CPUs chosen from those of `bound`; "-" where the process stays as it is. */
static const char *near(const char *bus_id, const char *bound) {
  static char list[64] = "-";
  hwloc_bitmap_t from = hwloc_bitmap_alloc(), to = hwloc_bitmap_alloc();
  ck_assert_int_eq(hwloc_bitmap_list_sscanf(from, bound), 0);
  if (oproj_place_near(machine, bus_id, from, to))
    hwloc_bitmap_list_snprintf(list, sizeof list, to);
  else
    snprintf(list, sizeof list, "-");
  hwloc_bitmap_free(to);
  hwloc_bitmap_free(from);
  return list;
}

START_TEST(processes_move_to_their_gpu) {
  ck_assert_str_eq(near(FIRST_GPU, "0-7"), "0-3");
  ck_assert_str_eq(near(LAST_GPU, "0-7"), "4-7");
  ck_assert_str_eq(near(LAST_GPU, "2-6"), "4-6"); /* never wider than allowed */
}
END_TEST

START_TEST(chosen_places_are_kept) {
  ck_assert_str_eq(near(FIRST_GPU, "0-3"), "-"); /* there already */
  ck_assert_str_eq(near(FIRST_GPU, "1"), "-");   /* narrower */
  ck_assert_str_eq(near(FIRST_GPU, "3-5"), "-"); /* narrower, and partly elsewhere */
  ck_assert_str_eq(near(FIRST_GPU, "4-7"), "-"); /* elsewhere: nothing near is allowed */
  ck_assert_str_eq(near("0000:01:00.0", "0-7"), "-");
}
END_TEST

/* Whatever this machine is: no GPU sits at that address, so nothing may change. */
START_TEST(unknown_gpus_bind_nothing) {
  char before[256], after[256];
  EXPECT_OK(oproj_place_describe(before, sizeof before));
  oproj_place_bind("ffff:ff:1f.7");
  EXPECT_OK(oproj_place_describe(after, sizeof after));
  ck_assert_str_eq(before, after);
  ck_assert_int_eq(oproj_place_node("ffff:ff:1f.7"), -1);
}
END_TEST

/* The CPUs of local rank `rank` of `ranks` that a launcher bound to `bound`; "-": as it is. */
static const char *share(const char *bound, int32_t rank, int32_t ranks) {
  static char list[64];
  hwloc_bitmap_t from = hwloc_bitmap_alloc(), to = hwloc_bitmap_alloc();
  ck_assert_int_eq(hwloc_bitmap_list_sscanf(from, bound), 0);
  if (oproj_place_share(machine, from, rank, ranks, to))
    hwloc_bitmap_list_snprintf(list, sizeof list, to);
  else
    snprintf(list, sizeof list, "-");
  hwloc_bitmap_free(to);
  hwloc_bitmap_free(from);
  return list;
}

START_TEST(single_cores_become_shares) {
  ck_assert_str_eq(share("0", 0, 2), "0-3");
  ck_assert_str_eq(share("1", 1, 2), "4-7");
  ck_assert_str_eq(share("3", 0, 1), "0-7");
  ck_assert_str_eq(share("0", 0, 3), "0-1");
  ck_assert_str_eq(share("2", 2, 3), "5-7");
  ck_assert_str_eq(share("0-1", 0, 2), "-"); /* somebody chose that */
  ck_assert_str_eq(share("0-7", 0, 2), "-");
  ck_assert_str_eq(share("0", 0, 8), "-"); /* one core each is all there is */
}
END_TEST

int main(void) {
  Suite *suite = suite_create("place");
  TCase *tc = tcase_create("place");
  tcase_add_unchecked_fixture(tc, load_machine, unload_machine);
  tcase_add_test(tc, ranks_get_gpus_in_order);
  tcase_add_test(tc, gpus_have_nodes);
  tcase_add_test(tc, processes_move_to_their_gpu);
  tcase_add_test(tc, chosen_places_are_kept);
  tcase_add_test(tc, unknown_gpus_bind_nothing);
  tcase_add_test(tc, single_cores_become_shares);
  suite_add_tcase(suite, tc);
  return run_suite(suite);
}
