// A decoder of the Llama family as one call for each step.
//
//     embed ─► [ norm ─► q k v, rotate ─► memory ─► attention ─► project, add ─► norm ─► gate up ─► down, add ] x layers
//           ─► norm ─► logits of the rows that were asked for
//
// One team of threads runs the whole step and meets at a barrier where a stage needs all outputs of the one before. The
// residual stream is kept in float32; what multiplies a weight is rounded to the weights' type. Nothing here depends on
// how many tokens a step holds, except how fast it is.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "team.h"

namespace pdray {

constexpr int FEW = 16;  // rows: below, each thread norms for itself, which saves a barrier

extern "C" {
// Pointers of one layer; null where the architecture has no such part. Norms and biases are float32.
struct LayerParts {
  const void *qkv, *out, *gate_up, *down;
  const float *norm_in, *norm_mid, *qkv_bias, *query_norm, *key_norm;
  int32_t window;
};
struct ModelParts {
  int32_t layers, hidden, heads, kv_heads, head_dim, inner, vocab, block_size;
  float epsilon, scale;
  const void *embedding, *head;  // [vocab][hidden] plain; packed
  const float *norm_out, *cosine, *sine;  // [hidden]; [positions][head_dim / 2]
  const LayerParts* layer;
  void* const* memory;  // of each layer
};
struct StepParts {
  int32_t tokens, spans, rows, pools;
  const int32_t* ids;              // [tokens]
  const int32_t* span;             // [spans][3]: row, count, first position
  const int32_t* const* blocks;    // [spans]
  const int32_t* wanted;           // [rows] of the packed row
  float* logits;                   // [rows][vocab]
  uint8_t* finite;                 // [tokens]
  void (*on_layer)(int32_t);       // or null
  const int32_t* pool;             // [pools][2]: row, count
  float* sums;                     // [pools][hidden], added to
};
}

inline size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

class Buffer {
 public:
  template <class T>
  T* get(size_t items) {
    size_t bytes = up(items * sizeof(T) + 64, 64);
    if (bytes > size_) {
      void* fresh = std::aligned_alloc(64, bytes);
      if (!fresh) return nullptr;
      std::memset(fresh, 0, bytes);
      memory_.reset(static_cast<char*>(fresh)), size_ = bytes;
    }
    return reinterpret_cast<T*>(memory_.get());
  }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

// put(item, 16 floats)
template <class Put>
inline void norm_row(const float* x, const float* gain, int size, float epsilon, const Put& put) {
  Floats sum = zeros();
  for (int i = 0; i < size; i += 16) {
    Floats v = load16(x + i);
    sum = fmadd(v, v, sum);
  }
  Floats scale = spread(1.0f / std::sqrt(sum_of(sum) / float(size) + epsilon));
  for (int i = 0; i < size; i += 16)
    put(i, mul(mul(load16(x + i), scale), load16(gain + i)));
}

inline bool all_finite(const float* x, int size) {
  Floats sum = zeros();
  for (int i = 0; i < size; i += 16) sum = fmadd(load16(x + i), zeros(), sum);
  return sum_of(sum) == 0.0f;
}

template <class E>
class Model {
 public:
  Model(const ModelParts& parts, int threads, bool pinned)
      : m_(parts), layers_(parts.layer, parts.layer + parts.layers), memory_(parts.memory, parts.memory + parts.layers),
        team_(threads, pinned), own_(team_.size()) {}

  // Returns 0, or 1 where memory ran out.
  int run(const StepParts& step) {
    const size_t rows = up(step.tokens, 2 * WIDE), q_items = size_t(m_.heads) * m_.head_dim;
    x_ = residual_.get<float>(rows * m_.hidden);
    normed_ = normed_all_.get<E>(rows * m_.hidden);
    raw_ = raw_all_.get<float>(rows * (q_items + 2 * size_t(m_.kv_heads) * m_.head_dim));
    queries_ = queries_all_.get<E>(rows * q_items);
    mixed_ = mixed_all_.get<E>(rows * q_items);
    inner_ = inner_all_.get<E>(rows * m_.inner);
    if (!x_ || !normed_ || !raw_ || !queries_ || !mixed_ || !inner_) return 1;
    paged_ = {m_.kv_heads, m_.heads / m_.kv_heads, m_.head_dim, m_.block_size, m_.scale * LOG2E, 0};
    spans_.clear();
    for (int i = 0; i < step.spans; ++i)
      spans_.push_back({step.span[3 * i], step.span[3 * i + 1], step.span[3 * i + 2], step.blocks[i]});
    next_ = std::vector<std::atomic<int>>(m_.layers);
    std::atomic<bool> failed{false};
    team_.run([&](int number) {
      Thread& own = own_[number];
      own.number = number;
      char* work = own.attention.template get<char>(Workspace<E>::bytes(paged_));
      own.normed_few = own.few.template get<E>(size_t(2 * WIDE) * m_.hidden);
      if (!work || !own.normed_few) failed = true;
      team_.barrier();
      if (failed) return;
      begin_tiles();
      Workspace<E> workspace(paged_, work);
      forward(step, own, workspace);
      end_tiles();
    });
    return failed;
  }

