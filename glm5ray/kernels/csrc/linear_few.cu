// x @ weight.T for one or a few rows of x: as fast as memory gives the weights.
//
// A block computes ROWS rows of the weight, a thread the same columns of all of them. All that the block reads of the
// weight is asked for at once, before anything is waited for, also before the kernel that computes x has ended: weights
// depend on nobody. Sums are fp32, of a thread's columns first, then over the threads in a fixed order, so that a row
// of x gives the same result beside any others and in every run.
//
// One source for nvcc and NVRTC, sm_90 and sm_120; no headers. Letters as in glm5ray/kernels/interface.py.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int THREADS = 256, WARPS = THREADS / 32;

__device__ __forceinline__ i64 read_once_policy() {
  i64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Volatile as the others are: they keep their order.
__device__ __forceinline__ uint4 load_weights(const void* from, i64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

__device__ __forceinline__ uint4 load16(const void* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ uint2 load8(const void* from) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}

// This kernel may be launched while the one before it still runs, and so may the one behind it. Every block waits for
// the kernel before: when this one has ended, so have all before it, and what any of them reads or writes may be
// overwritten.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void start_kernel_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ u16 to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ void put(u16* to, float v) { *to = to_bf16(v); }
__device__ __forceinline__ void put(float* to, float v) { *to = v; }

template <class Weight>  // numbers in 16 bytes
constexpr int EACH = 16 / sizeof(Weight);

__device__ __forceinline__ void widen(const uint4& v, float (&out)[8]) {
  u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) out[2 * i] = low(pairs[i]), out[2 * i + 1] = high(pairs[i]);
}

__device__ __forceinline__ void widen(const uint4& v, float (&out)[4]) {
  out[0] = __uint_as_float(v.x), out[1] = __uint_as_float(v.y);
  out[2] = __uint_as_float(v.z), out[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ void load_x(const u16* from, float (&out)[8]) { widen(load16(from), out); }

__device__ __forceinline__ void load_x(const u16* from, float (&out)[4]) {
  uint2 v = load8(from);
  out[0] = low(v.x), out[1] = high(v.x), out[2] = low(v.y), out[3] = high(v.y);
}

// T rows of x, CHUNKS times THREADS times EACH columns.
template <class Weight, class Out, int T, int CHUNKS, int ROWS>
__device__ __forceinline__ void linear(const u16* x, const Weight* weight, Out* out, int outputs, i64 x_stride) {
  constexpr int E = EACH<Weight>, COLUMNS = CHUNKS * THREADS * E;
  int first = blockIdx.x * ROWS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  i64 policy = read_once_policy();
  uint4 words[ROWS][CHUNKS];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int c = 0; c < CHUNKS; c++)
      words[r][c] = load_weights(
          weight + (i64)min(first + r, outputs - 1) * COLUMNS + (c * THREADS + threadIdx.x) * E, policy);
  start_kernel_behind();
  wait_for_kernel_before();

  float sums[ROWS][T] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    float xs[T][E];
#pragma unroll
    for (int t = 0; t < T; t++) load_x(x + t * x_stride + (c * THREADS + threadIdx.x) * E, xs[t]);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float ws[E];
      widen(words[r][c], ws);
#pragma unroll
      for (int i = 0; i < E; i++)
#pragma unroll
        for (int t = 0; t < T; t++) sums[r][t] += ws[i] * xs[t][i];
    }
  }

  __shared__ float parts[WARPS][ROWS * T];
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int t = 0; t < T; t++) {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2)
        sums[r][t] += __shfl_xor_sync(~0u, sums[r][t], distance);
      if (lane == 0) parts[warp][r * T + t] = sums[r][t];
    }
  __syncthreads();
  if (threadIdx.x >= ROWS * T) return;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += parts[w][threadIdx.x];
  int row = first + threadIdx.x / T, t = threadIdx.x % T;
  if (row < outputs) put(out + (i64)t * outputs + row, sum);
}

#define LINEAR(NAME, WEIGHT, OUT, T, CHUNKS, ROWS)                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                      \
      linear_##NAME(const u16* x, const WEIGHT* weight, OUT* out, int outputs, i64 x_stride) {                  \
    linear<WEIGHT, OUT, T, CHUNKS, ROWS>(x, weight, out, outputs, x_stride);                                    \
  }
