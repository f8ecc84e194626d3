/* test_config.c - config.json in its forms, and every refusal. */
#include "support/checkpoints.h"
#include "support/expect.h"
#include "weights/weights.h"

static char *dir;
static oproj_weights_config config;

static void setup(void) {
  dir = files_make_dir();
  memset(&config, 0, sizeof config);
}

static void teardown(void) {
  oproj_weights_config_free(&config);
  files_remove(dir);
}

static oproj_status read_text(const char *text) {
  files_write_text(dir, "config.json", text);
  return oproj_weights_config_read(files_path(dir, "config.json"), &config);
}

/* The small config with one text replaced. */
static oproj_status read_changed(const char *from, const char *to) {
  files_write_text(dir, "config.json", small_config);
  files_replace(dir, "config.json", from, to);
  return oproj_weights_config_read(files_path(dir, "config.json"), &config);
}

static void expect_rope(const oproj_rope *rope, double theta, double factor) {
  ck_assert_double_eq(rope->theta, theta);
  ck_assert_double_eq(rope->factor, factor);
  ck_assert_double_eq(rope->beta_fast, 32);
  ck_assert_double_eq(rope->beta_slow, 1);
  ck_assert_int_eq(rope->original_max_position, 65536);
}

START_TEST(v4) {
  EXPECT_OK(read_text(small_config));
  const oproj_model *model = &config.model;
  ck_assert_str_eq(model->model_type, "deepseek_v4");
  ck_assert_int_eq(model->dims.hidden, SMALL_HIDDEN);
  ck_assert_int_eq(model->dims.heads, 3);
  ck_assert_int_eq(model->dims.head_dim, 128);
  ck_assert_int_eq(model->dims.rope_dim, 64);
  ck_assert_int_eq(model->dims.groups, 3);
  ck_assert_int_eq(model->dims.lora_rank, 128);
  ck_assert_int_eq(model->dims.quant_block, 128);
  ck_assert_int_eq(model->layers, 2);
  ck_assert_int_eq(model->max_position, 1048576);
  ck_assert_int_eq(model->exact, 0);
  expect_rope(&model->plain, 10000, 1);
  expect_rope(&model->compressed, 160000, 16);
  ck_assert_int_eq(config.compress_ratio[0], 0);
  ck_assert_int_eq(config.compress_ratio[1], 4);
  ck_assert(!oproj_weights_is_compressed(model, 1));
  ck_assert(oproj_weights_is_compressed(model, 2));
  ck_assert_str_eq(config.text, small_config);
}
END_TEST

static const char v41_text[] =
    "{\"model_type\": \"deepseek_v41\", \"text_config\": {\"model_type\": \"deepseek_v41_text\","
    "\"hidden_size\": 5120, \"num_attention_heads\": 64, \"head_dim\": 512,"
    "\"qk_rope_head_dim\": 64, \"o_groups\": 8, \"o_lora_rank\": 1024, \"num_hidden_layers\": 4,"
    "\"max_position_embeddings\": 1048576, \"rope_parameters\": {"
    "\"main\": {\"rope_theta\": 10000.0, \"rope_type\": \"default\"},"
    "\"compress\": {\"rope_theta\": 160000.0, \"rope_type\": \"yarn\", \"factor\": 16.0,"
    "\"beta_fast\": 32, \"beta_slow\": 1, \"original_max_position_embeddings\": 65536}},"
    "\"layer_types\": [\"sliding_attention\", \"sparse\", \"heavy\", \"other\", \"draft\"],"
    "\"compress_rates\": {\"sparse\": 1, \"heavy\": 128, \"sliding_attention\": 7}}}";

START_TEST(v41_nested) {
  EXPECT_OK(read_text(v41_text));
  const oproj_model *model = &config.model;
  ck_assert_str_eq(model->model_type, "deepseek_v41");
  ck_assert_int_eq(model->dims.quant_block, 32);
  expect_rope(&model->plain, 10000, 1);
  expect_rope(&model->compressed, 160000, 16);
  const int32_t ratios[] = {0, 1, 128, 0};
  ck_assert_mem_eq(config.compress_ratio, ratios, sizeof ratios);
  ck_assert(!oproj_weights_is_compressed(model, 0));
  ck_assert(oproj_weights_is_compressed(model, 1));
}
END_TEST

START_TEST(accepted_forms) {
  EXPECT_OK(read_changed("\"type\": \"yarn\"", "\"rope_type\": \"yarn\""));
  oproj_weights_config_free(&config);
  EXPECT_OK(read_changed("\"quantization_config\"", "\"oproj_exact\": true, \"other\""));
  ck_assert_int_eq(config.model.dims.quant_block, 128);
  ck_assert_int_eq(config.model.exact, 1);
  oproj_weights_config_free(&config);
  EXPECT_OK(read_changed("[128, 128]", "[32, 32]"));
  ck_assert_int_eq(config.model.dims.quant_block, 32);
  oproj_weights_config_free(&config);
  EXPECT_OK(read_changed("\"rope_scaling\"", "\"rope_unscaled\""));
  ck_assert_double_eq(config.model.compressed.factor, 1);
}
END_TEST

