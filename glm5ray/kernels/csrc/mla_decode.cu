// Attention in absorbed form over pages or selected slots, for GLM-5's 64 heads: one block computes all heads of one token
// over one part of its context.
//
// A tile of POSITIONS latent rows is copied to shared memory once and is keys and values to all heads. For the scores a warp
// has 16 heads and half of the positions, for the values all heads and 64 of the columns: what either product reads again
// from shared memory is least so. Rows are copied a tile ahead, the numbers of their slots two. The two halves of a head's
// maximum meet in shared memory; results depend on the part's rows and their order only.
//
// Shared memory is rows of 128-byte pieces whose 16-byte chunks are exchanged by the row's number, so that ldmatrix reads
// eight rows without conflicts. One source for nvcc and NVRTC; no headers. Letters as in glm5ray/kernels/interface.py.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int HEADS = 64, LATENT = 512, ROPE = 64, ROW = LATENT + ROPE, ROW_BYTES = 2 * ROW, CHUNKS = ROW_BYTES / 16;
constexpr int WARPS = 8, THREADS = 32 * WARPS, POSITIONS = 64, STAGES = 2;
constexpr int COLUMNS = LATENT / WARPS;               // of the result, a warp's
constexpr int TILE_BYTES = POSITIONS * ROW_BYTES, QUERY_BYTES = HEADS * ROW_BYTES, WEIGHT_BYTES = HEADS * POSITIONS * 2;
constexpr int WEIGHTS_AT = QUERY_BYTES + STAGES * TILE_BYTES, TOPS_AT = WEIGHTS_AT + WEIGHT_BYTES;
constexpr int SHARED_BYTES = TOPS_AT + 3 * HEADS * 4;  // tops of both halves; by what a head's sums shrink

struct Batch {
  const i64* positions;      // [T]
  const int* slice;          // [T]
  const int* table;          // [S, P]
  const int* selected;       // [T, K], or null
  int table_stride;
  int selected_stride;
  int most_selected;         // K
  int page_size;
};

struct Query {
  const u16* q;              // [T, H, L]
  const u16* rows;           // [N, L]
  u16* out;                  // [T, H, C]: with one part
  float* partial;            // [T, B, H, C]: with several
  float* lse;                // [T, B, H], to base 2
  int token_stride;
  int head_stride;
  i64 row_stride;
  int parts;
  float scale_log2;
};

