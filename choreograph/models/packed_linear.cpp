// Linear layers over packed bfloat16 weights: out (rows, features) = x (rows, in) @ weight.T + bias.
//
// Panels of 64 output features follow one another in memory. In a panel, 32-bit element (i, c) holds input features
// 2i and 2i + 1 of output feature c, as dot products take them, so a step of few tokens streams the weights once, in
// order. Sums are float32.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

struct bf16 { uint16_t bits; };
constexpr int LANES = 16, C = 4, PANEL = C * LANES;
constexpr int WIDE = 6;    // rows at once: their sums and operands fit in registers
constexpr int FEW = 32;    // rows that are bound by memory
constexpr int ROWS = 192;  // rows that take turns with one panel while it is in the second-level cache

// M rows of one panel. bias: of the panel's features, or null. count: features of the panel that exist.
template <int M>
void product(const bf16* x, int64_t in, const uint32_t* panel, const bf16* bias, bf16* out, int64_t features, int count) {
  __m512 acc[M][C];
  for (int c = 0; c < C; c++) {
    int left = std::clamp(count - c * LANES, 0, LANES);
    __mmask16 inside = (1u << left) - 1;
    __m512 start = _mm512_setzero_ps();
    if (bias) {
      __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, bias + c * LANES));
      start = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    for (int m = 0; m < M; m++) acc[m][c] = start;
  }
  for (int64_t i = 0; i < in / 2; i++) {
    __m512bh y[C];
    for (int c = 0; c < C; c++) y[c] = (__m512bh)_mm512_loadu_si512(panel + i * PANEL + c * LANES);
    for (int m = 0; m < M; m++) {
      int32_t pair;
      memcpy(&pair, x + m * in + 2 * i, sizeof(pair));
      __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
      for (int c = 0; c < C; c++) acc[m][c] = _mm512_dpbf16_ps(acc[m][c], value, y[c]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) {
      int left = std::clamp(count - c * LANES, 0, LANES);
      __mmask16 inside = (1u << left) - 1;
      _mm256_mask_storeu_epi16(out + m * features + c * LANES, inside, (__m256i)_mm512_cvtneps_pbh(acc[m][c]));
    }
}

}  // namespace

// x and out are contiguous; in is even; packed holds ceil(features / 64) panels of in / 2 * 64 elements.
extern "C" void choreograph_linear(const bf16* x, int64_t rows, int64_t in, const uint32_t* packed, const bf16* bias,
                                   bf16* out, int64_t features, int64_t threads) {
  int64_t panels = (features + PANEL - 1) / PANEL, blocks = (rows + ROWS - 1) / ROWS, items = panels * blocks;
  // few rows are bound by memory: each thread reads one range in order
  int64_t chunk = rows <= FEW ? (items + threads - 1) / threads : std::max<int64_t>(1, items / (8 * threads));
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
  for (int64_t i = 0; i < items; i++) {
    int64_t n = i % panels * PANEL, row = i / panels * ROWS, end = std::min(rows, row + ROWS);
    int count = std::min<int64_t>(PANEL, features - n);
    const uint32_t* panel = packed + n * (in / 2);
    const bf16* start = bias ? bias + n : nullptr;
    for (; row < end; row += WIDE) {
      const bf16* a = x + row * in;
      bf16* to = out + row * features + n;
      switch (std::min<int64_t>(WIDE, end - row)) {
        case 6: product<6>(a, in, panel, start, to, features, count); break;
        case 5: product<5>(a, in, panel, start, to, features, count); break;
        case 4: product<4>(a, in, panel, start, to, features, count); break;
        case 3: product<3>(a, in, panel, start, to, features, count); break;
        case 2: product<2>(a, in, panel, start, to, features, count); break;
        default: product<1>(a, in, panel, start, to, features, count);
      }
    }
  }
}

#ifdef WITH_OPERATOR
using Packed = uint32_t;
#define KERNEL choreograph_linear
#define OPERATOR "linear"
#include "packed_operator.h"
#endif
