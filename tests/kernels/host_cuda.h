// CUDA C++ on a CPU, a lane at a time: enough of the language for the sources of glm5ray/kernels/csrc, which a test compiles
// with g++ behind this file, their functions of inline assembly left out (tests/kernels/host_cuda.py).
//
// Every lane is a coroutine. It runs until it needs others (a barrier, a shuffle, mma), and which lane goes on next is drawn
// from a seed, so that what lanes must wait for is waited for, or results differ. An asynchronous copy spoils its
// destination when it is issued and arrives when its group is waited for, not before.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct Index { int x, y; };

static Index threadIdx, blockIdx, gridDim, blockDim;
alignas(128) static char host_shared[1 << 18];

inline int min(int a, int b) { return a < b ? a : b; }

// --- lanes ------------------------------------------------------------------------------------------------------------

struct Copy { char* to; char bytes[16]; };

struct Lane {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  int number;
  bool done = false;
  std::vector<Copy> issued;              // not yet in a group
  std::deque<std::vector<Copy>> groups;  // the oldest first
};

struct Meeting { int arrived = 0; u32 times = 0; void* given[1024]; };

struct Block {
  std::vector<Lane> lanes;
  std::vector<Meeting> warps;
  Meeting all;
  int alive;
  ucontext_t scheduler;
  Lane* now;
  std::function<void()> body;
  i64 idle = 0;
};

static Block* block;
static std::function<void()> kernel_before;  // what the kernel before writes; it ends when this one waits for it

inline void give_way() {
  Lane* lane = block->now;
  swapcontext(&lane->context, &block->scheduler);
}

inline void meet(Meeting& meeting, int size, void* given, const std::function<void(void**)>& together) {
  int place = block->now->number % size;
  u32 before = meeting.times;
  meeting.given[place] = given;
  if (++meeting.arrived == size) {
    together(meeting.given);
    meeting.arrived = 0;
    meeting.times++;
    block->idle = 0;
  }
  while (meeting.times == before) give_way();
}

inline Meeting& own_warp() { return block->warps[block->now->number / 32]; }

inline void __syncwarp() { meet(own_warp(), 32, nullptr, [](void**) {}); }

inline void __syncthreads() {
  Meeting& all = block->all;
  u32 before = all.times;
  all.arrived++;
  while (all.times == before) {
    if (all.arrived >= block->alive) {  // those that have returned do not count
      all.arrived = 0;
      all.times++;
      block->idle = 0;
      break;
    }
    give_way();
  }
}

static void lane_main() {
  block->body();
  block->now->done = true;
  block->alive--;
  block->idle = 0;
  give_way();
}

static void run_block(int threads, const std::function<void()>& body, std::mt19937& draw) {
  Block here;
  block = &here;
  here.lanes.resize(threads);
  here.warps.resize((threads + 31) / 32);
  here.alive = threads;
  here.body = body;
  constexpr size_t STACK = 256 * 1024;
  for (int i = 0; i < threads; i++) {
    Lane& lane = here.lanes[i];
    lane.number = i;
    lane.stack.reset(new char[STACK]);
    getcontext(&lane.context);
    lane.context.uc_stack.ss_sp = lane.stack.get();
    lane.context.uc_stack.ss_size = STACK;
    lane.context.uc_link = nullptr;
    makecontext(&lane.context, lane_main, 0);
  }
  std::vector<int> order(threads);
  for (int i = 0; i < threads; i++) order[i] = i;
  while (here.alive > 0) {
    std::shuffle(order.begin(), order.end(), draw);
    for (int i : order) {
      Lane& lane = here.lanes[i];
      if (lane.done) continue;
      here.now = &lane;
      threadIdx = {i, 0};
      swapcontext(&here.scheduler, &lane.context);
    }
    if (++here.idle > 4) {
      fprintf(stderr, "lanes wait for each other for ever\n");
      abort();
    }
  }
}

struct Launch { int grid_x, grid_y, threads, shared_bytes, seed; };

