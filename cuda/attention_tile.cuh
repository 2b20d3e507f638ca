// What the two tensor-core attention kernels share: a warp's 16 packed rows against a tile of keys and values.
// Lane `4 g + t` holds rows g and g + 8 of the tile; see mma_16x8x16.
#pragma once
#include "paged_kv.cuh"

// The running softmax of rows g and g + 8. `top` in log2; `sum` is this lane's share.
struct RowState {
  float top[2], sum[2];
  DEV RowState() {
    top[0] = top[1] = negative_infinity();
    sum[0] = sum[1] = 0.f;
  }
};

// scores = q * keys^T for MT tiles of 16 query rows: each fragment of the keys serves all of them. load_q(a, m, k) gives
// tile m's fragment of columns 16 k and on.
template <class T, int D, int KV, int MT, class LoadQ>
DEV void multiply_keys(float (&scores)[MT][KV / 8][4], const LoadQ& load_q, const T* keys) {
  const int lane = threadIdx.x % WARP;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < KV / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.f;
  const T* row = keys + row_offset<T, D>(lane / 16 * 8 + lane % 8) + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) load_q(a[m], m, k);
#pragma unroll
    for (int n = 0; n < KV / 16; ++n) {  // matrices: (n, k) (n, k + 8) (n + 8, k) (n + 8, k + 8)
      uint32_t b[4];
      ldmatrix_x4(b, row + n * row_offset<T, D>(16) + k * 16);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma_16x8x16<T>(scores[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16<T>(scores[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Masks the scores, turns them into weights in place, and rescales what was accumulated before. `first`: the KV
// position of column 0; `row`: the packed row of row 0 of the tile, of `rows` in the item. Soft cap, mask and rescaling
// are branches that a whole warp takes or leaves: most tiles need none of them.
template <int D, int KV>
DEV void online_softmax(float (&scores)[KV / 8][4], float (&out)[D / 8][4], RowState& state, const Scores& unit,
                        int first, const Item& item, int row, int rows, int group, int window) {
  const int t = threadIdx.x % 4, g = threadIdx.x % WARP / 4;
  float factor = unit.scale * LOG2_E;  // of a score, to units of log2
  if (unit.softcap > 0.f) {
    factor = LOG2_E;
#pragma unroll
    for (int n = 0; n < KV / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = unit.capped(scores[n][i]);
  }
  // Every row of the item sees all positions in [full_begin, full_end).
  const bool all_visible = first >= Visible(item, item.num_queries - 1, window).begin &&
                           first + KV <= Visible(item, 0, window).end;
  if (!all_visible) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Visible visible(item, min(row + g + half * 8, rows - 1) / group, window);
#pragma unroll
      for (int n = 0; n < KV / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (!visible(first + n * 8 + t * 2 + i)) scores[n][half * 2 + i] = negative_infinity();
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = negative_infinity();
#pragma unroll
    for (int n = 0; n < KV / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) top = fmaxf(top, scores[n][half * 2 + i]);
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
    top = fmaxf(state.top[half], top * factor);
    const float base = top == negative_infinity() ? 0.f : top;  // a row that has seen nothing yet
    const float correction = fast_exp2(state.top[half] - base);
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < KV / 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& score = scores[n][half * 2 + i];
        score = fast_exp2(fmaf(score, factor, -base));
        sum += score;
      }
    state.top[half] = top;
    state.sum[half] = state.sum[half] * correction + sum;
    if (__any_sync(ALL_LANES, correction != 1.f)) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        out[n][half * 2] *= correction;
        out[n][half * 2 + 1] *= correction;
      }
    }
  }
}

// out += weights * values for MT tiles of 16 rows. An accumulator of the scores has the layout of an `a` operand.
template <class T, int D, int KV, int MT>
DEV void multiply_values(float (&out)[MT][D / 8][4], const float (&weights)[MT][KV / 8][4], const T* values) {
  const int lane = threadIdx.x % WARP;
  const T* row = values + row_offset<T, D>(lane % 16) + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < KV / 16; ++k) {
    uint32_t a[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[m][i] = pack2<T>(weights[m][2 * k + i / 2][i % 2 * 2], weights[m][2 * k + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {  // a row of values is a token: transposed on the way
      uint32_t b[4];
      ldmatrix_x4_trans(b, row + k * row_offset<T, D>(16) + n * 16);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma_16x8x16<T>(out[m][2 * n], a[m], b[0], b[1]);
        mma_16x8x16<T>(out[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
