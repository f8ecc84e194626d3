/* siblings.c - reads /proc for processes of this one's parent. */
#include "job/siblings.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the process does, if it is a child of our parent's. */
static sibling state_of(const char *pid) {
  char path[300], text[512] = "";
  snprintf(path, sizeof path, "/proc/%s/stat", pid);
  FILE *file = fopen(path, "re");
  if (!file) return SIBLING_UNSEEN;
  if (!fgets(text, sizeof text, file)) text[0] = '\0';
  fclose(file);
  const char *after_name = strrchr(text, ')'); /* the name may hold anything */
  char state;
  long parent;
  if (!after_name || sscanf(after_name + 1, " %c %ld", &state, &parent) != 2) return SIBLING_UNSEEN;
  if (parent != (long)getppid() || state == 'Z' || state == 'X') return SIBLING_UNSEEN;
  return state == 'T' || state == 't' ? SIBLING_STOPPED : SIBLING_RUNS;
}

/* In this order: a job of Slurm may run mpirun, whose ranks then see Slurm's as well. */
static const char *const rank_names[] = {
    "OMPI_COMM_WORLD_RANK=", "PMIX_RANK=", "PMI_RANK=", "SLURM_PROCID="};
enum { RANK_NAMES = sizeof rank_names / sizeof rank_names[0] };

/* The rank in its environment, or -1; *kind is the number of its name. */
static int32_t rank_of(const char *pid, size_t *kind) {
  char path[300], *word = NULL;
  size_t bytes = 0;
  int32_t rank = -1;
  *kind = RANK_NAMES;
  snprintf(path, sizeof path, "/proc/%s/environ", pid);
  FILE *file = fopen(path, "re");
  while (file && getdelim(&word, &bytes, '\0', file) > 0)
    for (size_t i = 0; i < *kind; i++) {
      size_t length = strlen(rank_names[i]);
      if (strncmp(word, rank_names[i], length) != 0) continue;
      rank = (int32_t)strtol(word + length, NULL, 10);
      *kind = i;
    }
  free(word);
  if (file) fclose(file);
  return rank;
}

/* Whether a script around this rank alone is the parent, in the place of the launcher. */
static int is_wrapped(void) {
  char parent[32];
  size_t mine, its;
  snprintf(parent, sizeof parent, "%ld", (long)getppid());
  return rank_of("self", &mine) >= 0 && rank_of(parent, &its) >= 0 && its == mine;
}

void siblings_look(sibling *ranks, int32_t size) {
  for (int32_t r = 0; r < size; r++) ranks[r] = SIBLING_UNSEEN;
  DIR *all = opendir("/proc");
  const struct dirent *entry;
  while (all && (entry = readdir(all))) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    sibling state = state_of(entry->d_name);
    size_t kind;
    int32_t rank = state == SIBLING_UNSEEN ? -1 : rank_of(entry->d_name, &kind);
    if (rank >= 0 && rank < size) ranks[rank] = state;
  }
  if (all) closedir(all);
}

int32_t siblings_lowest(int32_t rank, int32_t size) {
  sibling *ranks = calloc((size_t)size, sizeof *ranks);
  int32_t lowest = 0;
  if (ranks) siblings_look(ranks, size);
  while (ranks && lowest < rank && ranks[lowest] != SIBLING_RUNS) lowest++;
  free(ranks);
  return lowest;
}

int siblings_all_here(int32_t size) {
  static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"};
  if (is_wrapped()) return 0;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const char *text = getenv(names[i]);
    if (text) return strtol(text, NULL, 10) == size;
  }
  return 0;
}
