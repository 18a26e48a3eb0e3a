// Attention over paged KV memory with an online softmax: no score matrix, no gathered copy of a context.
//
// A layer's memory is [blocks][2][kv_heads][block_size][head_dim]. Work is cut into items: (span, KV head, up to
// QUERIES tokens). An item walks the keys in steps of KEYS, always at multiples of KEYS from position 0:
//
//     turn V of KEYS keys ─► scores of 16 rows ─► running maxima ─► weights ─► add to the rows' sums
//
// A row is one query head of one token. Scores, weights and sums have rows as columns, so that K is read where it lies and
// a vector holds the same step of 16 rows. Its arithmetic depends on its position alone, so chunk borders and neighbours do
// not change it: a step that holds nothing for a row multiplies by one and adds zero.
// Source of the method: Dao et al., FlashAttention (2022); Kwon et al., PagedAttention (2023).
#pragma once

#include <atomic>
#include <limits>
#include <vector>

#include "simd.h"

namespace pdray {

constexpr int KEYS = 64;
constexpr int MAX_DIM = 512;
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

// Of one thread; all sizes are bounded by QUERIES, KEYS and the shape of a head. A block is 16 rows of an item.
template <class E>
struct Workspace {
  E *keys, *values, *queries, *weights;
  float *scores, *sums, *top, *total;

  static size_t bytes(const Paged& p) {
    size_t rows = padded_rows(p), e = sizeof(E), f = sizeof(float), d = p.head_dim;
    return e * (2 * KEYS * d + rows * d + KEYS * WIDE) + f * (KEYS * WIDE + rows * d + 2 * rows) + 640;
  }
  static size_t padded_rows(const Paged& p) { return (size_t(QUERIES) * p.group + WIDE - 1) / WIDE * WIDE; }

  Workspace(const Paged& p, char* at) {
    size_t rows = padded_rows(p), d = p.head_dim;
    auto take = [&at](auto*& pointer, size_t items) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(at);
      at += (items * sizeof(*pointer) + 63) / 64 * 64;
    };
    take(keys, KEYS * d);         // [KEYS][dim], only where a pool's blocks do not hold whole blocks of 16
    take(values, KEYS * d);       // [dim], blocked over keys
    take(queries, rows * d);      // of each block: tiles with the head's dimensions as k
    take(weights, KEYS * WIDE);   // tiles with keys as k
    take(scores, KEYS * WIDE);    // [KEYS][16 rows]
    take(sums, rows * d);         // of each block: [dim][16 rows]
    take(top, rows), take(total, rows);
  }
};

// Tiles with `dim` items of each row as k and the 16 rows as outputs; rows past `count` are zero.
template <class E>
inline void pack_rows(const E* const rows[WIDE], int count, int dim, E* out) {
  constexpr int per_vector = 64 / sizeof(E);
  for (int d = 0; d < dim; d += per_vector) {
    Words in[16], turned[16];
    for (int i = 0; i < 16; ++i) in[i] = i < count ? load_words(rows[i] + d) : zero_words();
    transpose16(in, turned);
    for (int i = 0; i < 16; ++i) store_words(out + size_t(d) * WIDE + i * per_vector, turned[i]);
  }
}

