// Which experts a token goes to, and the pairs of tokens and experts sorted by expert. All on the device: the host never
// knows, so that no step waits and a captured graph holds the launches.
#include "block_argmax.cuh"

constexpr int CHOOSE_THREADS = 256, SORT_THREADS = 1024;
constexpr int MAX_EXPERTS = 2048;  // per_token is at most 32: a lane holds one of them

// A warp's choice for one token: ids and weights [per_token], by softmax over all experts, likeliest first, ties to the
// lower id. Each choice is the best of those that come after the one before, so nothing has to be marked. Logits with a
// NaN give NaN weights and ids that exist.
DEV void choose(int* ids, float* weights, const float* logits, int experts, int per_token, bool normalize) {
  const int lane = threadIdx.x % WARP;
  float top = negative_infinity(), sum = 0.f;
  for (int e = lane; e < experts; e += WARP) top = fmaxf(top, logits[e]);
  top = warp_max(top);
  for (int e = lane; e < experts; e += WARP) sum += expf(logits[e] - top);
  sum = warp_sum(sum);
  Best last{-negative_infinity(), -1};
  float own_weight = 0.f, total = 0.f;
  int own_id = 0;
  for (int rank = 0; rank < per_token; ++rank) {
    Best best{negative_infinity(), experts};
    for (int e = lane; e < experts; e += WARP) {
      const Best other{logits[e], e};
      if (last.before(other) && other.before(best)) best = other;
    }
    last = warp_argmax(best);
    const float weight = expf(last.value - top) / sum;
    total += weight;
    if (lane == rank) own_weight = weight, own_id = last.index < experts ? last.index : rank;
  }
  if (lane >= per_token) return;
  ids[lane] = own_id;
  weights[lane] = normalize ? own_weight / total : own_weight;
}

// Tokens whose cache slot is negative are padding: their ids are -1, and no expert is read for them.
DEV void choose_or_skip(int* ids, float* weights, const float* logits, const int64_t* kv_slots, int token, int experts,
                        int per_token, bool normalize) {
  const int64_t at = (int64_t)token * per_token;
  if (kv_slots && kv_slots[token] < 0) {
    if (threadIdx.x % WARP < per_token) ids[at + threadIdx.x % WARP] = -1;
  } else {
    choose(ids + at, weights + at, logits + (int64_t)token * experts, experts, per_token, normalize);
  }
}

// grid (ceil(tokens / 8)), block 256. ids and weights [tokens, per_token] from logits [tokens, experts]; kv_slots
// [tokens] or null: no token is padding.
__global__ void __launch_bounds__(CHOOSE_THREADS)
    choose_experts(int* ids, float* weights, const float* logits, const int64_t* kv_slots, int tokens, int experts,
                   int per_token, int normalize) {
  const int token = blockIdx.x * (CHOOSE_THREADS / WARP) + threadIdx.x / WARP;
  if (token < tokens) choose_or_skip(ids, weights, logits, kv_slots, token, experts, per_token, normalize);
}

// grid (1), block 1024. pairs [tokens * per_token]: the pairs with an id, sorted by expert; tiles [max_tiles, 4]: each
// expert's places in tiles of tile_rows (expert, first place, rows, 0), then -1. With logits it chooses first, as
// choose_experts does: one launch less where tokens are few. The order of pairs within an expert is not fixed; no value
// depends on it, as every row of a product is computed alike.
__global__ void __launch_bounds__(SORT_THREADS)
    sort_pairs(int* tiles, int* pairs, int* ids, float* weights, const float* logits, const int64_t* kv_slots,
               int tokens, int experts, int per_token, int normalize, int tile_rows, int max_tiles) {
  __shared__ int places[MAX_EXPERTS];  // of each expert: how many, then where the next one goes
  __shared__ int used_tiles;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, count = tokens * per_token;
  if (logits)
    for (int token = warp; token < tokens; token += SORT_THREADS / WARP)
      choose_or_skip(ids, weights, logits, kv_slots, token, experts, per_token, normalize);
  for (int e = threadIdx.x; e < experts; e += SORT_THREADS) places[e] = 0;
  __syncthreads();  // the ids are here, too
  for (int i = threadIdx.x; i < count; i += SORT_THREADS)
    if (ids[i] >= 0) atomicAdd(places + ids[i], 1);
  __syncthreads();
  if (warp == 0) {
    int first = 0, tile = 0;  // of the experts before these 32
    for (int e = lane; e - lane < experts; e += WARP) {
      const int rows = e < experts ? places[e] : 0, blocks = (rows + tile_rows - 1) / tile_rows;
      int place = rows, at = blocks;  // inclusive sums over the lanes
#pragma unroll
      for (int offset = 1; offset < WARP; offset *= 2) {
        const int lower_place = __shfl_up_sync(ALL_LANES, place, offset);
        const int lower_at = __shfl_up_sync(ALL_LANES, at, offset);
        if (lane >= offset) place += lower_place, at += lower_at;
      }
      if (e < experts) places[e] = first + place - rows;
      for (int block = 0; block < blocks; ++block)
        reinterpret_cast<int4*>(tiles)[tile + at - blocks + block] =
            make_int4(e, first + place - rows + block * tile_rows, min(tile_rows, rows - block * tile_rows), 0);
      first += __shfl_sync(ALL_LANES, place, WARP - 1);
      tile += __shfl_sync(ALL_LANES, at, WARP - 1);
    }
    if (lane == 0) used_tiles = tile;
  }
  __syncthreads();
  for (int i = used_tiles + threadIdx.x; i < max_tiles; i += SORT_THREADS)
    reinterpret_cast<int4*>(tiles)[i] = make_int4(-1, 0, 0, 0);
  for (int i = threadIdx.x; i < count; i += SORT_THREADS)
    if (ids[i] >= 0) pairs[atomicAdd(places + ids[i], 1)] = i;
}
