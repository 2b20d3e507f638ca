// Rotary embedding of q and k, optionally after a norm of each head, and the write of k and v to the paged cache.
#include "common.cuh"

constexpr int WARPS = 4, MAX_PAIRS = 4;  // head_dim up to 256: 128 pairs over 32 lanes

// One head's vector, as pairs (x[i], x[i + half]) that rotate together. Lane l holds pairs l, l + 32, ...
struct HeadPairs {
  float low[MAX_PAIRS], high[MAX_PAIRS];
};

// grid (tokens, ceil((q_heads + 2 kv_heads) / 4)), block 128: one warp a head.
// qkv [tokens, (q_heads + 2 kv_heads) * head_dim]: q is rotated in place; k and v go to the cache, rotated and as they
// are. rope [positions, rotary_dim]: cos, then sin. The first rotary_dim elements rotate, the rest pass. q_norm and k_norm
// [head_dim] or null. A token whose kv_slot is negative is padding: nothing of it is read or written.
template <class T>
__global__ void __launch_bounds__(WARPS* WARP)
    rope_kv_write(T* qkv, T* key_cache, T* value_cache, const float* rope, const int64_t* positions,
                  const int64_t* kv_slots, const T* q_norm, const T* k_norm, int q_heads, int kv_heads, int head_dim,
                  int rotary_dim, int block_size, float eps, float weight_offset) {
  const int token = blockIdx.x, head = blockIdx.y * WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int64_t kv_slot = kv_slots[token];
  if (head >= q_heads + 2 * kv_heads || kv_slot < 0) return;
  T* x = qkv + ((int64_t)token * (q_heads + 2 * kv_heads) + head) * head_dim;
  const int kv_head = head < q_heads + kv_heads ? head - q_heads : head - q_heads - kv_heads;
  const int64_t block = kv_slot / block_size;
  const int64_t cached = ((block * kv_heads + kv_head) * block_size + (kv_slot - block * block_size)) * head_dim;
  if (head >= q_heads + kv_heads) {
    for (int i = lane; i < head_dim; i += WARP) value_cache[cached + i] = x[i];
    return;
  }
  const bool is_q = head < q_heads;
  const T* norm = is_q ? q_norm : k_norm;
  T* to = is_q ? x : key_cache + cached;
  const int half = rotary_dim / 2, tail = head_dim - rotary_dim;

  // Elements past rotary_dim are taken as further pairs with no rotation: (x[rotary + j], x[rotary + j + tail / 2]).
  const auto low_at = [&](int pair) { return pair < half ? pair : rotary_dim + pair - half; };
  const auto high_at = [&](int pair) { return low_at(pair) + (pair < half ? half : tail / 2); };
  HeadPairs v;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < MAX_PAIRS; ++i) {
    const int pair = i * WARP + lane;
    if (pair >= head_dim / 2) break;
    v.low[i] = to_float(x[low_at(pair)]);
    v.high[i] = to_float(x[high_at(pair)]);
    squares += v.low[i] * v.low[i] + v.high[i] * v.high[i];
  }
  float inverse = 1.f;
  if (norm) inverse = rsqrtf(warp_sum(squares) / head_dim + eps);
  const float* angles = rope + positions[token] * rotary_dim;
#pragma unroll
  for (int i = 0; i < MAX_PAIRS; ++i) {
    const int pair = i * WARP + lane;
    if (pair >= head_dim / 2) break;
    const int low = low_at(pair), high = high_at(pair);
    float a = v.low[i], b = v.high[i];
    if (norm) {
      a *= inverse * (to_float(norm[low]) + weight_offset);
      b *= inverse * (to_float(norm[high]) + weight_offset);
    }
    if (pair < half) {
      const float c = angles[pair], s = angles[half + pair], rotated = a * c - b * s;
      b = b * c + a * s;
      a = rotated;
    }
    to[low] = from_float<T>(a);
    to[high] = from_float<T>(b);
  }
}
