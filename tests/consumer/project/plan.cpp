// plan.cpp - the public headers from C++: links, and errors come back as sentences.
#include <oproj.h>
#include <oproj/checkpoint.h>
#include <oproj/safetensors.h>
#include <cstdio>
#include <cstring>

int main() {
  oproj_dims dims = {4096, 64, 512, 64, 8, 1024, 128};
  oproj_shard shard;
  if (oproj_plan_shard(&dims, OPROJ_SPLIT_EVEN, 8, 7, &shard) != OPROJ_OK ||
      shard.group_begin != 7 || shard.head_begin != 56 || shard.z_end != 8192) {
    std::fprintf(stderr, "consumer: the last of 8 ranks is planned wrongly\n");
    return 1;
  }
  if (oproj_plan_shard(&dims, OPROJ_SPLIT_EVEN, 3, 0, &shard) != OPROJ_ERR_SHAPE ||
      !std::strstr(oproj_last_error(), "1, 2, 4, 8")) {
    std::fprintf(stderr, "consumer: 3 ranks got \"%s\"\n", oproj_last_error());
    return 1;
  }
  oproj_comm *comm = nullptr;
  oproj_config config = OPROJ_CONFIG_INIT;
  if (oproj_comm_self(&comm) != OPROJ_OK || oproj_comm_size(comm) != 1 ||
      config.struct_size != sizeof config)
    return 1;
  oproj_comm_destroy(comm);
  std::puts("consumer in C++: ok");
  return 0;
}
