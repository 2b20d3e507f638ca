// The products of expert_products.cu in float32 by fused multiply-adds (not TF32): 16 rows a block, 64 rows of the
// matrix, two stages. For exactness, not for speed: it is how a device is compared with the CPU backend.
#include "expert_tiles.cuh"

constexpr int M = 16, N = 2 * WARP, K = 32, WARP_M = M / WARPS;
constexpr int STAGE = (M + N) * K;

// acc = rows * weights^T: this warp's rows, and of the tile's columns those numbered lane and lane + 32.
template <class RowOf, class WeightOf>
DEV void multiply_tile(float (&acc)[WARP_M][2], const float* x, const RowOf& row_of, const float* matrix,
                       const WeightOf& weight_of, int depth) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  float* pipeline = reinterpret_cast<float*>(shared_bytes);  // [2 stages][16 rows, 64 weights][K]
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int tiles = (depth + K - 1) / K;
  const TileCopier<float, N, K> weights(matrix, depth, weight_of);
  const TileCopier<float, M, K> rows(x, depth, row_of);
  const auto load = [&](int tile) {
    if (tile < tiles) {
      float* stage = pipeline + tile % 2 * STAGE;
      rows.copy(stage, tile * K);
      weights.copy(stage + M * K, tile * K);
    }
    cp_async_commit();
  };
  load(0);
  for (int tile = 0; tile < tiles; ++tile) {
    load(tile + 1);
    cp_async_wait<1>();
    __syncthreads();
    const float* stage = pipeline + tile % 2 * STAGE;
#pragma unroll
    for (int k = 0; k < K; k += 4) {
      float4 w[2];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        w[n] = *reinterpret_cast<const float4*>(stage + tile_index<float, K>(M + n * WARP + lane, k / 4));
#pragma unroll
      for (int r = 0; r < WARP_M; ++r) {
        const float4 a = *reinterpret_cast<const float4*>(stage + tile_index<float, K>(warp * WARP_M + r, k / 4));
#pragma unroll
        for (int n = 0; n < 2; ++n)
          acc[r][n] = fmaf(a.w, w[n].w, fmaf(a.z, w[n].z, fmaf(a.y, w[n].y, fmaf(a.x, w[n].x, acc[r][n]))));
      }
    }
    __syncthreads();  // all have left the stage that is filled next
  }
  cp_async_wait<0>();
}

// grid (ceil(width / 32), tiles), block 128, shared memory: see table.expert_smem. Tensors as in expert_gate_up.
__global__ void __launch_bounds__(THREADS)
    expert_gate_up_f32(float* hidden, const float* x, const float* gate_up, const int* tiles, const int* pairs,
                       int per_token, int width, int depth) {
  const Tile tile = load_tile(tiles, blockIdx.y);
  if (tile.expert < 0) return;
  const int first = blockIdx.x * (N / 2), warp = threadIdx.x / WARP, column = first + threadIdx.x % WARP;
  const auto row_of = [&](int r) { return r < tile.rows ? pairs[tile.first + r] / per_token : -1; };
  float acc[WARP_M][2] = {};
  multiply_tile(acc, x, row_of, gate_up + (int64_t)tile.expert * 2 * width * depth, GateUpRows<N>{first, width}, depth);
#pragma unroll
  for (int r = 0; r < WARP_M; ++r) {
    const int row = warp * WARP_M + r;
    if (row < tile.rows && column < width)
      hidden[(int64_t)(tile.first + row) * width + column] = silu(acc[r][0]) * acc[r][1];
  }
}

// grid (ceil(width / 64), tiles), block 128, shared memory: see table.expert_smem. Tensors as in expert_down.
__global__ void __launch_bounds__(THREADS)
    expert_down_f32(float* parts, const float* hidden, const float* down, const int* tiles, const int* pairs, int width,
                    int depth) {
  const Tile tile = load_tile(tiles, blockIdx.y);
  if (tile.expert < 0) return;
  const int first = blockIdx.x * N, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  float acc[WARP_M][2] = {};
  multiply_tile(acc, hidden, PlainRows{tile.first, tile.first + tile.rows},
                down + (int64_t)tile.expert * width * depth, PlainRows{first, width}, depth);
#pragma unroll
  for (int r = 0; r < WARP_M; ++r) {
    const int row = warp * WARP_M + r;
    if (row >= tile.rows) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int column = first + n * WARP + lane;
      if (column < width) parts[(int64_t)pairs[tile.first + row] * width + column] = acc[r][n];
    }
  }
}
