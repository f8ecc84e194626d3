/* select.c - which backend serves a context, and which path a call takes on it. */
#include <string.h>

#include "base/error.h"
#include "kernels/kernels.h"

oproj_status oproj_kernels_find(const char *name, const oproj_kernels_ops **out) {
  const char *why_no_cuda = "";
  const oproj_kernels_ops *cuda = oproj_kernels_cuda(&why_no_cuda);
  if (!name) {
    *out = cuda ? cuda : &oproj_kernels_ref;
    return OPROJ_OK;
  }
  if (strcmp(name, "ref") == 0) {
    *out = &oproj_kernels_ref;
    return OPROJ_OK;
  }
  REQUIRE(strcmp(name, "cuda") == 0, OPROJ_ERR_INVALID, "backend is \"%s\"; it must be cuda or ref",
          name);
  REQUIRE(cuda, OPROJ_ERR_UNSUPPORTED, "the cuda backend cannot run: %s", why_no_cuda);
  *out = cuda;
  return OPROJ_OK;
}

const char *oproj_backend_missing(const char *name) {
  const char *why = "there is no backend of that name";
  if (name && strcmp(name, "ref") == 0) return NULL;
  if (name && strcmp(name, "cuda") == 0 && oproj_kernels_cuda(&why)) return NULL;
  return why;
}

/* ---- paths --------------------------------------------------------------------------------- */

enum {
  FIRST_SM = 80, /* bf16 arithmetic and 64-bit tensor addressing begin here */
  FUSED_TOKENS = 32,
  USUAL_RESIDENT = 132 /* multiprocessors of an H100 or H200 */
};

static int32_t group_cols(const oproj_dims *d) {
  return d->heads / d->groups * d->head_dim;
}

static const char *why_not_sm90(const oproj_path_query *q) {
  if (q->sm != 90)
    return "the FP8 kernels of this version are SM90's; here codes are widened first, which is "
           "slower";
  if (q->no_native) return "this build has no machine code for this GPU";
  return NULL;
}

/* Why SM90's own kernels cannot serve, or NULL. */
static const char *why_not_grouped(const oproj_path_query *q) {
  const char *why = why_not_sm90(q);
  if (why) return why;
  if (q->wo_a != OPROJ_DTYPE_E4M3) return "WO_A is bf16";
  if (q->wo_b != OPROJ_DTYPE_E4M3 && !q->own_out) return "WO_B is bf16";
  if (q->dims.lora_rank % 128 != 0) return "o_lora_rank is no multiple of 128";
  if (group_cols(&q->dims) % 256 != 0) return "a group's heads are no multiple of 256 values";
  if (!q->own_out && (q->groups * q->dims.lora_rank % 256 != 0 || q->dims.hidden % 4 != 0))
    return "z is no multiple of 256 columns, or hidden none of 4";
  return NULL;
}

static const char *why_not_fused(const oproj_path_query *q) {
  const char *why = why_not_grouped(q);
  if (why) return why;
  if (q->tokens > FUSED_TOKENS) return "more than 32 tokens";
  if (q->dims.head_dim != OPROJ_KERNELS_HEAD_DIM || q->dims.rope_dim != OPROJ_KERNELS_ROPE_DIM)
    return "heads are not of 448 + 64 values";
  if (q->has_adapter) return "an adapter needs the bf16 input";
  return NULL;
}

/* fastest: not only whether it can. */
static const char *why_not_decode(const oproj_path_query *q, int fastest) {
  oproj_kernels_decode shape;
  const char *why = why_not_sm90(q);
  if (why) return why;
  if (q->own_out) return "WO_B is the caller's";
  if (q->wo_a != OPROJ_DTYPE_E4M3 || q->wo_b != OPROJ_DTYPE_E4M3) return "a weight is bf16";
  if (q->has_adapter) return "an adapter needs the bf16 input";
  why = oproj_kernels_decode_shape(&q->dims, q->groups,
                                   q->resident > 0 ? q->resident : USUAL_RESIDENT, &shape);
  if (!why && q->tokens > shape.most) return "more tokens than one launch takes";
  if (!why && fastest && q->tokens > shape.tokens)
    why = "so many tokens of so large a share are faster stage by stage";
  return why;
}

