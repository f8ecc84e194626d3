/* args.c - takes the command line apart.  Not getopt_long: it accepts abbreviations and prints on
 * every rank. */
#include "args.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cases.h"
#include "job/choose.h"
#include "job/job.h"
#include "rig.h"

/* One flag; exactly one of on, text, number and word is set. */
typedef struct option {
  const char *names; /* "-b --begin": all the ways to write it */
  const char *help;
  bool *on;
  const char **text;
  int64_t *number;
  int64_t least, most;
  int *word;
  const char *const *words; /* ends with NULL */
} option;

static bool speaking;

static args_verdict wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

static args_verdict wrong(const char *format, ...) {
  char sentence[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(sentence, sizeof sentence, format, arguments);
  va_end(arguments);
  if (speaking) job_say(job_program, sentence);
  return ARGS_WRONG;
}

static bool is_name(const option *o, const char *word, size_t length) {
  const char *at = o->names;
  while (*at) {
    size_t name = strcspn(at, " ");
    if (name == length && strncmp(at, word, length) == 0) return true;
    at += name + strspn(at + name, " ");
  }
  return false;
}

static args_verdict take_word(const option *o, const char *flag, const char *text) {
  char list[256] = "";
  for (int i = 0; o->words[i]; i++) {
    if (strcmp(o->words[i], text) == 0) {
      *o->word = i;
      return ARGS_GO;
    }
    size_t used = strlen(list);
    snprintf(list + used, sizeof list - used, "%s%s", i ? ", " : "", o->words[i]);
  }
  return wrong("%s is \"%s\"; it must be one of %s", flag, text, list);
}

static args_verdict take_number(const option *o, const char *flag, const char *text) {
  char *end;
  errno = 0;
  long long value = strtoll(text, &end, 10);
  if (*text < '0' || *text > '9' || *end || errno || value < o->least || value > o->most)
    return wrong("%s is \"%s\"; it must be a whole number from %lld to %lld", flag, text,
                 (long long)o->least, (long long)o->most);
  *o->number = value;
  return ARGS_GO;
}

static args_verdict take_value(const option *o, const char *flag, const char *text) {
  if (o->number) return take_number(o, flag, text);
  if (o->word) return take_word(o, flag, text);
  if (!*text) return wrong("%s is empty", flag);
  *o->text = text;
  return ARGS_GO;
}

/* The flag at argv[*at]; leaves *at at the last word it took. */
static args_verdict take_flag(const option *options, int argc, char **argv, int *at) {
  const char *word = argv[*at];
  const char *equals = strncmp(word, "--", 2) == 0 ? strchr(word, '=') : NULL;
  size_t length = equals ? (size_t)(equals - word) : strlen(word);
  const option *o = options;
  while (o->names && !is_name(o, word, length)) o++;
  if (!o->names) return wrong("\"%s\" is no flag; `oproj-bench --help` lists them", word);
  char flag[32];
  snprintf(flag, sizeof flag, "%.*s", (int)length, word);
  if (o->on) {
    if (equals) return wrong("%s takes no value", flag);
    *o->on = true;
    return ARGS_GO;
  }
  if (!equals && *at + 1 == argc) return wrong("%s needs a value", flag);
  return take_value(o, flag, equals ? equals + 1 : argv[++*at]);
}

static void print_help(const option *options) {
  printf(
      "Usage: oproj-bench CASE [OPTION...]\n"
      "Times one part of the output projection for a range of token counts.\n\nCases:\n");
  for (const bench_case *const *c = bench_cases; *c; c++)
    printf("  %-10s %s\n", (*c)->name, (*c)->summary);
  printf("\nOptions:\n");
  for (const option *o = options; o->names; o++) printf("  %-22s %s\n", o->names, o->help);
  printf("  %-22s %s\n", "-h --help", "show this");
}

static args_verdict finish(bench_args *a) {
  if (!a->which) return wrong("no case was named; `oproj-bench --help` lists them");
  const bench_case *c = bench_case_find(a->which);
  if (!c) return wrong("there is no case \"%s\"; `oproj-bench --help` lists them", a->which);
  if (a->end == 0) a->end = a->begin > 0 ? a->begin : 128;
  if (a->begin == 0) a->begin = 1;
  if (a->end < a->begin)
    return wrong("-e %lld is less than -b %lld", (long long)a->end, (long long)a->begin);
  if (c->loads && !a->dir) return wrong("the case %s needs --dir", a->which);
  if (!c->loads && a->dir) return wrong("the case %s reads no checkpoint: no --dir", a->which);
  if (a->reduce >= 0 && !c->reduces)
    return wrong("the case %s sums nothing: no --reduce", a->which);
  if (a->path != OPROJ_PATH_AUTO && !c->chain)
    return wrong("the case %s is not the whole chain: no --path", a->which);
  if (a->chunk > 0 && !c->overlaps)
    return wrong("the case %s computes nothing beside its sums: no --chunk", a->which);
  if (a->reduce == OPROJ_REDUCE_NONE)
    return wrong("the case %s sums over ranks: no --reduce none", a->which);
  if (a->reduce < 0) a->reduce = OPROJ_REDUCE_ALL;
  if (c->loads && a->share != 1) return wrong("the case %s takes its ranks from mpirun", a->which);
  return ARGS_GO;
}

args_verdict args_parse(bench_args *a, int argc, char **argv, bool speak) {
  static const char *const backends[] = {"auto", "cuda", "ref", NULL};
  static const char *const paths[] = {"auto",  "reference", "portable", "grouped",
                                      "fused", "library",   "decode",   NULL}; /* oproj_path */
  enum { MOST_TOKENS = 1 << 17, MOST_COUNT = 1000000 };
  *a = (bench_args){.factor = 2, .share = 1, .reduce = -1};
  const option options[] = {
      {"-b --begin", "smallest number of tokens (1)", .number = &a->begin, .least = 1,
       .most = MOST_TOKENS},
      {"-e --end", "largest number of tokens (-b where that is given, else 128)", .number = &a->end,
       .least = 1, .most = MOST_TOKENS},
      {"-f --factor", "from one size to the next (2)", .number = &a->factor, .least = 2,
       .most = MOST_TOKENS},
      {"-n --iterations", "calls per graph, rounded up to whole rounds of layers (16; ref 1)",
       .number = &a->iterations, .least = 1, .most = 4096},
      {"-w --warmups", "replays before timing (3; ref 1)", .number = &a->warmups, .least = 1,
       .most = MOST_COUNT},
      {"-r --replays", "timed replays (30; ref 5)", .number = &a->replays, .least = 1,
       .most = MOST_COUNT},
      {"-c --check", "hold results against the backend ref; #wrong > 0 is exit code 1",
       .on = &a->check},
      {"-J --json", "append one JSON line per row to this file", .text = &a->json},
      {"--model", "v4-pro (default), v4-flash, v4.1-flash or tiny", .word = &a->model,
       .words = rig_model_names},
      {"--share", "time one rank's share of this many ranks (1)", .number = &a->share, .least = 1,
       .most = 1024},
      {"--backend", "auto (default), cuda or ref", .word = &a->backend, .words = backends},
      {"--comm", "auto (default: nccl where each rank has a GPU of its own, else mpi), mpi or nccl",
       .word = &a->comm, .words = choose_comms},
      {"--reduce", "of layer and reduce: all (default), scatter or vendor", .word = &a->reduce,
       .words = choose_reduces},
      {"--chunk",
       "of layer: tokens whose sum runs while the next are computed (the library's choice)",
       .number = &a->chunk, .least = 1, .most = MOST_TOKENS},
      {"--path",
       "of forward and layer: auto (default), reference, portable, grouped, fused, library or "
       "decode",
       .word = &a->path, .words = paths},
      {"--warm", "one layer, so that its weights may stay in the cache; of load the page cache",
       .on = &a->warm},
      {"--eager", "plain calls instead of a graph, timed by the host", .on = &a->eager},
      {"--no-naive", "leave out the naive composition, and of load the other ways",
       .on = &a->no_naive},
      {"--dir", "the checkpoint of the case load", .text = &a->dir},
      {NULL}};
  speaking = speak;
  for (int at = 1; at < argc; at++) {
    const char *word = argv[at];
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
      if (speak) print_help(options);
      return ARGS_HELP;
    }
    if (word[0] == '-' && word[1]) {
      args_verdict verdict = take_flag(options, argc, argv, &at);
      if (verdict != ARGS_GO) return verdict;
    } else if (a->which) {
      return wrong("\"%s\" is one word too many", word);
    } else {
      a->which = word;
    }
  }
  return finish(a);
}
