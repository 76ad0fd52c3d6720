// Routed experts in NVFP4 for few tokens an expert: two grouped products that read each weight once, and the sum.
//
// Weights lie in fragment order (glm5ray/kernels/nvfp4_fragments.py, from which the names are): they are the 16-row
// operand of mma.m16n8k16, tokens are the 8 columns of the other. A warp works alone: it takes ROW_TILES tiles of an
// expert's rows and up to 8 MAX_COLUMNS of the expert's tokens as one unit, copies the weights asynchronously into a
// ring of its own in shared memory, whose reading runs on into its next unit, decodes them in registers, and reads the
// tokens through the L1 cache, which the warps of a block share since their units are of one expert. Which warp
// computes a unit depends on nothing but the routing, and no sum is taken by two: results are the same in every run.
//
// One source for nvcc and NVRTC, sm_90 and sm_120; no headers. Letters as in glm5ray/kernels/interface.py.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

struct Work {
  const i64* ids;            // [X] as the router gave them
  const int* row_start;      // [E + 1], or null: rows are assignments, in their own order
  int assignments;           // X
  int choices;               // A
  int first_expert;
  int experts;               // E
};

struct Matrix {
  const char* words;         // [E, row tiles, K / 64, 512 bytes]
  const char* scales;        // [E, row tiles, K / 64, 64 bytes]
  const float* factor;       // gate and up: [E, 2]; down: [E]
  int row_tiles;
  int columns;               // K
};

constexpr int WORD_BYTES = 512, SCALE_BYTES = 64;  // of a tile
constexpr float UNSCALE = 256.0f;                  // decoded weights are smaller by this

// --- the instructions -----------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ i64 read_once_policy() {
  i64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void copy16(u32 to, const char* from, i64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int STAGES>
__device__ __forceinline__ void wait_for_oldest() {
  asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
}

__device__ __forceinline__ uint4 load_shared16(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}

__device__ __forceinline__ u16 load_shared2(u32 from) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
  return v;
}

