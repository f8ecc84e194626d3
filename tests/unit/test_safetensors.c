/* test_safetensors.c - the reader against hand-made files, the writer against the reader. */
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "oproj/safetensors.h"
#include "support/expect.h"
#include "support/files.h"

static char *dir;

static void setup(void) {
  dir = files_make_dir();
}

static void teardown(void) {
  files_remove(dir);
}

static oproj_status open_header(const char *header, size_t data_bytes) {
  static const char zeros[64];
  oproj_tensors_file *file;
  files_write_raw_tensors(dir, "f.safetensors", header, zeros, data_bytes);
  oproj_status status = oproj_tensors_open(&file, files_path(dir, "f.safetensors"));
  oproj_tensors_close(file);
  return status;
}

/* clang-format off */
static const struct {
  const char *header;
  size_t bytes;
  const char *words; /* NULL: accepted */
} headers[] = {
    {"{}", 0, NULL},
    {"{\"__metadata__\":{\"a\":\"b\"}}  ", 0, NULL},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,1]}}", 1, NULL},
    {"{\"t\":{\"dtype\":\"F4\",\"shape\":[3,2],\"data_offsets\":[0,3]}}", 3, NULL},
    {"{\"t\":{\"dtype\":\"Q8\",\"shape\":[7],\"data_offsets\":[0,1]}}", 1, NULL},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[0,4611686018427387904],"
     "\"data_offsets\":[0,0]}}", 0, NULL},
    {"", 0, "JSON"},
    {"[]", 0, "one JSON object"},
    {"{\"t\":{\"dtype\":\"U8\"", 0, "JSON"},
    {"{\"t\":1}", 0, "tensor t is not an object"},
    {"{\"__metadata__\":[]}", 0, "__metadata__"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__.a"},
    {"{\"t\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "tensor t: dtype is missing"},
    {"{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "shape is missing"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "shape[0]"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1, "shape[0]"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],"
     "\"data_offsets\":[0,1]}}", 1, "9 dimensions"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "data_offsets"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "data_offsets"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,\"1\"]}}", 1, "data_offsets"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 1, "not inside"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", 1, "not inside"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 1, "not inside"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],"
     "\"data_offsets\":[9223372036854775807,9223372036854775807]}}", 1, "not inside"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],"
     "\"data_offsets\":[0,99999999999999999999]}}", 1, "JSON"},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,2]}}", 2, "need 4"},
    {"{\"t\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]}}", 2, "whole number"},
    {"{\"t\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],"
     "\"data_offsets\":[0,0]}}", 0, "whole number"},
    {"{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
      "\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "duplicate"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
      "\"b\":{\"dtype\":\"U8\",\"shape\":[2],"
     "\"data_offsets\":[1,3]}}", 3, "tensors a and b overlap"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
      "\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}", 3, "before tensor b"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 2, "the file has"},
};
/* clang-format on */

START_TEST(header_rules) {
  oproj_status status = open_header(headers[_i].header, headers[_i].bytes);
  if (!headers[_i].words)
    EXPECT_OK(status);
  else
    EXPECT_FAIL(status, OPROJ_ERR_IO, headers[_i].words);
}
END_TEST

START_TEST(header_lengths) {
  oproj_tensors_file *file;
  const char *path = files_path(dir, "f");
  EXPECT_FAIL(oproj_tensors_open(&file, path), OPROJ_ERR_IO, "cannot be opened");
  files_write(dir, "f", "\1\0\0", 3);
  EXPECT_FAIL(oproj_tensors_open(&file, path), OPROJ_ERR_IO, "has 3 bytes");
  files_write(dir, "f", "\3\0\0\0\0\0\0\0{}", 10);
  EXPECT_FAIL(oproj_tensors_open(&file, path), OPROJ_ERR_IO, "header of 3 bytes");
  files_write(dir, "f", "\377\377\377\377\377\377\377\377{}", 10);
  EXPECT_FAIL(oproj_tensors_open(&file, path), OPROJ_ERR_IO, "at most 33554432");
  EXPECT_FAIL(oproj_tensors_open(&file, dir), OPROJ_ERR_IO, "not a regular file");
}
END_TEST

/* JSON nested beyond all reason must be an error, not a stack overflow. */
START_TEST(deep_header) {
  enum { DEPTH = 200000 };
  char *header = malloc(DEPTH + 16);
  strcpy(header, "{\"t\":");
  memset(header + 5, '[', DEPTH);
  header[5 + DEPTH] = '\0';
  EXPECT_FAIL(open_header(header, 0), OPROJ_ERR_IO, "JSON");
  free(header);
}
END_TEST

