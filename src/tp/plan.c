/* plan.c - which rank owns what.  The only place where ownership is decided: the loader, the
 * kernels, split and the tests all read the oproj_shard made here. */
#include <stdio.h>

#include "base/error.h"

static oproj_status check_dims(const oproj_dims *d) {
  const struct {
    const char *name;
    int32_t value;
  } fields[] = {{"hidden", d->hidden},          {"heads", d->heads},   {"head_dim", d->head_dim},
                {"rope_dim", d->rope_dim},      {"groups", d->groups}, {"lora_rank", d->lora_rank},
                {"quant_block", d->quant_block}};
  for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
    REQUIRE(fields[i].value > 0, OPROJ_ERR_INVALID, "%s is %d; it must be positive", fields[i].name,
            fields[i].value);
  REQUIRE(d->heads % d->groups == 0, OPROJ_ERR_INVALID, "%d heads do not divide into %d groups",
          d->heads, d->groups);
  REQUIRE(d->rope_dim % 2 == 0 && d->rope_dim <= d->head_dim, OPROJ_ERR_INVALID,
          "rope_dim is %d; it must be even and at most head_dim, %d", d->rope_dim, d->head_dim);
  REQUIRE(d->quant_block == 32 || d->quant_block == 128, OPROJ_ERR_INVALID,
          "quant_block is %d; it must be 32 or 128", d->quant_block);
  REQUIRE(d->head_dim % d->quant_block == 0, OPROJ_ERR_INVALID,
          "head_dim is %d; it must be a multiple of quant_block, %d", d->head_dim, d->quant_block);
  REQUIRE(d->lora_rank % d->quant_block == 0, OPROJ_ERR_INVALID,
          "lora_rank is %d; it must be a multiple of quant_block, %d", d->lora_rank,
          d->quant_block);
  REQUIRE((int64_t)d->heads * d->head_dim <= INT32_MAX &&
              (int64_t)d->groups * d->lora_rank <= INT32_MAX,
          OPROJ_ERR_INVALID, "%d heads x %d or %d groups x %d exceed 2^31 - 1", d->heads,
          d->head_dim, d->groups, d->lora_rank);
  return OPROJ_OK;
}

/* "1, 2, 4, 8" */
static void list_divisors(int32_t groups, char *text, size_t bytes) {
  size_t used = 0;
  text[0] = '\0';
  for (int32_t n = 1; n <= groups; n++) {
    if (groups % n != 0) continue;
    int written = snprintf(text + used, bytes - used, "%s%d", used ? ", " : "", n);
    if (written < 0 || (size_t)written >= bytes - used) return;
    used += (size_t)written;
  }
}

static oproj_status check_size(const oproj_dims *dims, oproj_split split, int32_t size) {
  if (split == OPROJ_SPLIT_UNEVEN) {
    REQUIRE(size >= 1 && size <= dims->groups, OPROJ_ERR_SHAPE,
            "%d ranks cannot share %d groups; legal sizes are 1 to %d", size, dims->groups,
            dims->groups);
    return OPROJ_OK;
  }
  REQUIRE(split == OPROJ_SPLIT_EVEN, OPROJ_ERR_INVALID, "split is %d; it is no oproj_split", split);
  if (size < 1 || dims->groups % size != 0) {
    char legal[256];
    list_divisors(dims->groups, legal, sizeof legal);
    return oproj_fail(OPROJ_ERR_SHAPE, "%d ranks cannot share %d groups evenly; legal sizes are %s",
                      size, dims->groups, legal);
  }
  return OPROJ_OK;
}

oproj_status oproj_plan_shard(const oproj_dims *dims, oproj_split split, int32_t size, int32_t rank,
                              oproj_shard *out) {
  REQUIRE(dims && out, OPROJ_ERR_INVALID, "dims and out must not be NULL");
  TRY(check_dims(dims));
  TRY(check_size(dims, split, size));
  REQUIRE(rank >= 0 && rank < size, OPROJ_ERR_INVALID, "rank is %d; it must be in [0, %d)", rank,
          size);

  int32_t share = dims->groups / size, larger = dims->groups % size;
  int32_t heads_per_group = dims->heads / dims->groups;
  oproj_shard shard = {.rank = rank, .size = size};
  shard.group_begin = rank * share + (rank < larger ? rank : larger);
  shard.group_end = shard.group_begin + share + (rank < larger ? 1 : 0);
  shard.head_begin = shard.group_begin * heads_per_group;
  shard.head_end = shard.group_end * heads_per_group;
  shard.z_begin = shard.group_begin * dims->lora_rank;
  shard.z_end = shard.group_end * dims->lora_rank;
  *out = shard;
  return OPROJ_OK;
}

void oproj_plan_rows(int32_t tokens, int32_t size, int32_t rank, int32_t *begin, int32_t *end) {
  int64_t chunk = ((int64_t)tokens + size - 1) / size;
  int64_t first = chunk * rank, last = first + chunk;
  *begin = (int32_t)(first < tokens ? first : tokens);
  *end = (int32_t)(last < tokens ? last : tokens);
}
