// Everything of the sampling contract between the raw logits and the temperature: bias and banned ids, penalties,
// grammar mask; then the largest logit, which is the greedy token, and the row's status.
#include "block_argmax.cuh"

constexpr int THREADS = 512;
constexpr int STATUS_OK = 0, STATUS_NON_FINITE = 1, STATUS_NO_CANDIDATE = 2;

// grid (rows), block 512. logits and adjusted [rows, vocab], which may be the same; argmax, top, status [rows].
// Entries of row r are [starts[r], starts[r + 1]), no id twice in a row:
//   bias_ids, bias_values   added; -inf bans (min_tokens bans the ends so)
//   history_ids, _counts    every id of prompt and output, and how often it is in the output
// penalties [rows, 3]: repetition, frequency, presence. grammar_mask: bit i % 32 of word i / 32 allows id i; row
// grammar_rows[r] of [masks, ceil(vocab / 32)], -1 for none. Both may be null.
__global__ void __launch_bounds__(THREADS)
    adjust_logits(float* adjusted, int64_t* argmax, float* top, int* status, const float* logits, const int* bias_starts,
                  const int* bias_ids, const float* bias_values, const int* history_starts, const int* history_ids,
                  const int* history_counts, const float* penalties, const int* grammar_mask, const int* grammar_rows,
                  int vocab) {
  __shared__ Best scratch[THREADS / WARP];
  const int row = blockIdx.x;
  const float* raw = logits + (int64_t)row * vocab;
  float* x = adjusted + (int64_t)row * vocab;
  bool bad = false;
  for (int i = threadIdx.x; i < vocab; i += THREADS) {
    const float value = raw[i];
    bad |= !(value < __uint_as_float(0x7f800000u));  // NaN or +inf
    x[i] = value;
  }
  bad = __syncthreads_or(bad);
  for (int i = bias_starts[row] + threadIdx.x; i < bias_starts[row + 1]; i += THREADS)
    x[bias_ids[i]] += bias_values[i];
  __syncthreads();
  const float repetition = penalties[row * 3], frequency = penalties[row * 3 + 1], presence = penalties[row * 3 + 2];
  for (int i = history_starts[row] + threadIdx.x; i < history_starts[row + 1]; i += THREADS) {
    const int id = history_ids[i], count = history_counts[i];
    const float value = x[id], repeated = value > 0.f ? value / repetition : value * repetition;
    x[id] = __fsub_rn(__fsub_rn(repeated, __fmul_rn(frequency, (float)count)), count > 0 ? presence : 0.f);
  }
  __syncthreads();
  const int mask_row = grammar_mask ? grammar_rows[row] : -1;
  const int* mask = grammar_mask + (int64_t)mask_row * ((vocab + 31) / 32);
  Best best{negative_infinity(), vocab};
  bool overflow = false;  // of bias and penalties
  for (int i = threadIdx.x; i < vocab; i += THREADS) {
    if (mask_row >= 0 && !(mask[i / 32] >> (i % 32) & 1)) x[i] = negative_infinity();
    const Best candidate{x[i], i};
    overflow |= !(candidate.value < __uint_as_float(0x7f800000u));
    if (candidate.value > best.value) best = candidate;
  }
  bad = __syncthreads_or(bad || overflow);
  best = block_argmax<THREADS>(best, scratch);
  if (threadIdx.x == 0) {
    const bool none = best.index >= vocab;
    argmax[row] = bad || none ? 0 : best.index;
    top[row] = best.value;
    status[row] = bad ? STATUS_NON_FINITE : none ? STATUS_NO_CANDIDATE : STATUS_OK;
  }
}
