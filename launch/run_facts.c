/* run_facts.c - owns what tells one checkpoint or input from another. */
#include "run_facts.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { END_BYTES = 4096, TEXT_BYTES = 1 << 20 };

/* Size and last bytes of a file; files that cannot be read are told apart from all others by the
 * reader that needs them. */
static XXH64_hash_t look_at(const char *path, size_t end_bytes) {
  int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a fifo is not waited for */
  struct stat facts = {.st_size = -1};
  char *end = malloc(end_bytes);
  ssize_t got = 0;
  if (file >= 0 && end && fstat(file, &facts) == 0) {
    off_t begin = facts.st_size > (off_t)end_bytes ? facts.st_size - (off_t)end_bytes : 0;
    got = pread(file, end, end_bytes, begin);
  }
  XXH64_hash_t hash =
      XXH3_64bits_withSeed(end, got > 0 ? (size_t)got : 0, (XXH64_hash_t)facts.st_size);
  free(end);
  if (file >= 0) close(file);
  return hash;
}

static int ends_with(const char *text, const char *ending) {
  size_t length = strlen(text), tail = strlen(ending);
  return length >= tail && strcmp(text + length - tail, ending) == 0;
}

static int is_json(const struct dirent *entry) {
  return ends_with(entry->d_name, ".json");
}

static int is_tensors(const struct dirent *entry) {
  return ends_with(entry->d_name, ".safetensors");
}

/* Over the chosen files of a folder, in the order of their names. */
static XXH64_hash_t look_into(const char *dir, int (*chosen)(const struct dirent *),
                              size_t end_bytes, int *count) {
  struct dirent **entries = NULL;
  XXH64_hash_t hash = 0;
  *count = scandir(dir, &entries, chosen, alphasort);
  for (int i = 0; i < *count; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, entries[i]->d_name);
    hash = XXH3_64bits_withSeed(entries[i]->d_name, strlen(entries[i]->d_name), hash) ^
           look_at(path, end_bytes);
    free(entries[i]);
  }
  free(entries);
  return hash;
}

oproj_status run_facts_compare(oproj_comm *comm, const oproj_checkpoint *checkpoint,
                               const char *dir, const char *input) {
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  char layers[32], split[32], json[64], files[64] = "its manifest says", in[32] = "none";
  int count;
  snprintf(layers, sizeof layers, "%d + %d", model->layers, model->draft_layers);
  snprintf(split, sizeof split, "%d ranks", oproj_checkpoint_split_size(checkpoint));
  XXH64_hash_t hash = look_into(dir, is_json, TEXT_BYTES, &count);
  snprintf(json, sizeof json, "%016llx of %d files", (unsigned long long)hash, count);
  /* Of a split checkpoint each host may hold only its ranks' files; the manifest, a JSON file, has
   * the checksums of all. */
  if (oproj_checkpoint_split_size(checkpoint) == 0) {
    hash = look_into(dir, is_tensors, END_BYTES, &count);
    snprintf(files, sizeof files, "%016llx of %d files", (unsigned long long)hash, count);
  }
  if (input) snprintf(in, sizeof in, "%016llx", (unsigned long long)look_at(input, END_BYTES));
  const oproj_fact facts[] = {{"the model", model->model_type},
                              {"the number of layers", layers},
                              {"what the checkpoint was split for", split},
                              {"the checkpoint's config, index or manifest", json},
                              {"the checkpoint's tensors", files},
                              {"the input", in}};
  return oproj_comm_same(comm, facts, sizeof facts / sizeof facts[0]);
}
