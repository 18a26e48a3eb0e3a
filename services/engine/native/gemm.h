// Activations times packed weights. A thread takes a range of panels (32 outputs each), so a weight is read by one
// thread and once per step; what becomes of the sums is the caller's: `done(row, panel, 16 sums, the next 16)`.
#pragma once

#include "simd.h"

namespace pdray {

// Packed [panels][k-steps][2 tiles]; see simd.h. Outputs past the matrix are zero, up to a whole panel.
template <class E>
struct Weights {
  const E* items = nullptr;
  int steps = 0;
  int panels = 0;

  const E* panel(int p) const { return items + size_t(p) * steps * 2 * TILE; }
};

// Args: a: [rows padded to 32][32 * steps], blocked, see simd.h, and readable to the padding.
template <class E, class Done>
inline void gemm(int rows, const E* a, const Weights<E>& w, int first, int stop, Done&& done) {
  const size_t lda = size_t(w.steps) * STEP;
  alignas(64) float c[WIDE * 2 * WIDE];
  for (int p = first; p < stop; ++p)
    for (int r = 0; r < rows; r += WIDE) {
      int count = rows - r < WIDE ? rows - r : WIDE;
      size_t ahead = r ? 0 : w.steps * 2 * TILE;  // the first rows fetch the next panel
      dot_block<E>(count, a + r * lda, BLOCKED, w.panel(p), 2 * TILE, w.steps, c, 2 * WIDE, ahead);
      dot_block<E>(count, a + r * lda, BLOCKED, w.panel(p) + TILE, 2 * TILE, w.steps, c + WIDE, 2 * WIDE, ahead);
      for (int i = 0; i < count; ++i)
        done(r + i, p, load16(c + i * 2 * WIDE), load16(c + i * 2 * WIDE + WIDE));
    }
}

#if defined(__AMX_BF16__)
// Two tiles that will be read soon.
template <_mm_hint WHERE>
INLINE void fetch(const bf16* tiles) {
  for (size_t line = 0; line < 2 * TILE; line += 32) _mm_prefetch(reinterpret_cast<const char*>(tiles + line), WHERE);
}

template <class Done>
inline void gemm(int rows, const bf16* a, const Weights<bf16>& w, int first, int stop, Done&& done) {
  const size_t lda = size_t(w.steps) * STEP;
  alignas(64) float c[4][WIDE * WIDE];
  settle();
  for (int p = first; p < stop; ++p) {
    const bf16* panel = w.panel(p);
    int r = 0;
    for (; r + WIDE < rows; r += 2 * WIDE) {
      const bf16 *top = a + r * lda, *bottom = top + WIDE * lda;
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
      for (int s = 0; s < w.steps; ++s) {
        if (!r) fetch<_MM_HINT_T1>(panel + (s + w.steps) * 2 * TILE);  // of the next panel
        _tile_loadd(4, top + s * TILE, 64);
        _tile_loadd(6, panel + s * 2 * TILE, 64); _tile_loadd(7, panel + s * 2 * TILE + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, bottom + s * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c[0], 64); _tile_stored(1, c[1], 64); _tile_stored(2, c[2], 64); _tile_stored(3, c[3], 64);
      int count = rows - r < 2 * WIDE ? rows - r : 2 * WIDE;
      for (int i = 0; i < count; ++i) {
        int half = i / WIDE * 2, at = i % WIDE * WIDE;
        done(r + i, p, load16(c[half] + at), load16(c[half + 1] + at));
      }
    }
    if (r >= rows) continue;
    _tile_zero(0); _tile_zero(1);
    for (int s = 0; s < w.steps; ++s) {
      const bf16* next = panel + s * 2 * TILE;
      fetch<_MM_HINT_T0>(next + 8 * 2 * TILE);
      _tile_loadd(4, a + r * lda + s * TILE, 64);
      _tile_loadd(6, next, 64); _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, next + TILE, 64); _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, c[0], 64); _tile_stored(1, c[1], 64);
    for (int i = 0; i < rows - r; ++i)
      done(r + i, p, load16(c[0] + i * WIDE), load16(c[1] + i * WIDE));
  }
}
#endif

}  // namespace pdray
