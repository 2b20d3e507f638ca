// The input ids that the host does not know yet: each is the token that the previous step's sampling wrote.
#include "common.cuh"

constexpr int THREADS = 128;

// grid (ceil(tokens / 128)), block 128. Where input_ids is negative, it becomes last_tokens[token_slots].
// input_ids int64 [tokens], last_tokens int64 [slots], token_slots int32 [tokens].
__global__ void __launch_bounds__(THREADS)
    gather_ids(int64_t* input_ids, const int64_t* last_tokens, const int* token_slots, int tokens) {
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < tokens && input_ids[i] < 0) input_ids[i] = last_tokens[token_slots[i]];
}
