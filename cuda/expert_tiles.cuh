// What the products of a mixture of experts share: tiles of rows that go to one expert, and copies into shared memory.
//
// A pair is one of a token's experts: pair p = token * per_token + rank. route_experts sorts the pairs by expert into
// places and cuts each expert's places into tiles. Activations between the two products stand in the order of places,
// outputs in that of pairs.
#pragma once
#include "common.cuh"

constexpr int THREADS = 128, WARPS = THREADS / WARP;

struct Tile {
  int expert;  // -1: nothing to do
  int first;   // its first place
  int rows;    // consecutive places
};

DEV Tile load_tile(const int* tiles, int index) {
  const int4 tile = reinterpret_cast<const int4*>(tiles)[index];
  return Tile{tile.x, tile.y, tile.z};
}

// Where 16 bytes of a shared tile stand, in elements: chunk `chunk` of row `row`, rows of K elements. Eight neighbouring
// chunks of a row are exchanged by the row's number, so that one column of eight rows meets eight different bank groups.
template <class T, int K> DEV int tile_index(int row, int chunk) { return row * K + (chunk ^ row % 8) * VEC<T>; }

// Copies ROWS rows, K elements of each, of a row-major matrix [.., depth] into a shared tile; done by the whole block.
// `row_of(r)` is the matrix's row at row r of the tile, asked once. Rows of -1 and elements past the depth become zeros
// and are never read.
template <class T, int ROWS, int K> struct TileCopier {
  static constexpr int CHUNKS = K / VEC<T>, STEP = THREADS / CHUNKS, STEPS = ROWS / STEP;
  static_assert(STEPS * STEP == ROWS && STEP * CHUNKS == THREADS && CHUNKS % 8 == 0);
  const T* matrix;
  int depth, row[STEPS];

  template <class RowOf> DEV TileCopier(const T* matrix, int depth, const RowOf& row_of) : matrix(matrix), depth(depth) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) row[step] = row_of(step * STEP + threadIdx.x / CHUNKS);
  }
  // Elements from k on.
  DEV void copy(T* tile, int k) const {
    const int c = threadIdx.x % CHUNKS * VEC<T>;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const bool valid = row[step] >= 0 && k + c < depth;
      cp_async16(tile + tile_index<T, K>(step * STEP + threadIdx.x / CHUNKS, threadIdx.x % CHUNKS),
                 matrix + (valid ? (int64_t)row[step] * depth + k + c : 0), valid ? 16 : 0);
    }
  }
};

// Rows of an expert's gate_up [2 width, depth] for a tile whose every COLUMNS rows are COLUMNS / 2 of the gate, then
// the same of up: whoever multiplies them has both halves of an output column.
template <int COLUMNS> struct GateUpRows {
  int first, width;  // output columns
  DEV int operator()(int r) const {
    const int column = first + r / COLUMNS * (COLUMNS / 2) + r % (COLUMNS / 2);
    return column >= width ? -1 : r % COLUMNS < COLUMNS / 2 ? column : width + column;
  }
};

// Consecutive rows, up to the last.
struct PlainRows {
  int first, end;
  DEV int operator()(int r) const { return first + r < end ? first + r : -1; }
};
