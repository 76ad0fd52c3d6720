// Routed experts in NVFP4 for many tokens an expert, on wgmma (sm_90a); behind experts_nvfp4.cu, whose parts it uses.
//
// Three warpgroups: one gathers tokens, 128 at a time, into shared memory; two multiply, each 128 weight rows as two
// blocks of 64. Weights go from a warp's ring to the registers that wgmma reads its first operand from: while one block
// is multiplied, the other one's next weights are decoded. Tokens and hidden vectors come with the columns of each 64
// in matrix_order().

typedef unsigned long long u64;

struct Wide {
  static constexpr int ROW_TILES = 2;     // of a warp: one of each block
  static constexpr int MAX_COLUMNS = 16;  // of 8 tokens
  static constexpr int DEPTH = 2;
  static constexpr int STAGES = 4;
  static constexpr int WARPS = 8;         // that multiply
  static constexpr int GROUP_TILES = ROW_TILES * WARPS;
  static constexpr int STEP = 1;
  static constexpr int STAGE_BYTES = ROW_TILES * DEPTH * (WORD_BYTES + SCALE_BYTES);
  static constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
  static constexpr int GATHERERS = 128;   // threads
  static constexpr int THREADS = WARPS * 32 + GATHERERS;
  static constexpr int TOKENS = 8 * MAX_COLUMNS;
  static constexpr int TOKEN_STAGES = 6;
  static constexpr int TOKEN_BYTES = TOKENS * 128;  // of a stage: 64 columns of each token
};

