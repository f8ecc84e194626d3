/* synth_values.c - owns the numbers of made-up checkpoints and inputs.
 *
 * Every number is a hash of where it stands (seed, layer, matrix, index), so any part can be made
 * in any order, by any rank, and is the same.
 *
 * Random: codes look like bell-shaped weights scaled to e4m3's range; scales bring a row's length
 * to about 1, so that N(0,1) inputs give z and y of order 1.
 *
 * Exact: each row of WO_A has 8 entries +-1, spread evenly over its columns, and each row of WO_B
 * has 16, dealt to the groups in turn.  With inputs in {-2..2}, |z| <= 8*2 and |y| <= 16*16 = 256,
 * and so is every partial sum: integers that f32, bf16 and block-quantised e4m3 all hold exactly.
 * An entry is a code 2^-s under a block scale 2^s with s in [-3, 3], so that a lost or shifted
 * scale shows. */
#include <math.h>
#include <string.h>

#include "base/num.h"
#include "weights/weights.h"

enum { A_ENTRIES = 8, B_ENTRIES = 16, EXACT_SHIFTS = 7, CODES_PER_HASH = 8 };

/* ---- hashing ------------------------------------------------------------------------------- */

/* The finaliser of splitmix64: every input bit changes every output bit. */
static inline uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

static inline uint64_t hash(uint64_t key, uint64_t index) {
  return mix(key + (index + 1) * 0x9E3779B97F4A7C15u);
}

/* A number in [0, bound) from a hash; bound is small, so the bias is nothing. */
static inline int64_t below(uint64_t value, int64_t bound) {
  return (int64_t)((value >> 32) * (uint64_t)bound >> 32);
}

uint64_t oproj_weights_fill_key(uint64_t seed, bool draft, int32_t number,
                                oproj_weights_matrix matrix) {
  return hash(hash(hash(seed, draft), (uint64_t)number), (uint64_t)matrix);
}

/* ---- shapes -------------------------------------------------------------------------------- */

static oproj_weights_region whole(const oproj_weights_fill *fill, oproj_weights_part part) {
  int64_t z = (int64_t)fill->dims->groups * fill->dims->lora_rank;
  return oproj_weights_region_of(fill->dims, fill->matrix, part, 0, z);
}

/* ---- random -------------------------------------------------------------------------------- */

/* Four bits choose the power of two below a code's value, weighted like the halves, quarters, ...
 * of a bell curve whose largest value is scaled to 448. */
static const uint8_t exponent_of[16] = {15, 14, 14, 14, 14, 13, 13, 13,
                                        13, 12, 12, 12, 11, 11, 10, 9};

static uint8_t random_code(unsigned byte) {
  unsigned exponent = exponent_of[byte >> 3 & 15], mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) mantissa = 6; /* 0x7F is NaN */
  return (uint8_t)((byte & 128) | exponent << 3 | mantissa);
}

static void random_codes(const oproj_weights_fill *fill, int64_t begin, int64_t count,
                         uint8_t *out) {
  uint8_t codes[256];
  for (unsigned byte = 0; byte < 256; byte++) codes[byte] = random_code(byte);
  /* Rows are multiples of 8 wide, so hashes never straddle a boundary. */
  for (int64_t i = 0; i < count; i += CODES_PER_HASH) {
    uint64_t bits = hash(fill->key, (uint64_t)((begin + i) / CODES_PER_HASH));
    uint8_t *to = out + i;
    for (int k = 0; k < CODES_PER_HASH; k++, bits >>= 8) to[k] = codes[bits & 255];
  }
}

/* The power of two that gives a row of that many columns a length of about 1. */
static int random_shift(int64_t cols) {
  double squares = 0.0;
  for (unsigned byte = 0; byte < 256; byte++) {
    double value = oproj_e4m3_to_f32(random_code(byte));
    squares += value * value / 256.0;
  }
  return (int)lround(-0.5 * log2(squares * (double)cols));
}

/* ---- exact --------------------------------------------------------------------------------- */

/* s of a block's scale 2^s. */
static int exact_shift(const oproj_weights_fill *fill, int64_t block_row, int64_t block_col) {
  int64_t cols = whole(fill, OPROJ_WEIGHTS_SCALE).cols;
  uint64_t bits = hash(fill->key ^ 0x5CA1E5u, (uint64_t)(block_row * cols + block_col));
  return (int)below(bits, EXACT_SHIFTS) - EXACT_SHIFTS / 2;
}

