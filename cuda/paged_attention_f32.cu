// Attention in float32 by fused multiply-adds (not TF32), for decode and prefill alike: 16 packed rows a block, KV tiles
// of 32 tokens, two stages. For exactness, not for speed: it is how a device is compared with the CPU backend.
#include "paged_kv.cuh"

constexpr int WARPS = 4, ROWS = 16, WARP_ROWS = ROWS / WARPS, TILE = 32;

// grid (items, kv_heads), block 128, shared memory: see table.f32_smem. Tensors as in paged_decode. Four blocks allow 128
// registers: unasked, ptxas aims lower and spills at some head sizes.
template <int D>
__global__ void __launch_bounds__(WARPS* WARP, 4)
    paged_attention_f32(float* out, float* part_out, float* part_lse, const float* q, const float* key_cache,
                        const float* value_cache, const int* block_tables, const int* items, int table_stride,
                        int block_size, int group, int q_stride, int window, float scale, float softcap) {
  constexpr int COLUMNS = (D + WARP - 1) / WARP, TILE_SIZE = row_offset<float, D>(TILE);
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  float* queries = reinterpret_cast<float*>(shared_bytes);  // [16][D]
  float* weights = queries + row_offset<float, D>(ROWS);    // [16][TILE]
  float* pipeline = weights + ROWS * TILE;                  // [2 stages][keys, values][TILE][D]
  const Item item = load_item(items, blockIdx.x);
  if (item.row < 0) return;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, rows = item.num_queries * group;
  const Pages pages{block_tables + (int64_t)item.row * table_stride, block_size, kv_heads, kv_head};
  const Scores unit{scale, softcap};

  copy_queries<float, D, ROWS, WARPS * WARP>(queries, q, q_stride, item.first_token, rows, group, kv_head);
  const int first = item.kv_begin / TILE * TILE;
  const int tiles = item.kv_end > first ? (item.kv_end - first + TILE - 1) / TILE : 0;
  const auto load = [&](int tile) {  // warps 0 and 1 the keys, 2 and 3 the values
    if (tile < tiles) {
      float* to = pipeline + (tile % 2 * 2 + warp / 2) * TILE_SIZE + warp % 2 * row_offset<float, D>(16);
      const RowCopier<float, D, 16> rows_of(pages, first + tile * TILE + warp % 2 * 16, item.kv_end);
      rows_of.copy(to, warp / 2 ? value_cache : key_cache);
    }
    cp_async_commit();
  };

  float acc[WARP_ROWS][COLUMNS] = {}, top[WARP_ROWS], sum[WARP_ROWS];
#pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r) top[r] = negative_infinity(), sum[r] = 0.f;
  float* own = weights + warp * WARP_ROWS * TILE;
  load(0);
  for (int tile = 0; tile < tiles; ++tile) {
    load(tile + 1);
    cp_async_wait<1>();
    __syncthreads();
    const float* keys = pipeline + tile % 2 * 2 * TILE_SIZE;
    const float* values = keys + TILE_SIZE;
    float dot[WARP_ROWS] = {};
#pragma unroll 4
    for (int c = 0; c < D; c += 4) {
      const float4 k = *reinterpret_cast<const float4*>(keys + row_offset<float, D>(lane) + c);
#pragma unroll
      for (int r = 0; r < WARP_ROWS; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(queries + row_offset<float, D>(warp * WARP_ROWS + r) + c);
        dot[r] += x.x * k.x + x.y * k.y + x.z * k.z + x.w * k.w;
      }
    }
#pragma unroll
    for (int r = 0; r < WARP_ROWS; ++r) {
      const Visible visible(item, min(warp * WARP_ROWS + r, rows - 1) / group, window);
      const bool seen = visible(first + tile * TILE + lane);
      const float score = seen ? unit.log2(dot[r]) : negative_infinity();
      const float new_top = fmaxf(top[r], warp_max(score));
      const float base = new_top == negative_infinity() ? 0.f : new_top;
      const float correction = exp2f(top[r] - base), weight = exp2f(score - base);
      top[r] = new_top;
      sum[r] = sum[r] * correction + warp_sum(weight);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) acc[r][c] *= correction;
      own[r * TILE + lane] = weight;
    }
    __syncwarp();
#pragma unroll 4
    for (int k = 0; k < TILE; ++k)
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int column = c * WARP + lane;
        if (D % WARP && column >= D) continue;
        const float v = values[row_offset<float, D>(k) + column];
#pragma unroll
        for (int r = 0; r < WARP_ROWS; ++r) acc[r][c] += own[r * TILE + k] * v;
      }
    __syncthreads();  // all have left the stage that is filled next
  }
  cp_async_wait<0>();

#pragma unroll
  for (int r = 0; r < WARP_ROWS; ++r) {
    const int row = warp * WARP_ROWS + r;
    if (row >= rows) continue;
    const float inverse = sum[r] > 0.f ? 1.f / sum[r] : 0.f;
    const int64_t token = item.first_token + row / group;
    const int64_t slot_row = ((int64_t)item.slot * kv_heads + kv_head) * ROWS + row;
    float* to = item.slot < 0 ? out + (token * kv_heads * group + kv_head * group + row % group) * D
                              : part_out + slot_row * D;
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = c * WARP + lane;
      if (column < D) to[column] = acc[r][c] * inverse;
    }
    if (item.slot >= 0 && lane == 0) part_lse[slot_row] = sum[r] > 0.f ? top[r] + log2f(sum[r]) : negative_infinity();
  }
}
