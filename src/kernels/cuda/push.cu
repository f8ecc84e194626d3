/* push.cu - the sum over ranks whose GPUs write to one another's memory: bf16 [count] from each of
 * n ranks -> bf16 [count] on all of them, in one launch and one trip over the link.
 *
 * Every rank has a mailbox, uint64 [2 epochs][n senders][words]; a word is two bf16 in its low half
 * and the number of the sum in its high half, so it is its own flag: no fence, no second trip, and
 * no value of the data that could be taken for another thing.  A counter of the device numbers the
 * sums from 1 on, so a replayed graph numbers them too.
 *
 * A thread sends all of its words before it waits for any, and waits for those of the same index
 * alone.  Sums alternate between two epochs: a rank writes over epoch e again only after it has
 * received sum e + 1 of everyone, and a peer sends that only after it has read sum e.
 *
 * The parts are added in f32 in rank order, from the first, and rounded once: every rank computes
 * the same bits.  Grid: x over runs of 4 elements, at most MOST_BLOCKS blocks, all resident.
 * Bound: latency of the link up to tens of KB, then its bandwidth, (n - 1) 4 count bytes out. */
#include "kernels/cuda/push.cuh"

namespace {

constexpr int THREADS = 256, MOST_BLOCKS = 64;
constexpr int RUN = 4;            /* elements: two words, one 16-byte store */
constexpr int LOOK_AT_CLOCK = 64; /* polls between looks at the clock */

struct Words {
  uint64_t low, high;
};

__device__ __forceinline__ void send(uint64_t *to, const Words &w) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(w.low), "l"(w.high)
               : "memory");
}

__device__ __forceinline__ Words look(const uint64_t *from) {
  Words w;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(w.low), "=l"(w.high)
               : "l"(from)
               : "memory");
  return w;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ __forceinline__ bool numbered(const Words &w, uint32_t number) {
  return static_cast<uint32_t>(w.low >> 32) == number &&
         static_cast<uint32_t>(w.high >> 32) == number;
}

/* Elements run*RUN .. of bf16 [count]; zeros behind its end. */
__device__ __forceinline__ uint2 load_run(const cuda_push &p, int64_t run) {
  if (p.whole) return reinterpret_cast<const uint2 *>(p.partial)[run];
  uint32_t v[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) v[i] = run * RUN + i < p.count ? p.partial[run * RUN + i] : 0u;
  return make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
}

__device__ __forceinline__ void store_run(const cuda_push &p, int64_t run,
                                          const float (&sums)[RUN]) {
  uint32_t v[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) v[i] = oproj_bf16_from_f32(sums[i]);
  if (p.whole) {
    reinterpret_cast<uint2 *>(p.out)[run] = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
    return;
  }
#pragma unroll
  for (int i = 0; i < RUN; i++)
    if (run * RUN + i < p.count) p.out[run * RUN + i] = static_cast<uint16_t>(v[i]);
}

__device__ __forceinline__ void add_run(const uint2 &part, float (&sums)[RUN]) {
  float2 low = floats_of_bf16s(part.x), high = floats_of_bf16s(part.y);
  sums[0] = oproj_num_add(sums[0], low.x);
  sums[1] = oproj_num_add(sums[1], low.y);
  sums[2] = oproj_num_add(sums[2], high.x);
  sums[3] = oproj_num_add(sums[3], high.y);
}

__device__ __forceinline__ void give_up(const cuda_push &p, int sender) {
  volatile cuda_push_control *control = p.control;
  volatile cuda_fault *fault = p.fault;
  control->lost = 1;
  fault->lost_rank = sender + 1;
  __threadfence_system();
}

/* One run of every sender, N of them at most; false: gave up. */
template <int N>
__device__ __forceinline__ bool receive(const cuda_push &p, uint32_t number, int64_t run,
                                        Words (&w)[N]) {
  uint32_t missing = ((1u << p.n) - 1) & ~(1u << p.rank);
  uint64_t since = 0;
  for (int polls = 0; missing != 0; polls++) {
#pragma unroll
    for (int s = 0; s < N; s++)
      if (missing >> s & 1)
        w[s] = look(p.mailboxes[p.rank] + mailbox_offset(p, number, s) + 2 * run);
#pragma unroll
    for (int s = 0; s < N; s++)
      if ((missing >> s & 1) && numbered(w[s], number)) missing &= ~(1u << s);
    if (missing == 0 || polls % LOOK_AT_CLOCK != LOOK_AT_CLOCK - 1) continue;
    uint64_t now = nanoseconds();
    if (since == 0) since = now;
    bool others = static_cast<volatile cuda_push_control *>(p.control)->lost != 0;
    if (!others && now - since < p.patience_ns) continue;
    if (!others) give_up(p, __ffs(missing) - 1);
    return false;
  }
  return true;
}

template <int N>
__global__ void __launch_bounds__(THREADS) push_kernel(const __grid_constant__ cuda_push p) {
  int64_t first = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  int64_t stride = static_cast<int64_t>(gridDim.x) * THREADS,
          runs = ceil_div<int64_t>(p.count, RUN);
  let_successors_start();
  wait_for_predecessors();
  uint32_t number = next_sum(p.control->sums);
  bool lost = p.control->lost != 0;

  for (int64_t run = first; run < runs && !p.sent; run += stride) {
    uint2 mine = load_run(p, run);
    uint64_t flag = static_cast<uint64_t>(number) << 32;
    Words w = {flag | mine.x, flag | mine.y};
    for (int s = 1; s < p.n; s++) {
      int to = p.rank + s < p.n ? p.rank + s : p.rank + s - p.n;
      send(p.mailboxes[to] + mailbox_offset(p, number, p.rank) + 2 * run, w);
    }
  }
  for (int64_t run = first; run < runs; run += stride) {
    Words w[N];
    float sums[RUN];
    lost = lost || !receive<N>(p, number, run, w);
#pragma unroll
    for (int i = 0; i < RUN; i++) sums[i] = lost ? oproj_num_from_bits(0x7FC00000u) : -0.0f;
#pragma unroll
    for (int s = 0; s < N; s++) {
      if (s >= p.n || lost) break;
      uint2 part = s == p.rank ? load_run(p, run)
                               : make_uint2(static_cast<uint32_t>(w[s].low),
                                            static_cast<uint32_t>(w[s].high));
      add_run(part, sums);
    }
    store_run(p, run, sums);
  }

  __syncthreads(); /* all of the block's reads of the number are over */
  if (threadIdx.x == 0 && atomicInc(&p.control->arrivals, gridDim.x - 1) == gridDim.x - 1)
    p.control->sums = number;
}

}  // namespace

extern "C" cudaError_t cuda_launch_push(const cuda_push *push, cudaStream_t stream) {
  if (push->count == 0) return cudaSuccess;
  int64_t blocks = ceil_div<int64_t>(ceil_div<int64_t>(push->count, RUN), THREADS);
  dim3 grid(static_cast<unsigned>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS));
  void (*kernel)(cuda_push) = push->n <= 2   ? push_kernel<2>
                              : push->n <= 4 ? push_kernel<4>
                              : push->n <= 8 ? push_kernel<8>
                                             : push_kernel<OPROJ_KERNELS_PUSH_RANKS>;
  return launch(kernel, grid, THREADS, *push, stream, push->dependent != 0);
}
