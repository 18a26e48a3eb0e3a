// Element types, small vector helpers, and the one matrix primitive that GEMM and attention are made of.
//
// A *tile* is what one k-step (32 inputs) of 16 outputs takes, contiguous in memory:
//   bf16  [16 pairs of inputs][16 outputs][2]   1 KiB, the layout of TDPBF16PS and VDPBF16PS
//   f32   [32 inputs][16 outputs]               2 KiB
// A panel is two tiles side by side: [k-steps][2 tiles]. Rows never affect one another, and each output is summed in an
// order that depends on k alone, so a row's result is the same in any company.
#pragma once

#include <cmath>
#include <cstring>

#include "vectors.h"

namespace pdray {

constexpr int STEP = 32;  // inputs of a k-step
constexpr int WIDE = 16;  // outputs of a tile; rows of a block
constexpr size_t TILE = size_t(STEP) * WIDE;  // items of a tile

struct bf16 {
  uint16_t bits;
};

INLINE Floats load16(const bf16* p) {
  return as_floats(up16(widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
}
INLINE void store16(bf16* p, Floats x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(x)); }

// 2^x for x up to 100; exactly 0 below -126, also for -inf, as denormal results take a hundred cycles each. Relative
// error 3e-6 for bf16, 1e-7 for float. The polynomials are least-maximum fits on [-0.5, 0.5].
template <class E>
INLINE Floats exp2_16(Floats x) {
  const Mask some = not_below(x, spread(-126.0f));  // NaN stays NaN
  Floats n = nearest(x), r = sub(x, n), y;
  if constexpr (sizeof(E) == 2) {
    y = fmadd(spread(9.570096662e-3f), r, spread(5.591785991e-2f));
    y = fmadd(y, r, spread(2.402474496e-1f));
    y = fmadd(y, r, spread(6.931218148e-1f));
    y = fmadd(y, r, spread(9.999992614e-1f));
  } else {
    y = fmadd(spread(1.534580752e-4f), r, spread(1.339993118e-3f));
    y = fmadd(y, r, spread(9.618488974e-3f));
    y = fmadd(y, r, spread(5.550328777e-2f));
    y = fmadd(y, r, spread(2.402264689e-1f));
    y = fmadd(y, r, spread(6.931472057e-1f));
    y = fmadd(y, r, spread(1.0f));
  }
  return where_or_zero(some, times_power(y, n));
}

constexpr float LOG2E = 1.44269504088896341f;

// x / (1 + exp(-x)); NaN stays NaN.
template <class E>
INLINE Floats silu16(Floats x) {
  Floats e = exp2_16<E>(min(spread(100.0f), mul(x, spread(-LOG2E))));
  Floats below = add(e, spread(1.0f));
  if constexpr (sizeof(E) == 2) {
    Floats guess = inverse(below);
    return mul(x, mul(guess, fnmadd(below, guess, spread(2.0f))));
  }
  return div(x, below);
}

// ---------------------------------------------------------------------------------------------------- multiply-add

#if defined(__AMX_BF16__)
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
// The compiler does not know that tile instructions read memory: what was stored before must be there.
inline void settle(const void* at = nullptr) { asm volatile("" ::"r"(at) : "memory"); }
inline void begin_tiles() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
  settle(&config);
  _tile_loadconfig(&config);
}
inline void end_tiles() { _tile_release(); }
#else
inline void begin_tiles() {}
inline void end_tiles() {}
#endif

// Where the left operand's items lie: a row's are `row` items apart in pieces of 32, these `step` items apart.
struct Strides {
  size_t row, step;
};
constexpr Strides BLOCKED{STEP, STEP * WIDE};  // [rows / 16][k-steps][16][32], so that a block's piece is contiguous

template <class E>
INLINE E* place(E* blocked, int steps, int row, int item) {
  return blocked + (size_t(row / WIDE) * steps + item / STEP) * (STEP * WIDE) + size_t(row % WIDE) * STEP + item % STEP;
}

// c[rows][16] = (c +) a . tiles, for one column of tiles, which lie `tile_step` items apart. What lies `ahead` items behind
// each line of them is fetched meanwhile.
template <int ROWS, bool ADD>
inline void dot_rows(const bf16* a, Strides by, const bf16* tiles, size_t tile_step, int steps, float* c, size_t ldc,
                     size_t ahead = 0) {
  if constexpr (ROWS > MOST_ROWS) {
    dot_rows<MOST_ROWS, ADD>(a, by, tiles, tile_step, steps, c, ldc, ahead);
    dot_rows<ROWS - MOST_ROWS, ADD>(a + MOST_ROWS * by.row, by, tiles, tile_step, steps, c + MOST_ROWS * ldc, ldc);
    return;
  }
  Floats sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = ADD ? load16(c + r * ldc) : zeros();
  for (int s = 0; s < steps; ++s, tiles += tile_step, a += by.step) {
    for (int p = 0; p < STEP / 2; ++p) {
      Words b = load_words(tiles + p * 2 * WIDE);
      _mm_prefetch(reinterpret_cast<const char*>(tiles + p * 2 * WIDE + ahead), _MM_HINT_T1);
#if !defined(__AVX512BF16__)
      Floats even = as_floats(up16(b)), odd = as_floats(upper(b));
#endif
      for (int r = 0; r < ROWS; ++r) {
        int32_t pair;
        std::memcpy(&pair, a + r * by.row + 2 * p, 4);
#if defined(__AVX512BF16__)
        sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)spread_words(pair), (__m512bh)b);
#else
        sum[r] = fmadd(spread_low(pair), even, sum[r]);
        sum[r] = fmadd(spread_high(pair), odd, sum[r]);
#endif
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) store16(c + r * ldc, sum[r]);
}

template <int ROWS, bool ADD>
inline void dot_rows(const float* a, Strides by, const float* tiles, size_t tile_step, int steps, float* c, size_t ldc,
                     size_t ahead = 0) {
  if constexpr (ROWS > MOST_ROWS) {
    dot_rows<MOST_ROWS, ADD>(a, by, tiles, tile_step, steps, c, ldc, ahead);
    dot_rows<ROWS - MOST_ROWS, ADD>(a + MOST_ROWS * by.row, by, tiles, tile_step, steps, c + MOST_ROWS * ldc, ldc);
    return;
  }
  Floats sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = ADD ? load16(c + r * ldc) : zeros();
  for (int s = 0; s < steps; ++s, tiles += tile_step, a += by.step)
    for (int k = 0; k < STEP; ++k) {
      Floats b = load16(tiles + k * WIDE);
      _mm_prefetch(reinterpret_cast<const char*>(tiles + k * WIDE + ahead), _MM_HINT_T1);
      for (int r = 0; r < ROWS; ++r) sum[r] = fmadd(spread(a[r * by.row + k]), b, sum[r]);
    }
  for (int r = 0; r < ROWS; ++r) store16(c + r * ldc, sum[r]);
}

// The same for 1 to 16 rows; `a` must be readable for 16.
template <class E>
inline void dot_block(int rows, const E* a, Strides by, const E* tiles, size_t tile_step, int steps, float* c, size_t ldc,
                      size_t ahead) {
  if (rows <= 1) return dot_rows<1, false>(a, by, tiles, tile_step, steps, c, ldc, ahead);
  if (rows <= 2) return dot_rows<2, false>(a, by, tiles, tile_step, steps, c, ldc, ahead);
  if (rows <= 4) return dot_rows<4, false>(a, by, tiles, tile_step, steps, c, ldc, ahead);
  if (rows <= 8) return dot_rows<8, false>(a, by, tiles, tile_step, steps, c, ldc, ahead);
  if (rows <= 12) return dot_rows<12, false>(a, by, tiles, tile_step, steps, c, ldc, ahead);
  dot_rows<16, false>(a, by, tiles, tile_step, steps, c, ldc, ahead);
}

// c[t][16][16] = (c +) a[t] . tiles: several blocks of 16 rows, each wherever it lies, times one column of tiles.
template <bool ADD, class E>
inline void multiply(const E* const* a, int blocks, Strides by, const E* tiles, int steps, float* c) {
  for (int t = 0; t < blocks; ++t)
    dot_rows<WIDE, ADD>(a[t], by, tiles, TILE, steps, c + size_t(t) * WIDE * WIDE, WIDE);
}

#if defined(__AMX_BF16__)
template <bool ADD>
inline void multiply(const bf16* const* a, int blocks, Strides by, const bf16* tiles, int steps, float* c) {
  settle();
  int t = 0;
  for (; t + 4 <= blocks; t += 4) {
    float* to = c + size_t(t) * WIDE * WIDE;
    if (ADD) {
      _tile_loadd(0, to, 64); _tile_loadd(1, to + 256, 64); _tile_loadd(2, to + 512, 64); _tile_loadd(3, to + 768, 64);
    } else {
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int s = 0; s < steps; ++s) {
      _tile_loadd(6, tiles + s * TILE, 64);
      _tile_loadd(4, a[t] + s * by.step, by.row * 2); _tile_loadd(5, a[t + 1] + s * by.step, by.row * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(4, a[t + 2] + s * by.step, by.row * 2);
      _tile_dpbf16ps(1, 5, 6);
      _tile_loadd(5, a[t + 3] + s * by.step, by.row * 2);
      _tile_dpbf16ps(2, 4, 6); _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, to, 64); _tile_stored(1, to + 256, 64); _tile_stored(2, to + 512, 64); _tile_stored(3, to + 768, 64);
  }
  for (; t < blocks; ++t) {
    float* to = c + size_t(t) * WIDE * WIDE;
    if (ADD) {
      _tile_loadd(0, to, 64);
    } else {
      _tile_zero(0);
    }
    for (int s = 0; s < steps; ++s) {
      _tile_loadd(6, tiles + s * TILE, 64);
      _tile_loadd(4, a[t] + s * by.step, by.row * 2); _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, to, 64);
  }
}
#endif

}  // namespace pdray