static void run_kernel(const Launch& launch, const std::function<void()>& body) {
  if ((size_t)launch.shared_bytes > sizeof host_shared) abort();
  std::mt19937 draw(launch.seed);
  gridDim = {launch.grid_x, launch.grid_y};
  blockDim = {launch.threads, 1};
  for (int y = 0; y < launch.grid_y; y++)
    for (int x = 0; x < launch.grid_x; x++) {
      blockIdx = {x, y};
      memset(host_shared, 0xFF, launch.shared_bytes);  // not a number, read as any type
      run_block(launch.threads, body, draw);
    }
}

// --- intrinsics -------------------------------------------------------------------------------------------------------

inline float __uint_as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
inline u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  u32 result = 0;
  for (int i = 0; i < 4; i++) {
    int at = selector >> (4 * i) & 7;
    result |= ((at < 4 ? a >> (8 * at) : b >> (8 * (at - 4))) & 0xFF) << (8 * i);
  }
  return result;
}

template <class T>
inline T exchange(T value, const std::function<int(int)>& from) {
  struct Slot { T in, out; } slot = {value, value};
  meet(own_warp(), 32, &slot, [&](void** given) {
    for (int lane = 0; lane < 32; lane++) {
      int other = from(lane);
      if (other >= 0 && other < 32) ((Slot*)given[lane])->out = ((Slot*)given[other])->in;
    }
  });
  return slot.out;
}

template <class T>
inline T __shfl_up_sync(u32, T value, int by) { return exchange<T>(value, [by](int lane) { return lane - by; }); }

template <class T>
inline T __shfl_sync(u32, T value, int from) { return exchange<T>(value, [from](int) { return from; }); }

template <class T>
inline T __shfl_xor_sync(u32, T value, int by) { return exchange<T>(value, [by](int lane) { return lane ^ by; }); }

inline u32 __match_any_sync(u32, int value) {
  struct Slot { int in; u32 out; } slot = {value, 0};
  meet(own_warp(), 32, &slot, [](void** given) {
    for (int a = 0; a < 32; a++)
      for (int b = 0; b < 32; b++)
        if (((Slot*)given[a])->in == ((Slot*)given[b])->in) ((Slot*)given[a])->out |= 1u << b;
  });
  return slot.out;
}

inline size_t __cvta_generic_to_shared(const void* p) { return (const char*)p - host_shared; }

// --- the functions of assembly ----------------------------------------------------------------------------------------

inline i64 read_once_policy() { return 0; }

inline void copy16(u32 to, const char* from, i64) {
  Copy copy;
  copy.to = host_shared + to;
  memcpy(copy.bytes, from, 16);
  memset(copy.to, 0xFF, 16);
  block->now->issued.push_back(copy);
}

inline void copy16_or_zeros(u32 to, const void* from, int bytes) {
  static const char zeros[16] = {};
  copy16(to, bytes ? (const char*)from : zeros, 0);
}

inline void commit_copies() {
  block->now->groups.push_back(std::move(block->now->issued));
  block->now->issued.clear();
}

template <int STAGES>
inline void wait_for_oldest() {
  auto& groups = block->now->groups;
  while (groups.size() > STAGES - 2) {
    for (const Copy& copy : groups.front()) memcpy(copy.to, copy.bytes, 16);
    groups.pop_front();
  }
}

inline void wait_for_copies() { wait_for_oldest<2>(); }

template <class T>
inline T read_as(const void* from) {
  if ((uintptr_t)from % sizeof(T)) abort();  // as a GPU would
  T v;
  memcpy(&v, from, sizeof(T));
  return v;
}

inline uint4 load_shared16(u32 from) { return read_as<uint4>(host_shared + from); }
inline u16 load_shared2(u32 from) { return read_as<u16>(host_shared + from); }
inline uint4 load_global16(const void* from) { return read_as<uint4>(from); }
inline uint4 load_weights(const void* from, i64) { return read_as<uint4>(from); }
inline uint4 load16(const void* from) { return read_as<uint4>(from); }
inline uint2 load8(const void* from) { return read_as<uint2>(from); }

