/* args.h - the command line, strictly: what every command shares on top of argp.
 *
 * A command fills a struct of strings and numbers from an argp parser.  Whatever is not understood
 * (unknown flags, words that are no whole numbers, missing arguments) ends the process with exit
 * code 2 and one sentence from rank 0, before anything is started. */
#ifndef OPROJ_LAUNCH_ARGS_H
#define OPROJ_LAUNCH_ARGS_H

#include <argp.h>
#include <stdbool.h>
#include <stdint.h>

enum { ARGS_EXIT_USAGE = 2 };

/* Parses the whole command line of one command; argv[0] is its name for messages. */
void args_parse(const struct argp *argp, int argc, char **argv, void *into);

/* `text` as a whole number in [least, most]; ends with a usage error naming `flag` otherwise. */
int64_t args_integer(const struct argp_state *state, const char *flag, const char *text,
                     int64_t least, int64_t most);

/* The place of `text` in a list of words that ends with NULL; a usage error otherwise. */
int args_word(const struct argp_state *state, const char *flag, const char *text,
              const char *const words[]);

/* The parser's answer to ARGP_KEY_ARG where a command takes one folder, or none. */
error_t args_take_dir(const struct argp_state *state, const char **dir, char *text);

#endif /* OPROJ_LAUNCH_ARGS_H */
