/* load_ways.h - other ways to get a checkpoint's bytes into memory, to compare a load with.  They
 * read the weights alone (scales are a ten-thousandth of the bytes), and neither verify nor upload
 * them. */
#ifndef OPROJ_BENCH_LOAD_WAYS_H
#define OPROJ_BENCH_LOAD_WAYS_H

#include "job/job.h"
#include "oproj/checkpoint.h"
#include "oproj/safetensors.h"

/* One weight in its file, and this rank's part of it. */
typedef struct load_weight {
  int32_t file; /* place in load_set.files */
  int64_t offset, rows, row_bytes;
  int64_t row_begin, row_end, begin, end; /* begin, end: bytes within each row */
} load_weight;

typedef struct load_set {
  job_state *job;
  oproj_tensors_file **files; /* all *.safetensors of the folder */
  int *descriptors;
  int32_t file_count;
  load_weight *weights;
  int32_t weight_count;
  uint8_t *memory; /* this rank's part of the largest weight */
} load_set;

/* Opens the folder's files and finds the weights of a whole checkpoint's layers; of a split one
 * there are none to find.  A zeroed set may be closed. */
oproj_status load_set_open(load_set *set, job_state *job, const char *dir,
                           const oproj_checkpoint *checkpoint, const oproj_shard *shard);
void load_set_close(load_set *set);

/* Drops what the page cache holds of the files. */
void load_set_forget(const load_set *set);

/* COLLECTIVE, all three.  As dd bs=16M iflag=direct: one rank reads all bytes of the weights, in
 * file order, past the page cache (ERR_UNSUPPORTED where the file system cannot). */
oproj_status load_direct(const load_set *set);
/* MPI-IO: collective reads through subarray views. */
oproj_status load_mpi_io(const load_set *set);
/* Every rank for itself: its columns of WO_B row by row. */
oproj_status load_slices(const load_set *set);

/* Bytes that this process has caused to be fetched from storage so far; 0 where that is unknown. */
int64_t load_storage_bytes(void);

#endif /* OPROJ_BENCH_LOAD_WAYS_H */
