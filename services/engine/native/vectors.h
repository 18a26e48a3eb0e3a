// Sixteen numbers of 32 bits at a time: one AVX-512 register, or two of AVX2. All kernels are written with these.
//
// Both do the same operations in the same order, and differ only where the names say so: `inverse` is an estimate.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#define INLINE inline __attribute__((always_inline))

namespace pdray {

using Halves = __m256i;  // 16 numbers of 16 bits

#if defined(__AVX512F__)

using Floats = __m512;
using Words = __m512i;
using Mask = __mmask16;

constexpr int MOST_ROWS = 16;  // sums of 16 that the registers hold beside what is multiplied

INLINE Floats load16(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store16(float* p, Floats x) { _mm512_storeu_ps(p, x); }
INLINE void store_first(float* p, int count, Floats x) {
  _mm512_mask_storeu_ps(p, count >= 16 ? 0xffff : (1u << count) - 1, x);
}
INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store_words(void* p, Words x) { _mm512_storeu_si512(p, x); }
INLINE Floats zeros() { return _mm512_setzero_ps(); }
INLINE Words zero_words() { return _mm512_setzero_si512(); }
INLINE Floats spread(float x) { return _mm512_set1_ps(x); }
INLINE Words spread_words(int32_t x) { return _mm512_set1_epi32(x); }
INLINE Words lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Floats as_floats(Words x) { return _mm512_castsi512_ps(x); }

INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
INLINE Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats fmsub(Floats a, Floats b, Floats c) { return _mm512_fmsub_ps(a, b, c); }
INLINE Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE Floats inverse(Floats x) { return _mm512_rcp14_ps(x); }
INLINE Floats nearest(Floats x) { return _mm512_roundscale_ps(x, 8); }
INLINE Floats times_power(Floats x, Floats n) { return _mm512_scalef_ps(x, n); }
INLINE float sum_of(Floats x) { return _mm512_reduce_add_ps(x); }
INLINE float most_of(Floats x) { return _mm512_reduce_max_ps(x); }
INLINE float first_of(Floats x) { return _mm512_cvtss_f32(x); }

INLINE Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
INLINE Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
INLINE Words up16(Words x) { return _mm512_slli_epi32(x, 16); }
INLINE Words upper(Words x) { return _mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000))); }
// Of a pair of bf16, the first or the second as floats.
INLINE Floats spread_low(int32_t pair) { return as_floats(spread_words(pair << 16)); }
INLINE Floats spread_high(int32_t pair) { return as_floats(spread_words(pair & int(0xffff0000))); }

INLINE Mask differ(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ); }
INLINE Mask not_below(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }  // also where one is NaN
INLINE Mask within(Words at, Words from, Words to) {  // from <= at < to
  return _mm512_cmpge_epi32_mask(at, from) & _mm512_cmplt_epi32_mask(at, to);
}
INLINE bool any(Mask m) { return m; }
INLINE Floats where(Mask m, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, m, yes); }
INLINE Floats where_or_zero(Mask m, Floats yes) { return _mm512_maskz_mov_ps(m, yes); }

