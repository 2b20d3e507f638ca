// Merges the partial results that attention left for ranges of one row's KV positions.
#include "common.cuh"

constexpr int WARPS = 4, MAX_ROWS = 16;

// grid (merges, kv_heads), block 128: one warp a packed row. merges: int32 [merges, 4] = first token of the flat
// batch (-1: nothing to do), queries, first slot, slots. For out, part_out and part_lse see paged_decode.
template <class T>
__global__ void __launch_bounds__(WARPS* WARP)
    paged_merge(T* out, const float* part_out, const float* part_lse, const int* merges, int group, int head_dim) {
  const int4 merge = reinterpret_cast<const int4*>(merges)[blockIdx.x];
  const int token = merge.x, rows = merge.y * group, first = merge.z, slots = merge.w;
  if (token < 0) return;
  const int kv_head = blockIdx.y, kv_heads = gridDim.y, lane = threadIdx.x % WARP;
  const int64_t slot_stride = (int64_t)kv_heads * MAX_ROWS;
  for (int r = threadIdx.x / WARP; r < rows; r += WARPS) {
    const int64_t base = ((int64_t)first * kv_heads + kv_head) * MAX_ROWS + r;
    float top = negative_infinity();
    for (int s = lane; s < slots; s += WARP) top = fmaxf(top, part_lse[base + s * slot_stride]);
    top = warp_max(top);
    if (top == negative_infinity()) top = 0.f;
    float sum = 0.f;
    for (int s = lane; s < slots; s += WARP) sum += fast_exp2(part_lse[base + s * slot_stride] - top);
    sum = warp_sum(sum);
    const float inverse = sum > 0.f ? 1.f / sum : 0.f;
    const int64_t to = ((int64_t)(token + r / group) * kv_heads * group + kv_head * group + r % group) * head_dim;
    for (int c = lane; c < head_dim; c += WARP) {
      float x = 0.f;
      for (int s = 0; s < slots; ++s) {
        const int64_t at = base + s * slot_stride;
        x += fast_exp2(part_lse[at] - top) * part_out[at * head_dim + c];
      }
      out[to + c] = from_float<T>(x * inverse);
    }
  }
}
