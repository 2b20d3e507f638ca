// The draw, bit for bit that of executor_svc/sampling/draw.py: integer weights, so that no result depends on the order
// of a sum. Candidates are ordered by the key (MAX_WEIGHT - weight) << 24 | id; each of top_k, top_p and the draw
// asks for the first key at which a running count or mass reaches a target. That key is found by radix descent: a
// histogram of ten bits at a time over the candidates that share the bits found so far.
#include "common.cuh"

constexpr int THREADS = 512, DIGIT_BITS = 10, BINS = 1 << DIGIT_BITS, KEY_BITS = 62, ID_BITS = 24, WEIGHT_BITS = 38;
constexpr int64_t MAX_WEIGHT = (int64_t)1 << WEIGHT_BITS;
constexpr int TABLE_BITS = 6;
constexpr double LOWEST_STEPS = -(WEIGHT_BITS + 2) * (1 << TABLE_BITS);  // below, every weight rounds to 0
constexpr double STEP = 0.6931471805599453 / (1 << TABLE_BITS);

struct Histogram {
  uint64_t mass[BINS];
  int count[BINS];
};

struct Found {
  uint64_t key, mass;  // mass of all keys up to and with this one
};

// One row's candidates.
struct Row {
  const float* logits;
  const double* exp2_table;  // 2^(j / 64), shared memory
  double top, factor;        // factor: 64 / ln 2 / temperature
  int64_t least;
  int vocab;

  // 0 if id is no candidate. Every operation is rounded on its own: no fused multiply-add.
  DEV int64_t weight(int id) const {
    const double steps = __dmul_rn((double)logits[id] - top, factor);
    if (!(steps > LOWEST_STEPS)) return 0;
    const double whole = floor(steps), x = __dmul_rn(steps - whole, STEP);
    double p = __dadd_rn(1.0 / 6.0, __dmul_rn(x, 1.0 / 24.0));
    p = __dadd_rn(0.5, __dmul_rn(x, p));
    p = __dadd_rn(1.0, __dmul_rn(x, p));
    p = __dadd_rn(1.0, __dmul_rn(x, p));
    const int n = (int)whole;
    const double scale = __longlong_as_double((int64_t)(1023 + WEIGHT_BITS + (n >> TABLE_BITS)) << 52);
    const double value = __dmul_rn(__dmul_rn(exp2_table[n & ((1 << TABLE_BITS) - 1)], p), scale);
    const int64_t w = (int64_t)__dadd_rn(value, 0.5);
    return w >= least ? w : 0;
  }
  DEV uint64_t key(int id, int64_t w) const { return (uint64_t)(MAX_WEIGHT - w) << ID_BITS | (uint64_t)id; }
};

// Counts the candidates whose key begins with `prefix` (its bits from `known` up) by their bits from `shift` to there.
DEV void fill(Histogram& histogram, const Row& row, uint64_t prefix, int known, int shift) {
  for (int i = threadIdx.x; i < BINS; i += THREADS) histogram.mass[i] = 0, histogram.count[i] = 0;
  __syncthreads();
  const uint64_t digit = ((uint64_t)1 << (known - shift)) - 1;
#pragma unroll 1
  for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
    const int64_t w = row.weight(id);
    const uint64_t key = row.key(id, w);
    if (w == 0 || key >> known != prefix) continue;
    atomicAdd(&histogram.mass[key >> shift & digit], (uint64_t)w);
    atomicAdd(&histogram.count[key >> shift & digit], 1);
  }
  __syncthreads();
}

struct Step {
  uint64_t before, mass_before;  // what the quantity and the mass sum to in the bins before
  int bin, count;
};

// The first bin at which `before` plus the running sum of count or mass reaches target. One warp; BINS / 32 bins a lane.
DEV Step walk(const Histogram& histogram, bool by_count, uint64_t before, uint64_t mass_before, uint64_t target) {
  constexpr int SHARE = BINS / WARP;
  const int lane = threadIdx.x % WARP;
  uint64_t quantity = 0, mass = 0;
#pragma unroll 4
  for (int i = lane * SHARE; i < (lane + 1) * SHARE; ++i) {
    quantity += by_count ? (uint64_t)histogram.count[i] : histogram.mass[i];
    mass += histogram.mass[i];
  }
  uint64_t quantity_end = quantity, mass_end = mass;  // inclusive prefix sums over lanes
#pragma unroll
  for (int offset = 1; offset < WARP; offset <<= 1) {
    const uint64_t q = __shfl_up_sync(ALL_LANES, quantity_end, offset), m = __shfl_up_sync(ALL_LANES, mass_end, offset);
    if (lane >= offset) quantity_end += q, mass_end += m;
  }
  Step step{before + quantity_end - quantity, mass_before + mass_end - mass, lane * SHARE, 0};
  const uint32_t reached = __ballot_sync(ALL_LANES, before + quantity_end >= target);
  const int owner = reached ? __ffs(reached) - 1 : WARP - 1;
  if (lane == owner) {
#pragma unroll 1
    for (; step.bin < (lane + 1) * SHARE - 1; ++step.bin) {
      const uint64_t here = by_count ? (uint64_t)histogram.count[step.bin] : histogram.mass[step.bin];
      if (step.before + here >= target) break;
      step.before += here;
      step.mass_before += histogram.mass[step.bin];
    }
    step.count = histogram.count[step.bin];
  }
  step.before = __shfl_sync(ALL_LANES, step.before, owner);
  step.mass_before = __shfl_sync(ALL_LANES, step.mass_before, owner);
  step.bin = __shfl_sync(ALL_LANES, step.bin, owner);
  step.count = __shfl_sync(ALL_LANES, step.count, owner);
  return step;
}