/* Where entry k of a row stands: somewhere in the k-th of equal ranges, for WO_B within a group. */
static int64_t exact_column(const oproj_weights_fill *fill, int k, int64_t cols, uint64_t bits) {
  int64_t base = 0, range = cols, parts = A_ENTRIES, ordinal = k;
  if (fill->matrix == OPROJ_WEIGHTS_B) {
    int64_t groups = fill->dims->groups;
    int64_t group = k % groups;
    range = fill->dims->lora_rank;
    base = group * range;
    ordinal = k / groups;
    parts = B_ENTRIES / groups + (group < B_ENTRIES % groups);
  }
  int64_t first = ordinal * range / parts, last = (ordinal + 1) * range / parts;
  return base + first + below(bits, last - first);
}

static void exact_row(const oproj_weights_fill *fill, int64_t row, int64_t cols, uint8_t *out) {
  int entries = fill->matrix == OPROJ_WEIGHTS_A ? A_ENTRIES : B_ENTRIES;
  int64_t block = fill->dims->quant_block;
  memset(out, 0, (size_t)cols);
  for (int k = 0; k < entries; k++) {
    uint64_t bits = hash(fill->key, (uint64_t)(row * B_ENTRIES + k));
    int64_t col = exact_column(fill, k, cols, bits);
    int shift = exact_shift(fill, row / block, col / block);
    float value = ldexpf(bits & 1 ? -1.0f : 1.0f, -shift);
    out[col] = oproj_e4m3_from_f32(value);
  }
}

/* ---- a matrix ------------------------------------------------------------------------------ */

void oproj_weights_fill_codes(const oproj_weights_fill *fill, int64_t begin, int64_t end,
                              uint8_t *out) {
  int64_t cols = whole(fill, OPROJ_WEIGHTS_WEIGHT).cols;
  if (!fill->exact) {
    random_codes(fill, begin * cols, (end - begin) * cols, out);
    return;
  }
  for (int64_t row = begin; row < end; row++)
    exact_row(fill, row, cols, out + (row - begin) * cols);
}

void oproj_weights_fill_scales(const oproj_weights_fill *fill, void *out) {
  oproj_weights_region blocks = whole(fill, OPROJ_WEIGHTS_SCALE);
  int middle = random_shift(whole(fill, OPROJ_WEIGHTS_WEIGHT).cols);
  for (int64_t i = 0; i < blocks.rows * blocks.cols; i++) {
    uint64_t bits = hash(fill->key ^ 0x5CA1Eu, (uint64_t)i);
    int shift = fill->exact ? exact_shift(fill, i / blocks.cols, i % blocks.cols)
                            : middle + (int)below(bits, 3) - 1;
    if (fill->scale_dtype != OPROJ_SCALE_DTYPE_F32) {
      ((uint8_t *)out)[i] = (uint8_t)(127 + shift);
      continue;
    }
    /* An odd mantissa: no power of two, so that a path which rounds such scales is found out. */
    float scale = ldexpf(1.0f, shift);
    if (!fill->exact)
      scale = oproj_num_from_bits(oproj_num_bits(scale) | (uint32_t)(bits & 0x7FFFFFu) | 1u);
    memcpy((uint8_t *)out + i * 4, &scale, sizeof scale);
  }
}

/* ---- inputs -------------------------------------------------------------------------------- */

/* The sum of four uniforms of 16 bits, shifted and scaled to mean 0 and variance 1. */
static float bell(uint64_t bits) {
  int32_t sum = 0;
  for (int k = 0; k < 4; k++) sum += (int32_t)(bits >> 16 * k & 0xFFFF);
  return (float)(sum - 2 * 0xFFFF) * (1.7320508f / 65536.0f);
}

void oproj_synth_input(const oproj_dims *dims, uint64_t seed, int32_t exact, int32_t tokens,
                       int32_t head_begin, int32_t head_end, uint16_t *attn_out) {
  for (int32_t token = 0; token < tokens; token++)
    for (int32_t head = head_begin; head < head_end; head++) {
      uint64_t key = hash(hash(seed ^ 0x1A9B7u, (uint64_t)token), (uint64_t)head);
      for (int32_t i = 0; i < dims->head_dim; i++) {
        uint64_t bits = hash(key, (uint64_t)i);
        float value = exact ? (float)(below(bits, 5) - 2) : bell(bits);
        *attn_out++ = oproj_bf16_from_f32(value);
      }
    }
}
