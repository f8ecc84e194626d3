/* ctx_facts.c - owns the list of what the ranks of a context must have in common. */
#include <mpi.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "tp/ctx.h"
#include "tp/facts.h"

/* Switches that change results, or what ranks do together; those that may differ (which GPUs, how
 * many threads, how much is logged) are not here. */
static const char *const switches[] = {"OPROJ_BIND",
                                       "OPROJ_DEADLINE",
                                       "OPROJ_PUSH",
                                       "CUDA_LAUNCH_BLOCKING",
                                       "CUDA_MODULE_LOADING",
                                       "CUDA_DEVICE_MAX_CONNECTIONS",
                                       "CUBLASLT_WORKSPACE_SIZE",
                                       "NVIDIA_TF32_OVERRIDE",
                                       "NCCL_ALGO",
                                       "NCCL_PROTO",
                                       "NCCL_NVLS_ENABLE",
                                       "NCCL_P2P_DISABLE",
                                       "NCCL_P2P_LEVEL",
                                       "NCCL_SHM_DISABLE",
                                       "NCCL_IB_DISABLE",
                                       "NCCL_CUMEM_ENABLE",
                                       "NCCL_BUFFSIZE",
                                       "NCCL_MAX_NCHANNELS",
                                       "NCCL_MIN_NCHANNELS",
                                       "NCCL_COMM_BLOCKING"};

static void add_versions(oproj_facts *facts) {
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  if (MPI_Get_library_version(mpi, &length) != MPI_SUCCESS) mpi[0] = '\0';
  mpi[strcspn(mpi, ",\n")] = '\0';
  unsigned version = oproj_version();
  oproj_facts_add(facts, "oproj's version", "%u.%u.%u", version / 10000, version / 100 % 100,
                  version % 100);
  oproj_facts_add(facts, "the MPI library", "%s", mpi);
}

static void add_switches(oproj_facts *facts) {
  for (size_t i = 0; i < sizeof switches / sizeof switches[0]; i++) {
    const char *value = getenv(switches[i]);
    oproj_facts_add(facts, switches[i], "%s%s%s", value ? "\"" : "not set", value ? value : "",
                    value ? "\"" : "");
  }
}

static void add_dims(oproj_facts *facts, const oproj_dims *d) {
  oproj_facts_add(facts, "hidden", "%d", d->hidden);
  oproj_facts_add(facts, "heads", "%d", d->heads);
  oproj_facts_add(facts, "head_dim", "%d", d->head_dim);
  oproj_facts_add(facts, "rope_dim", "%d", d->rope_dim);
  oproj_facts_add(facts, "groups", "%d", d->groups);
  oproj_facts_add(facts, "lora_rank", "%d", d->lora_rank);
  oproj_facts_add(facts, "quant_block", "%d", d->quant_block);
}

oproj_status oproj_ctx_compare_requests(oproj_comm *comm, const oproj_dims *dims,
                                        const oproj_config *config) {
  static const char *const splits[] = {"even", "uneven"};
  static const char *const reduces[] = {"all", "scatter", "vendor", "none"};
  static const char *const paths[] = {"auto",  "reference", "portable", "grouped",
                                      "fused", "library",   "decode"};
  oproj_facts facts = {.count = 0};
  add_versions(&facts);
  add_dims(&facts, dims);
  oproj_facts_add(&facts, "max_tokens", "%d", config->max_tokens);
  oproj_facts_add(&facts, "split", "%s", splits[config->split == OPROJ_SPLIT_UNEVEN]);
  oproj_facts_add(&facts, "reduce", "%s", reduces[config->reduce]);
  oproj_facts_add(&facts, "path", "%s", paths[config->path]);
  oproj_facts_add(&facts, "chunk_tokens", "%lld", (long long)config->chunk_tokens);
  oproj_facts_add(&facts, "the backend asked for", "%s", config->backend ? config->backend : "any");
  oproj_facts_add(&facts, "the threshold of path library", "%d tokens",
                  OPROJ_KERNELS_LIBRARY_TOKENS);
  oproj_facts_add(&facts, "the threshold of the reduction", "%d bytes", OPROJ_TP_GATHER_BYTES);
  add_switches(&facts);
  return oproj_comm_same(comm, facts.list, facts.count);
}

oproj_status oproj_ctx_compare_switches(oproj_comm *comm) {
  oproj_facts facts = {.count = 0};
  add_switches(&facts);
  return oproj_comm_same(comm, facts.list, facts.count);
}

oproj_status oproj_ctx_compare_devices(oproj_ctx *ctx) {
  oproj_facts facts = {.count = 0};
  int32_t capability = ctx->ops->capability(ctx->kernels);
  char versions[OPROJ_FACTS_TEXT];
  oproj_facts_add(&facts, "the backend", "%s", ctx->ops->name);
  oproj_facts_add(&facts, "the GPU's compute capability", "%d.%d", capability / 10,
                  capability % 10);
  oproj_versions_describe(versions, sizeof versions);
  if (!ctx->ops->host) oproj_facts_add(&facts, "the GPU libraries", "%s", versions);
  return oproj_comm_same(ctx->comm, facts.list, facts.count);
}
