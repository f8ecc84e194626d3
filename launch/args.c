/* args.c - strict parsing; ranks other than 0 keep silent, so that a mistake is reported once. */
#include "args.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job.h"

void args_parse(const struct argp *argp, int argc, char **argv, void *into) {
  argp_err_exit_status = ARGS_EXIT_USAGE;
  if (job_launched_rank() > 0) {
    /* argp writes to these streams only. */
    if (!freopen("/dev/null", "w", stderr) || !freopen("/dev/null", "w", stdout))
      exit(ARGS_EXIT_USAGE);
  }
  if (argp_parse(argp, argc, argv, 0, NULL, into) != 0) exit(ARGS_EXIT_USAGE);
}

int64_t args_integer(const struct argp_state *state, const char *flag, const char *text,
                     int64_t least, int64_t most) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  bool digits =
      text[0] == '-' ? text[1] >= '0' && text[1] <= '9' : text[0] >= '0' && text[0] <= '9';
  if (!digits || *end != '\0' || errno == ERANGE || value < least || value > most)
    argp_error(state, "%s is \"%s\"; it must be a whole number from %lld to %lld", flag, text,
               (long long)least, (long long)most);
  return value;
}

int args_word(const struct argp_state *state, const char *flag, const char *text,
              const char *const words[]) {
  char list[256] = "";
  for (int i = 0; words[i]; i++) {
    if (strcmp(text, words[i]) == 0) return i;
    if (i > 0) strncat(list, ", ", sizeof list - strlen(list) - 1);
    strncat(list, words[i], sizeof list - strlen(list) - 1);
  }
  argp_error(state, "%s is \"%s\"; it must be one of %s", flag, text, list);
  return -1;
}

error_t args_take_dir(const struct argp_state *state, const char **dir, char *text) {
  if (*dir) argp_error(state, "\"%s\" is one argument too many", text);
  *dir = text;
  return 0;
}
