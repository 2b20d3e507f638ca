// The largest value of a warp or block and where it stands; the lowest index wins a tie.
#pragma once
#include "common.cuh"

struct Best {
  float value;
  int index;
  DEV bool before(const Best& other) const { return value > other.value || (value == other.value && index < other.index); }
};

// Every lane gets the result.
DEV Best warp_argmax(Best best) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) {
    const Best other{__shfl_xor_sync(ALL_LANES, best.value, offset), __shfl_xor_sync(ALL_LANES, best.index, offset)};
    if (other.before(best)) best = other;
  }
  return best;
}

// Every thread gets the result. `scratch` holds THREADS / 32 entries and may be used again after the next barrier.
template <int THREADS> DEV Best block_argmax(Best best, Best* scratch) {
  best = warp_argmax(best);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = best;
  __syncthreads();
  for (int warp = 0; warp < THREADS / WARP; ++warp)
    if (scratch[warp].before(best)) best = scratch[warp];
  return best;
}
