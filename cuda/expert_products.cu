// The two matrix products of a mixture of experts on tensor cores, for all experts in one launch: a block multiplies a
// tile of up to M rows that go to one expert with 64 or 128 rows of that expert's matrix. Few rows a tile (decode) are
// bound by the weights' bytes: deep stages, small blocks. Many (prompts) by arithmetic: each fragment serves many.
// Every element is summed over the depth in one order, whatever M and whatever else is in the batch.
#include "expert_tiles.cuh"

template <class T, int M> struct Shape {
  static constexpr int WARPS_M = M == 128 ? 2 : 1, WARP_M = M / WARPS_M;
  static constexpr int WARP_N = M == 16 ? 16 : M == 64 ? 32 : 64, N = WARPS / WARPS_M * WARP_N;
  static constexpr int K = M == 16 ? 128 : 64, STAGES = M == 16 ? 4 : 3;
  static constexpr int STAGE = (M + N) * K;  // elements
  static constexpr int MT = WARP_M / 16, NT = WARP_N / 8;
  using Rows = TileCopier<T, M, K>;
  using Weights = TileCopier<T, N, K>;
};

// acc = rows * weights^T, this warp's part. `row_of` is asked after the first weights are under way.
template <class T, int M, class RowOf, class WeightOf>
DEV void multiply_tile(float (&acc)[Shape<T, M>::MT][Shape<T, M>::NT][4], const T* x, const RowOf& row_of,
                       const T* matrix, const WeightOf& weight_of, int depth) {
  using S = Shape<T, M>;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  T* pipeline = reinterpret_cast<T*>(shared_bytes);  // [STAGES][M rows, N weights][K]
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int tiles = (depth + S::K - 1) / S::K;
  const typename S::Weights weights(matrix, depth, weight_of);
#pragma unroll
  for (int stage = 0; stage < S::STAGES - 1; ++stage)
    if (stage < tiles) weights.copy(pipeline + stage * S::STAGE + M * S::K, stage * S::K);
  const typename S::Rows rows(x, depth, row_of);
#pragma unroll
  for (int stage = 0; stage < S::STAGES - 1; ++stage) {
    if (stage < tiles) rows.copy(pipeline + stage * S::STAGE, stage * S::K);
    cp_async_commit();  // always, so that the wait can count groups
  }
  const int a_row = warp % S::WARPS_M * S::WARP_M + lane % 16;
  const int b_row = M + warp / S::WARPS_M * S::WARP_N + lane / 16 * 8 + lane % 8;
  int stage = 0;
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<S::STAGES - 2>();
    __syncthreads();  // this tile is here, and all warps have left the stage that is filled next
    const int next = tile + S::STAGES - 1;
    T* free = pipeline + (stage + S::STAGES - 1) % S::STAGES * S::STAGE;
    if (next < tiles) {
      weights.copy(free + M * S::K, next * S::K);
      rows.copy(free, next * S::K);
    }
    cp_async_commit();
    const T* at = pipeline + stage * S::STAGE;
#pragma unroll
    for (int k = 0; k < S::K; k += 16) {
      uint32_t a[S::MT][4];
#pragma unroll
      for (int m = 0; m < S::MT; ++m) ldmatrix_x4(a[m], at + tile_index<T, S::K>(a_row, k / 8 + lane / 16) + m * 16 * S::K);
#pragma unroll
      for (int n = 0; n < S::NT; n += 2) {  // matrices: (n, k) (n, k + 8) (n + 8, k) (n + 8, k + 8)
        uint32_t b[4];
        ldmatrix_x4(b, at + tile_index<T, S::K>(b_row, k / 8 + lane / 8 % 2) + n * 8 * S::K);
#pragma unroll
        for (int m = 0; m < S::MT; ++m) {
          mma_16x8x16<T>(acc[m][n], a[m], b[0], b[1]);
          mma_16x8x16<T>(acc[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
    stage = (stage + 1) % S::STAGES;
  }
  cp_async_wait<0>();
}

// grid (ceil(width / (N / 2)), tiles), block 128, shared memory: see table.expert_smem. hidden [places, width] =
// silu(gate) * up of x [tokens, depth] and the tile's expert of gate_up [experts, 2 width, depth], the gate first.
template <class T, int M>
__global__ void __launch_bounds__(THREADS)
    expert_gate_up(T* hidden, const T* x, const T* gate_up, const int* tiles, const int* pairs, int per_token,
                   int width, int depth) {
  using S = Shape<T, M>;
  const Tile tile = load_tile(tiles, blockIdx.y);
  if (tile.expert < 0) return;
  const int first = blockIdx.x * (S::N / 2);
  const auto row_of = [&](int r) { return r < tile.rows ? pairs[tile.first + r] / per_token : -1; };
  float acc[S::MT][S::NT][4] = {};
  multiply_tile<T, M>(acc, x, row_of, gate_up + (int64_t)tile.expert * 2 * width * depth,
                      GateUpRows<S::WARP_N>{first, width}, depth);

  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
  for (int m = 0; m < S::MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp % S::WARPS_M * S::WARP_M + m * 16 + half * 8 + lane / 4;
      if (row >= tile.rows) continue;
      T* to = hidden + (int64_t)(tile.first + row) * width;
#pragma unroll
      for (int n = 0; n < S::NT / 2; ++n) {
        const int column = first + warp / S::WARPS_M * (S::WARP_N / 2) + n * 8 + lane % 4 * 2;
        const float *gate = acc[m][n] + half * 2, *up = acc[m][n + S::NT / 2] + half * 2;
        if (column < width)
          *reinterpret_cast<uint32_t*>(to + column) = pack2<T>(silu(gate[0]) * up[0], silu(gate[1]) * up[1]);
      }
    }
}

// grid (ceil(width / N), tiles), block 128, shared memory: see table.expert_smem. parts [pairs, width] = hidden [places,
// depth] times the tile's expert of down [experts, width, depth].
template <class T, int M>
__global__ void __launch_bounds__(THREADS)
    expert_down(T* parts, const T* hidden, const T* down, const int* tiles, const int* pairs, int width, int depth) {
  using S = Shape<T, M>;
  const Tile tile = load_tile(tiles, blockIdx.y);
  if (tile.expert < 0) return;
  const int first = blockIdx.x * S::N;
  float acc[S::MT][S::NT][4] = {};
  multiply_tile<T, M>(acc, hidden, PlainRows{tile.first, tile.first + tile.rows},
                      down + (int64_t)tile.expert * width * depth, PlainRows{first, width}, depth);

  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#pragma unroll
  for (int m = 0; m < S::MT; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp % S::WARPS_M * S::WARP_M + m * 16 + half * 8 + lane / 4;
      if (row >= tile.rows) continue;
      T* to = parts + (int64_t)pairs[tile.first + row] * width;
#pragma unroll
      for (int n = 0; n < S::NT; ++n) {
        const int column = first + warp / S::WARPS_M * S::WARP_N + n * 8 + lane % 4 * 2;
        const float* sum = acc[m][n] + half * 2;
        if (column < width) *reinterpret_cast<uint32_t*>(to + column) = pack2<T>(sum[0], sum[1]);
      }
    }
}
