// The gated activation of the feed-forward layer.
#include "common.cuh"

constexpr int THREADS = 256;

// grid (tokens, ceil(width / (256 vectors))), block 256. gate_up [tokens, 2 width], gate first; out [tokens, width] =
// silu(gate) * up; width is a multiple of a 16-byte vector.
template <class T> __global__ void __launch_bounds__(THREADS) silu_mul(T* out, const T* gate_up, int width) {
  const int i = (blockIdx.y * THREADS + threadIdx.x) * VEC<T>;
  if (i >= width) return;
  const int64_t token = blockIdx.x;
  const Vector<T> gate = load_vector(gate_up + token * 2 * width + i);
  Vector<T> up = load_vector(gate_up + token * 2 * width + width + i);
#pragma unroll
  for (int k = 0; k < VEC<T>; ++k) up.at[k] = from_float<T>(silu(to_float(gate.at[k])) * to_float(up.at[k]));
  store_vector(out + token * width + i, up);
}