__device__ __forceinline__ uint4 load_global16(const void* from) {  // volatile: not before a wait for who wrote it
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

// A kernel may be launched while the one before it still runs. It then says where it needs that one's results, and
// where the one behind it may start; what comes before the wait may read what older kernels wrote.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void start_kernel_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ u32 times(u32 pair, u32 scale) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(scale));
  return r;
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u16 to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Two E4M3 scales -> each twice, as BF16, times 2^118: FP16's bits moved by three are a BF16's with another exponent
// bias, which 0x7300 puts right by 112, and the exponent up by 118 in all with the 6 of E2M1's.
__device__ __forceinline__ void spread_scales(u16 both, u32& low, u32& high) {
  u32 half;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"(both));
  u32 pair = (half >> 3) + 0x73007300u;
  low = __byte_perm(pair, pair, 0x1010);
  high = __byte_perm(pair, pair, 0x3232);
}

__device__ __forceinline__ void decode(u32 word, u32 low, u32 high, u32 (&a)[4]) {
  const u32 sign = 0x80008000u, magnitude = 0x01C001C0u;
  a[0] = times(word & (sign | magnitude), low);
  a[1] = times((word << 3) & (sign | magnitude), high);
  a[2] = times(((word << 6) & magnitude) | ((word << 2) & sign), low);
  a[3] = times(((word >> 3) & magnitude) | ((word << 1) & sign), high);
}

// --- who computes what ----------------------------------------------------------------------------------------------

// Experts that have rows, in shared memory: their numbers, first rows, counts of rows, and units up to each.
struct Plan {
  int* expert;
  int* row;
  int* rows;
  int* cumulative;  // one longer; units / row groups
  int size;
};

constexpr int PLAN_ARRAYS = 4;

template <int WARPS>
__device__ __forceinline__ void add_up(int value, int& before, int& total, int* sums) {  // over a block's threads
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, upto = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(~0u, upto, d);
    if (lane >= d) upto += other;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  before = upto - value;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  __syncthreads();
}

// Every block makes the whole plan for itself: a launch less, and it is short.
template <int WARPS>
__device__ void make_plan(const Work& work, int most_rows, int* memory, int capacity, Plan& plan) {
  __shared__ int sums[WARPS];
  plan.expert = memory;
  plan.row = memory + capacity;
  plan.rows = memory + 2 * capacity;
  plan.cumulative = memory + 3 * capacity;
  int size = 0, units = 0, entries = work.row_start ? work.experts : work.assignments;
  for (int start = 0; start < entries; start += WARPS * 32) {
    int i = start + threadIdx.x, expert = 0, row = 0, rows = 0;
    if (i < entries && work.row_start) {
      expert = i;
      row = work.row_start[i];
      rows = work.row_start[i + 1] - row;
    } else if (i < entries) {
      i64 local = work.ids[i] - work.first_expert;
      expert = (int)local;
      row = i;
      rows = local >= 0 && local < work.experts;
    }
    int here = (rows + most_rows - 1) / most_rows, at, found, units_before, more_units;
    add_up<WARPS>(rows > 0, at, found, sums);
    add_up<WARPS>(here, units_before, more_units, sums);
    if (rows > 0) {
      plan.expert[size + at] = expert;
      plan.row[size + at] = row;
      plan.rows[size + at] = rows;
      plan.cumulative[size + at] = units + units_before;
    }
    size += found;
    units += more_units;
  }
  if (threadIdx.x == 0) plan.cumulative[size] = units;
  plan.size = size;
  __syncthreads();
}

struct Unit {
  int entry;      // of the plan
  int row_group;
  int part;       // of the expert's rows
  int parts;
};

// Row groups of an expert follow one another, and parts of its rows within a group: warps side by side read the same
// tokens, or the same weights. `entry` is where to begin to look.
__device__ __forceinline__ Unit find_unit(const Plan& plan, int unit, int row_groups, int entry) {
  while (unit >= plan.cumulative[entry + 1] * row_groups) entry++;
  int before = plan.cumulative[entry], local = unit - before * row_groups;
  Unit found;
  found.entry = entry;
  found.parts = plan.cumulative[entry + 1] - before;
  found.row_group = local / found.parts;
  found.part = local - found.row_group * found.parts;
  return found;
}

__device__ __forceinline__ int first_entry(const Plan& plan, int unit, int row_groups) {
  int low = 0, high = plan.size - 1;
  while (low < high) {
    int middle = (low + high) / 2;
    if (unit >= plan.cumulative[middle + 1] * row_groups) low = middle + 1;
    else high = middle;
  }
  return low;
}

// --- the products ---------------------------------------------------------------------------------------------------

template <int ROW_TILES_, int MAX_COLUMNS_, int DEPTH_, int STAGES_, int WARPS_, int AHEAD_>
struct Shape {
  static constexpr int ROW_TILES = ROW_TILES_;      // of a unit, 16 weight rows each
  static constexpr int MAX_COLUMNS = MAX_COLUMNS_;  // of a unit, 8 tokens each
  static constexpr int DEPTH = DEPTH_;              // of a stage of the ring, 64 weight columns each
  static constexpr int STAGES = STAGES_;
  static constexpr int WARPS = WARPS_;
  static constexpr bool AHEAD = AHEAD_;             // whether tokens are read a step before they are needed
  static constexpr int STAGE_BYTES = ROW_TILES * DEPTH * (WORD_BYTES + SCALE_BYTES);
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
};

// The ring of a warp: what it is to read, in order, over all its units.
template <class S>
struct Reader {
  const Matrix& matrix;
  const Plan& plan;
  int row_groups, unit, stop, entry, column_tiles, column_tile, slot;
  u32 ring;
  i64 policy;
  const char *words, *scales;

  __device__ __forceinline__ void aim() {  // at the beginning of `unit`
    Unit found = find_unit(plan, unit, row_groups, entry);
    entry = found.entry;
    i64 tile = ((i64)plan.expert[entry] * matrix.row_tiles + found.row_group * S::ROW_TILES) * column_tiles;
    int lane = threadIdx.x % 32;
    words = matrix.words + tile * WORD_BYTES + lane * 16;
    constexpr int COPIES = S::DEPTH * SCALE_BYTES / 16;  // of a row tile
    scales = matrix.scales + tile * SCALE_BYTES + (lane / COPIES) * (i64)column_tiles * SCALE_BYTES + lane % COPIES * 16;
    column_tile = 0;
  }

  __device__ __forceinline__ void read() {  // the next stage, if there is one
    if (unit < stop) {
      u32 to = ring + slot * S::STAGE_BYTES + threadIdx.x % 32 * 16;
#pragma unroll
      for (int i = 0; i < S::ROW_TILES; i++)
#pragma unroll
        for (int j = 0; j < S::DEPTH; j++)
          copy16(to + (j * S::ROW_TILES + i) * WORD_BYTES, words + (i64)i * column_tiles * WORD_BYTES + j * WORD_BYTES,
                 policy);
      constexpr int LANES = S::ROW_TILES * S::DEPTH * SCALE_BYTES / 16;
      static_assert(LANES <= 32, "one copy of scales a stage");
      if (LANES == 32 || threadIdx.x % 32 < LANES) copy16(to + S::ROW_TILES * S::DEPTH * WORD_BYTES, scales, policy);
      words += S::DEPTH * WORD_BYTES;
      scales += S::DEPTH * SCALE_BYTES;
      column_tile += S::DEPTH;
      if (column_tile == column_tiles) {
        unit += S::WARPS;
        if (unit < stop) aim();
      }
      slot = slot + 1 == S::STAGES ? 0 : slot + 1;
    }
    commit_copies();  // empty ones too: waiting counts groups
  }
};

template <int COLUMNS>
struct Tokens {
  const char* at[COLUMNS];  // this lane's 32 bytes of each token's first 64 columns
  uint4 next[COLUMNS][2];

  __device__ __forceinline__ void load(int column_tile) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      next[n][0] = load_global16(at[n] + column_tile * 128);
      next[n][1] = load_global16(at[n] + column_tile * 128 + 16);
    }
  }
};

