/* fuzz.h - what a fuzz target is: one parser of foreign files, fed with any bytes.
 *
 *   fuzz_NAME.c   a target
 *   replay.c      a main that feeds it files and folders of files: the corpus, in every test run
 *   corpus/NAME   inputs worth keeping: valid ones to start from, and every finding
 *
 * With the preset `fuzz` (clang) each target is also built as fuzz_NAME with libFuzzer's main. */
#ifndef TESTS_FUZZ_H
#define TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A copy of the bytes with a NUL behind them, as oproj_weights_read_text gives it. */
char *fuzz_text(const uint8_t *data, size_t size);

#endif /* TESTS_FUZZ_H */
