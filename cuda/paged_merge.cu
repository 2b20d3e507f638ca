// Merges the partial results that attention left for ranges of one row's KV positions.
#include "common.cuh"

constexpr int WARPS = 4, MAX_ROWS = 16, COLUMNS = 4;

template <class T> struct alignas(COLUMNS * sizeof(T)) Columns { T at[COLUMNS]; };

// grid (merges, kv_heads, any), block 128: a warp takes a packed row, a lane four columns, so that many slots' loads are
// under way at once. merges: int32 [merges, 4] = first token of the flat batch (-1: nothing to do), queries, first slot,
// slots. For out, part_out and part_lse see paged_decode.
template <class T>
__global__ void __launch_bounds__(WARPS* WARP, 4)
    paged_merge(T* out, const float* part_out, const float* part_lse, const int* merges, int group, int head_dim) {
  const int4 merge = reinterpret_cast<const int4*>(merges)[blockIdx.x];
  const int token = merge.x, rows = merge.y * group, first = merge.z, slots = merge.w;
  if (token < 0) return;
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, lane = threadIdx.x % WARP;
  const int64_t slot_stride = (int64_t)kv_heads * MAX_ROWS;
  for (int r = blockIdx.z * WARPS + threadIdx.x / WARP; r < rows; r += gridDim.z * WARPS) {
    const int64_t base = ((int64_t)first * kv_heads + kv_head) * MAX_ROWS + r;
    float top = negative_infinity();
    for (int s = lane; s < slots; s += WARP) top = fmaxf(top, part_lse[base + s * slot_stride]);
    top = warp_max(top);
    if (top == negative_infinity()) top = 0.f;
    const int64_t to = ((int64_t)(token + r / group) * kv_heads * group + kv_head * group + r % group) * head_dim;
    for (int from = 0; from < head_dim; from += WARP * COLUMNS) {
      const int c = from + lane * COLUMNS;
      const float* column = part_out + base * head_dim + min(c, head_dim - COLUMNS);
      float sum = 0.f;
      float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int begin = 0; begin < slots; begin += WARP) {  // each lane the weight of one slot
        const int s = begin + lane;
        const float weight = s < slots ? fast_exp2(part_lse[base + s * slot_stride] - top) : 0.f;
        sum += weight;
        const int count = min(WARP, slots - begin);
#pragma unroll 8
        for (int i = 0; i < count; ++i) {
          const float w = __shfl_sync(ALL_LANES, weight, i);
          const float4 part = *reinterpret_cast<const float4*>(column + (begin + i) * slot_stride * head_dim);
          x.x += w * part.x, x.y += w * part.y, x.z += w * part.z, x.w += w * part.w;
        }
      }
      sum = warp_sum(sum);
      const float inverse = sum > 0.f ? 1.f / sum : 0.f;
      if (c < head_dim)
        *reinterpret_cast<Columns<T>*>(out + to + c) = {
            from_float<T>(x.x * inverse), from_float<T>(x.y * inverse), from_float<T>(x.z * inverse),
            from_float<T>(x.w * inverse)};
    }
  }
}