// sums[i][n]: of row tile i and tokens 8n to 8n + 7, as mma leaves them, times the scales, without the global factor.
template <class S, int COLUMNS>
__device__ __forceinline__ void product(Reader<S>& reader, int& slot, Tokens<COLUMNS>& tokens,
                                        float (&sums)[S::ROW_TILES][COLUMNS][4]) {
  int lane = threadIdx.x % 32, last = reader.column_tiles - 1;
#pragma unroll
  for (int i = 0; i < S::ROW_TILES; i++)
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums[i][n][c] = 0.0f;
  if (S::AHEAD) tokens.load(0);
  for (int k = 0; k <= last; k += S::DEPTH) {
    wait_for_oldest<S::STAGES>();
    __syncwarp();  // scales were copied by other lanes; and all have done with the slot that is read into next
    reader.read();
    u32 stage = reader.ring + slot * S::STAGE_BYTES;
#pragma unroll
    for (int j = 0; j < S::DEPTH; j++) {
      if (!S::AHEAD) tokens.load(k + j);
      u32 b[COLUMNS][8];
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        uint4 x = tokens.next[n][0], y = tokens.next[n][1];
        b[n][0] = x.x, b[n][1] = x.y, b[n][2] = x.z, b[n][3] = x.w;
        b[n][4] = y.x, b[n][5] = y.y, b[n][6] = y.z, b[n][7] = y.w;
      }
      if (S::AHEAD) tokens.load(min(k + j + 1, last));
#pragma unroll
      for (int i = 0; i < S::ROW_TILES; i++) {
        uint4 four = load_shared16(stage + (j * S::ROW_TILES + i) * WORD_BYTES + lane * 16);
        u32 words[4] = {four.x, four.y, four.z, four.w}, low, high;
        spread_scales(
            load_shared2(stage + S::ROW_TILES * S::DEPTH * WORD_BYTES + (i * S::DEPTH + j) * SCALE_BYTES + lane * 2),
            low, high);
#pragma unroll
        for (int s = 0; s < 4; s++) {
          u32 a[4];
          decode(words[s], low, high, a);
#pragma unroll
          for (int n = 0; n < COLUMNS; n++) multiply(sums[i][n], a, b[n][2 * s], b[n][2 * s + 1]);
        }
      }
    }
    slot = slot + 1 == S::STAGES ? 0 : slot + 1;
  }
}

struct GateUp {
  static constexpr bool PLAN_IS_READY = false;  // the kernel before may be the one that sorts
  const u16* x;            // [T, K]
  const int* assignment;   // [X], or null: rows are assignments
  u16* hidden;             // [X, 8 row tiles]

  __device__ __forceinline__ const u16* token(int row, const Work& work, int columns) const {
    return x + (i64)((assignment ? assignment[row] : row) / work.choices) * columns;
  }

  template <class S, int COLUMNS>
  __device__ __forceinline__ void finish(const float (&sums)[S::ROW_TILES][COLUMNS][4], const Matrix& matrix,
                                         int expert, int row_tile, int row, int rows) const {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, width = matrix.row_tiles * 8;
    float gate_factor = matrix.factor[2 * expert] * UNSCALE, up_factor = matrix.factor[2 * expert + 1] * UNSCALE;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        int column = 8 * n + 2 * t + c;
        if (column < rows)
#pragma unroll
          for (int i = 0; i < S::ROW_TILES; i++) {
            float gate = sums[i][n][c] * gate_factor, up = sums[i][n][2 + c] * up_factor;
            hidden[(i64)(row + column) * width + (row_tile + i) * 8 + g] = to_bf16(__fdividef(gate, 1.0f + __expf(-gate)) * up);
          }
      }
  }
};

