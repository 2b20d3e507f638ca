// Attention of many new tokens (prompts, chunks, mixed batches) over the paged cache: flash attention on tensor cores.
// A block owns 4 x ROW_TILES x 16 packed rows and walks KV tiles of 32 or 64 tokens. Values arrive while the scores are
// computed, the next keys while the values are multiplied:
//
//   wait K(t) | barrier | start V(t) | scores, softmax | wait V(t) | barrier | start K(t+1) | values | ...
#include "attention_tile.cuh"

constexpr int WARPS = 4;

// Sixteen packed rows of a warp; two such tiles halve the shared-memory traffic per product. Heads of 256 have no
// registers for a second one.
template <int D> constexpr int ROW_TILES = D > 128 ? 1 : 2;
template <int D> constexpr int KV_TILE = D == 96 || D == 128 ? 32 : 64;  // 64 would spill there

// grid (items, kv_heads), block 128, shared memory: see table.prefill_smem. Tensors as in paged_decode; an item covers
// all KV positions of its queries (slot -1).
template <class T, int D>
__global__ void __launch_bounds__(WARPS* WARP)
    paged_prefill(T* out, const T* q, const T* key_cache, const T* value_cache, const int* block_tables,
                  const int* items, int table_stride, int block_size, int group, int q_stride, int window, float scale,
                  float softcap) {
  constexpr int TILE = KV_TILE<D>, MT = ROW_TILES<D>, WARP_ROWS = MT * 16, ROWS = WARPS * WARP_ROWS;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* queries = reinterpret_cast<T*>(shared_bytes);
  T* keys = queries + row_offset<T, D>(ROWS);
  T* values = keys + row_offset<T, D>(TILE);
  const Item item = load_item(items, blockIdx.x);
  if (item.row < 0) return;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, rows = item.num_queries * group;
  const Pages pages{block_tables + (int64_t)item.row * table_stride, block_size, kv_heads, kv_head};
  const Scores unit{scale, softcap};

  copy_queries<T, D, ROWS, WARPS * WARP>(queries, q, q_stride, item.first_token, rows, group, kv_head);
  const int first = item.kv_begin / TILE * TILE;
  const int tiles = item.kv_end > first ? (item.kv_end - first + TILE - 1) / TILE : 0;
  constexpr int SHARE = TILE / WARPS;  // rows that each warp copies
  using Rows = RowCopier<T, D, SHARE>;
  const auto rows_of = [&](int tile) { return Rows(pages, first + tile * TILE + warp * SHARE, item.kv_end); };
  const int share = warp * row_offset<T, D>(SHARE);
  Rows loaded = rows_of(0);
  if (tiles > 0) loaded.copy(keys + share, key_cache);
  cp_async_commit();

  float acc[MT][D / 8][4] = {};
  RowState state[MT];
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<0>();
    __syncthreads();  // the keys are here, and no warp reads the last values any more
    loaded.copy(values + share, value_cache);
    cp_async_commit();
    loaded = rows_of(tile + 1);  // the block table is read while the scores are computed: nothing waits for it
    float scores[MT][TILE / 8][4];
    const auto load_q = [&](uint32_t(&a)[4], int m, int k) {
      ldmatrix_x4(a, queries + row_offset<T, D>(warp * WARP_ROWS + m * 16 + lane % 16) + k * 16 + lane / 16 * 8);
    };
    multiply_keys<T, D, TILE, MT>(scores, load_q, keys);
#pragma unroll
    for (int m = 0; m < MT; ++m)
      online_softmax<D, TILE>(scores[m], acc[m], state[m], unit, first + tile * TILE, item, warp * WARP_ROWS + m * 16,
                              rows, group, window);
    cp_async_wait<0>();
    __syncthreads();  // the values are here, and no warp reads the keys any more
    if (tile + 1 < tiles) loaded.copy(keys + share, key_cache);
    cp_async_commit();
    multiply_values<T, D, TILE, MT>(acc, scores, values);
  }
  cp_async_wait<0>();

#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state[m].sum[half];
      sum += __shfl_xor_sync(ALL_LANES, sum, 1);
      sum += __shfl_xor_sync(ALL_LANES, sum, 2);
      const float inverse = sum > 0.f ? 1.f / sum : 0.f;
      const int r = warp * WARP_ROWS + m * 16 + g + half * 8;
      if (r >= rows) continue;
      const int64_t token = item.first_token + r / group;
      T* to = out + (token * kv_heads * group + kv_head * group + r % group) * D + t * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<uint32_t*>(to + n * 8) =
            pack2<T>(acc[m][n][half * 2] * inverse, acc[m][n][half * 2 + 1] * inverse);
    }
}
