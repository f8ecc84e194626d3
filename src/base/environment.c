/* environment.c - owns the names and the legal values of oproj's variables. */
#include "base/environment.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/log.h"

enum { MOST_WORDS = 4 };

typedef struct variable {
  const char *name;
  const char *words[MOST_WORDS]; /* none: seconds */
  int standard;                  /* the word's number, or the seconds */
  const char *wanted;
} variable;

#define SWITCH \
  { "0", "1" }

static const variable variables[OPROJ_ENVIRONMENT_COUNT] = {
    [OPROJ_ENVIRONMENT_BIND] = {"OPROJ_BIND", SWITCH, 1, "0 or 1"},
    [OPROJ_ENVIRONMENT_DEADLINE] = {"OPROJ_DEADLINE", {NULL}, 30, "seconds up to 1e6, 0 for none"},
    [OPROJ_ENVIRONMENT_LOG] = {"OPROJ_LOG",
                               {"error", "warn", "info", "debug"},
                               1,
                               "error, warn, info or debug"},
    [OPROJ_ENVIRONMENT_PDL] = {"OPROJ_PDL", SWITCH, 1, "0 or 1"},
    [OPROJ_ENVIRONMENT_PUSH] = {"OPROJ_PUSH", SWITCH, 0, "0 or 1"},
    [OPROJ_ENVIRONMENT_TERMINAL] = {"OPROJ_TERMINAL", SWITCH, 0, "0 or 1"}};

/* Of scripts and tests: what their names begin with. */
static const char *const others[] = {"OPROJ_JOBS=", "OPROJ_PREFIX=", "OPROJ_TEST_",
                                     "OPROJ_REQUIRE_"};

/* ---- values --------------------------------------------------------------------------------- */

/* 0, and *word or *seconds as the variable says, or nothing where it is not set; else -1. */
static int read_value(const variable *v, int *word, double *seconds) {
  const char *text = getenv(v->name);
  char *end;
  if (!text) return 0;
  for (int i = 0; i < MOST_WORDS && v->words[i]; i++) {
    if (strcmp(text, v->words[i]) != 0) continue;
    *word = i;
    return 0;
  }
  if (v->words[0]) return -1;
  double value = strtod(text, &end);
  if (end == text || *end != '\0' || !(value >= 0 && value <= 1e6)) return -1;
  *seconds = value;
  return 0;
}

static void read_or_warn(oproj_base_variable which, int *word, double *seconds) {
  static atomic_flag warned[OPROJ_ENVIRONMENT_COUNT]; /* static: clear */
  const variable *v = &variables[which];
  if (read_value(v, word, seconds) == 0 || atomic_flag_test_and_set(&warned[which])) return;
  oproj_base_log(OPROJ_LOG_WARN, "%s is \"%.200s\"; it must be %s", v->name, getenv(v->name),
                 v->wanted);
}

int oproj_base_word(oproj_base_variable which) {
  int word = variables[which].standard;
  double none;
  read_or_warn(which, &word, &none);
  return word;
}

double oproj_base_seconds(oproj_base_variable which) {
  double seconds = variables[which].standard;
  int none;
  read_or_warn(which, &none, &seconds);
  return seconds;
}

/* ---- for programs --------------------------------------------------------------------------- */

oproj_status oproj_environment_check(const char **name) {
  for (int i = 0; i < OPROJ_ENVIRONMENT_COUNT; i++) {
    const variable *v = &variables[i];
    int word;
    double seconds;
    if (read_value(v, &word, &seconds) == 0) continue;
    if (name) *name = v->name;
    return oproj_fail(OPROJ_ERR_INVALID, "%s is \"%.200s\"; it must be %s", v->name,
                      getenv(v->name), v->wanted);
  }
  return OPROJ_OK;
}

static int is_known(const char *entry) {
  size_t length = strcspn(entry, "=");
  for (int i = 0; i < OPROJ_ENVIRONMENT_COUNT; i++)
    if (strlen(variables[i].name) == length && strncmp(variables[i].name, entry, length) == 0)
      return 1;
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
    if (strncmp(others[i], entry, strlen(others[i])) == 0) return 1;
  return 0;
}

void oproj_environment_unknown(char *names, size_t bytes) {
  size_t used = 0;
  if (bytes > 0) names[0] = '\0';
  for (char **entry = environ; entry && *entry; entry++) {
    if (strncmp(*entry, "OPROJ_", 6) != 0 || is_known(*entry) || used >= bytes) continue;
    used += (size_t)snprintf(names + used, bytes - used, "%s%.*s", used ? ", " : "",
                             (int)strcspn(*entry, "="), *entry);
  }
}
