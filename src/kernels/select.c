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

enum { FIRST_SM = 80 }; /* bf16 arithmetic and 64-bit tensor addressing begin here */

oproj_status oproj_path_choose(const oproj_path_query *query, oproj_path_choice *out) {
  REQUIRE(query && out, OPROJ_ERR_INVALID, "query and out must not be NULL");
  REQUIRE(query->tokens >= 0, OPROJ_ERR_INVALID, "tokens is %d; it must not be negative",
          query->tokens);
  REQUIRE(query->quant_block == 32 || query->quant_block == 128, OPROJ_ERR_INVALID,
          "quant_block is %d; it must be 32 or 128", query->quant_block);
  if (query->sm == 0) {
    *out = (oproj_path_choice){OPROJ_PATH_REFERENCE, "reference",
                               "no GPU: every stage runs in plain C on the host"};
    return OPROJ_OK;
  }
  REQUIRE(query->sm >= FIRST_SM, OPROJ_ERR_UNSUPPORTED,
          "compute capability %d.%d is too old; 8.0 or newer is needed", query->sm / 10,
          query->sm % 10);
  *out = (oproj_path_choice){OPROJ_PATH_PORTABLE, "portable",
                             "one kernel per stage, accumulating in f32; this version has no fused "
                             "or tensor-core kernel for any GPU"};
  return OPROJ_OK;
}