// --- the instructions -----------------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_when_copied(u32 barrier) {  // when this thread's copies so far are there
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy16_again(u32 to, const void* from) {  // of what others will read, too
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most PENDING groups of products run; the block that is then done has read `a` up to here.
template <int PENDING>
__device__ __forceinline__ void await_products(u32 (&a)[16]) {
  asm volatile("wgmma.wait_group.sync.aligned %16;"
               : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(a[4]), "+r"(a[5]), "+r"(a[6]), "+r"(a[7]),
                 "+r"(a[8]), "+r"(a[9]), "+r"(a[10]), "+r"(a[11]), "+r"(a[12]), "+r"(a[13]), "+r"(a[14]), "+r"(a[15])
               : "n"(PENDING)
               : "memory");
}

// d += a [64, 16] x tokens [16, N]; b: a descriptor of rows of 128 bytes, swizzled.
template <int N>
__device__ __forceinline__ void multiply_wide(float (&d)[N / 8][4], const u32* a, u64 b);

template <>
__device__ __forceinline__ void multiply_wide<32>(float (&d)[4][4], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void multiply_wide<64>(float (&d)[8][4], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void multiply_wide<96>(float (&d)[12][4], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
      "}, {%48, %49, %50, %51}, %52, 1, 1, 1, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
        "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
        "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),
        "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

template <>
__device__ __forceinline__ void multiply_wide<128>(float (&d)[16][4], const u32* a, u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
        "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
        "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
        "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
        "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
        "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
        "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),
        "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
        "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
        "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
        "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ u64 describe(u32 address) {
  constexpr u64 EIGHT_ROWS = 1024 >> 4, SWIZZLE_128 = 1;
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | EIGHT_ROWS << 32 | SWIZZLE_128 << 62;
}

// --- the roles ------------------------------------------------------------------------------------------------------

struct Part {  // of an expert's rows
  int expert, row_tile, row, rows;
};

__device__ __forceinline__ Part find_part(const Plan& plan, const Unit& unit) {
  int rows = plan.rows[unit.entry], each = ((rows + unit.parts - 1) / unit.parts + 7) & ~7, first = unit.part * each;
  return {plan.expert[unit.entry], unit.row_group * Wide::GROUP_TILES, plan.row[unit.entry] + first,
          min(each, rows - first)};
}

struct Barriers {
  u32 full, empty;  // the first of each

  __device__ __forceinline__ static void next(int& slot, int& parity) {
    if (++slot == Wide::TOKEN_STAGES) slot = 0, parity ^= 1;
  }
};

template <class Side>
__device__ __forceinline__ void gather(const Work& work, const Matrix& matrix, const Side& side, const Plan& plan,
                                       u32 stages, Barriers barriers, int unit, int stop, int row_groups) {
  constexpr int EACH = Wide::TOKENS * 8 / Wide::GATHERERS, APART = Wide::GATHERERS / 8;
  int thread = threadIdx.x - Wide::WARPS * 32, first = thread / 8, chunk = thread % 8;
  int slot = 0, parity = 1, entry = first_entry(plan, unit, row_groups);
  u32 to = stages + first * 128 + ((chunk ^ (first & 7)) * 16);  // rows APART have the same swizzle
  for (; unit < stop; unit++) {
    Unit found = find_unit(plan, unit, row_groups, entry);
    entry = found.entry;
    Part part = find_part(plan, found);
    int needed = (part.rows + 31) / 32 * 32;
    const u16* from[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
      from[i] = side.token(part.row + min(first + i * APART, part.rows - 1), work, matrix.columns) + chunk * 8;
    for (int k = 0; k < matrix.columns / 64; k++) {
      wait_for(barriers.empty + slot * 8, parity);
#pragma unroll
      for (int i = 0; i < EACH; i++)
        if (i * APART < needed) copy16_again(to + slot * Wide::TOKEN_BYTES + i * APART * 128, from[i] + k * 64);
      arrive_when_copied(barriers.full + slot * 8);
      Barriers::next(slot, parity);
    }
  }
}

__device__ __forceinline__ void decode_block(u32 stage, int i, int j, u32 (&a)[16]) {
  int lane = threadIdx.x % 32;
  uint4 four = load_shared16(stage + (j * Wide::ROW_TILES + i) * WORD_BYTES + lane * 16);
  u32 words[4] = {four.x, four.y, four.z, four.w}, low, high;
  u32 scales = stage + Wide::ROW_TILES * Wide::DEPTH * WORD_BYTES + (i * Wide::DEPTH + j) * SCALE_BYTES;
  spread_scales(load_shared2(scales + lane * 2), low, high);
#pragma unroll
  for (int s = 0; s < 4; s++) {
    u32 quarter[4];
    decode(words[s], low, high, quarter);
#pragma unroll
    for (int c = 0; c < 4; c++) a[4 * s + c] = quarter[c];
  }
}

template <int N>
__device__ __forceinline__ void multiply_block(float (&sums)[N / 8][4], const u32 (&a)[16], u32 tokens) {
  begin_products();
#pragma unroll
  for (int s = 0; s < 4; s++) multiply_wide<N>(sums, a + 4 * s, describe(tokens + s * 32));
  end_products();
}

__device__ __forceinline__ void release(u32 barrier) {
  if (threadIdx.x % 32 == 0) arrive(barrier);
}

template <int N, class Side>
__device__ __forceinline__ void compute_wide(Reader<Wide>& reader, int& ring_slot, u32 stages, Barriers barriers,
                                             int& slot, int& parity, const Side& side, const Part& part) {
  float sums[2][N / 8][4];
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums[i][n][c] = 0.0f;
  u32 first[16], second[16], stage = 0;
  auto open_stage = [&]() {
    wait_for_oldest<Wide::STAGES>();
    __syncwarp();
    reader.read();
    stage = reader.ring + ring_slot * Wide::STAGE_BYTES;
    ring_slot = ring_slot + 1 == Wide::STAGES ? 0 : ring_slot + 1;
  };
  auto open_tokens = [&]() {
    wait_for(barriers.full + slot * 8, parity);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  };
  auto finish_second = [&](int j) {  // its weights are decoded while the first block is multiplied
    decode_block(stage, 1, j, second);
    multiply_block<N>(sums[1], second, stages + slot * Wide::TOKEN_BYTES);
    await_products<1>(first);
  };
  auto start_first = [&](int j) {  // and the other way round
    u32 done = barriers.empty + slot * 8;
    Barriers::next(slot, parity);
    decode_block(stage, 0, j, first);
    open_tokens();
    multiply_block<N>(sums[0], first, stages + slot * Wide::TOKEN_BYTES);
    await_products<1>(second);
    release(done);
  };
  open_stage();
  decode_block(stage, 0, 0, first);
  open_tokens();
  multiply_block<N>(sums[0], first, stages + slot * Wide::TOKEN_BYTES);
  for (int k = 2; k < reader.column_tiles; k += 2) {
    finish_second(0);
    start_first(1);
    finish_second(1);
    open_stage();
    start_first(0);
  }
  finish_second(0);
  start_first(1);
  finish_second(1);
  await_products<0>(second);
  release(barriers.empty + slot * 8);
  Barriers::next(slot, parity);
  int row_tile = part.row_tile + threadIdx.x / 32 * Wide::ROW_TILES;
  side.template finish<Wide, N / 8>(sums, reader.matrix, part.expert, row_tile, part.row, part.rows);
}

template <class Side>
__device__ __forceinline__ void experts_wide(const Work& work, const Matrix& matrix, const Side& side) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u64 barrier_memory[2 * Wide::TOKEN_STAGES];
  wait_for_kernel_before();
  Barriers barriers = {shared_address(barrier_memory), shared_address(barrier_memory + Wide::TOKEN_STAGES)};
  if (threadIdx.x < Wide::TOKEN_STAGES) {
    init_barrier(barriers.full + threadIdx.x * 8, Wide::GATHERERS);
    init_barrier(barriers.empty + threadIdx.x * 8, Wide::WARPS);
  }
  char* aligned = shared + (-shared_address(shared) & 1023);  // as the swizzle has it
  char* rings = aligned + Wide::TOKEN_STAGES * Wide::TOKEN_BYTES;
  Plan plan;
  make_plan<Wide::THREADS / 32>(work, Wide::TOKENS, (int*)(rings + Wide::RING_BYTES), work.experts + 1, plan);
  int row_groups = matrix.row_tiles / Wide::GROUP_TILES, warp = threadIdx.x / 32;
  i64 units = (i64)plan.cumulative[plan.size] * row_groups;
  int unit = (int)(units * blockIdx.x / gridDim.x), stop = (int)(units * (blockIdx.x + 1) / gridDim.x);
  if (unit >= stop) return;
  u32 stages = shared_address(aligned);
  if (warp >= Wide::WARPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    gather(work, matrix, side, plan, stages, barriers, unit, stop, row_groups);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    int entry = first_entry(plan, unit, row_groups), ring_slot = 0, slot = 0, parity = 0;
    Reader<Wide> reader = {matrix, plan, row_groups, unit, stop, entry, warp * Wide::ROW_TILES, matrix.columns / 64,
                           0, 0, shared_address(rings) + warp * Wide::STAGES * Wide::STAGE_BYTES, read_once_policy()};
    reader.aim();
#pragma unroll
    for (int i = 0; i < Wide::STAGES - 1; i++) reader.read();
    for (; unit < stop; unit++) {
      Unit found = find_unit(plan, unit, row_groups, entry);
      entry = found.entry;
      Part part = find_part(plan, found);
      if (part.rows <= 32) compute_wide<32>(reader, ring_slot, stages, barriers, slot, parity, side, part);
      else if (part.rows <= 64) compute_wide<64>(reader, ring_slot, stages, barriers, slot, parity, side, part);
      else if (part.rows <= 96) compute_wide<96>(reader, ring_slot, stages, barriers, slot, parity, side, part);
      else compute_wide<128>(reader, ring_slot, stages, barriers, slot, parity, side, part);
    }
  }
}

extern "C" __global__ void __launch_bounds__(Wide::THREADS, 1) gate_up_wide(Work work, Matrix matrix, GateUp<true> side) {
  experts_wide(work, matrix, side);
}

extern "C" __global__ void __launch_bounds__(Wide::THREADS, 1) down_wide(Work work, Matrix matrix, Down side) {
  experts_wide(work, matrix, side);
}