// --- the instructions -----------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// `bytes` 0: zeros are written, nothing is read
__device__ __forceinline__ void copy16_or_zeros(u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// four 8 x 8 matrices: lane 8i + j has the address of row j of matrix i
__device__ __forceinline__ void load_matrices(u32 from, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 from, u32 (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float power_of_2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ float logarithm_to_2(float v) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

__device__ __forceinline__ u32 to_bf16_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// --- rows in shared memory ------------------------------------------------------------------------------------------

// where a 16-byte chunk of a row stands; rows are a multiple of 128 bytes
template <int BYTES>
__device__ __forceinline__ u32 chunk_at(int row, int chunk) {
  return row * BYTES + ((chunk & ~7) | ((chunk ^ row) & 7)) * 16;
}

// Of a warp's eight rows of each tile: lane i < 8 knows where row i stands in the cache.
struct Places {
  const Batch& batch;
  const int* table;
  const int* selected;
  int end, lane, warp;

  __device__ __forceinline__ int position(int first) const { return first + warp * 8 + (lane & 7); }

  __device__ __forceinline__ int look_up(int first) const {  // a page, or a slot
    int at = position(first);
    if (at >= end) return -1;
    return selected ? selected[at] : table[at / batch.page_size];
  }

  __device__ __forceinline__ int slot(int first, int found) const {  // -1: none
    int at = position(first);
    if (at >= end || found < 0) return -1;
    return selected ? found : found * batch.page_size + at % batch.page_size;
  }
};

__device__ __forceinline__ void copy_tile(u32 to, const Query& query, const Places& places, int slot) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    int from = __shfl_sync(~0u, slot, i), row = places.warp * 8 + i;
    const char* at = (const char*)(query.rows + (from < 0 ? 0 : from) * query.row_stride);
    int bytes = from < 0 ? 0 : 16;
    for (int chunk = places.lane; chunk < CHUNKS; chunk += 32)
      copy16_or_zeros(to + chunk_at<ROW_BYTES>(row, chunk), at + chunk * 16, bytes);
  }
}

// --- the two products -----------------------------------------------------------------------------------------------

// scores[n]: 16 heads by 8 positions of the warp's half
__device__ __forceinline__ void compute_scores(u32 queries, u32 tile, int head_tile, int half, int lane,
                                               float (&scores)[4][4]) {
#pragma unroll
  for (int n = 0; n < 4; n++)
#pragma unroll
    for (int c = 0; c < 4; c++) scores[n][c] = 0.0f;
  int a_row = head_tile * 16 + lane % 16, a_chunk = lane / 16;
  int b_row = half * 32 + (lane & 7) + (lane & 16) / 2, b_chunk = lane / 8 % 2;
#pragma unroll 4
  for (int k = 0; k < ROW / 16; k++) {
    u32 a[4], b[4];
    load_matrices(queries + chunk_at<ROW_BYTES>(a_row, 2 * k + a_chunk), a);
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      load_matrices(tile + chunk_at<ROW_BYTES>(b_row + 8 * n, 2 * k + b_chunk), b);
      multiply(scores[n], a, b[0], b[1]);
      multiply(scores[n + 1], a, b[2], b[3]);
    }
  }
}

