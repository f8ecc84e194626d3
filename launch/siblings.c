/* siblings.c - reads /proc for processes of this one's parent. */
#include "siblings.h"

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

/* The rank in its environment, or -1. */
static int32_t rank_of(const char *pid) {
  static const char *const names[] = {
      "OMPI_COMM_WORLD_RANK=", "PMIX_RANK=", "PMI_RANK=", "SLURM_PROCID="};
  char path[300], *word = NULL;
  size_t bytes = 0;
  int32_t rank = -1;
  snprintf(path, sizeof path, "/proc/%s/environ", pid);
  FILE *file = fopen(path, "re");
  while (file && rank < 0 && getdelim(&word, &bytes, '\0', file) > 0)
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
      if (strncmp(word, names[i], strlen(names[i])) == 0)
        rank = (int32_t)strtol(word + strlen(names[i]), NULL, 10);
  free(word);
  if (file) fclose(file);
  return rank;
}

void siblings_look(sibling *ranks, int32_t size) {
  for (int32_t r = 0; r < size; r++) ranks[r] = SIBLING_UNSEEN;
  DIR *all = opendir("/proc");
  const struct dirent *entry;
  while (all && (entry = readdir(all))) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    sibling state = state_of(entry->d_name);
    int32_t rank = state == SIBLING_UNSEEN ? -1 : rank_of(entry->d_name);
    if (rank >= 0 && rank < size) ranks[rank] = state;
  }
  if (all) closedir(all);
}

int siblings_all_here(int32_t size) {
  static const char *const names[] = {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    const char *text = getenv(names[i]);
    if (text) return strtol(text, NULL, 10) == size;
  }
  return 0;
}
