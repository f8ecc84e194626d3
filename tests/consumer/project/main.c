/* main.c - a program outside the tree: one rank, one layer from memory, two tokens, y by hand.
 *
 * hidden 2; 2 heads of 32 in 2 groups; lora_rank 32.  Token 0 stands at position 0, which the table
 * leaves unturned; token 1 at position 1, a quarter turn, which inverse RoPE turns back:
 * (x30, x31) -> (x31, -x30).  Input, by head: x0, x30, x31 and zeros:
 *
 *   token 0   head 0: 3, 5, 7       head 1: 2, 0, 0
 *   token 1   head 0: 3, 5, 7       head 1: 0, 4, 0      turned: 3, 7, -5 and 0, 0, -4
 *
 * WO_A: group 0 has z0 = x0 + 2 x30 and z1 = x31; group 1 has z32 = x0 - x31.
 *
 *   token 0   z0 = 3 + 10 = 13   z1 =  7   z32 = 2
 *   token 1   z0 = 3 + 14 = 17   z1 = -5   z32 = 4
 *
 * WO_B: y0 = z0 + z32, y1 = z1 - 2 z32.
 *
 *   token 0   y = 15,  3
 *   token 1   y = 21, -13
 *
 * Weights are bf16, so nothing is quantised and every number is exact. */
#include <oproj.h>
#include <oproj/checkpoint.h>
#include <oproj/safetensors.h>
#include <stdio.h>
#include <string.h>

enum { HIDDEN = 2, HEADS = 2, HEAD_DIM = 32, GROUPS = 2, LORA = 32, TOKENS = 2 };

static uint16_t bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static uint16_t attn_out[TOKENS][HEADS][HEAD_DIM];
static uint16_t wo_a[GROUPS * LORA][HEAD_DIM];
static uint16_t wo_b[HIDDEN][GROUPS * LORA];

static void fill(void) {
  for (int t = 0; t < TOKENS; t++) {
    attn_out[t][0][0] = bf16(3);
    attn_out[t][0][30] = bf16(5);
    attn_out[t][0][31] = bf16(7);
  }
  attn_out[0][1][0] = bf16(2);
  attn_out[1][1][30] = bf16(4);

  wo_a[0][0] = bf16(1);
  wo_a[0][30] = bf16(2);
  wo_a[1][31] = bf16(1);
  wo_a[32][0] = bf16(1);
  wo_a[32][31] = bf16(-1);

  wo_b[0][0] = bf16(1);
  wo_b[0][32] = bf16(1);
  wo_b[1][1] = bf16(1);
  wo_b[1][32] = bf16(-2);
}

static int failed(const char *what) {
  fprintf(stderr, "consumer: %s: %s\n", what, oproj_last_error());
  return 1;
}

int main(void) {
  static const float want[TOKENS][HIDDEN] = {{15, 3}, {21, -13}};
  static const int64_t positions[TOKENS] = {0, 1};
  static const float cos_sin[2][2] = {{1, 0}, {0, 1}}; /* rows: cos, sin */
  const oproj_dims dims = {HIDDEN, HEADS, HEAD_DIM, 2, GROUPS, LORA, 32};
  fill();

  unsigned header = OPROJ_VERSION_MAJOR * 10000 + OPROJ_VERSION_MINOR * 100 + OPROJ_VERSION_PATCH;
  if (oproj_version() != header) {
    fprintf(stderr, "consumer: header %u, library %u\n", header, oproj_version());
    return 1;
  }

  oproj_shard shard;
  if (oproj_plan_shard(&dims, OPROJ_SPLIT_EVEN, 2, 1, &shard) != OPROJ_OK) return failed("plan");
  if (shard.z_begin != LORA || shard.z_end != 2 * LORA) {
    fprintf(stderr, "consumer: rank 1 of 2 holds z [%d, %d)\n", shard.z_begin, shard.z_end);
    return 1;
  }

  oproj_comm *comm = NULL;
  oproj_ctx *ctx = NULL;
  oproj_layer *layer = NULL;
  oproj_config config = OPROJ_CONFIG_INIT;
  config.backend = "ref";
  config.max_tokens = TOKENS;
  oproj_matrix a = {OPROJ_DTYPE_BF16, GROUPS * LORA, HEAD_DIM, wo_a, NULL, 0};
  oproj_matrix b = {OPROJ_DTYPE_BF16, HIDDEN, GROUPS * LORA, wo_b, NULL, 0};
  if (oproj_comm_self(&comm) != OPROJ_OK) return failed("comm");
  if (oproj_ctx_create(&ctx, comm, &dims, &config) != OPROJ_OK) return failed("context");
  if (oproj_layer_create(&layer, ctx, &a, &b) != OPROJ_OK) return failed("layer");

  uint16_t y[TOKENS][HIDDEN];
  memset(y, 0xff, sizeof y);
  oproj_io io;
  memset(&io, 0, sizeof io);
  io.tokens = TOKENS;
  io.attn_out = &attn_out[0][0][0];
  io.positions = positions;
  io.cos_sin = &cos_sin[0][0];
  io.cos_sin_rows = 2;
  io.cos_sin_width = 2;
  io.y = &y[0][0];
  if (oproj_forward(layer, &io, NULL) != OPROJ_OK) return failed("forward");

  int wrong = 0;
  for (int t = 0; t < TOKENS; t++)
    for (int n = 0; n < HIDDEN; n++)
      if (from_bf16(y[t][n]) != want[t][n]) {
        fprintf(stderr, "consumer: y[%d][%d] is %g, by hand it is %g\n", t, n,
                (double)from_bf16(y[t][n]), (double)want[t][n]);
        wrong = 1;
      }

  oproj_layer_destroy(layer);
  oproj_ctx_destroy(ctx);
  oproj_comm_destroy(comm);
  if (!wrong) puts("consumer in C: ok");
  return wrong;
}
