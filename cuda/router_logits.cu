// How much each token likes each expert: the router's product, in float32.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int EXPERTS_PER_WARP = 2, TOKENS = 16;  // of a warp
constexpr int STEPS = 4;  // of 128 elements each, whose loads are under way together

DEV float4 load_four(const float* p) { return *reinterpret_cast<const float4*>(p); }
template <class T> DEV float4 load_four(const T* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  const T* at = reinterpret_cast<const T*>(&raw);
  return make_float4(to_float(at[0]), to_float(at[1]), to_float(at[2]), to_float(at[3]));
}

// grid (ceil(experts / 8), ceil(tokens / 16)), block 128. logits [tokens, experts] = x [tokens, hidden] times router
// [experts, hidden], in one order of sums whatever the batch; hidden is a multiple of 4.
template <class T>
__global__ void __launch_bounds__(THREADS)
    router_logits(float* logits, const T* x, const float* router, int tokens, int experts, int hidden) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int expert = (blockIdx.x * (THREADS / WARP) + warp) * EXPERTS_PER_WARP;
  if (expert >= experts) return;
  const int first = blockIdx.y * TOKENS, count = min(TOKENS, tokens - first);
  float acc[TOKENS][EXPERTS_PER_WARP] = {};
  const float4 nothing = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int begin = lane * 4; begin < hidden; begin += STEPS * WARP * 4) {
    float4 w[STEPS][EXPERTS_PER_WARP];
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int e = 0; e < EXPERTS_PER_WARP; ++e) {
        const int i = begin + s * WARP * 4;
        w[s][e] = i < hidden ? load_four(router + (int64_t)min(expert + e, experts - 1) * hidden + i) : nothing;
      }
#pragma unroll
    for (int j = 0; j < TOKENS; ++j) {
      if (j >= count) continue;
      float4 a[STEPS];
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int i = begin + s * WARP * 4;
        a[s] = i < hidden ? load_four(x + (int64_t)(first + j) * hidden + i) : nothing;
      }
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int e = 0; e < EXPERTS_PER_WARP; ++e)
          acc[j][e] = fmaf(a[s].w, w[s][e].w, fmaf(a[s].z, w[s][e].z, fmaf(a[s].y, w[s][e].y,
                                                                             fmaf(a[s].x, w[s][e].x, acc[j][e]))));
    }
  }
#pragma unroll
  for (int j = 0; j < TOKENS; ++j) {
    if (j >= count) continue;
#pragma unroll
    for (int e = 0; e < EXPERTS_PER_WARP; ++e) {
      const float sum = warp_sum(acc[j][e]);
      if (lane == 0 && expert + e < experts) logits[(int64_t)(first + j) * experts + expert + e] = sum;
    }
  }
}