inline float power_of_2(float v) { return exp2f(v); }
inline float logarithm_to_2(float v) { return log2f(v); }

// lane 8i + j has the address of row j of matrix i; lane 4g + t gets of each matrix row g, or column g, at 2t and 2t + 1
inline void load_four(u32 from, u32 (&v)[4], bool transposed) {
  struct Slot { u32 from; u32* v; } slot = {from, v};
  meet(own_warp(), 32, &slot, [transposed](void** given) {
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        u16 both[2];
        for (int k = 0; k < 2; k++) {
          int row = transposed ? lane % 4 * 2 + k : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + k;
          u32 at = ((Slot*)given[8 * i + row])->from;
          if (at % 16) abort();
          both[k] = read_as<u16>(host_shared + at + 2 * column);
        }
        ((Slot*)given[lane])->v[i] = both[0] | (u32)both[1] << 16;
      }
  });
}
inline void load_matrices(u32 from, u32 (&v)[4]) { load_four(from, v, false); }
inline void load_matrices_transposed(u32 from, u32 (&v)[4]) { load_four(from, v, true); }

inline void wait_for_kernel_before() {
  if (kernel_before) kernel_before(), kernel_before = nullptr;
}
inline void start_kernel_behind() {}

inline u16 to_bf16(float v) {  // to the nearest, ties to even
  u32 bits = __float_as_uint(v);
  if (v != v) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline u32 to_bf16_pair(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }

inline float bf16(u32 bits) { return __uint_as_float(bits << 16); }

inline u32 times(u32 pair, u32 scale) {
  return to_bf16_pair(bf16(pair & 0xFFFF) * bf16(scale & 0xFFFF), bf16(pair >> 16) * bf16(scale >> 16));
}

inline u16 half_of_e4m3(u32 code) {  // exact
  u32 sign = (code & 0x80) << 8, exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 0) {
    if (mantissa == 0) return sign;
    while (!(mantissa & 8)) mantissa <<= 1, exponent--;
    mantissa &= 7, exponent++;
  }
  return sign | (exponent + 8) << 10 | mantissa << 7;
}

// as in the source, but for the conversion
inline void spread_scales(u16 both, u32& low, u32& high) {
  u32 half = half_of_e4m3(both & 0xFF) | (u32)half_of_e4m3(both >> 8) << 16;
  u32 pair = (half >> 3) + 0x73007300u;
  low = __byte_perm(pair, pair, 0x1010);
  high = __byte_perm(pair, pair, 0x3232);
}

// mma.m16n8k16: lane 4g + t has rows g and g + 8 of A at columns 2t, 2t + 1 and those plus 8; of B column g, rows alike
inline void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  struct Slot { const u32* a; u32 b[2]; float* sum; } slot = {a, {b0, b1}, sum};
  meet(own_warp(), 32, &slot, [](void** given) {
    float A[16][16], B[16][8];
    for (int lane = 0; lane < 32; lane++) {
      auto& s = *(Slot*)given[lane];
      int g = lane / 4, t = lane % 4;
      for (int part = 0; part < 4; part++)
        for (int half = 0; half < 2; half++)
          A[g + part % 2 * 8][2 * t + half + part / 2 * 8] = bf16(s.a[part] >> (16 * half) & 0xFFFF);
      for (int part = 0; part < 2; part++)
        for (int half = 0; half < 2; half++) B[2 * t + half + part * 8][g] = bf16(s.b[part] >> (16 * half) & 0xFFFF);
    }
    for (int lane = 0; lane < 32; lane++) {
      auto& s = *(Slot*)given[lane];
      int g = lane / 4, t = lane % 4;
      for (int c = 0; c < 4; c++) {
        float total = 0;
        for (int k = 0; k < 16; k++) total += A[g + c / 2 * 8][k] * B[k][2 * t + c % 2];
        s.sum[c] += total;
      }
    }
  });
}
