/* replay.c - feeds a target the files named on the command line, and those in folders named there.
 * Says how many; a finding ends it as it would end the fuzzer. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "fuzz.h"

enum { MOST_BYTES = 1 << 20 };

static int feed_file(const char *path) {
  uint8_t *data = malloc(MOST_BYTES);
  FILE *file = fopen(path, "rb");
  if (!data || !file) {
    fprintf(stderr, "%s cannot be read\n", path);
    exit(1);
  }
  size_t size = fread(data, 1, MOST_BYTES, file);
  fclose(file);
  /* Exactly as large as the input, so that a sanitizer sees a byte too many. */
  uint8_t *exact = realloc(data, size + (size == 0));
  LLVMFuzzerTestOneInput(exact, size);
  free(exact);
  return 1;
}

static int feed(const char *path) {
  struct stat facts;
  if (stat(path, &facts) != 0 || !S_ISDIR(facts.st_mode)) return feed_file(path);
  int count = 0;
  DIR *folder = opendir(path);
  for (struct dirent *entry; folder && (entry = readdir(folder));) {
    char *inside;
    if (entry->d_name[0] == '.' || asprintf(&inside, "%s/%s", path, entry->d_name) < 0) continue;
    count += feed(inside);
    free(inside);
  }
  if (folder) closedir(folder);
  return count;
}

int main(int argc, char **argv) {
  int count = 0;
  for (int i = 1; i < argc; i++) count += feed(argv[i]);
  printf("%d inputs\n", count);
  return count == 0;
}
