// Log-probabilities of the raw distribution: of the chosen token, with its rank, and of the most likely ones.
#include "block_argmax.cuh"

constexpr int THREADS = 512;

// grid (rows), block 512. logits [rows, vocab], tokens [rows]; num_top [rows]: how many alternatives, -1 for none and
// nothing of the row written. chosen, ranks [rows]; top_ids, top_logprobs [rows, max_top], filled up to num_top.
// A rank is 1 for the most likely; of equal logits the lower id comes first.
__global__ void __launch_bounds__(THREADS)
    logprobs(float* chosen, int* ranks, int64_t* top_ids, float* top_logprobs, const float* logits, const int64_t* tokens,
             const int* num_top, int max_top, int vocab) {
  __shared__ Best scratch[2][THREADS / WARP];  // two: a slow warp may still read the one before
  __shared__ float sums[THREADS / WARP];
  const int row = blockIdx.x, wanted = num_top[row];
  if (wanted < 0) return;
  const float* x = logits + (int64_t)row * vocab;
  Best best{negative_infinity(), vocab};
  for (int i = threadIdx.x; i < vocab; i += THREADS)
    if (x[i] > best.value) best = Best{x[i], i};
  best = block_argmax<THREADS>(best, scratch[0]);
  float sum = 0.f;
  for (int i = threadIdx.x; i < vocab; i += THREADS) sum += expf(x[i] - best.value);
  const float log_sum = best.value + logf(block_sum<THREADS>(sum, sums));

  const Best mine{x[tokens[row]], (int)tokens[row]};
  int ahead = 0;
  for (int i = threadIdx.x; i < vocab; i += THREADS) ahead += Best{x[i], i}.before(mine);
  __syncthreads();  // `sums` is used again
  const float rank = block_sum<THREADS>((float)ahead, sums);  // exact: below 2^24
  if (threadIdx.x == 0) {
    chosen[row] = mine.value - log_sum;
    ranks[row] = 1 + (int)rank;
  }
  for (int n = 0; n < wanted; ++n) {
    if (n > 0) {
      const Best last = best;
      best = Best{negative_infinity(), vocab};
      for (int i = threadIdx.x; i < vocab; i += THREADS) {
        const Best candidate{x[i], i};
        if (last.before(candidate) && candidate.before(best)) best = candidate;
      }
      best = block_argmax<THREADS>(best, scratch[n % 2]);
    }
    if (threadIdx.x == 0) {
      top_ids[(int64_t)row * max_top + n] = best.index;
      top_logprobs[(int64_t)row * max_top + n] = best.value - log_sum;
    }
  }
}
