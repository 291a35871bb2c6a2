// What products over packed weights have in common: panels of output features, and their distribution to threads.

#include "cpp_amx.h"

namespace panels {  // whose vectors are those of bfloat16 products, and not of the widest registers
namespace {

constexpr int PANEL = 64;  // output features
constexpr int WIDE = 6;    // rows at once: their sums and operands fit in registers
constexpr int FEW = 32;    // rows that are bound by memory
constexpr int ROWS = 192;  // rows that take turns with one panel while it is in the second-level cache

// A vector has an output feature in each lane. Words are pairs of bfloat16, of two input features. AVX-512 multiplies
// both in one instruction; elsewhere one part of the words after the other is widened to float32, and inputs before.
#ifdef __AVX512BF16__
constexpr int LANES = 16, PARTS = 1;
typedef __m512 vec;
typedef __m512i words;
typedef __m512bh operand;
typedef bf16 element;  // of inputs
inline vec splat(float x) { return _mm512_set1_ps(x); }
inline words load_words(const void* from) { return _mm512_loadu_si512(from); }
inline operand input_pair(const element* pair, int) {
  int32_t word;
  memcpy(&word, pair, sizeof(word));
  return (operand)_mm512_set1_epi32(word);
}
inline operand part_of(words pairs, int) { return (operand)pairs; }
inline vec multiply_add(operand a, operand b, vec sum) { return _mm512_dpbf16_ps(sum, a, b); }
inline vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
inline vec clamp(vec x, float limit) { return _mm512_max_ps(splat(-limit), _mm512_min_ps(splat(limit), x)); }
inline vec nearest(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec times_power_of_2(vec x, vec power) { return _mm512_scalef_ps(x, power); }
inline vec widen_fp16(const uint16_t* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline vec widen_bf16(const bf16* from) {
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
inline void store_bf16(bf16* to, vec x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }
#else
constexpr int LANES = 8, PARTS = 2;
typedef __m256 vec;
typedef __m256i words;
typedef __m256 operand;
typedef float element;
inline vec splat(float x) { return _mm256_set1_ps(x); }
inline words load_words(const void* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline operand input_pair(const element* pair, int part) { return _mm256_broadcast_ss(pair + part); }
inline operand part_of(words pairs, int part) {
  return (operand)(part ? _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff0000)) : _mm256_slli_epi32(pairs, 16));
}
inline vec multiply_add(operand a, operand b, vec sum) { return _mm256_fmadd_ps(a, b, sum); }
inline vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
inline vec clamp(vec x, float limit) { return _mm256_max_ps(splat(-limit), _mm256_min_ps(splat(limit), x)); }
inline vec nearest(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vec times_power_of_2(vec x, vec power) {  // power: whole, -126 to 126
  return x * (vec)_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127)), 23);
}
inline vec widen_fp16(const uint16_t* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline vec widen_bf16(const bf16* from) {
  return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
inline void store_bf16(bf16* to, vec x) {  // rounds to nearest, ties to even
  words bits = (words)x, is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  words rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), (words)_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  words halves = _mm256_packus_epi32(_mm256_srli_epi32(rounded, 16), _mm256_setzero_si256());
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
}
#endif
constexpr int VECTORS = PANEL / LANES;  // of a panel

// The first `count` features at most, zero elsewhere.
inline vec widen_bf16(const bf16* from, int count) {
  if (count >= LANES) return widen_bf16(from);
  bf16 values[LANES] = {};
  std::copy_n(from, std::max(0, count), values);
  return widen_bf16(values);
}

inline vec silu(vec x) {  // relative error at most 4e-6 for x >= -87
  vec power = clamp(x * splat(-1.4426950408889634f), 126.0f);  // of two: exp(-x)
  vec whole = nearest(power), f = power - whole, p = splat(9.5701e-3f);
  p = fma(p, f, splat(5.591786e-2f));
  p = fma(p, f, splat(2.4024745e-1f));
  p = fma(p, f, splat(6.9312181e-1f));
  p = fma(p, f, splat(9.9999926e-1f));
  return x / (splat(1.0f) + times_power_of_2(p, whole));
}

// Some rows of the output for the features of one panel of the weight.
struct Block {
  int64_t panel, row, rows;
  bool has_new_rows;  // other ones than the thread's block before
  int count;         // features of the panel that exist
  bf16* out;         // of the first row and feature
  int64_t stride;    // of a row of out
  const bf16* gate;  // (rows, 64), of which SiLU multiplies the output; or null

  // Writes a vector of a row, from feature `at` of the panel on.
  void store(vec value, int64_t at_row, int at) const {
    bf16 rounded[LANES], *to = out + at_row * stride + at;
    if (gate) {
      store_bf16(rounded, value);
      value = silu(widen_bf16(gate + at_row * PANEL + at)) * widen_bf16(rounded);
    }
    if (count - at >= LANES) return store_bf16(to, value);
    store_bf16(rounded, value);
    std::copy_n(rounded, std::max(0, count - at), to);
  }
};

// The block's rows of x as inputs of products.
inline const element* inputs(const bf16* x, int64_t in, const Block& block) {
  x += block.row * in;
#ifdef __AVX512BF16__
  return x;
#else
  static thread_local std::vector<float> buffer;
  if (block.has_new_rows) {
    buffer.resize(block.rows * in + LANES);
    for (int64_t i = 0; i < block.rows * in; i += LANES)
      _mm256_storeu_ps(buffer.data() + i, widen_bf16(x + i, std::min<int64_t>(LANES, block.rows * in - i)));
  }
  return buffer.data();
#endif
}

// Calls `compute.template operator()<M>(begin, end)` for rows that are computed M at a time.
template <class Compute>
void for_rows(int64_t rows, Compute compute) {
  int64_t full = rows - rows % WIDE;
  if (full) compute.template operator()<WIDE>(0, full);
  switch (rows - full) {
    case 5: return compute.template operator()<5>(full, rows);
    case 4: return compute.template operator()<4>(full, rows);
    case 3: return compute.template operator()<3>(full, rows);
    case 2: return compute.template operator()<2>(full, rows);
    case 1: return compute.template operator()<1>(full, rows);
  }
}

// Runs `prepare` for all rows of the input; in threads if that is faster than to wait for them.
template <class Prepare>
void for_each_row(int64_t rows, int64_t threads, Prepare prepare) {
  if (rows <= WIDE) {
    for (int64_t row = 0; row < rows; row++) prepare(row);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; row++) prepare(row);
}

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
        Block block{panel + (gated && !is_gate ? panels : 0), row, std::min<int64_t>(ROWS, rows - row)};
        block.has_new_rows = i % panels == 0 || (i == begin && (is_gate || !gated || end - begin > 1));
        block.count = count;
        block.out = is_gate ? gate : to;
        block.stride = is_gate ? PANEL : features;
        block.gate = gated && !is_gate ? gate : nullptr;
        compute(block);
      }
    }
  }
}

}  // namespace
}  // namespace panels
