/* args.c - takes a command line apart.  Not argp or getopt_long: those accept abbreviations, print
 * on every rank, and end the process where MPI must end first. */
#include "args.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HELP_COLUMN = 24, HELP_WIDTH = 96 };

bool args_wrong(job_state *job, const char *name, const char *format, ...) {
  char sentence[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  if (job->rank == 0) job_say(name, sentence);
  job->code = JOB_USAGE;
  return false;
}

/* ---- help ----------------------------------------------------------------------------------- */

/* Breaks text between words; lines but the first begin in HELP_COLUMN. */
static void print_wrapped(const char *text) {
  const int width = HELP_WIDTH - HELP_COLUMN;
  while ((int)strlen(text) > width) {
    int end = width;
    while (end > 0 && text[end] != ' ') end--;
    if (end == 0) break;
    printf("%.*s\n%*s", end, text, HELP_COLUMN, "");
    text += end + 1;
  }
  printf("%s\n", text);
}

static void print_help(const args_command *command) {
  printf("Usage: %s [OPTION...]%s%s\n%s\n\n", command->name, command->operand ? " " : "",
         command->operand ? command->operand : "", command->summary);
  for (const args_option *o = command->options; o->name; o++) {
    int used = printf("  --%s%s%s", o->name, o->value ? " " : "", o->value ? o->value : "");
    printf("%*s", used < HELP_COLUMN ? HELP_COLUMN - used : 1, "");
    print_wrapped(o->help);
  }
  printf("%-*s%s\n", HELP_COLUMN, "  --help", "show this");
}

/* ---- values --------------------------------------------------------------------------------- */

bool args_integer(job_state *job, const char *name, const char *flag, const char *text,
                  int64_t least, int64_t most, int64_t *out) {
  char *end;
  const char *digits = text[0] == '-' ? text + 1 : text;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (digits[0] < '0' || digits[0] > '9' || *end != '\0' || errno == ERANGE || value < least ||
      value > most)
    return args_wrong(job, name, "--%s is \"%s\"; it must be a whole number from %lld to %lld",
                      flag, text, (long long)least, (long long)most);
  *out = value;
  return true;
}

static bool take_word(job_state *job, const char *name, const args_option *option,
                      const char *text) {
  char list[256] = "";
  for (int i = 0; option->words[i]; i++) {
    if (strcmp(text, option->words[i]) == 0) {
      *option->word = i;
      return true;
    }
    if (i > 0) strncat(list, ", ", sizeof list - strlen(list) - 1);
    strncat(list, option->words[i], sizeof list - strlen(list) - 1);
  }
  return args_wrong(job, name, "--%s is \"%s\"; it must be one of %s", option->name, text, list);
}

static bool take_value(job_state *job, const char *name, const args_option *option,
                       const char *text) {
  if (option->number)
    return args_integer(job, name, option->name, text, option->least, option->most, option->number);
  if (option->word) return take_word(job, name, option, text);
  if (*text == '\0') return args_wrong(job, name, "--%s is empty", option->name);
  *option->text = text;
  return true;
}

/* ---- words ---------------------------------------------------------------------------------- */

static const args_option *find_option(const args_command *command, const char *word,
                                      size_t length) {
  for (const args_option *o = command->options; o->name; o++)
    if (strlen(o->name) == length && strncmp(o->name, word, length) == 0) return o;
  return NULL;
}

/* The flag at argv[*at], with its value there or in the next word; leaves *at at its last word. */
static bool take_flag(job_state *job, const args_command *command, int argc, char **argv, int *at) {
  const char *word = argv[*at], *equals = strchr(word, '=');
  size_t length = equals ? (size_t)(equals - word) : strlen(word);
  const args_option *option =
      strncmp(word, "--", 2) == 0 ? find_option(command, word + 2, length - 2) : NULL;
  if (!option)
    return args_wrong(job, command->name, "\"%.*s\" is no flag; `%s --help` lists them",
                      (int)length, word, command->name);
  if (option->on) {
    if (equals) return args_wrong(job, command->name, "--%s takes no value", option->name);
    *option->on = true;
    return true;
  }
  if (!equals && *at + 1 == argc)
    return args_wrong(job, command->name, "--%s needs a value", option->name);
  return take_value(job, command->name, option, equals ? equals + 1 : argv[++*at]);
}

static bool take_operand(job_state *job, const args_command *command, const char *word) {
  if (!command->operand || *command->operand_text)
    return args_wrong(job, command->name, "\"%s\" is one argument too many", word);
  if (*word == '\0') return args_wrong(job, command->name, "%s is empty", command->operand);
  *command->operand_text = word;
  return true;
}

bool args_parse(job_state *job, const args_command *command, int argc, char **argv) {
  bool flags = true;
  for (int at = 1; at < argc; at++) {
    const char *word = argv[at];
    if (flags && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
      if (job->rank == 0) print_help(command);
      return false;
    }
    if (flags && strcmp(word, "--") == 0) {
      flags = false;
      continue;
    }
    bool taken = flags && word[0] == '-' && word[1] != '\0'
                     ? take_flag(job, command, argc, argv, &at)
                     : take_operand(job, command, word);
    if (!taken) return false;
  }
  if (command->operand && !*command->operand_text)
    return args_wrong(job, command->name, "the checkpoint's folder is missing");
  return true;
}