// Dimensions as rows and keys as items, blocked; keys past `count` are zero, up to a whole step.
inline void pack_values(const bf16* const rows[KEYS], int count, int dim, bf16* out) {
  const Interleaving by;
  const int steps = (count + STEP - 1) / STEP;
  for (int s = 0; s < steps; ++s)
    for (int d = 0; d < dim; d += 32) {
      Words near[16], far[16], turned[16];
      for (int i = 0; i < 16; ++i) {
        int k = s * STEP + 2 * i;
        Words a = k < count ? load_words(rows[k] + d) : zero_words();
        Words b = k + 1 < count ? load_words(rows[k + 1] + d) : zero_words();
        near[i] = by.near(a, b), far[i] = by.far(a, b);
      }
      transpose16(near, turned);
      for (int i = 0; i < 16; ++i) store_words(place(out, steps, d + i, s * STEP), turned[i]);
      transpose16(far, turned);
      for (int i = 0; i < 16; ++i) store_words(place(out, steps, d + 16 + i, s * STEP), turned[i]);
    }
}
inline void pack_values(const float* const rows[KEYS], int count, int dim, float* out) {
  const int steps = (count + STEP - 1) / STEP;
  for (int k = 0; k < steps * STEP; k += 16)
    for (int d = 0; d < dim; d += 16) {
      Words in[16], turned[16];
      for (int i = 0; i < 16; ++i) in[i] = k + i < count ? load_words(rows[k + i] + d) : zero_words();
      transpose16(in, turned);
      for (int i = 0; i < 16; ++i) store_words(place(out, steps, d + i, k), turned[i]);
    }
}

// Keys or values as tiles with keys as k: [dim / 16][k-steps][...]; keys past `count` are zero, up to a whole step.
inline void pack_pairs(const bf16* const rows[KEYS], int count, int dim, bf16* out) {
  const Interleaving by;
  const int steps = (count + STEP - 1) / STEP;
  for (int k = 0; k < steps * STEP; k += 2)
    for (int d = 0; d < dim; d += 32) {
      Words a = k < count ? load_words(rows[k] + d) : zero_words();
      Words b = k + 1 < count ? load_words(rows[k + 1] + d) : zero_words();
      bf16* to = out + size_t(d) * steps * STEP + size_t(k) * WIDE;
      store_words(to, by.near(a, b));
      store_words(to + steps * TILE, by.far(a, b));
    }
}
inline void pack_pairs(const float* const rows[KEYS], int count, int dim, float* out) {
  const int steps = (count + STEP - 1) / STEP;
  for (int k = 0; k < steps * STEP; ++k)
    for (int d = 0; d < dim; d += 16)
      store16(out + size_t(d) * steps * STEP + size_t(k) * WIDE, k < count ? load16(rows[k] + d) : zeros());
}

// Weights of two neighbouring keys for 16 rows, as tiles have them.
INLINE void put_weights(bf16* tiles, int key, Floats even, Floats odd) {
  Words low = widen(narrow16(even)), high = up16(widen(narrow16(odd)));
  store_words(tiles + size_t(key) * WIDE, either(low, high));
}
INLINE void put_weights(float* tiles, int key, Floats even, Floats odd) {
  store16(tiles + size_t(key) * WIDE, even), store16(tiles + size_t(key + 1) * WIDE, odd);
}

// Where keys and values of one head at positions base .. base + keys - 1 lie.
template <class E>
inline void find_rows(const Paged& p, const E* layer, const Span& span, int head, int base, int keys, const E** key_rows,
                      const E** value_rows) {
  const size_t head_items = size_t(p.block_size) * p.head_dim, value_items = head_items * p.kv_heads;
  for (int i = 0, block = base / p.block_size, inside = base % p.block_size; i < keys; ++block, inside = 0) {
    const E* from = layer + size_t(span.blocks[block]) * 2 * value_items + head * head_items;
    for (; inside < p.block_size && i < keys; ++inside, ++i) {
      key_rows[i] = from + size_t(inside) * p.head_dim;
      value_rows[i] = key_rows[i] + value_items;
    }
  }
}

// Which of a step's keys each of 16 rows sees: from .. to - 1, counted from the step's first.
struct Seen {
  Words from, to;
  bool all;
};

