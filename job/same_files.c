/* same_files.c - owns what tells one checkpoint or input from another. */
#include "job/same_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { PIECE_BYTES = 1 << 16, SAMPLE_BYTES = 4096 };

/* A file to be hashed; one that cannot be read is told apart from all others by the reader that
 * needs it. */
typedef struct file_hash {
  int file;
  int64_t size;
  XXH3_state_t *state;
} file_hash;

static file_hash begin_hash(const char *path) {
  struct stat facts = {.st_size = -1};
  /* A fifo is not waited for. */
  file_hash h = {.file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC),
                 .state = XXH3_createState()};
  if (h.file < 0 || fstat(h.file, &facts) != 0) facts.st_size = -1;
  h.size = facts.st_size;
  if (h.state) XXH3_64bits_reset_withSeed(h.state, (XXH64_hash_t)h.size);
  return h;
}

static void add_bytes(file_hash *h, int64_t begin, int64_t end) {
  char piece[PIECE_BYTES];
  while (h->state && begin < end) {
    size_t wanted = end - begin < PIECE_BYTES ? (size_t)(end - begin) : PIECE_BYTES;
    ssize_t got = pread(h->file, piece, wanted, begin);
    if (got <= 0) return;
    XXH3_64bits_update(h->state, piece, (size_t)got);
    begin += got;
  }
}

static XXH64_hash_t end_hash(file_hash *h) {
  XXH64_hash_t hash = h->state ? XXH3_64bits_digest(h->state) : 0;
  XXH3_freeState(h->state);
  if (h->file >= 0) close(h->file);
  return hash;
}

static XXH64_hash_t hash_all(const char *path) {
  file_hash h = begin_hash(path);
  add_bytes(&h, 0, h.size);
  return end_hash(&h);
}

/* Its size and what it begins with, the header; then the middle and the end. */
static XXH64_hash_t hash_samples(const char *path) {
  file_hash h = begin_hash(path);
  int64_t sample = h.size < SAMPLE_BYTES ? h.size : SAMPLE_BYTES;
  int64_t begins[] = {0, (h.size - sample) / 2, h.size - sample};
  for (int i = 0; i < 3; i++) add_bytes(&h, begins[i], begins[i] + sample);
  return end_hash(&h);
}

static int is_json(const struct dirent *entry) {
  size_t length = strlen(entry->d_name);
  return length >= 5 && strcmp(entry->d_name + length - 5, ".json") == 0;
}

/* Over the JSON files of a folder, in the order of their names. */
static XXH64_hash_t hash_json(const char *dir, int *count) {
  struct dirent **entries = NULL;
  XXH64_hash_t hash = 0;
  *count = scandir(dir, &entries, is_json, alphasort);
  for (int i = 0; i < *count; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, entries[i]->d_name);
    hash =
        XXH3_64bits_withSeed(entries[i]->d_name, strlen(entries[i]->d_name), hash) ^ hash_all(path);
    free(entries[i]);
  }
  free(entries);
  return hash;
}

oproj_status job_compare_files(oproj_comm *comm, const oproj_checkpoint *checkpoint,
                               const char *dir, const char *input) {
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  char layers[32], split[32], json[64], tensors[32], in[32] = "none";
  uint64_t digest = 0;
  int count;
  oproj_status status = oproj_comm_agree(comm, oproj_checkpoint_digest(checkpoint, &digest));
  if (status != OPROJ_OK) return status;
  snprintf(layers, sizeof layers, "%d + %d", model->layers, model->draft_layers);
  snprintf(split, sizeof split, "%d ranks", oproj_checkpoint_split_size(checkpoint));
  XXH64_hash_t hash = hash_json(dir, &count);
  snprintf(json, sizeof json, "%016llx of %d files", (unsigned long long)hash, count);
  snprintf(tensors, sizeof tensors, "%016llx", (unsigned long long)digest);
  if (input) snprintf(in, sizeof in, "%016llx", (unsigned long long)hash_samples(input));
  const oproj_fact facts[] = {{"the model", model->model_type},
                              {"the number of layers", layers},
                              {"what the checkpoint was split for", split},
                              {"the checkpoint's config, index or manifest", json},
                              {"the checkpoint's tensors", tensors},
                              {"the input", in}};
  return oproj_comm_same(comm, facts, sizeof facts / sizeof facts[0]);
}
