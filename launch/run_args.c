/* run_args.c - owns what `oproj run` takes, and what of it contradicts itself. */
#include "run_args.h"

#include <stdlib.h>
#include <string.h>

#include "args.h"
#include "job/choose.h"

const char *const run_backends[] = {"auto", "ref", "cuda", NULL};

/* "all", "a" or "a:b"; NULL: not given. */
static bool parse_layers(job_state *job, const char *name, run_args *out) {
  const char *text = out->layers;
  enum { MOST = 1 << 20 };
  int64_t begin = 0, end = -1;
  if (text && strcmp(text, "all") != 0) {
    const char *colon = strchrnul(text, ':');
    char *first = strndup(text, (size_t)(colon - text));
    bool right = first && args_integer(job, name, "layers", first, 0, MOST, &begin);
    free(first);
    if (!right) return false;
    end = begin + 1;
    if (*colon && !args_integer(job, name, "layers", colon + 1, 0, MOST, &end)) return false;
    if (end <= begin) return args_wrong(job, name, "--layers %s is empty", text);
  }
  out->layer_begin = (int32_t)begin;
  out->layer_end = (int32_t)end;
  return true;
}

bool run_args_parse(job_state *job, int argc, char **argv, run_args *out) {
  int64_t tokens = -1, seed = 0, load_mib = 1024;
  int reduce = OPROJ_REDUCE_ALL;
  bool uneven = false;
  *out = (run_args){.deadline = -1};
  const args_option options[] = {
      {"tokens", "T", "tokens to make up, or that --input must hold (default 16)",
       .number = &tokens, .least = 0, .most = 1 << 20},
      {"layers", "WHICH",
       "all, one number, or a:b for [a, b); draft layers follow the others (default all)",
       .text = &out->layers},
      {"input", "F",
       "safetensors with attn_out BF16 [T, heads, head_dim], positions I64 or I32 [T] and "
       "optionally "
       "cos_sin F32 [rows, rope_dim]",
       .text = &out->input},
      {"output", "F", "safetensors to write: layers.N.y BF16 [T, hidden]", .text = &out->output},
      {"check", NULL, "compare with the formula in double precision and with one rank",
       .on = &out->check},
      {"seed", "S", "of the made-up input (default 0)", .number = &seed, .least = 0,
       .most = INT64_MAX},
      {"backend", "B", "auto, ref or cuda (default auto)", .word = &out->backend,
       .words = run_backends},
      {"comm", "C",
       "auto, mpi or nccl (default auto: nccl where each rank has a GPU of its own, else mpi)",
       .word = &out->comm, .words = choose_comms},
      {"reduce", "R", "all, scatter, vendor or none (default all: deterministic, in rank order)",
       .word = &reduce, .words = choose_reduces},
      {"chunk", "T",
       "tokens whose sum over ranks runs while the next are computed; 0 lets the library choose "
       "(default 0)",
       .number = &out->chunk_tokens, .least = 0, .most = 1 << 20},
      {"load-memory", "MIB",
       "host memory that loading may take on each rank, beside the weights (default 1024)",
       .number = &load_mib, .least = 1, .most = 1 << 20},
      {"deadline", "S",
       "seconds to wait for a rank that is silent or late; 0 waits for ever (default "
       "OPROJ_DEADLINE, else 30)",
       .number = &out->deadline, .least = 0, .most = 1000000},
      {"uneven", NULL, "allow ranks that do not divide the groups", .on = &uneven},
      {"json", "FILE", "write the table as JSON", .text = &out->json},
      {0}};
  const args_command command = {
      "oproj run",
      "Projects an attention output through the layers of the checkpoint in DIR (whole or split), "
      "on\nas many ranks as mpirun started, and prints one row per layer.",
      options, "DIR", &out->dir};
  if (!args_parse(job, &command, argc, argv)) return false;
  if (!parse_layers(job, command.name, out)) return false;
  if (reduce == OPROJ_REDUCE_NONE && (out->output || out->check))
    return args_wrong(job, command.name, "--reduce none leaves no y to write or check");
  out->tokens = (int32_t)tokens;
  out->seed = (uint64_t)seed;
  out->load_bytes = load_mib << 20;
  out->reduce = (oproj_reduce)reduce;
  out->split = uneven ? OPROJ_SPLIT_UNEVEN : OPROJ_SPLIT_EVEN;
  return true;
}
