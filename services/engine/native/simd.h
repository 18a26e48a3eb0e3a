// Element types, small vector helpers, and the one matrix primitive that GEMM and attention are made of.
//
// A *tile* is what one k-step (32 inputs) of 16 outputs takes, contiguous in memory:
//   bf16  [16 pairs of inputs][16 outputs][2]   1 KiB, the layout of TDPBF16PS and VDPBF16PS
//   f32   [32 inputs][16 outputs]               2 KiB
// A panel is two tiles side by side: [k-steps][2 tiles]. Rows never affect one another, and each output is summed in an
// order that depends on k alone, so a row's result is the same in any company.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define INLINE inline __attribute__((always_inline))

namespace pdray {

constexpr int STEP = 32;  // inputs of a k-step
constexpr int WIDE = 16;  // outputs of a tile; rows of a block
constexpr size_t TILE = size_t(STEP) * WIDE;  // items of a tile

struct bf16 {
  uint16_t bits;
};

// 16 floats from and to memory of either type.
INLINE __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
INLINE __m512 load16(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
INLINE void store16(float* p, __m512 x) { _mm512_storeu_ps(p, x); }

// To nearest even; NaN stays NaN.
INLINE __m256i narrow16(__m512 x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
INLINE void store16(bf16* p, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(x)); }

// 2^x for x up to 100; exactly 0 below -126, also for -inf, as denormal results take a hundred cycles each. Relative
// error 3e-6 for bf16, 1e-7 for float. The polynomials are least-maximum fits on [-0.5, 0.5].
template <class E>
INLINE __m512 exp2_16(__m512 x) {
  const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // NaN stays NaN
  __m512 n = _mm512_roundscale_ps(x, 8), r = _mm512_sub_ps(x, n), y;
  if constexpr (sizeof(E) == 2) {
    y = _mm512_fmadd_ps(_mm512_set1_ps(9.570096662e-3f), r, _mm512_set1_ps(5.591785991e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.402474496e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.931218148e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.999992614e-1f));
  } else {
    y = _mm512_fmadd_ps(_mm512_set1_ps(1.534580752e-4f), r, _mm512_set1_ps(1.339993118e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(9.618488974e-3f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.550328777e-2f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(2.402264689e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(6.931472057e-1f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
  }
  return _mm512_maskz_scalef_ps(some, y, n);
}

constexpr float LOG2E = 1.44269504088896341f;

// x / (1 + exp(-x)); NaN stays NaN.
template <class E>
INLINE __m512 silu16(__m512 x) {
  __m512 e = exp2_16<E>(_mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_mul_ps(x, _mm512_set1_ps(-LOG2E))));
  __m512 below = _mm512_add_ps(e, _mm512_set1_ps(1.0f));
  if constexpr (sizeof(E) == 2) {
    __m512 inverse = _mm512_rcp14_ps(below);
    return _mm512_mul_ps(x, _mm512_mul_ps(inverse, _mm512_fnmadd_ps(below, inverse, _mm512_set1_ps(2.0f))));
  }
  return _mm512_div_ps(x, below);
}

// A 16 x 16 matrix of 32-bit items, transposed in registers.
INLINE void transpose16(const __m512i in[16], __m512i out[16]) {
  __m512i t[16], u[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    __m512i a = _mm512_shuffle_i32x4(u[i], u[4 + i], 0x88), b = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0x88);
    __m512i c = _mm512_shuffle_i32x4(u[i], u[4 + i], 0xdd), d = _mm512_shuffle_i32x4(u[8 + i], u[12 + i], 0xdd);
    out[i] = _mm512_shuffle_i32x4(a, b, 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(a, b, 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(c, d, 0x88);
    out[12 + i] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
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
  __m512 sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = ADD ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
  for (int s = 0; s < steps; ++s, tiles += tile_step, a += by.step) {
    for (int p = 0; p < STEP / 2; ++p) {
      __m512i b = _mm512_loadu_si512(tiles + p * 2 * WIDE);
      _mm_prefetch(reinterpret_cast<const char*>(tiles + p * 2 * WIDE + ahead), _MM_HINT_T1);
#if !defined(__AVX512BF16__)
      __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
      __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(b, _mm512_set1_epi32(int(0xffff0000))));
#endif
      for (int r = 0; r < ROWS; ++r) {
        int32_t pair;
        std::memcpy(&pair, a + r * by.row + 2 * p, 4);
#if defined(__AVX512BF16__)
        sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
#else
        sum[r] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(pair << 16)), even, sum[r]);
        sum[r] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(pair & int(0xffff0000))), odd, sum[r]);
#endif
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(c + r * ldc, sum[r]);
}

template <int ROWS, bool ADD>
inline void dot_rows(const float* a, Strides by, const float* tiles, size_t tile_step, int steps, float* c, size_t ldc,
                     size_t ahead = 0) {
  __m512 sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = ADD ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
  for (int s = 0; s < steps; ++s, tiles += tile_step, a += by.step)
    for (int k = 0; k < STEP; ++k) {
      __m512 b = _mm512_loadu_ps(tiles + k * WIDE);
      _mm_prefetch(reinterpret_cast<const char*>(tiles + k * WIDE + ahead), _MM_HINT_T1);
      for (int r = 0; r < ROWS; ++r) sum[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * by.row + k]), b, sum[r]);
    }
  for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(c + r * ldc, sum[r]);
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
