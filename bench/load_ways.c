/* load_ways.c - see load_ways.h. */
#include "load_ways.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "job/guard.h"

enum { DIRECT_BYTES = 16 << 20, PAGE_BYTES = 4096 };

/* ---- the set -------------------------------------------------------------------------------- */

static int is_tensors(const struct dirent *entry) {
  size_t length = strlen(entry->d_name), ending = strlen(".safetensors");
  return length > ending && strcmp(entry->d_name + length - ending, ".safetensors") == 0;
}

static oproj_status open_files(load_set *set, const char *dir) {
  struct dirent **names;
  int count = scandir(dir, &names, is_tensors, alphasort);
  if (count < 0) return oproj_fail(OPROJ_ERR_IO, "%s: cannot be listed: %s", dir, strerror(errno));
  set->files = calloc((size_t)count + 1, sizeof *set->files);
  set->descriptors = calloc((size_t)count + 1, sizeof *set->descriptors);
  oproj_status status = set->files && set->descriptors
                            ? OPROJ_OK
                            : oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d files", count);
  for (int i = 0; i < count; i++) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, names[i]->d_name);
    free(names[i]);
    if (status == OPROJ_OK) status = oproj_tensors_open(&set->files[i], path);
    if (status != OPROJ_OK) continue;
    set->descriptors[set->file_count++] = open(path, O_RDONLY | O_CLOEXEC);
  }
  free(names);
  return status;
}

static oproj_status add_weight(load_set *set, const char *name, int64_t row_begin, int64_t row_end,
                               double begin, double end) {
  for (int32_t i = 0; i < set->file_count; i++) {
    const oproj_tensor *tensor = oproj_tensors_find(set->files[i], name);
    if (!tensor) continue;
    int64_t row_bytes = tensor->bytes / tensor->shape[0];
    set->weights[set->weight_count++] =
        (load_weight){.file = i,
                      .offset = tensor->offset,
                      .rows = tensor->shape[0],
                      .row_bytes = row_bytes,
                      .row_begin = row_begin,
                      .row_end = row_end < 0 ? tensor->shape[0] : row_end,
                      .begin = (int64_t)(begin * (double)row_bytes),
                      .end = (int64_t)(end * (double)row_bytes)};
    return OPROJ_OK;
  }
  return oproj_fail(OPROJ_ERR_IO, "no file holds tensor %s", name);
}

static oproj_status find_weights(load_set *set, const oproj_checkpoint *checkpoint,
                                 const oproj_shard *shard) {
  const oproj_model *model = oproj_checkpoint_model(checkpoint);
  int32_t layers = model->layers + model->draft_layers;
  double z = (double)model->dims.groups * model->dims.lora_rank;
  set->weights = calloc((size_t)layers * 2 + 1, sizeof *set->weights);
  if (!set->weights) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %d layers", layers);
  oproj_status status = OPROJ_OK;
  for (int32_t i = 0; i < layers && status == OPROJ_OK; i++) {
    oproj_layer_info info;
    status = oproj_checkpoint_layer(checkpoint, i, &info);
    if (status == OPROJ_OK)
      status = add_weight(set, info.wo_a_tensor, shard->z_begin, shard->z_end, 0.0, 1.0);
    if (status == OPROJ_OK)
      status = add_weight(set, info.wo_b_tensor, 0, -1, shard->z_begin / z, shard->z_end / z);
  }
  return status;
}

static int64_t part_bytes(const load_weight *w) {
  return (w->row_end - w->row_begin) * (w->end - w->begin);
}

oproj_status load_set_open(load_set *set, job_state *job, const char *dir,
                           const oproj_checkpoint *checkpoint, const oproj_shard *shard) {
  *set = (load_set){.job = job};
  int64_t most = DIRECT_BYTES;
  oproj_status status = open_files(set, dir);
  if (oproj_checkpoint_split_size(checkpoint) > 0) return status;
  if (status == OPROJ_OK) status = find_weights(set, checkpoint, shard);
  for (int32_t i = 0; i < set->weight_count; i++)
    if (part_bytes(&set->weights[i]) > most) most = part_bytes(&set->weights[i]);
  if (status != OPROJ_OK) return status;
  set->memory = aligned_alloc(PAGE_BYTES, (size_t)(most + PAGE_BYTES) / PAGE_BYTES * PAGE_BYTES);
  if (!set->memory) return oproj_fail(OPROJ_ERR_NOMEM, "no memory for %lld bytes", (long long)most);
  memset(set->memory, 0, (size_t)most);
  return OPROJ_OK;
}

void load_set_close(load_set *set) {
  for (int32_t i = 0; i < set->file_count; i++) close(set->descriptors[i]);
  for (int32_t i = 0; i < set->file_count; i++) oproj_tensors_close(set->files[i]);
  free(set->files);
  free(set->descriptors);
  free(set->weights);
  free(set->memory);
  *set = (load_set){0};
}

void load_set_forget(const load_set *set) {
  for (int32_t i = 0; i < set->file_count; i++)
    posix_fadvise(set->descriptors[i], 0, 0, POSIX_FADV_DONTNEED);
}

int64_t load_storage_bytes(void) {
  long long bytes = 0;
  char line[256];
  FILE *file = fopen("/proc/self/io", "re");
  while (file && fgets(line, sizeof line, file))
    if (sscanf(line, "read_bytes: %lld", &bytes) == 1) break;
  if (file) fclose(file);
  return bytes;
}

/* ---- the ways ------------------------------------------------------------------------------- */

