// The paged KV cache and the work items that attention runs over.
//
// A layer's cache is two tensors [num_blocks, kv_heads, block_size, head_dim], K and V: the tokens of one block and
// one KV head are contiguous. Queries that share a KV head are packed into rows of one tile:
//
//   packed row p of an item  =  query p / group of the item, query head kv_head * group + p % group
//
// so that every KV byte is read once for all query heads of its group.
#pragma once
#include "common.cuh"

// One item is what a block computes for each KV head. Eight int32, written by the host (kernels/plan.py):
struct Item {
  int row;          // of the block table; -1: nothing to do
  int first_token;  // index of its first query in the flat batch
  int num_queries;  // consecutive queries
  int position;     // position of its first query in its sequence
  int kv_begin;     // the KV positions it covers: [kv_begin, kv_end), not yet masked
  int kv_end;
  int slot;         // where its partial result goes; -1: it covers all its KV positions and writes the output itself
  int unused;
};

DEV Item load_item(const int* items, int index) {
  const int4* p = reinterpret_cast<const int4*>(items) + 2 * (size_t)index;
  const int4 a = p[0], b = p[1];
  return Item{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}

struct Pages {
  const int* table;  // this row's block ids
  int block_size, kv_heads, kv_head;

  // Index of a token's vector, in units of head_dim elements. Offsets in elements need 64 bits; this does not: 2^31
  // vectors would be 256 GiB of keys and as much of values, of one layer.
  DEV int vector_index(int position) const {
    const int block = position / block_size;
    return (table[block] * kv_heads + kv_head) * block_size + (position - block * block_size);
  }
};

// A shared tile of rows of D elements. Copies write eight neighbouring 16-byte vectors at a time, products read one
// vector of eight neighbouring rows; both meet every bank once when PAD elements follow not each row, but each run of
// rows that fills whole lines of all 32 banks. (PAD of 16 bytes where rows are read by vectors of 16.)
template <class T, int D>
constexpr int LINE_ROWS = D * sizeof(T) % 128 == 0 ? 1 : D * sizeof(T) % 64 == 0 ? 2 : 4;

// Where row `row` begins, in elements; of ROWS: the size of a tile of so many rows.
template <class T, int D, int PAD = VEC<T>> DEV constexpr int row_offset(int row) {
  constexpr int RUN = LINE_ROWS<T, D>;
  static_assert(RUN * D * sizeof(T) % 128 == 0);
  return row / RUN * (RUN * D + PAD) + row % RUN * D;
}

// Copies ROWS tokens' vectors into the rows of a shared tile; done by one warp. Rows of positions at or after `end`
// are set to zero, never read: they may hold NaN, and 0 x NaN is NaN.
template <class T, int D, int ROWS> struct RowCopier {
  static constexpr int CHUNKS = D / VEC<T>;
  static_assert(ROWS <= WARP && ROWS * CHUNKS % WARP == 0 && ROWS % LINE_ROWS<T, D> == 0);
  int index;  // of the token of lane % ROWS, or -1

  DEV RowCopier(const Pages& pages, int first, int end) {
    const int position = first + threadIdx.x % ROWS;
    index = position < end ? pages.vector_index(position) : -1;
  }
  DEV void copy(T* tile, const T* cache) const {
#pragma unroll
    for (int step = 0; step < ROWS * CHUNKS / WARP; ++step) {
      const int i = step * WARP + threadIdx.x % WARP, r = i / CHUNKS, c = i % CHUNKS * VEC<T>;
      const int from = __shfl_sync(ALL_LANES, index, r);
      cp_async16(tile + row_offset<T, D>(r) + c, cache + (from < 0 ? 0 : (int64_t)from * D + c), from < 0 ? 0 : 16);
    }
  }
};

// Copies an item's packed query rows into a shared tile of ROWS rows, zeros after the last; done by the whole block.
template <class T, int D, int ROWS, int THREADS>
DEV void copy_queries(T* tile, const T* q, int q_stride, int first_token, int rows, int group, int kv_head) {
  constexpr int CHUNKS = D / VEC<T>;
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int r = i / CHUNKS, c = i % CHUNKS * VEC<T>;
    const int64_t at = (int64_t)(first_token + r / group) * q_stride + (kv_head * group + r % group) * D + c;
    cp_async16(tile + row_offset<T, D>(r) + c, q + (r < rows ? at : 0), r < rows ? 16 : 0);
  }
}

// Which KV positions a query sees: at most its own, and of those the last `window` (0: all).
struct Visible {
  int begin, end;
  DEV Visible(const Item& item, int query, int window) {
    const int position = item.position + query;
    begin = max(item.kv_begin, window > 0 ? position - window + 1 : 0);
    end = min(item.kv_end, position + 1);
  }
  DEV bool operator()(int position) const { return position >= begin && position < end; }
};

// Attention logits in units of log2: scores times scale * log2(e), after the soft cap where there is one.
struct Scores {
  float scale;    // 1 / sqrt(head_dim) or what the model says
  float softcap;  // 0: none
  DEV float capped(float dot) const { return softcap * fast_tanh(__fdividef(dot * scale, softcap)); }
  DEV float log2(float dot) const { return (softcap > 0.f ? capped(dot) : dot * scale) * LOG2_E; }
};