// sums[m][n]: 16 heads by 8 of the warp's columns
__device__ __forceinline__ void add_values(u32 weights, u32 tile, int warp, int lane, float (&sums)[4][8][4]) {
  int a_row = lane % 16, a_chunk = lane / 16;
#pragma unroll
  for (int k = 0; k < POSITIONS / 16; k++) {
    u32 b[4][4];
#pragma unroll
    for (int n = 0; n < 8; n += 2)
      load_matrices_transposed(
          tile + chunk_at<ROW_BYTES>(k * 16 + lane % 16, warp * (COLUMNS / 8) + n + lane / 16), b[n / 2]);
#pragma unroll
    for (int m = 0; m < 4; m++) {
      u32 a[4];
      load_matrices(weights + chunk_at<2 * POSITIONS>(m * 16 + a_row, 2 * k + a_chunk), a);
#pragma unroll
      for (int n = 0; n < 8; n++) multiply(sums[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

__device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

constexpr float NOTHING = -1e30f;  // below any score, and no infinity that would make differences of it

// --- one part of one token ------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla_decode(Batch batch, Query query) {
  extern __shared__ __align__(128) char shared[];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  int head_tile = warp / 2, half = warp % 2, part = blockIdx.x, token = blockIdx.y;
  u32 queries = shared_address(shared), tiles = queries + QUERY_BYTES, weights = queries + WEIGHTS_AT;
  float* tops = (float*)(shared + TOPS_AT);  // [2][HEADS]
  float* shrinks = tops + 2 * HEADS;

  int visible = (int)batch.positions[token] + 1;
  if (batch.selected) visible = min(visible, batch.most_selected);
  int all = (visible + POSITIONS - 1) / POSITIONS, each = (all + query.parts - 1) / query.parts * POSITIONS;
  int first = part * each, end = min(first + each, visible);
  Places places = {batch, batch.table + (i64)batch.slice[token] * batch.table_stride,
                   batch.selected ? batch.selected + (i64)token * batch.selected_stride : nullptr, end, lane, warp};

  const u16* q = query.q + (i64)token * query.token_stride;
  for (int i = threadIdx.x; i < HEADS * CHUNKS; i += THREADS) {
    int head = i / CHUNKS, chunk = i % CHUNKS;
    copy16_or_zeros(queries + chunk_at<ROW_BYTES>(head, chunk), q + (i64)head * query.head_stride + chunk * 8, 16);
  }
  if (first < end) copy_tile(tiles, query, places, places.slot(first, places.look_up(first)));
  commit_copies();
  int found = places.look_up(first + POSITIONS);

  float top[2] = {NOTHING, NOTHING}, total[2] = {}, sums[4][8][4] = {};  // top and total: of heads g and g + 8
  int stage = 0;
  for (int start = first; start < end; start += POSITIONS, stage ^= 1) {
    u32 tile = tiles + stage * TILE_BYTES;
    wait_for_copies();
    __syncthreads();  // the tile is there; all have done with the one before, and with its weights
    int next = start + POSITIONS;
    if (next < end) copy_tile(tiles + (stage ^ 1) * TILE_BYTES, query, places, places.slot(next, found));
    commit_copies();
    found = places.look_up(next + POSITIONS);

    float scores[4][4];
    compute_scores(queries, tile, head_tile, half, lane, scores);
    float highest[2] = {NOTHING, NOTHING};
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        bool is_seen = start + half * 32 + 8 * n + 2 * t + c % 2 < end;
        scores[n][c] = is_seen ? scores[n][c] * query.scale_log2 : NOTHING;
        highest[c / 2] = larger(highest[c / 2], scores[n][c]);
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      highest[r] = larger(highest[r], __shfl_xor_sync(~0u, highest[r], 1));
      highest[r] = larger(highest[r], __shfl_xor_sync(~0u, highest[r], 2));
      if (t == 0) tops[half * HEADS + head_tile * 16 + g + 8 * r] = highest[r];
    }
    __syncthreads();
    float shrink[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = head_tile * 16 + g + 8 * r;
      float new_top = larger(top[r], larger(tops[head], tops[HEADS + head]));
      shrink[r] = power_of_2(top[r] - new_top);
      top[r] = new_top;
      total[r] *= shrink[r];
      if (half == 0 && t == 0) shrinks[head] = shrink[r];
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      float p[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        p[c] = scores[n][c] > NOTHING ? power_of_2(scores[n][c] - top[c / 2]) : 0.0f;
        total[c / 2] += p[c];
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 at = chunk_at<2 * POSITIONS>(head_tile * 16 + g + 8 * r, half * 4 + n) + 4 * t;
        *(u32*)(shared + WEIGHTS_AT + at) = to_bf16_pair(p[2 * r], p[2 * r + 1]);
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float by = shrinks[m * 16 + g + 8 * r];
#pragma unroll
        for (int n = 0; n < 8; n++) sums[m][n][2 * r] *= by, sums[m][n][2 * r + 1] *= by;
      }
    add_values(weights, tile, warp, lane, sums);
  }

  // totals of both halves, where the tops were
#pragma unroll
  for (int r = 0; r < 2; r++) {
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
  }
  wait_for_copies();
  __syncthreads();
  if (t == 0)
#pragma unroll
    for (int r = 0; r < 2; r++) tops[half * HEADS + head_tile * 16 + g + 8 * r] = total[r];
  __syncthreads();
  i64 row = (i64)token * query.parts + part;
  if (query.partial && half == 0 && t == 0)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = head_tile * 16 + g + 8 * r;
      float both = tops[head] + tops[HEADS + head];
      query.lse[row * HEADS + head] = both > 0.0f ? top[r] + logarithm_to_2(both) : -__uint_as_float(0x7F800000u);
    }
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int head = m * 16 + g + 8 * r;
      float both = tops[head] + tops[HEADS + head], by = both > 0.0f ? 1.0f / both : 0.0f;
      i64 at = (row * HEADS + head) * LATENT + warp * COLUMNS + 2 * t;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        float low = sums[m][n][2 * r] * by, high = sums[m][n][2 * r + 1] * by;
        if (query.partial) *(float2*)(query.partial + at + 8 * n) = {low, high};
        else *(u32*)(query.out + at + 8 * n) = to_bf16_pair(low, high);
      }
    }
}