  size_t bytes() const {
    size_t sum = residual_.size() + normed_all_.size() + raw_all_.size() + queries_all_.size() + mixed_all_.size() +
                 inner_all_.size();
    for (const Thread& own : own_) sum += own.attention.size() + own.few.size();
    return sum;
  }

 private:
  struct Thread {
    Buffer attention, few;
    E* normed_few = nullptr;
    int number = 0;
  };
  struct Range {
    int first, stop;
  };

  Range share(int items, const Thread& own) const {
    int64_t team = team_.size(), me = own.number;
    return {int(items * me / team), int(items * (me + 1) / team)};
  }

  // All rows, normed: by each thread for itself where they are few, else together.
  const E* norm(int tokens, const float* gain, Thread& own) {
    const bool few = tokens <= FEW;
    Range mine = few ? Range{0, tokens} : share(tokens, own);
    E* to = few ? own.normed_few : normed_;
    for (int t = mine.first; t < mine.stop; ++t)
      norm_row(x_ + size_t(t) * m_.hidden, gain, m_.hidden, m_.epsilon,
               [&](int i, Floats v) { store16(place(to, m_.hidden / STEP, t, i), v); });
    if (!few) team_.barrier();
    return to;
  }

  void forward(const StepParts& step, Thread& own, Workspace<E>& workspace) {
    const int hidden = m_.hidden, tokens = step.tokens;
    Range rows = share(tokens, own);
    for (int t = rows.first; t < rows.stop; ++t) {
      const E* from = static_cast<const E*>(m_.embedding) + size_t(step.ids[t]) * hidden;
      for (int i = 0; i < hidden; i += 16) store16(x_ + size_t(t) * hidden + i, load16(from + i));
    }
    team_.barrier();
    for (int layer = 0; layer < m_.layers; ++layer) run_layer(layer, step, own, workspace);
    for (int t = rows.first; t < rows.stop; ++t) {
      step.finite[t] = all_finite(x_ + size_t(t) * hidden, hidden);
    }
    if (step.rows) predict(step, own);
    if (step.pools) pool(step, rows, own);
  }

  void predict(const StepParts& step, const Thread& own) {
    const int hidden = m_.hidden;
    for (int i = share(step.rows, own).first; i < share(step.rows, own).stop; ++i)
      norm_row(x_ + size_t(step.wanted[i]) * hidden, m_.norm_out, hidden, m_.epsilon,
               [&](int k, Floats v) { store16(place(normed_, hidden / STEP, i, k), v); });
    team_.barrier();
    Weights<E> head{static_cast<const E*>(m_.head), hidden / STEP, (m_.vocab + 31) / 32};
    Range mine = share(head.panels, own);
    gemm(step.rows, normed_, head, mine.first, mine.stop, [&](int r, int p, Floats a, Floats b) {
      float* to = step.logits + size_t(r) * m_.vocab + p * 32;
      int left = m_.vocab - p * 32;
      store_first(to, left, a);
      if (left > 16) store_first(to + 16, left - 16, b);
    });
  }

  // Adds the normed rows of each pooled span to its sum, one after the other, so that the sum depends neither on where a
  // prompt is cut nor on the threads. Their residuals are overwritten, which nobody needs any more.
  void pool(const StepParts& step, Range rows, const Thread& own) {
    const int hidden = m_.hidden;
    for (int p = 0; p < step.pools; ++p) {
      const int first = step.pool[2 * p], stop = first + step.pool[2 * p + 1];
      for (int t = std::max(rows.first, first); t < std::min(rows.stop, stop); ++t) {
        float* x = x_ + size_t(t) * hidden;
        norm_row(x, m_.norm_out, hidden, m_.epsilon, [x](int i, Floats v) { store16(x + i, v); });
      }
    }
    team_.barrier();
    Range mine = share(hidden / 16, own);
    for (int p = 0; p < step.pools; ++p)
      for (int i = 16 * mine.first; i < 16 * mine.stop; i += 16) {
        float* sum = step.sums + size_t(p) * hidden + i;
        Floats v = load16(sum);
        for (int t = step.pool[2 * p]; t < step.pool[2 * p] + step.pool[2 * p + 1]; ++t)
          v = add(v, load16(x_ + size_t(t) * hidden + i));
        store16(sum, v);
      }
  }

