// Root-mean-square norm, with the residual stream's addition before it.
#include "common.cuh"

constexpr int THREADS = 256;

// grid (tokens), block 256. residual += delta (delta null: unchanged), out = norm(residual) * (weight + weight_offset).
// All [tokens, hidden], weight [hidden]; hidden is a multiple of a 16-byte vector.
template <class T>
__global__ void __launch_bounds__(THREADS)
    add_rms_norm(T* out, T* residual, const T* delta, const T* weight, float eps, float weight_offset, int hidden) {
  __shared__ float scratch[THREADS / WARP];
  const int64_t row = (int64_t)blockIdx.x * hidden;
  float squares = 0.f;
  for (int i = threadIdx.x * VEC<T>; i < hidden; i += THREADS * VEC<T>) {
    Vector<T> x = load_vector(residual + row + i);
    if (delta) {
      const Vector<T> d = load_vector(delta + row + i);
#pragma unroll
      for (int k = 0; k < VEC<T>; ++k) x.at[k] = from_float<T>(to_float(x.at[k]) + to_float(d.at[k]));
      store_vector(residual + row + i, x);
    }
#pragma unroll
    for (int k = 0; k < VEC<T>; ++k) squares += to_float(x.at[k]) * to_float(x.at[k]);
  }
  const float inverse = rsqrtf(block_sum<THREADS>(squares, scratch) / hidden + eps);
  for (int i = threadIdx.x * VEC<T>; i < hidden; i += THREADS * VEC<T>) {
    const Vector<T> w = load_vector(weight + i);
    Vector<T> x = load_vector(residual + row + i);  // this thread's own, from the nearest cache
#pragma unroll
    for (int k = 0; k < VEC<T>; ++k)
      x.at[k] = from_float<T>(to_float(x.at[k]) * inverse * (to_float(w.at[k]) + weight_offset));
    store_vector(out + row + i, x);
  }
}