// Scores [padded][16] of a block become weights; its maxima, totals and sums so far are brought to the new maxima.
template <class E>
inline void soften(float* scores, E* weights, const Seen& seen, int padded, float scale, float* top, float* total,
                   float* sums, int dim) {
  const Floats hidden = spread(-std::numeric_limits<float>::infinity()), by = spread(scale);
  Floats most = hidden;
  for (int n = 0; n < padded; ++n) {
    Floats s = load16(scores + n * WIDE);
    if (!seen.all) {
      Words at = spread_words(n);
      s = where(within(at, seen.from, seen.to), s, hidden);
      store16(scores + n * WIDE, s);
    }
    most = max(most, s);
  }
  const Floats before = load16(top);
  const Floats peak = max(max(mul(most, by), before), spread(NEVER));
  Floats sum = zeros();
  for (int n = 0; n < padded; n += 2) {
    Floats even = exp2_16<E>(fmsub(load16(scores + n * WIDE), by, peak));
    Floats odd = exp2_16<E>(fmsub(load16(scores + (n + 1) * WIDE), by, peak));
    sum = add(add(sum, even), odd);
    put_weights(weights, n, even, odd);
  }
  const Mask grew = differ(before, peak);
  const Floats shrink = where(grew, exp2_16<E>(sub(before, peak)), spread(1.0f));
  store16(total, fmadd(load16(total), shrink, sum));
  store16(top, peak);
  if (!any(grew)) return;
  for (int d = 0; d < dim; ++d) store16(sums + d * WIDE, mul(load16(sums + d * WIDE), shrink));
}

// `soften` with keys as columns: scores [ROWS][KEYS], sums [ROWS][dim]. Keys outside from .. keys - 1 are hidden.
template <int ROWS, class E>
inline void soften_few(float* scores, E* weights, int from, int keys, int padded, float scale, float* top, float* total,
                       float* sums, int dim) {
  const Words lane = lanes();
  const Words low = spread_words(from), high = spread_words(keys);
  const Floats hidden = spread(-std::numeric_limits<float>::infinity()), by = spread(scale);
  float sum[ROWS] = {}, shrunk[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    float *s = scores + r * KEYS, *own = sums + r * dim;
    Floats most = hidden;
    for (int n = 0; n < padded; n += 16) {
      Words at = add(lane, spread_words(n));
      Floats v = where(within(at, low, high), load16(s + n), hidden);
      store16(s + n, v);
      most = max(most, v);
    }
    const Floats before = spread(top[r]);
    const Floats reached = mul(spread(most_of(most)), by);
    const Floats peak = max(max(reached, before), spread(NEVER));
    for (int n = 0; n < padded; n += 16) {
      Floats e = exp2_16<E>(fmsub(load16(s + n), by, peak));
      store16(s + n, e);
      store16(weights + r * KEYS + n, e);
    }
    top[r] = first_of(peak), shrunk[r] = 1.0f;
    if (!any(differ(before, peak))) continue;
    const Floats shrink = exp2_16<E>(sub(before, peak));
    shrunk[r] = first_of(shrink);
    for (int d = 0; d < dim; d += 16) store16(own + d, mul(load16(own + d), shrink));
  }
  for (int n = 0; n < padded; ++n)  // one after another, as `soften` adds them
    for (int r = 0; r < ROWS; ++r) sum[r] += scores[r * KEYS + n];
  for (int r = 0; r < ROWS; ++r) total[r] = std::fma(total[r], shrunk[r], sum[r]);
}

