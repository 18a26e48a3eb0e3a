// Attention over paged KV memory with an online softmax: no score matrix, no gathered copy of a context.
//
// A layer's memory is [blocks][2][kv_heads][block_size][head_dim]. Work is cut into items: (span, KV head, up to
// QUERIES tokens). An item walks the keys in steps of KEYS, always at multiples of KEYS from position 0:
//
//     pack K and V of KEYS keys ─► scores of 16 rows ─► running maximum ─► weights ─► sum into the rows' outputs
//
// A row is one query head of one token. Its arithmetic depends on its position alone, so chunk borders and neighbours do
// not change it: a step that holds nothing for a row multiplies by one and adds zero.
// Source of the method: Dao et al., FlashAttention (2022); Kwon et al., PagedAttention (2023).
#pragma once

#include <atomic>
#include <limits>

#include "simd.h"

namespace pdray {

constexpr int KEYS = 128;
constexpr int QUERIES = 64;  // tokens of an item, at most
constexpr float NEVER = -1e30f;

struct Paged {
  int kv_heads, group, head_dim, block_size;  // group: query heads of a KV head
  float scale;                                // of the scores, times log2(e): weights are powers of two
  int window;                                 // a token sees itself and window - 1 before it; 0: all before it
};

// Tokens at positions first .. first + count - 1 of one sequence, at `row` of the packed row.
struct Span {
  int row, count, first;
  const int32_t* blocks;
};

// Of one thread; all sizes are bounded by QUERIES, KEYS and the shape of a head.
template <class E>
struct Workspace {
  E *keys, *values, *queries, *weights;
  float *scores, *sums, *part, *top, *total;

  static size_t bytes(const Paged& p) {
    size_t rows = padded_rows(p), e = sizeof(E), f = sizeof(float), d = p.head_dim;
    return KEYS * d * e * 2 + rows * d * e + WIDE * KEYS * e + f * (WIDE * KEYS + rows * d + WIDE * d + 2 * rows) + 640;
  }
  static size_t padded_rows(const Paged& p) { return (size_t(QUERIES) * p.group + WIDE - 1) / WIDE * WIDE; }

  Workspace(const Paged& p, char* at) {
    size_t rows = padded_rows(p), d = p.head_dim;
    auto take = [&at](auto*& pointer, size_t items) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
      at += (items * sizeof(*pointer) + 63) / 64 * 64;
    };
    take(keys, KEYS * d), take(values, KEYS * d), take(queries, rows * d), take(weights, WIDE * KEYS);
    take(scores, WIDE * KEYS), take(sums, rows * d), take(part, WIDE * d), take(top, rows), take(total, rows);
  }
};

// Tiles with the head's dimensions as k and 16 keys as outputs: [16-key columns][k-steps].
template <class E>
inline void pack_keys(const E* const rows[KEYS], int count, int dim, E* out) {
  constexpr int per_vector = 64 / sizeof(E);
  const size_t column = size_t(dim) * WIDE;
  for (int n = 0; n < count; n += WIDE)
    for (int d = 0; d < dim; d += per_vector) {
      __m512i in[16], turned[16];
      for (int i = 0; i < 16; ++i) in[i] = n + i < count ? _mm512_loadu_si512(rows[n + i] + d) : _mm512_setzero_si512();
      transpose16(in, turned);
      E* to = out + n / WIDE * column + size_t(d) * WIDE;
      for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * per_vector, turned[i]);
    }
}