INLINE Words widen(Halves x) { return _mm512_cvtepu16_epi32(x); }
// The upper halves, rounded to nearest even; NaN stays NaN.
INLINE Halves narrow16(Floats x) {
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

// Pairs of 16-bit items from two vectors of 32: of the first 16 of each, and of the others.
struct Interleaving {
  __m512i low, high;

  Interleaving() {
    alignas(64) uint16_t l[32], h[32];
    for (int i = 0; i < 16; ++i) {
      l[2 * i] = uint16_t(i), l[2 * i + 1] = uint16_t(32 + i);
      h[2 * i] = uint16_t(16 + i), h[2 * i + 1] = uint16_t(48 + i);
    }
    low = _mm512_load_si512(l), high = _mm512_load_si512(h);
  }
  INLINE Words near(Words a, Words b) const { return _mm512_permutex2var_epi16(a, low, b); }
  INLINE Words far(Words a, Words b) const { return _mm512_permutex2var_epi16(a, high, b); }
};

// A 16 x 16 matrix of 32-bit items, transposed in registers.
INLINE void transpose16(const Words in[16], Words out[16]) {
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

#else  // AVX2 and FMA

struct Floats {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};
struct Mask {
  __m256 low, high;  // all bits of a number, or none
};

constexpr int MOST_ROWS = 4;

INLINE Floats load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store16(float* p, Floats x) { _mm256_storeu_ps(p, x.low), _mm256_storeu_ps(p + 8, x.high); }
INLINE void store_first(float* p, int count, Floats x) {
  if (count >= 16) return store16(p, x);
  alignas(32) float all[16];
  store16(all, x);
  for (int i = 0; i < count; ++i) p[i] = all[i];
}
INLINE Words load_words(const void* p) {
  const __m256i* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
INLINE void store_words(void* p, Words x) {
  __m256i* at = static_cast<__m256i*>(p);
  _mm256_storeu_si256(at, x.low), _mm256_storeu_si256(at + 1, x.high);
}
INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE Words zero_words() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE Floats spread(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE Words spread_words(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE Words lanes() { return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}; }
INLINE Floats as_floats(Words x) { return {_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)}; }

INLINE Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
INLINE Floats sub(Floats a, Floats b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
INLINE Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
INLINE Floats div(Floats a, Floats b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
INLINE Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
INLINE Floats fmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
INLINE Floats fmsub(Floats a, Floats b, Floats c) {
  return {_mm256_fmsub_ps(a.low, b.low, c.low), _mm256_fmsub_ps(a.high, b.high, c.high)};
}
INLINE Floats fnmadd(Floats a, Floats b, Floats c) {
  return {_mm256_fnmadd_ps(a.low, b.low, c.low), _mm256_fnmadd_ps(a.high, b.high, c.high)};
}
INLINE Floats inverse(Floats x) { return {_mm256_rcp_ps(x.low), _mm256_rcp_ps(x.high)}; }
INLINE Floats nearest(Floats x) {
  constexpr int to_even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.low, to_even), _mm256_round_ps(x.high, to_even)};
}
// x * 2^n for whole n from -126 to 127; NaN stays NaN.
INLINE __m256 times_power(__m256 x, __m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
INLINE Floats times_power(Floats x, Floats n) { return {times_power(x.low, n.low), times_power(x.high, n.high)}; }
INLINE float sum_of(Floats x) {
  __m256 eight = _mm256_add_ps(x.low, x.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float most_of(Floats x) {
  __m256 eight = _mm256_max_ps(x.low, x.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE float first_of(Floats x) { return _mm256_cvtss_f32(x.low); }

INLINE Words add(Words a, Words b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
INLINE Words either(Words a, Words b) { return {_mm256_or_si256(a.low, b.low), _mm256_or_si256(a.high, b.high)}; }
INLINE Words up16(Words x) { return {_mm256_slli_epi32(x.low, 16), _mm256_slli_epi32(x.high, 16)}; }
INLINE Words upper(Words x) {
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  return {_mm256_and_si256(x.low, mask), _mm256_and_si256(x.high, mask)};
}
INLINE Floats spread_low(int32_t pair) { return as_floats(up16(spread_words(pair))); }
INLINE Floats spread_high(int32_t pair) { return as_floats(upper(spread_words(pair))); }

INLINE Mask differ(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_NEQ_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NEQ_UQ)};
}
INLINE Mask not_below(Floats a, Floats b) {
  return {_mm256_cmp_ps(a.low, b.low, _CMP_NLT_UQ), _mm256_cmp_ps(a.high, b.high, _CMP_NLT_UQ)};
}
INLINE __m256 within(__m256i at, __m256i from, __m256i to) {
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(from, at), _mm256_cmpgt_epi32(to, at)));
}
INLINE Mask within(Words at, Words from, Words to) {
  return {within(at.low, from.low, to.low), within(at.high, from.high, to.high)};
}
INLINE bool any(Mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.low, m.high)); }
INLINE Floats where(Mask m, Floats yes, Floats no) {
  return {_mm256_blendv_ps(no.low, yes.low, m.low), _mm256_blendv_ps(no.high, yes.high, m.high)};
}
INLINE Floats where_or_zero(Mask m, Floats yes) { return {_mm256_and_ps(yes.low, m.low), _mm256_and_ps(yes.high, m.high)}; }

INLINE Words widen(Halves x) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(x, 1))};
}
INLINE __m256i rounded_half(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
INLINE Halves narrow16(Floats x) {
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded_half(x.low), rounded_half(x.high)), 0xd8);
}

struct Interleaving {
  INLINE Words near(Words a, Words b) const { return pairs(a.low, b.low); }
  INLINE Words far(Words a, Words b) const { return pairs(a.high, b.high); }

 private:
  static INLINE Words pairs(__m256i a, __m256i b) {
    __m256i outer = _mm256_unpacklo_epi16(a, b), inner = _mm256_unpackhi_epi16(a, b);
    return {_mm256_permute2x128_si256(outer, inner, 0x20), _mm256_permute2x128_si256(outer, inner, 0x31)};
  }
};

INLINE void transpose8(const __m256i in[8], __m256i out[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x20);
    out[4 + i] = _mm256_permute2x128_si256(u[i], u[4 + i], 0x31);
  }
}
inline void transpose16(const Words in[16], Words out[16]) {
  __m256i corner[8], turned[8];
  for (int rows = 0; rows < 16; rows += 8)
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 8; ++i) corner[i] = half ? in[rows + i].high : in[rows + i].low;
      transpose8(corner, turned);
      for (int i = 0; i < 8; ++i) (rows ? out[8 * half + i].high : out[8 * half + i].low) = turned[i];
    }
}

#endif

}  // namespace pdray
