/* facts.c - owns the comparison of ranks: the first fact that differs, and who has which value. */
#include "tp/facts.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "tp/comm.h"

enum { SHOWN_VALUES = 4 };

void oproj_facts_add(oproj_facts *facts, const char *name, const char *format, ...) {
  if (facts->count == OPROJ_FACTS_MOST) return;
  char *value = facts->values[facts->count];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(value, OPROJ_FACTS_TEXT, format, arguments);
  va_end(arguments);
  facts->list[facts->count++] = (oproj_fact){.name = name, .value = value};
}

/* ---- sheets --------------------------------------------------------------------------------- */

oproj_status oproj_facts_pack(const oproj_fact *facts, int32_t count,
                              char sheet[OPROJ_FACTS_SHEET]) {
  size_t used = 0;
  memset(sheet, 0, OPROJ_FACTS_SHEET);
  REQUIRE(count >= 0 && count <= OPROJ_FACTS_MOST && (facts || count == 0), OPROJ_ERR_INVALID,
          "%d facts; 0 to %d can be compared", count, OPROJ_FACTS_MOST);
  for (int32_t i = 0; i < count; i++) {
    REQUIRE(facts[i].name && *facts[i].name && facts[i].value, OPROJ_ERR_INVALID,
            "fact %d has no name or no value", i);
    const char *words[] = {facts[i].name, facts[i].value};
    for (int w = 0; w < 2; w++) {
      size_t length = strnlen(words[w], OPROJ_FACTS_TEXT - 1);
      REQUIRE(used + length + 2 <= OPROJ_FACTS_SHEET, OPROJ_ERR_INVALID,
              "the facts up to %s exceed %d bytes", facts[i].name, OPROJ_FACTS_SHEET);
      memcpy(sheet + used, words[w], length);
      used += length + 1;
    }
  }
  return OPROJ_OK;
}

static const char *next_word(const char *word) {
  return word + strlen(word) + 1;
}

/* ---- words ---------------------------------------------------------------------------------- */

/* Text that grows in a buffer and is cut at its end. */
typedef struct line {
  char text[768];
  size_t used;
} line;

static void say(line *l, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void say(line *l, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int written = vsnprintf(l->text + l->used, sizeof l->text - l->used, format, arguments);
  va_end(arguments);
  if (written < 0) return;
  l->used += (size_t)written;
  if (l->used >= sizeof l->text) l->used = sizeof l->text - 1;
}

/* "rank 3" or "ranks 0, 2 to 7": those whose value is `value`. */
static void say_ranks(line *l, const char *const *values, int32_t size, const char *value) {
  int32_t holders = 0;
  for (int32_t r = 0; r < size; r++) holders += strcmp(values[r], value) == 0;
  say(l, " on rank%s ", holders == 1 ? "" : "s");
  const char *between = "";
  for (int32_t r = 0; r < size; r++) {
    if (strcmp(values[r], value) != 0) continue;
    int32_t last = r;
    while (last + 1 < size && strcmp(values[last + 1], value) == 0) last++;
    say(l, "%s%d", between, r);
    if (last > r) say(l, last == r + 1 ? ", %d" : " to %d", last);
    between = ", ";
    r = last;
  }
}

static oproj_status differs(const char *name, const char *const *values, int32_t size) {
  line l = {.used = 0};
  int shown = 0;
  for (int32_t r = 0; r < size; r++) {
    int32_t first = 0; /* who has this value */
    while (strcmp(values[first], values[r]) != 0) first++;
    if (first < r) continue;
    if (shown == SHOWN_VALUES) {
      say(&l, ", and others");
      break;
    }
    say(&l, "%s%s", shown ? ", " : "", *values[r] ? values[r] : "nothing");
    say_ranks(&l, values, size, values[r]);
    shown++;
  }
  return oproj_fail(OPROJ_ERR_INVALID, "%s must be the same on all ranks; it is %s", name, l.text);
}

/* ---- verdict -------------------------------------------------------------------------------- */

static int all_equal(const char *const *words, int32_t size) {
  for (int32_t r = 1; r < size; r++)
    if (strcmp(words[r], words[0]) != 0) return 0;
  return 1;
}

oproj_status oproj_facts_judge(const char *sheets, int32_t size) {
  const char **words = malloc((size_t)size * sizeof *words);
  REQUIRE(words, OPROJ_ERR_NOMEM, "no memory to compare %d ranks", size);
  oproj_status status = OPROJ_OK;
  for (int32_t r = 0; r < size; r++) words[r] = sheets + (size_t)r * OPROJ_FACTS_SHEET;
  while (status == OPROJ_OK) {
    const char *name = words[0];
    if (!all_equal(words, size)) {
      status = differs("what is compared", words, size);
      break;
    }
    if (!*name) break;
    for (int32_t r = 0; r < size; r++) words[r] = next_word(words[r]);
    if (!all_equal(words, size)) status = differs(name, words, size);
    for (int32_t r = 0; r < size; r++) words[r] = next_word(words[r]);
  }
  free(words);
  return status;
}

oproj_status oproj_comm_same(oproj_comm *comm, const oproj_fact *facts, int32_t count) {
  char *sheets = malloc(((size_t)comm->size + 1) * OPROJ_FACTS_SHEET);
  oproj_status status = OPROJ_OK;
  REQUIRE_GOTO(sheets, status, agree, OPROJ_ERR_NOMEM, "no memory to compare %d ranks", comm->size);
  status = oproj_facts_pack(facts, count, sheets + (size_t)comm->size * OPROJ_FACTS_SHEET);
agree:
  TRY_GOTO(oproj_comm_agree(comm, status), status, out);
  TRY_GOTO(comm->ops->gather(comm, sheets + (size_t)comm->size * OPROJ_FACTS_SHEET, sheets,
                             OPROJ_FACTS_SHEET),
           status, out);
  TRY_GOTO(oproj_facts_judge(sheets, comm->size), status, out);
out:
  free(sheets);
  return status;
}