START_TEST(reads_at_odd_offsets) {
  const uint16_t values[] = {1, 2, 3, 4, 5, 6};
  const files_tensor tensors[] = {{"z", "U8", 1, 3, "abc"}, {"a", "BF16", 2, 3, values}};
  oproj_tensors_file *file;
  for (int pad = 0; pad < 2; pad++) {
    uint16_t got[3];
    files_write_tensors(dir, "f", tensors, 2, pad);
    EXPECT_OK(oproj_tensors_open(&file, files_path(dir, "f")));
    ck_assert_int_eq(oproj_tensors_count(file), 2);
    ck_assert_str_eq(oproj_tensors_at(file, 0)->name, "a");
    ck_assert_ptr_null(oproj_tensors_at(file, 2));
    ck_assert_ptr_null(oproj_tensors_find(file, "b"));
    const oproj_tensor *tensor = oproj_tensors_find(file, "a");
    ck_assert_int_eq(tensor->dimensions, 2);
    EXPECT_OK(oproj_tensors_read(file, tensor, 6, 6, got));
    ck_assert_mem_eq(got, values + 3, 6);
    EXPECT_FAIL(oproj_tensors_read(file, tensor, 6, 7, got), OPROJ_ERR_INVALID, "12 bytes");
    EXPECT_FAIL(oproj_tensors_read(file, tensor, -1, 1, got), OPROJ_ERR_INVALID, "12 bytes");
    oproj_tensors_close(file);
  }
}
END_TEST

START_TEST(truncated_after_open) {
  const files_tensor tensor = {"t", "U8", 1, 8, "12345678"};
  oproj_tensors_file *file;
  char got[8];
  files_write_tensors(dir, "f", &tensor, 1, 0);
  EXPECT_OK(oproj_tensors_open(&file, files_path(dir, "f")));
  const oproj_tensor *found = oproj_tensors_find(file, "t");
  ck_assert_int_eq(truncate(files_path(dir, "f"), found->offset + 4), 0);
  EXPECT_FAIL(oproj_tensors_read(file, found, 0, 8, got), OPROJ_ERR_IO, "more are needed");
  oproj_tensors_close(file);
}
END_TEST

static const oproj_tensor planned[] = {
    {.name = "y\"\n", .dtype = "BF16", .dimensions = 2, .shape = {1, 3}},
    {.name = "a", .dtype = "I64", .dimensions = 1, .shape = {2}},
    {.name = "empty", .dtype = "F32", .dimensions = 2, .shape = {0, 4}},
};

START_TEST(writes_what_it_reads) {
  const uint16_t y[] = {7, 8, 9};
  const int64_t a[] = {-1, 1};
  const oproj_tensors_text texts[] = {{"id", "0000"}, {"k", "v"}};
  oproj_tensors_writer *writer;
  oproj_tensors_file *file;
  const char *path = files_path(dir, "out.safetensors");
  EXPECT_OK(oproj_tensors_create(&writer, path, planned, 3, texts, 2));
  EXPECT_OK(oproj_tensors_write(writer, y, 4));
  EXPECT_OK(oproj_tensors_write(writer, y + 2, 2));
  EXPECT_OK(oproj_tensors_write(writer, a, 16));
  EXPECT_FAIL(oproj_tensors_write(writer, a, 1), OPROJ_ERR_INVALID, "its tensors have 22");
  EXPECT_FAIL(oproj_tensors_rewrite_text(writer, "id", "12345"), OPROJ_ERR_INVALID, "id");
  EXPECT_FAIL(oproj_tensors_rewrite_text(writer, "no", "1234"), OPROJ_ERR_INVALID, "no");
  EXPECT_OK(oproj_tensors_rewrite_text(writer, "id", "abcd"));
  ck_assert(!files_exists(dir, "out.safetensors"));
  EXPECT_OK(oproj_tensors_finish(writer));
  ck_assert_int_eq(files_count(dir), 1);

  EXPECT_OK(oproj_tensors_open(&file, path));
  ck_assert_str_eq(oproj_tensors_path(file), path);
  ck_assert_str_eq(oproj_tensors_metadata(file, "id"), "abcd");
  ck_assert_str_eq(oproj_tensors_metadata(file, "k"), "v");
  ck_assert_ptr_null(oproj_tensors_metadata(file, "none"));
  uint16_t got[3];
  int64_t got_a[2];
  EXPECT_OK(oproj_tensors_read(file, oproj_tensors_find(file, "y\"\n"), 0, 6, got));
  EXPECT_OK(oproj_tensors_read(file, oproj_tensors_find(file, "a"), 0, 16, got_a));
  ck_assert_mem_eq(got, y, sizeof y);
  ck_assert_mem_eq(got_a, a, sizeof a);
  ck_assert_int_eq(oproj_tensors_find(file, "empty")->bytes, 0);
  oproj_tensors_close(file);
}
END_TEST