static const char *why_not_library(const oproj_path_query *q) {
  if (q->sm != 90 && q->sm != 100 && q->sm != 103)
    return "cuBLASLt has block-scaled FP8 on SM90 and SM100";
  if (q->wo_a != OPROJ_DTYPE_E4M3 || (q->wo_b != OPROJ_DTYPE_E4M3 && !q->own_out))
    return "a weight is bf16";
  if (q->sm == 90 && q->dims.quant_block != 128 && q->unjoined)
    return "WO_B has blocks of 32 that cannot be joined";
  if (q->tokens < OPROJ_KERNELS_LIBRARY_TOKENS) return "fewer than 768 tokens";
  if (q->dims.lora_rank % 128 != 0 || group_cols(&q->dims) % 512 != 0 ||
      q->dims.hidden % 128 != 0 || q->groups * q->dims.lora_rank % 512 != 0)
    return "extents are no multiples of cuBLASLt's blocks";
  if (q->has_adapter) return "an adapter is added before z is rounded";
  return NULL;
}

static oproj_path_choice describe(oproj_path path, const char *reason) {
  static const struct {
    const char *name;
    int32_t exact;
  } words[] = {
      [OPROJ_PATH_REFERENCE] = {"reference", 1},  [OPROJ_PATH_PORTABLE] = {"portable", 1},
      [OPROJ_PATH_GROUPED] = {"grouped-fast", 0}, [OPROJ_PATH_FUSED] = {"fused-fast", 0},
      [OPROJ_PATH_LIBRARY] = {"library-fast", 0}, [OPROJ_PATH_DECODE] = {"decode-fast", 0}};
  return (oproj_path_choice){path, words[path].name, reason, words[path].exact};
}

static oproj_path_choice choose_fastest(const oproj_path_query *q) {
  if (!why_not_decode(q, 1))
    return describe(OPROJ_PATH_DECODE, "few tokens: the whole chain in one launch");
  const char *no_library = why_not_library(q), *why = why_not_grouped(q);
  if (!no_library && q->sm == 90 && q->own_out) no_library = "WO_B is the caller's, WO_A our own";
  if (!no_library)
    return describe(OPROJ_PATH_LIBRARY,
                    q->sm == 90 ? "a large batch: cuBLASLt for WO_B" : "a large batch: cuBLASLt");
  if (why) return describe(OPROJ_PATH_PORTABLE, why);
  if (why_not_fused(q)) return describe(OPROJ_PATH_GROUPED, no_library);
  return describe(OPROJ_PATH_GROUPED,
                  "a quantiser of its own measures faster than the fused one on an H200");
}

static oproj_status choose_forced(const oproj_path_query *q, oproj_path_choice *out) {
  const char *why = NULL;
  switch (q->forced) {
    case OPROJ_PATH_GROUPED:
      why = why_not_grouped(q);
      break;
    case OPROJ_PATH_FUSED:
      why = why_not_fused(q);
      break;
    case OPROJ_PATH_LIBRARY:
      why = why_not_library(q);
      break;
    case OPROJ_PATH_DECODE:
      why = why_not_decode(q, 0);
      break;
    case OPROJ_PATH_REFERENCE:
      why = "a GPU was chosen";
      break;
    case OPROJ_PATH_PORTABLE:
    case OPROJ_PATH_AUTO:
      break;
  }
  *out = describe(q->forced, "forced");
  REQUIRE(!why, OPROJ_ERR_UNSUPPORTED, "the forced path %s cannot serve %d tokens: %s", out->name,
          q->tokens, why);
  return OPROJ_OK;
}

oproj_status oproj_path_choose(const oproj_path_query *query, oproj_path_choice *out) {
  REQUIRE(query && out, OPROJ_ERR_INVALID, "query and out must not be NULL");
  REQUIRE(query->tokens >= 0, OPROJ_ERR_INVALID, "tokens is %d; it must not be negative",
          query->tokens);
  REQUIRE(query->dims.groups > 0 && query->dims.heads > 0, OPROJ_ERR_INVALID,
          "dims must be filled in");
  REQUIRE(query->forced >= OPROJ_PATH_AUTO && query->forced <= OPROJ_PATH_DECODE, OPROJ_ERR_INVALID,
          "forced is %d; it is no oproj_path", (int)query->forced);
  if (query->sm == 0) {
    REQUIRE(query->forced == OPROJ_PATH_AUTO || query->forced == OPROJ_PATH_REFERENCE,
            OPROJ_ERR_UNSUPPORTED, "the forced path needs a GPU");
    *out = describe(OPROJ_PATH_REFERENCE, "no GPU: every stage runs in plain C on the host");
    return OPROJ_OK;
  }
  REQUIRE(query->sm >= FIRST_SM, OPROJ_ERR_UNSUPPORTED,
          "compute capability %d.%d is too old; 8.0 or newer is needed", query->sm / 10,
          query->sm % 10);
  if (query->forced != OPROJ_PATH_AUTO) return choose_forced(query, out);
  *out = choose_fastest(query);
  return OPROJ_OK;
}
