// The output of a mixture of experts: each token's parts, weighted, added in the order of their rank.
#include "common.cuh"

constexpr int THREADS = 256;

// grid (tokens, ceil(width / (256 vectors))), block 256. out [tokens, width] from parts [tokens, per_token, width] and
// weights, ids [tokens, per_token]; zeros for padding (id -1). width is a multiple of a 16-byte vector.
template <class T>
__global__ void __launch_bounds__(THREADS)
    combine_experts(T* out, const T* parts, const float* weights, const int* ids, int per_token, int width) {
  const int i = (blockIdx.y * THREADS + threadIdx.x) * VEC<T>;
  if (i >= width) return;
  const int64_t token = blockIdx.x, pair = token * per_token;
  float sum[VEC<T>] = {};
  if (ids[pair] >= 0)
    for (int rank = 0; rank < per_token; ++rank) {
      const Vector<T> part = load_vector(parts + (pair + rank) * width + i);
      const float weight = weights[pair + rank];
#pragma unroll
      for (int k = 0; k < VEC<T>; ++k) sum[k] = fmaf(weight, to_float(part.at[k]), sum[k]);
    }
  Vector<T> result;
#pragma unroll
  for (int k = 0; k < VEC<T>; ++k) result.at[k] = from_float<T>(sum[k]);
  store_vector(out + token * width + i, result);
}