static const struct {
  const char *from, *to;
  oproj_status status;
  const char *words;
} refusals[] = {
    {"\"deepseek_v4\"", "\"llama\"", OPROJ_ERR_UNSUPPORTED, "\"llama\""},
    {"\"model_type\"", "\"type\"", OPROJ_ERR_IO, "model_type is missing"},
    {"\"deepseek_v4\"", "4", OPROJ_ERR_IO, "model_type is not a string"},
    {"{\"model_type\"", "{\"text_config\": 1, \"model_type\"", OPROJ_ERR_IO, "text_config"},
    {"\"hidden_size\": 200", "\"hidden_size\": 0", OPROJ_ERR_IO, "hidden_size is 0"},
    {"\"hidden_size\": 200", "\"hidden_size\": 2e2", OPROJ_ERR_IO, "hidden_size is not an integer"},
    {"\"hidden_size\": 200", "\"hidden_size\": 99999999999", OPROJ_ERR_IO, "hidden_size is 9999"},
    {"\"hidden_size\": 200,", "", OPROJ_ERR_IO, "hidden_size is missing"},
    {"\"hidden_size\": 200", "\"head_dim\": 1, \"hidden_size\": 200", OPROJ_ERR_IO, "duplicate"},
    {"\"num_attention_heads\": 3", "\"num_attention_heads\": 4", OPROJ_ERR_SHAPE, "o_groups 3"},
    {"_head_dim\": 64", "_head_dim\": 63", OPROJ_ERR_SHAPE, "qk_rope_head_dim 63"},
    {"_head_dim\": 64", "_head_dim\": 130", OPROJ_ERR_SHAPE, "qk_rope_head_dim 130"},
    {"\"head_dim\": 128", "\"head_dim\": 130", OPROJ_ERR_SHAPE, "head_dim 130"},
    {"\"o_lora_rank\": 128", "\"o_lora_rank\": 100", OPROJ_ERR_SHAPE, "o_lora_rank 100"},
    {"\"num_attention_heads\": 3,\n \"head_dim\": 128",
     "\"num_attention_heads\": 16777215, \"head_dim\": 256", OPROJ_ERR_SHAPE, "below 2^31"},
    {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0", OPROJ_ERR_IO, "num_hidden_layers"},
    {"\"num_hidden_layers\": 2", "\"num_hidden_layers\": 4", OPROJ_ERR_IO, "has 3 entries"},
    {"[0, 4, 0]", "[0, -4, 0]", OPROJ_ERR_IO, "compress_ratios[1]"},
    {"[0, 4, 0]", "[0, \"4\", 0]", OPROJ_ERR_IO, "compress_ratios[1]"},
    {"[0, 4, 0]", "4", OPROJ_ERR_IO, "compress_ratios is not a list"},
    {"\"compress_ratios\"", "\"ratios\"", OPROJ_ERR_IO, "neither compress_ratios"},
    {"\"compress_ratios\": [0, 4, 0]", "\"layer_types\": [\"a\", \"b\"]", OPROJ_ERR_IO, "neither"},
    {"\"compress_ratios\": [0, 4, 0]", "\"layer_types\": [\"a\"], \"compress_rates\": {}",
     OPROJ_ERR_IO, "layer_types has 1"},
    {"\"compress_ratios\": [0, 4, 0]", "\"layer_types\": [\"a\", 1], \"compress_rates\": {}",
     OPROJ_ERR_IO, "layer_types[1]"},
    {"\"compress_ratios\": [0, 4, 0]",
     "\"layer_types\": [\"a\", \"a\"], \"compress_rates\": {\"a\": -1}", OPROJ_ERR_IO, "a is -1"},
    {"[128, 128]", "[128, 32]", OPROJ_ERR_IO, "weight_block_size"},
    {"[128, 128]", "[64, 64]", OPROJ_ERR_IO, "weight_block_size"},
    {"[128, 128]", "[128]", OPROJ_ERR_IO, "weight_block_size"},
    {"\"weight_block_size\"", "\"block\"", OPROJ_ERR_IO, "weight_block_size is missing"},
    {"\"rope_theta\": 10000", "\"rope_theta\": -1", OPROJ_ERR_IO, "rope_theta"},
    {"\"rope_theta\": 10000", "\"rope_theta\": \"x\"", OPROJ_ERR_IO, "rope_theta is not a number"},
    {"\"compress_rope_theta\"", "\"theta\"", OPROJ_ERR_IO, "compress_rope_theta is missing"},
    {"\"yarn\"", "\"linear\"", OPROJ_ERR_UNSUPPORTED, "\"linear\""},
    {"\"type\": \"yarn\", ", "", OPROJ_ERR_IO, "neither rope_type nor type"},
    {"\"factor\": 16", "\"factor\": 0", OPROJ_ERR_IO, "factor is 0"},
    {"\"beta_fast\": 32", "\"beta_fast\": 1", OPROJ_ERR_IO, "beta_fast 1"},
    {"\"rope_scaling\"", "\"rope_parameters\": {\"main\": {}}, \"x\"", OPROJ_ERR_IO, "compress"},
    {"1048576", "0", OPROJ_ERR_IO, "max_position_embeddings"},
    {"\"model_type\"", "model_type", OPROJ_ERR_IO, "JSON"},
};

START_TEST(refused) {
  EXPECT_FAIL(read_changed(refusals[_i].from, refusals[_i].to), refusals[_i].status,
              refusals[_i].words);
}
END_TEST

START_TEST(missing_file) {
  EXPECT_FAIL(oproj_weights_config_read(files_path(dir, "config.json"), &config), OPROJ_ERR_IO,
              "config.json: cannot be opened");
  EXPECT_FAIL(oproj_weights_config_read(dir, &config), OPROJ_ERR_IO, "regular file");
}
END_TEST

int main(void) {
  Suite *suite = suite_create("config");
  TCase *cases = tcase_create("all");
  tcase_add_checked_fixture(cases, setup, teardown);
  tcase_add_test(cases, v4);
  tcase_add_test(cases, v41_nested);
  tcase_add_test(cases, accepted_forms);
  tcase_add_loop_test(cases, refused, 0, sizeof refusals / sizeof refusals[0]);
  tcase_add_test(cases, missing_file);
  suite_add_tcase(suite, cases);
  return run_suite(suite);
}