START_TEST(unfinished_writer_leaves_nothing) {
  oproj_tensors_writer *writer;
  EXPECT_OK(oproj_tensors_create(&writer, files_path(dir, "f"), planned, 3, NULL, 0));
  EXPECT_FAIL(oproj_tensors_finish(writer), OPROJ_ERR_INVALID, "0 bytes were written");
  EXPECT_OK(oproj_tensors_create(&writer, files_path(dir, "f"), planned, 3, NULL, 0));
  oproj_tensors_abandon(writer);
  oproj_tensors_abandon(NULL);
  ck_assert_int_eq(files_count(dir), 0);
}
END_TEST

START_TEST(writer_refuses) {
  oproj_tensors_writer *writer;
  oproj_tensor two[] = {planned[0], planned[0]};
  const char *path = files_path(dir, "f");
  EXPECT_FAIL(oproj_tensors_create(&writer, path, two, 2, NULL, 0), OPROJ_ERR_INVALID, "twice");
  two[0].dtype = "WORD";
  EXPECT_FAIL(oproj_tensors_create(&writer, path, two, 1, NULL, 0), OPROJ_ERR_INVALID, "WORD");
  two[1].shape[0] = -1;
  EXPECT_FAIL(oproj_tensors_create(&writer, path, two + 1, 1, NULL, 0), OPROJ_ERR_INVALID,
              "negative");
  two[1].name = "\xff";
  two[1].shape[0] = 1;
  EXPECT_FAIL(oproj_tensors_create(&writer, path, two + 1, 1, NULL, 0), OPROJ_ERR_INVALID, "UTF-8");
  EXPECT_FAIL(oproj_tensors_create(&writer, files_path(dir, "no/f"), planned, 3, NULL, 0),
              OPROJ_ERR_IO, "No such file");
  ck_assert_int_eq(files_count(dir), 0);
}
END_TEST

START_TEST(reader_and_writer_refuse_special_files) {
  oproj_tensors_writer *writer;
  oproj_tensors_file *file;
  struct stat facts;
  const char *path = files_path(dir, "fifo");
  ck_assert_int_eq(mkfifo(path, 0600), 0);
  EXPECT_FAIL(oproj_tensors_open(&file, path), OPROJ_ERR_IO, "regular");
  EXPECT_FAIL(oproj_tensors_create(&writer, path, planned, 3, NULL, 0), OPROJ_ERR_IO, "regular");
  EXPECT_FAIL(oproj_tensors_create(&writer, dir, planned, 3, NULL, 0), OPROJ_ERR_IO, "regular");
  EXPECT_FAIL(oproj_tensors_create(&writer, "", planned, 3, NULL, 0), OPROJ_ERR_INVALID, "empty");
  ck_assert_int_eq(lstat(path, &facts), 0);
  ck_assert(S_ISFIFO(facts.st_mode));
  ck_assert_int_eq(files_count(dir), 1);
}
END_TEST

/* A link stays one, and what it names gets the bytes, whether or not that was there. */
START_TEST(writer_follows_links) {
  const int64_t bytes = 22;
  const char data[22] = {0};
  oproj_tensors_writer *writer;
  struct stat facts;
  const char *link = files_path(dir, "link");
  ck_assert_int_eq(mkdir(files_path(dir, "sub"), 0700), 0);
  ck_assert_int_eq(symlink("sub/real", link), 0);
  for (int i = 0; i < 2; i++) {
    EXPECT_OK(oproj_tensors_create(&writer, link, planned, 3, NULL, 0));
    EXPECT_OK(oproj_tensors_write(writer, data, bytes));
    EXPECT_OK(oproj_tensors_finish(writer));
    ck_assert_int_eq(lstat(link, &facts), 0);
    ck_assert(S_ISLNK(facts.st_mode));
    ck_assert_int_eq(lstat(files_path(dir, "sub/real"), &facts), 0);
    ck_assert(S_ISREG(facts.st_mode));
  }
  ck_assert_int_eq(symlink("loop", files_path(dir, "loop")), 0);
  EXPECT_FAIL(oproj_tensors_create(&writer, files_path(dir, "loop"), planned, 3, NULL, 0),
              OPROJ_ERR_IO, "links");
}
END_TEST

int main(void) {
  Suite *suite = suite_create("safetensors");
  TCase *cases = tcase_create("all");
  tcase_add_checked_fixture(cases, setup, teardown);
  tcase_add_loop_test(cases, header_rules, 0, sizeof headers / sizeof headers[0]);
  tcase_add_test(cases, header_lengths);
  tcase_add_test(cases, deep_header);
  tcase_add_test(cases, reads_at_odd_offsets);
  tcase_add_test(cases, truncated_after_open);
  tcase_add_test(cases, writes_what_it_reads);
  tcase_add_test(cases, unfinished_writer_leaves_nothing);
  tcase_add_test(cases, writer_refuses);
  tcase_add_test(cases, reader_and_writer_refuse_special_files);
  tcase_add_test(cases, writer_follows_links);
  suite_add_tcase(suite, cases);
  return run_suite(suite);
}
