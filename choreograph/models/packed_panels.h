// What products over packed weights have in common: panels of output features, and their distribution to threads.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>

namespace {

struct bf16 { uint16_t bits; };
constexpr int LANES = 16, C = 4, PANEL = C * LANES;
constexpr int WIDE = 6;    // rows at once: their sums and operands fit in registers
constexpr int FEW = 32;    // rows that are bound by memory
constexpr int ROWS = 192;  // rows that take turns with one panel while it is in the second-level cache

inline __mmask16 lanes(int count) { return (1u << std::clamp(count, 0, LANES)) - 1; }

inline __m512 widen_bf16(const bf16* from, __mmask16 inside) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __m512 silu(__m512 x) {  // relative error at most 4e-6 for x >= -87
  const __m512 limit = _mm512_set1_ps(126.0f), one = _mm512_set1_ps(1.0f);
  __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(-1.4426950408889634f));  // of two: exp(-x)
  power = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit), _mm512_min_ps(limit, power));
  __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 f = _mm512_sub_ps(power, whole), p = _mm512_set1_ps(9.5701e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.591786e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4024745e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9312181e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999926e-1f));
  return _mm512_div_ps(x, _mm512_add_ps(one, _mm512_scalef_ps(p, whole)));
}

// Some rows of the output for the features of one panel of the weight.
struct Block {
  int64_t panel, row, rows;
  int count;         // features of the panel that exist
  bf16* out;         // of the first row and feature
  int64_t stride;    // of a row of out
  const bf16* gate;  // (rows, 64), of which SiLU multiplies the output; or null

  // Writes 16 features of a row, from feature `at` of the panel on.
  void store(__m512 value, int64_t at_row, int at) const {
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(value);
    if (gate) {
      __m512 other = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
      __m512 factor = silu(widen_bf16(gate + at_row * PANEL + at, 0xffff));
      rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(factor, other));
    }
    _mm256_mask_storeu_epi16(out + at_row * stride + at, lanes(count - at), rounded);
  }
};

// Runs `compute` for all blocks of the output, in threads. Gated: for the gate's panel of a block first.
template <class Compute>
void for_each_block(int64_t rows, int64_t features, int64_t threads, bool gated, bf16* out, Compute compute) {
  int64_t panels = (features + PANEL - 1) / PANEL, items = panels * ((rows + ROWS - 1) / ROWS);
  if (items == 0) return;
  // few rows are bound by memory: each thread reads one range in order, gated one of each factor
  int64_t chunk = gated ? 1 : std::max<int64_t>(1, items / (8 * threads)), height = std::min<int64_t>(rows, ROWS);
  if (rows <= FEW) chunk = (items + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t begin = 0; begin < items; begin += chunk) {
    int64_t end = std::min(items, begin + chunk);
    static thread_local std::vector<bf16> gates;
    if (gated) gates.resize((end - begin) * height * PANEL);
    for (int pass = gated ? 0 : 1; pass < 2; pass++) {
      bool is_gate = pass == 0;
      for (int64_t i = begin; i < end; i++) {
        int64_t panel = i % panels, row = i / panels * ROWS;
        int count = std::min<int64_t>(PANEL, features - panel * PANEL);
        bf16 *gate = gates.data() + (i - begin) * height * PANEL, *to = out + row * features + panel * PANEL;
        Block block{panel + (gated && !is_gate ? panels : 0), row, std::min<int64_t>(ROWS, rows - row), count};
        block.out = is_gate ? gate : to;
        block.stride = is_gate ? PANEL : features;
        block.gate = gated && !is_gate ? gate : nullptr;
        compute(block);
      }
    }
  }
}

}  // namespace