struct Down {
  static constexpr bool PLAN_IS_READY = true;
  const u16* hidden;       // [X, K]
  u16* out;                // [X, 16 row tiles]

  __device__ __forceinline__ const u16* token(int row, const Work&, int columns) const {
    return hidden + (i64)row * columns;
  }

  template <class S, int COLUMNS>
  __device__ __forceinline__ void finish(const float (&sums)[S::ROW_TILES][COLUMNS][4], const Matrix& matrix,
                                         int expert, int row_tile, int row, int rows) const {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, width = matrix.row_tiles * 16;
    float factor = matrix.factor[expert] * UNSCALE;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        int column = 8 * n + 2 * t + c;
        if (column < rows)
#pragma unroll
          for (int i = 0; i < S::ROW_TILES; i++) {
            u16* to = out + (i64)(row + column) * width + (row_tile + i) * 16 + g;
            to[0] = to_bf16(sums[i][n][c] * factor);
            to[8] = to_bf16(sums[i][n][2 + c] * factor);
          }
      }
  }
};

template <class S, int COLUMNS, class Side>
__device__ __forceinline__ void compute(Reader<S>& reader, int& slot, const Work& work, const Side& side, int expert,
                                        int row_tile, int row, int rows) {
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  Tokens<COLUMNS> tokens;
#pragma unroll
  for (int n = 0; n < COLUMNS; n++)  // a column without a token reads the last one's, and is not stored
    tokens.at[n] = (const char*)(side.token(row + min(8 * n + g, rows - 1), work, reader.matrix.columns) + 16 * t);
  float sums[S::ROW_TILES][COLUMNS][4];
  product<S, COLUMNS>(reader, slot, tokens, sums);
  side.template finish<S, COLUMNS>(sums, reader.matrix, expert, row_tile, row, rows);
}

template <class S, int COLUMNS, class Side>
__device__ __forceinline__ void compute_columns(Reader<S>& reader, int& slot, const Work& work, const Side& side,
                                                int expert, int row_tile, int row, int rows) {
  if (rows <= 8 * COLUMNS) {
    compute<S, COLUMNS>(reader, slot, work, side, expert, row_tile, row, rows);
  } else if constexpr (COLUMNS < S::MAX_COLUMNS) {
    compute_columns<S, COLUMNS + 1>(reader, slot, work, side, expert, row_tile, row, rows);
  }
}

template <class S, class Side>
__device__ __forceinline__ void experts(const Work& work, const Matrix& matrix, const Side& side) {
  extern __shared__ __align__(128) char shared[];
  if (!Side::PLAN_IS_READY) {
    wait_for_kernel_before();
    start_kernel_behind();
  }
  int capacity = (work.row_start ? work.experts : work.assignments) + 1;
  Plan plan;
  make_plan<S::WARPS>(work, 8 * S::MAX_COLUMNS, (int*)(shared + S::RING_BYTES), capacity, plan);
  int row_groups = matrix.row_tiles / S::ROW_TILES, warp = threadIdx.x / 32;
  i64 units = (i64)plan.cumulative[plan.size] * row_groups;
  int unit = (int)(units * blockIdx.x / gridDim.x) + warp, stop = (int)(units * (blockIdx.x + 1) / gridDim.x);
  if (unit >= stop) {
    if (Side::PLAN_IS_READY) wait_for_kernel_before(), start_kernel_behind();
    return;
  }
  int entry = first_entry(plan, unit, row_groups), slot = 0;
  Reader<S> reader = {matrix, plan, row_groups, unit, stop, entry, matrix.columns / 64, 0, 0,
                      shared_address(shared) + warp * S::STAGES * S::STAGE_BYTES, read_once_policy()};
  reader.aim();
#pragma unroll
  for (int i = 0; i < S::STAGES - 1; i++) reader.read();
  if (Side::PLAN_IS_READY) {
    wait_for_kernel_before();  // weights are on their way already
    start_kernel_behind();
  }
  for (; unit < stop; unit += S::WARPS) {
    Unit found = find_unit(plan, unit, row_groups, entry);
    entry = found.entry;
    int expert = plan.expert[entry], rows = plan.rows[entry];
    int each = ((rows + found.parts - 1) / found.parts + 7) & ~7, first = found.part * each;
    int row = plan.row[entry] + first, tile = found.row_group * S::ROW_TILES;
    rows = min(each, rows - first);
    compute_columns<S, 1>(reader, slot, work, side, expert, tile, row, rows);
  }
}