// `attend_item` for one token with few query heads to a KV head: 16 keys or dimensions stand as columns, not 16 rows. Each
// number comes from the same operations in the same order, so the results are equal.
template <int ROWS, class E, class Put>
inline void attend_few(const Paged& p, const E* layer, const Span& span, int head, int token, const E* queries,
                       Workspace<E>& w, const Put& put) {
  const int dim = p.head_dim, last = span.first + token, from = p.window ? last - p.window + 1 : 0;
  const E* own = queries + (size_t(span.row + token) * p.kv_heads + head) * ROWS * dim;
  for (int r = 0; r < ROWS; ++r) w.top[r] = -std::numeric_limits<float>::infinity(), w.total[r] = 0.0f;
  std::memset(w.sums, 0, sizeof(float) * ROWS * dim);
  for (int base = from > 0 ? from / KEYS * KEYS : 0; base <= last; base += KEYS) {
    const int keys = last + 1 - base < KEYS ? last + 1 - base : KEYS, steps = (keys + STEP - 1) / STEP;
    const E *key_rows[KEYS], *value_rows[KEYS];
    find_rows(p, layer, span, head, base, keys, key_rows, value_rows);
    for (int n = 0; n < steps * STEP; n += WIDE) {
      if (n < keys) pack_rows(key_rows + n, keys - n < WIDE ? keys - n : WIDE, dim, w.keys);
      dot_rows<ROWS, false>(own, Strides{size_t(dim), STEP}, w.keys, TILE, dim / STEP, w.scores + n, KEYS);
    }
    soften_few<ROWS, E>(w.scores, w.weights, from - base, keys, steps * STEP, p.scale, w.top, w.total, w.sums, dim);
    pack_pairs(value_rows, keys, dim, w.values);
    for (int d = 0; d < dim; d += WIDE)
      dot_rows<ROWS, true>(w.weights, Strides{KEYS, STEP}, w.values + size_t(d) * steps * STEP, TILE, steps, w.sums + d, dim);
  }
  for (int r = 0; r < ROWS; ++r)
    for (int d = 0; d < dim; d += WIDE)
      put(span.row + token, (head * ROWS + r) * dim + d, mul(load16(w.sums + r * dim + d), spread(1.0f / w.total[r])));
}

#if defined(__AMX_BF16__)
template <class E>
constexpr bool FEW_PAYS = sizeof(E) == 4;  // a tile's multiplication takes as long for one row as for 16
#else
template <class E>
constexpr bool FEW_PAYS = true;
#endif