  void run_layer(int layer, const StepParts& step, Thread& own, Workspace<E>& workspace) {
    const LayerParts& part = layers_[layer];
    const int hidden = m_.hidden, tokens = step.tokens;
    const size_t q_items = size_t(m_.heads) * m_.head_dim;
    project(layer, step, norm(tokens, part.norm_in, own), own);
    team_.barrier();
    if (step.on_layer && !own.number) step.on_layer(layer);
    Paged paged = paged_;
    paged.window = part.window;
    attend<E>(paged, static_cast<const E*>(memory_[layer]), spans_, queries_, workspace, next_[layer],
              [&](int row, int item, Floats v) { store16(place(mixed_, int(q_items) / STEP, row, item), v); });
    team_.barrier();
    auto add_on = [&](int r, int p, Floats a, Floats b) {
      float* to = x_ + size_t(r) * hidden + p * 32;
      store16(to, add(load16(to), a));
      store16(to + 16, add(load16(to + 16), b));
    };
    Range mine = share(hidden / 32, own);
    gemm(tokens, mixed_, Weights<E>{static_cast<const E*>(part.out), int(q_items) / STEP, hidden / 32}, mine.first,
         mine.stop, add_on);
    team_.barrier();
    const E* normed = norm(tokens, part.norm_mid, own);
    Range inner = share(m_.inner / 16, own);
    gemm(tokens, normed, Weights<E>{static_cast<const E*>(part.gate_up), hidden / STEP, m_.inner / 16}, inner.first,
         inner.stop, [&](int r, int p, Floats gate, Floats rise) {
           store16(place(inner_, m_.inner / STEP, r, p * 16), mul(silu16<E>(gate), rise));
         });
    team_.barrier();
    gemm(tokens, inner_, Weights<E>{static_cast<const E*>(part.down), m_.inner / STEP, hidden / 32}, mine.first, mine.stop,
         add_on);
    team_.barrier();
  }

  // Queries, keys and values of the thread's heads: multiplied, biased, normed, rotated; K and V go to the memory.
  void project(int layer, const StepParts& step, const E* normed, const Thread& own) {
    const LayerParts& part = layers_[layer];
    const int dim = m_.head_dim, heads = m_.heads + 2 * m_.kv_heads, panels = dim / 32;
    const size_t width = size_t(heads) * dim;
    Range mine = share(heads, own);
    gemm(step.tokens, normed, Weights<E>{static_cast<const E*>(part.qkv), m_.hidden / STEP, heads * panels},
         mine.first * panels, mine.stop * panels, [&](int r, int p, Floats a, Floats b) {
           float* to = raw_ + r * width + size_t(p) * 32;
           store16(to, a), store16(to + 16, b);
         });
    for (const Span& span : spans_)
      for (int i = 0; i < span.count; ++i) {
        int t = span.row + i, position = span.first + i;
        E* block = static_cast<E*>(memory_[layer]) +
                   size_t(span.blocks[position / m_.block_size]) * 2 * m_.kv_heads * m_.block_size * dim;
        for (int h = mine.first; h < mine.stop; ++h) {
          float* x = raw_ + t * width + size_t(h) * dim;
          if (part.qkv_bias)
            for (int d = 0; d < dim; d += 16)
              store16(x + d, add(load16(x + d), load16(part.qkv_bias + size_t(h) * dim + d)));
          const bool is_query = h < m_.heads, is_key = !is_query && h < m_.heads + m_.kv_heads;
          const float* gain = is_query ? part.query_norm : is_key ? part.key_norm : nullptr;
          if (gain) norm_row(x, gain, dim, m_.epsilon, [x](int i, Floats v) { store16(x + i, v); });
          int kv = h - m_.heads - (is_key ? 0 : m_.kv_heads);
          E* to = is_query ? queries_ + size_t(t) * m_.heads * dim + size_t(h) * dim
                           : block + size_t(is_key ? kv : m_.kv_heads + kv) * m_.block_size * dim +
                                 size_t(position % m_.block_size) * dim;
          if (is_query || is_key)
            rotate(x, m_.cosine + size_t(position) * (dim / 2), m_.sine + size_t(position) * (dim / 2), dim / 2, to);
          else
            for (int d = 0; d < dim; d += 16) store16(to + d, load16(x + d));
        }
      }
  }

  static void rotate(const float* x, const float* cosine, const float* sine, int half, E* to) {
    for (int d = 0; d < half; d += 16) {
      Floats a = load16(x + d), b = load16(x + half + d);
      Floats c = load16(cosine + d), s = load16(sine + d);
      store16(to + d, fmsub(a, c, mul(b, s)));
      store16(to + half + d, fmadd(b, c, mul(a, s)));
    }
  }

  ModelParts m_;
  std::vector<LayerParts> layers_;
  std::vector<void*> memory_;
  Team team_;
  std::vector<Thread> own_;
  std::vector<Span> spans_;
  std::vector<std::atomic<int>> next_;
  Paged paged_{};
  Buffer residual_, normed_all_, raw_all_, queries_all_, mixed_all_, inner_all_;
  float *x_ = nullptr, *raw_ = nullptr;
  E *normed_ = nullptr, *queries_ = nullptr, *mixed_ = nullptr, *inner_ = nullptr;
};

}  // namespace pdray