static oproj_status read_at(const load_set *set, const load_weight *w, int64_t offset,
                            int64_t bytes, uint8_t *to) {
  while (bytes > 0) {
    ssize_t got = pread(set->descriptors[w->file], to, (size_t)bytes, (off_t)offset);
    if (got <= 0)
      return oproj_fail(OPROJ_ERR_IO, "%s: reading at byte %lld: %s",
                        oproj_tensors_path(set->files[w->file]), (long long)offset,
                        got < 0 ? strerror(errno) : "the file ends");
    to += got;
    offset += got;
    bytes -= got;
  }
  return OPROJ_OK;
}

static oproj_status read_direct(const load_set *set, const load_weight *w) {
  const char *path = oproj_tensors_path(set->files[w->file]);
  int file = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (file < 0)
    return oproj_fail(errno == EINVAL ? OPROJ_ERR_UNSUPPORTED : OPROJ_ERR_IO,
                      "%s: no direct reads: %s", path, strerror(errno));
  int64_t at = w->offset / PAGE_BYTES * PAGE_BYTES, end = w->offset + w->rows * w->row_bytes;
  ssize_t got = 1;
  for (; at < end && got > 0; at += got) {
    int64_t bytes = (end - at + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    got = pread(file, set->memory, (size_t)(bytes < DIRECT_BYTES ? bytes : DIRECT_BYTES), at);
  }
  int error = got < 0 ? errno : 0;
  close(file);
  if (got > 0) return OPROJ_OK;
  return oproj_fail(error == EINVAL ? OPROJ_ERR_UNSUPPORTED : OPROJ_ERR_IO, "%s: direct reads: %s",
                    path, error ? strerror(error) : "the file ends");
}

oproj_status load_direct(const load_set *set) {
  oproj_status status = OPROJ_OK;
  for (int32_t i = 0; i < set->weight_count && status == OPROJ_OK && set->job->rank == 0; i++)
    status = read_direct(set, &set->weights[i]);
  return oproj_comm_agree(set->job->comm, status);
}

oproj_status load_slices(const load_set *set) {
  oproj_status status = OPROJ_OK;
  for (int32_t i = 0; i < set->weight_count && status == OPROJ_OK; i++) {
    const load_weight *w = &set->weights[i];
    int64_t bytes = w->end - w->begin;
    if (bytes == w->row_bytes) {
      status = read_at(set, w, w->offset + w->row_begin * bytes, part_bytes(w), set->memory);
      continue;
    }
    for (int64_t row = w->row_begin; row < w->row_end && status == OPROJ_OK; row++)
      status = read_at(set, w, w->offset + row * w->row_bytes + w->begin, bytes,
                       set->memory + (row - w->row_begin) * bytes);
  }
  return oproj_comm_agree(set->job->comm, status);
}

static int read_view(MPI_File file, const load_weight *w, uint8_t *memory) {
  const int whole[] = {(int)w->rows, (int)w->row_bytes};
  const int part[] = {(int)(w->row_end - w->row_begin), (int)(w->end - w->begin)};
  const int from[] = {(int)w->row_begin, (int)w->begin};
  MPI_Datatype view;
  MPI_Type_create_subarray(2, whole, part, from, MPI_ORDER_C, MPI_BYTE, &view);
  MPI_Type_commit(&view);
  int code = MPI_File_set_view(file, w->offset, MPI_BYTE, view, "native", MPI_INFO_NULL);
  if (code == MPI_SUCCESS)
    code = MPI_File_read_all(file, memory, part[0] * part[1], MPI_BYTE, MPI_STATUS_IGNORE);
  MPI_Type_free(&view);
  return code;
}

static oproj_status mpi_io_status(int code, const char *path) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length;
  if (code == MPI_SUCCESS) return OPROJ_OK;
  MPI_Error_string(code, text, &length);
  return oproj_fail(OPROJ_ERR_IO, "%s: MPI-IO: %s", path, text);
}

/* A file that one rank alone cannot open makes MPI-IO wait without end. */
static oproj_status look_for(const char *path) {
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return oproj_fail(OPROJ_ERR_IO, "%s: cannot be opened: %s", path, strerror(errno));
  close(file);
  return OPROJ_OK;
}

static oproj_status read_by_mpi_io(const load_set *set, int32_t f) {
  const char *path = oproj_tensors_path(set->files[f]);
  MPI_File file;
  oproj_status status = oproj_comm_agree(set->job->comm, look_for(path));
  if (status != OPROJ_OK) return status;
  int code = MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_RDONLY, MPI_INFO_NULL, &file);
  status = oproj_comm_agree(set->job->comm, mpi_io_status(code, path));
  if (status != OPROJ_OK) return status;
  for (int32_t i = 0; i < set->weight_count && code == MPI_SUCCESS; i++)
    if (set->weights[i].file == f) code = read_view(file, &set->weights[i], set->memory);
  MPI_File_close(&file);
  return oproj_comm_agree(set->job->comm, mpi_io_status(code, path));
}

/* MPI's collective calls on files are out of the watch's sight; the guard's time for them allows
 * for slow storage. */
oproj_status load_mpi_io(const load_set *set) {
  const double slowest = 20e6; /* bytes a second */
  double bytes = 0.0, deadline = set->job->deadline;
  oproj_status status = OPROJ_OK;
  for (int32_t i = 0; i < set->weight_count; i++)
    bytes += (double)set->weights[i].rows * (double)set->weights[i].row_bytes;
  guard_begin("MPI-IO", deadline > 0.0 ? deadline + bytes / slowest : 0.0);
  for (int32_t f = 0; f < set->file_count && status == OPROJ_OK; f++)
    status = read_by_mpi_io(set, f);
  guard_end();
  return status;
}