struct Workspace {
  Histogram first, digits;  // `first`: of the highest digit, made once a row
  double exp2_table[1 << TABLE_BITS];
  Step step;
  Found found;
};

// The first key in candidate order at which the count or the mass reaches target (at least 1, at most the total).
DEV Found find(Workspace& shared, const Row& row, bool by_count, uint64_t target) {
  uint64_t prefix = 0, before = 0, mass_before = 0;
  int known = KEY_BITS;  // the key's bits from here up are `prefix`
#pragma unroll 1
  do {
    const int shift = max(known - DIGIT_BITS, 0);
    if (known < KEY_BITS) fill(shared.digits, row, prefix, known, shift);
    if (threadIdx.x < WARP) {
      const Step step =
          walk(known < KEY_BITS ? shared.digits : shared.first, by_count, before, mass_before, target);
      if (threadIdx.x == 0) shared.step = step;
    }
    __syncthreads();
    before = shared.step.before, mass_before = shared.step.mass_before;
    prefix = prefix << (known - shift) | (uint64_t)shared.step.bin;
    known = shift;
  } while (shared.step.count > 1 && known > 0);
  // One candidate is left: it alone has this prefix.
#pragma unroll 1
  for (int id = threadIdx.x; id < row.vocab; id += THREADS) {
    const int64_t w = row.weight(id);
    if (w && row.key(id, w) >> known == prefix) shared.found = Found{row.key(id, w), mass_before + (uint64_t)w};
  }
  __syncthreads();
  const Found found = shared.found;
  __syncthreads();
  return found;
}

// grid (rows), block 512. tokens [rows], and last_tokens[slots[r]] where slots[r] >= 0, get the row's token.
// adjusted [rows, vocab], argmax and top as adjust_logits left them. factor [rows] float64: 64 / ln 2 / temperature,
// 0 for greedy; least int64 [rows]: max(1, ceil(min_p * 2^38)); top_k 0: off; top_p 1: off; bits: of philox.draw_bits.
// Rows whose status is not 0 get token 0.
__global__ void __launch_bounds__(THREADS)
    sample_rows(int64_t* tokens, int64_t* last_tokens, const float* adjusted, const int64_t* argmax, const float* top,
                const int* status, const int* slots, const double* factor, const int64_t* least, const int* top_k,
                const double* top_p, const uint64_t* bits, const double* exp2_table, int vocab) {
  __shared__ Workspace shared;
  const int r = blockIdx.x;
  int64_t token = argmax[r];
  if (status[r] == 0 && factor[r] > 0.0) {
    for (int i = threadIdx.x; i < 1 << TABLE_BITS; i += THREADS) shared.exp2_table[i] = exp2_table[i];
    __syncthreads();
    const Row row{adjusted + (int64_t)r * vocab, shared.exp2_table, (double)top[r], factor[r], least[r], vocab};
    fill(shared.first, row, 0, KEY_BITS, KEY_BITS - DIGIT_BITS);
    if (threadIdx.x < WARP) {
      uint64_t count = 0, mass = 0;
#pragma unroll 4
      for (int i = threadIdx.x; i < BINS; i += WARP) count += shared.first.count[i], mass += shared.first.mass[i];
#pragma unroll
      for (int offset = 16; offset; offset >>= 1) {
        count += __shfl_xor_sync(ALL_LANES, count, offset);
        mass += __shfl_xor_sync(ALL_LANES, mass, offset);
      }
      if (threadIdx.x == 0) shared.found = Found{count, mass};
    }
    __syncthreads();
    const uint64_t count = shared.found.key;
    uint64_t mass = shared.found.mass;
    __syncthreads();
    if (top_k[r] > 0 && (uint64_t)top_k[r] < count) mass = find(shared, row, true, (uint64_t)top_k[r]).mass;
    if (top_p[r] < 1.0) {
      const uint64_t wanted = (uint64_t)ceil(__dmul_rn(top_p[r], (double)mass));
      mass = find(shared, row, false, min(max(wanted, (uint64_t)1), mass)).mass;
    }
    const uint64_t target = __umul64hi(bits[r], mass);
    token = (int64_t)(find(shared, row, false, target + 1).key & ((1u << ID_BITS) - 1));
  }
  if (threadIdx.x == 0) {
    tokens[r] = token;
    if (slots[r] >= 0) last_tokens[slots[r]] = token;
  }
}
