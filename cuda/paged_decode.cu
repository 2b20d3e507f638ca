// Decode attention over the paged cache: up to 16 packed rows (query heads of one KV head, for one or a few queries)
// against a range of KV positions. Memory-bound: the four warps of a block walk tiles of 16 tokens in turn, each with
// its own pipeline of asynchronous copies and no barrier, and merge once at the end. A range that is only part of a
// row's cache leaves a partial result for paged_merge.
#include "attention_tile.cuh"

constexpr int WARPS = 4, TILE = 16;

template <class T, int D> struct Shape {
  static constexpr int STAGES = D > 128 ? 2 : 3;
  static constexpr int ROWS = row_offset<T, D>(TILE);  // elements of a tile
  static constexpr int STAGE = 2 * ROWS;               // keys, then values
  // The merge's accumulators are written by four rows of eight floats at a time, and read by rows.
  DEV static constexpr int merge_offset(int row) { return row_offset<float, D, 8>(row); }
};

// grid (items, kv_heads), block 128, shared memory: see table.decode_smem.
// out [tokens, kv_heads * group, D], q the same with q_stride elements a token; part_out [slots, kv_heads, 16, D],
// part_lse [slots, kv_heads, 16] (log2).
template <class T, int D>
__global__ void __launch_bounds__(WARPS* WARP)
    paged_decode(T* out, float* part_out, float* part_lse, const T* q, const T* key_cache, const T* value_cache,
                 const int* block_tables, const int* items, int table_stride, int block_size, int group, int q_stride,
                 int window, float scale, float softcap) {
  using S = Shape<T, D>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* shared = reinterpret_cast<T*>(shared_bytes);
  const Item item = load_item(items, blockIdx.x);
  if (item.row < 0) return;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, rows = item.num_queries * group;
  const Pages pages{block_tables + (int64_t)item.row * table_stride, block_size, kv_heads, kv_head};
  const Scores unit{scale, softcap};

  copy_queries<T, D, TILE, WARPS * WARP>(shared, q, q_stride, item.first_token, rows, group, kv_head);
  cp_async_commit();
  const auto load_q = [&](uint32_t(&a)[4], int, int k) {
    ldmatrix_x4(a, shared + row_offset<T, D>(lane % 16) + k * 16 + lane / 16 * 8);
  };

  T* pipeline = shared + S::ROWS + warp * S::STAGES * S::STAGE;
  const int first = item.kv_begin / TILE * TILE;
  const int tiles = item.kv_end > first ? (item.kv_end - first + TILE - 1) / TILE : 0;
  using Rows = RowCopier<T, D, TILE>;
  const auto rows_of = [&](int tile) { return Rows(pages, first + tile * TILE, item.kv_end); };
  const auto load = [&](int tile, int stage, const Rows& rows_of_tile) {
    if (tile < tiles) {
      T* keys = pipeline + stage * S::STAGE;
      rows_of_tile.copy(keys, key_cache);
      rows_of_tile.copy(keys + S::ROWS, value_cache);
    }
    cp_async_commit();  // even if empty, so that the wait can count groups
  };

  float acc[1][D / 8][4] = {};
  RowState state;
#pragma unroll
  for (int stage = 0; stage < S::STAGES - 1; ++stage) load(warp + stage * WARPS, stage, rows_of(warp + stage * WARPS));
  Rows next = rows_of(warp + (S::STAGES - 1) * WARPS);
  cp_async_wait<S::STAGES - 1>();
  __syncthreads();  // the queries are here
  int stage = 0;
  for (int tile = warp; tile < tiles; tile += WARPS) {
    cp_async_wait<S::STAGES - 2>();
    __syncwarp();  // this tile has arrived for all lanes, and all have left the stage that is filled next
    load(tile + (S::STAGES - 1) * WARPS, (stage + S::STAGES - 1) % S::STAGES, next);
    next = rows_of(tile + S::STAGES * WARPS);  // the block table is read a tile ahead: nothing waits for it
    const T* keys = pipeline + stage * S::STAGE;
    float scores[1][TILE / 8][4];
    multiply_keys<T, D, TILE, 1>(scores, load_q, keys);
    online_softmax<D, TILE>(scores[0], acc[0], state, unit, first + tile * TILE, item, 0, rows, group, window);
    multiply_values<T, D, TILE, 1>(acc, scores, keys + S::ROWS);
    stage = (stage + 1) % S::STAGES;
  }
  cp_async_wait<0>();
  __syncthreads();  // the pipelines' memory is used again below

  // Merge the warps: accumulators [warp][16][D], then top and sum [warp][16][2].
  float* merged = reinterpret_cast<float*>(shared_bytes);
  float* stats = merged + S::merge_offset(WARPS * TILE);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    const int r = warp * TILE + g + half * 8;
    if (t == 0) *reinterpret_cast<float2*>(stats + r * 2) = make_float2(state.top[half], sum);
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      *reinterpret_cast<float2*>(merged + S::merge_offset(r) + n * 8 + t * 2) =
          make_float2(acc[0][n][half * 2], acc[0][n][half * 2 + 1]);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * (D / 2); i += WARPS * WARP) {
    const int r = i / (D / 2), c = i % (D / 2) * 2;
    float top = negative_infinity();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, stats[(w * TILE + r) * 2]);
    const float base = top == negative_infinity() ? 0.f : top;
    float sum = 0.f, x = 0.f, y = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float weight = fast_exp2(stats[(w * TILE + r) * 2] - base);
      const float2 part = *reinterpret_cast<const float2*>(merged + S::merge_offset(w * TILE + r) + c);
      sum += weight * stats[(w * TILE + r) * 2 + 1];
      x += weight * part.x;
      y += weight * part.y;
    }
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;  // a row that sees nothing is zero
    if (item.slot < 0) {
      const int64_t token = item.first_token + r / group;
      const int64_t at = (token * kv_heads * group + kv_head * group + r % group) * D + c;
      *reinterpret_cast<uint32_t*>(out + at) = pack2<T>(x * inverse, y * inverse);
    } else {
      const int64_t at = ((int64_t)item.slot * kv_heads + kv_head) * TILE + r;
      *reinterpret_cast<float2*>(part_out + at * D + c) = make_float2(x * inverse, y * inverse);
      if (c == 0) part_lse[at] = sum > 0.f ? base + log2f(sum) : negative_infinity();
    }
  }
}