// Tiles with keys as k and 16 dimensions as outputs: [k-steps][dim / 16]; keys past `count` are zero.
inline void pack_values(const bf16* const rows[KEYS], int count, int dim, bf16* out) {
  alignas(64) uint16_t low[32], high[32];
  for (int i = 0; i < 16; ++i) {
    low[2 * i] = uint16_t(i), low[2 * i + 1] = uint16_t(32 + i);
    high[2 * i] = uint16_t(16 + i), high[2 * i + 1] = uint16_t(48 + i);
  }
  const __m512i at_low = _mm512_load_si512(low), at_high = _mm512_load_si512(high);
  const size_t tile = tile_items<bf16>(), step = size_t(dim / WIDE) * tile;
  const int padded = (count + STEP - 1) / STEP * STEP;
  for (int k = 0; k < padded; k += 2)
    for (int d = 0; d < dim; d += 32) {
      __m512i a = k < count ? _mm512_loadu_si512(rows[k] + d) : _mm512_setzero_si512();
      __m512i b = k + 1 < count ? _mm512_loadu_si512(rows[k + 1] + d) : _mm512_setzero_si512();
      bf16* to = out + k / STEP * step + d / WIDE * tile + size_t(k % STEP) * WIDE;
      _mm512_store_si512(to, _mm512_permutex2var_epi16(a, at_low, b));
      _mm512_store_si512(to + tile, _mm512_permutex2var_epi16(a, at_high, b));
    }
}
inline void pack_values(const float* const rows[KEYS], int count, int dim, float* out) {
  const size_t tile = tile_items<float>(), step = size_t(dim / WIDE) * tile;
  const int padded = (count + STEP - 1) / STEP * STEP;
  for (int k = 0; k < padded; ++k)
    for (int d = 0; d < dim; d += WIDE)
      _mm512_store_ps(out + k / STEP * step + d / WIDE * tile + size_t(k % STEP) * WIDE,
                      k < count ? _mm512_loadu_ps(rows[k] + d) : _mm512_setzero_ps());
}

// One row's scores of this step become weights; its maximum, total and sums so far are brought to the new maximum.
template <class E>
INLINE void soften(float* scores, E* weights, int from, int to, int padded, float scale, float& top, float& total,
                   float* sums, int dim) {
  const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const bool all_seen = from <= 0 && to >= padded;
  __m512 most = hidden;
  for (int n = 0; n < padded; n += WIDE) {
    __m512 s = _mm512_load_ps(scores + n);
    if (!all_seen) {
      __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(n));
      __mmask16 seen = _mm512_cmpge_epi32_mask(at, _mm512_set1_epi32(from)) & _mm512_cmplt_epi32_mask(at, _mm512_set1_epi32(to));
      s = _mm512_mask_mov_ps(hidden, seen, s);
      _mm512_store_ps(scores + n, s);
    }
    most = _mm512_max_ps(most, s);
  }
  const float peak = std::fmax(std::fmax(_mm512_reduce_max_ps(most) * scale, top), NEVER);
  __m512 sum = _mm512_setzero_ps();
  for (int n = 0; n < padded; n += WIDE) {
    __m512 w = exp2_16<E>(_mm512_fmsub_ps(_mm512_load_ps(scores + n), _mm512_set1_ps(scale), _mm512_set1_ps(peak)));
    sum = _mm512_add_ps(sum, w);
    store16(weights + n, w);
  }
  float shrink = top == peak ? 1.0f : _mm512_cvtss_f32(exp2_16<E>(_mm512_set1_ps(top - peak)));
  total = total * shrink + _mm512_reduce_add_ps(sum);
  top = peak;
  if (shrink == 1.0f) return;
  for (int d = 0; d < dim; d += WIDE)
    _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), _mm512_set1_ps(shrink)));
}