#define EXPERTS(NAME, ROW_TILES, MAX_COLUMNS, DEPTH, STAGES, WARPS, BLOCKS, AHEAD)                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                \
      gate_up_##NAME(Work work, Matrix matrix, GateUp side) {                                                     \
    experts<Shape<ROW_TILES, MAX_COLUMNS, DEPTH, STAGES, WARPS, AHEAD>>(work, matrix, side);                      \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                \
      down_##NAME(Work work, Matrix matrix, Down side) {                                                          \
    experts<Shape<ROW_TILES, MAX_COLUMNS, DEPTH, STAGES, WARPS, AHEAD>>(work, matrix, side);                      \
  }

// --- rows in order of experts ---------------------------------------------------------------------------------------

// A stable sort by counting, in one block: every warp takes a run of assignments, counts them by expert, and then places
// them behind those of the warps before it. Assignments to other ranks' experts stand last. Shared memory: 33 integers
// for each of E + 1 experts.
extern "C" __global__ void __launch_bounds__(1024) sort_rows(const i64* ids, int* assignment, int* row_of,
                                                             int* row_start, int assignments, int first_expert,
                                                             int experts) {
  constexpr int WARPS = 32;
  extern __shared__ int counts[];
  __shared__ int sums[WARPS];
  int bins = experts + 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int *mine = counts + warp * bins, *start = counts + WARPS * bins;
  wait_for_kernel_before();
  start_kernel_behind();
  for (int i = threadIdx.x; i < WARPS * bins; i += WARPS * 32) counts[i] = 0;
  __syncthreads();
  int each = (assignments + WARPS * 32 - 1) / (WARPS * 32) * 32, first = warp * each;
  int stop = min(first + each, assignments);
  for (int pass = 0; pass < 2; pass++) {
    for (int i = first + lane; i - lane < stop; i += 32) {
      i64 local = i < stop ? ids[i] - first_expert : -1;
      int expert = i >= stop ? -1 : local >= 0 && local < experts ? (int)local : experts;
      u32 peers = __match_any_sync(~0u, expert), before = peers & ((1u << lane) - 1);
      if (pass == 1 && expert >= 0) {
        int row = start[expert] + mine[expert] + __popc(before);
        row_of[i] = row;
        assignment[row] = i;
      }
      __syncwarp();
      if (expert >= 0 && before == 0) mine[expert] += __popc(peers);
      __syncwarp();
    }
    __syncthreads();
    if (pass == 1) return;
    int total = 0, upto, everything;
    if (threadIdx.x < bins) {
#pragma unroll 8
      for (int w = 0; w < WARPS; w++) {
        int count = counts[w * bins + threadIdx.x];
        counts[w * bins + threadIdx.x] = total;
        total += count;
      }
    }
    add_up<WARPS>(total, upto, everything, sums);
    if (threadIdx.x < bins) start[threadIdx.x] = row_start[threadIdx.x] = upto;  // the last: rows of this rank
    __syncthreads();
  }
}

// --- the sum --------------------------------------------------------------------------------------------------------

// out[t] = sum of weights[t, a] * rows[row of (t, a)] in order of a, in fp32, over this rank's experts. Eight columns a
// thread.
extern "C" __global__ void combine(const u16* rows, const int* row_of, const float* weights, const i64* ids, u16* out,
                                   int width, int choices, int first_expert, int experts) {
  constexpr int AT_ONCE = 8;
  int column = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  float sums[8] = {};
  for (int first = 0; first < choices; first += AT_ONCE) {
    const u16* from[AT_ONCE];
    float factors[AT_ONCE];
    uint4 values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      int assignment = blockIdx.y * choices + first + i;
      from[i] = nullptr;
      if (first + i >= choices || column >= width) continue;
      i64 local = ids[assignment] - first_expert;
      factors[i] = weights[assignment];
      if (local >= 0 && local < experts)
        from[i] = rows + (i64)(row_of ? row_of[assignment] : assignment) * width + column;
    }
    if (first == 0) wait_for_kernel_before();
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if (from[i]) values[i] = load_global16(from[i]);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (!from[i]) continue;
      u32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        sums[2 * j] += factors[i] * __uint_as_float(pairs[j] << 16);
        sums[2 * j + 1] += factors[i] * __uint_as_float(pairs[j] & 0xFFFF0000u);
      }
    }
  }
  if (column >= width) return;
  uint4 result = {to_bf16_pair(sums[0], sums[1]), to_bf16_pair(sums[2], sums[3]), to_bf16_pair(sums[4], sums[5]),
                  to_bf16_pair(sums[6], sums[7])};
  *(uint4*)(out + (i64)blockIdx.y * width + column) = result;
}