// Args: layer: the layer's memory; queries: [tokens][heads][head_dim]; put(token's row, item of it, 16 floats).
template <class E, class Put>
inline void attend_item(const Paged& p, const E* layer, const Span& span, int head, int token, int count,
                        const E* queries, Workspace<E>& w, const Put& put) {
  const int dim = p.head_dim, group = p.group, rows = count * group, blocks = (rows + WIDE - 1) / WIDE;
  if (FEW_PAYS<E> && count == 1) switch (group) {
      case 1: return attend_few<1>(p, layer, span, head, token, queries, w, put);
      case 2: return attend_few<2>(p, layer, span, head, token, queries, w, put);
      case 3: return attend_few<3>(p, layer, span, head, token, queries, w, put);
      case 4: return attend_few<4>(p, layer, span, head, token, queries, w, put);
      case 5: return attend_few<5>(p, layer, span, head, token, queries, w, put);
      case 6: return attend_few<6>(p, layer, span, head, token, queries, w, put);
      case 7: return attend_few<7>(p, layer, span, head, token, queries, w, put);
      case 8: return attend_few<8>(p, layer, span, head, token, queries, w, put);
      default: break;
    }
  const size_t stride = size_t(p.kv_heads) * group * dim;
  const int first = span.first + token, last = first + count - 1;
  for (int b = 0; b < blocks; ++b) {
    const E* from[WIDE];
    const int some = rows - b * WIDE < WIDE ? rows - b * WIDE : WIDE;
    for (int i = 0; i < some; ++i) {
      int r = b * WIDE + i;
      from[i] = queries + size_t(span.row + token + r / group) * stride + size_t(head * group + r % group) * dim;
    }
    pack_rows(from, some, dim, w.queries + size_t(b) * WIDE * dim);
    store16(w.top + b * WIDE, spread(-std::numeric_limits<float>::infinity()));
    store16(w.total + b * WIDE, zeros());
  }
  std::memset(w.sums, 0, sizeof(float) * blocks * WIDE * dim);
  const int start = p.window && first - p.window + 1 > 0 ? (first - p.window + 1) / KEYS * KEYS : 0;
  for (int base = start; base <= last; base += KEYS) {
    const int keys = last + 1 - base < KEYS ? last + 1 - base : KEYS, steps = (keys + STEP - 1) / STEP;
    const E *key_rows[KEYS], *value_rows[KEYS], *key_blocks[KEYS / WIDE], *value_blocks[MAX_DIM / WIDE];
    find_rows(p, layer, span, head, base, keys, key_rows, value_rows);
    for (int n = 0; n < steps * STEP; n += WIDE) {
      if (n >= keys) {
        key_blocks[n / WIDE] = key_blocks[0];  // hidden from all
      } else if (p.block_size % WIDE == 0) {
        key_blocks[n / WIDE] = key_rows[n];
      } else {
        E* to = w.keys + size_t(n) * dim;
        for (int i = 0; i < WIDE; ++i) std::memcpy(to + size_t(i) * dim, key_rows[n + i < keys ? n + i : n], dim * sizeof(E));
        key_blocks[n / WIDE] = to;
      }
    }
    pack_values(value_rows, keys, dim, w.values);
    for (int d = 0; d < dim; d += WIDE) value_blocks[d / WIDE] = place(w.values, steps, d, 0);
    for (int b = 0; b < blocks; ++b) {
      alignas(64) int32_t from[WIDE], to[WIDE];
      bool all = true;
      for (int i = 0, r = b * WIDE, own = first + r / group - base, inside = r % group; i < WIDE; ++i) {
        to[i] = own + 1 < keys ? own + 1 : keys, from[i] = p.window ? own - p.window + 1 : 0;
        all = all && to[i] >= steps * STEP && from[i] <= 0;
        if (++inside == group) inside = 0, ++own;
      }
      if (to[WIDE - 1] <= 0) continue;
      multiply<false>(key_blocks, steps * 2, Strides{size_t(dim), STEP}, w.queries + size_t(b) * WIDE * dim, dim / STEP, w.scores);
      soften<E>(w.scores, w.weights, Seen{load_words(from), load_words(to), all}, steps * STEP, p.scale,
                w.top + b * WIDE, w.total + b * WIDE, w.sums + size_t(b) * WIDE * dim, dim);
      multiply<true>(value_blocks, dim / WIDE, BLOCKED, w.weights, steps, w.sums + size_t(b) * WIDE * dim);
    }
  }
  for (int b = 0; b < blocks; ++b)
    for (int d = 0; d < dim; d += WIDE) {
      Words in[16], turned[16];
      for (int i = 0; i < 16; ++i) in[i] = load_words(w.sums + (size_t(b) * dim + d + i) * WIDE);
      transpose16(in, turned);
      for (int i = 0; i < WIDE && b * WIDE + i < rows; ++i) {
        int r = b * WIDE + i;
        put(span.row + token + r / group, (head * group + r % group) * dim + d,
            mul(as_floats(turned[i]), spread(1.0f / w.total[r])));
      }
    }
}

// All items of a step, called by each thread of a team with the same arguments; `next` starts at 0.
template <class E, class Put>
inline void attend(const Paged& p, const E* layer, const std::vector<Span>& spans, const E* queries, Workspace<E>& w,
                   std::atomic<int>& next, const Put& put) {
  int passed = 0, mine = next.fetch_add(1);
  for (const Span& span : spans) {
    const int cuts = (span.count + QUERIES - 1) / QUERIES, items = cuts * p.kv_heads;
    for (; mine < passed + items; mine = next.fetch_add(1)) {
      int at = mine - passed, cut = cuts - 1 - at / p.kv_heads;  // the longest first
      int token = cut * QUERIES, count = span.count - token < QUERIES ? span.count - token : QUERIES;
      attend_item<E>(p, layer, span, at % p.kv_heads, token, count, queries, w, put);
    }
    passed += items;
  }
}

}  // namespace pdray