// Args: layer: the layer's memory; queries, out: [tokens][heads][head_dim] with `stride` items between tokens.
template <class E>
inline void attend_item(const Paged& p, const E* layer, const Span& span, int head, int token, int count,
                        const E* queries, E* out, size_t stride, Workspace<E>& w) {
  const int dim = p.head_dim, rows = count * p.group, steps = dim / STEP;
  const size_t tile = tile_items<E>();
  for (int r = 0; r < rows; ++r) {
    const E* q = queries + size_t(span.row + token + r / p.group) * stride + size_t(head * p.group + r % p.group) * dim;
    std::memcpy(w.queries + size_t(r) * dim, q, dim * sizeof(E));
    w.top[r] = -std::numeric_limits<float>::infinity(), w.total[r] = 0;
  }
  std::memset(w.sums, 0, sizeof(float) * rows * dim);
  const int first = span.first + token, last = first + count - 1;
  const int start = p.window && first - p.window + 1 > 0 ? (first - p.window + 1) / KEYS * KEYS : 0;
  const size_t head_items = size_t(p.block_size) * dim, value_items = head_items * p.kv_heads;
  for (int base = start; base <= last; base += KEYS) {
    const int keys = last + 1 - base < KEYS ? last + 1 - base : KEYS, padded = (keys + STEP - 1) / STEP * STEP;
    const E *key_rows[KEYS], *value_rows[KEYS];
    for (int i = 0, block = base / p.block_size, inside = base % p.block_size; i < keys; ++block, inside = 0) {
      const E* from = layer + size_t(span.blocks[block]) * 2 * value_items + head * head_items;
      for (; inside < p.block_size && i < keys; ++inside, ++i) {
        key_rows[i] = from + size_t(inside) * dim;
        value_rows[i] = key_rows[i] + value_items;
      }
    }
    pack_keys(key_rows, keys, dim, w.keys);
    pack_values(value_rows, keys, dim, w.values);
    const int columns = (keys + WIDE - 1) / WIDE;
    for (int r = 0; r < rows; r += WIDE) {
      const int some = rows - r < WIDE ? rows - r : WIDE;
      if (first + (r + some - 1) / p.group < base) continue;
      multiply<E>(some, w.queries + size_t(r) * dim, dim, w.keys, tile, size_t(dim) * WIDE, steps, columns, w.scores, KEYS);
      for (int i = 0; i < some; ++i) {
        int own = first + (r + i) / p.group - base;  // of the row's token, from this step's first key
        int from = p.window ? own - p.window + 1 : 0;
        for (int n = columns * WIDE; n < padded; n += WIDE) _mm512_store_ps(w.scores + i * KEYS + n, _mm512_setzero_ps());
        soften<E>(w.scores + i * KEYS, w.weights + i * KEYS, from, own + 1 < keys ? own + 1 : keys, padded, p.scale,
                  w.top[r + i], w.total[r + i], w.sums + size_t(r + i) * dim, dim);
      }
      multiply<E>(some, w.weights, KEYS, w.values, size_t(dim / WIDE) * tile, tile, padded / STEP, dim / WIDE, w.part, dim);
      for (int i = 0; i < some; ++i)
        for (int d = 0; d < dim; d += WIDE) {
          float* sum = w.sums + size_t(r + i) * dim + d;
          _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_load_ps(w.part + i * dim + d)));
        }
    }
  }
  for (int r = 0; r < rows; ++r) {
    E* to = out + size_t(span.row + token + r / p.group) * stride + size_t(head * p.group + r % p.group) * dim;
    __m512 share = _mm512_set1_ps(1.0f / w.total[r]);
    for (int d = 0; d < dim; d += WIDE) store16(to + d, _mm512_mul_ps(_mm512_load_ps(w.sums + size_t(r) * dim + d), share));
  }
}

// All items of a step, called by each thread of a team with the same arguments; `next` starts at 0.
template <class E>
inline void attend(const Paged& p, const E* layer, const Span* spans, int num_spans, const E* queries, E* out,
                   size_t stride, Workspace<E>& w, std::atomic<int>& next) {
  int passed = 0, mine = next.fetch_add(1);
  for (int i = 0; i < num_spans; ++i) {
    const Span& span = spans[i];
    const int cuts = (span.count + QUERIES - 1) / QUERIES, items = cuts * p.kv_heads;
    for (; mine < passed + items; mine = next.fetch_add(1)) {
      int at = mine - passed, cut = cuts - 1 - at / p.kv_heads;  // the longest first
      int token = cut * QUERIES, count = span.count - token < QUERIES ? span.count - token : QUERIES;
      attend_item<E>(p, layer, span, at % p.kv_heads, token, count, queries, out, stride, w);
    }
    passed += items;
  }
}

}  // namespace pdray
