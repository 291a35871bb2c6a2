// Vector registers, bfloat16, exp2 and transposition: what the CPU kernel computes with.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace {

constexpr float BASE2 = 1.4426950408889634f;  // log2(e)
#if !defined(REGISTER) && defined(__AVX512F__)
#define REGISTER 16
#elif !defined(REGISTER)
#define REGISTER 8
#endif
constexpr int LANES = REGISTER;            // floats per vector register
typedef float vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int ivec __attribute__((vector_size(LANES * 4)));
typedef unsigned uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int8_t bvec __attribute__((vector_size(LANES), aligned(1), may_alias));

inline vec load(const float* p) { return *(const vec*)p; }
inline void store(float* p, vec x) { *(vec*)p = x; }
inline vec splat(float x) { return x - vec{}; }
inline vec larger(vec a, vec b) {  // `a` if one is NaN; GCC does not see that an instruction does this
#if REGISTER == 16 && defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)b, (__m512)a);
#elif REGISTER == 8 && defined(__AVX__)
  return (vec)_mm256_max_ps((__m256)b, (__m256)a);
#else
  return a < b ? b : a;
#endif
}
inline bool any(ivec x) {  // whether a lane is not 0
#if REGISTER == 16 && defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
  int sum = 0;
  for (int i = 0; i < LANES; i++) sum |= x[i];
  return sum;
#endif
}
// Keeps an operand in a register: otherwise GCC may read it from memory again for each product.
template <class Vector>
inline Vector hold(Vector x) {
#if REGISTER == 16 && defined(__AVX512F__) || REGISTER == 8 && defined(__AVX__)
  asm("" : "+v"(x));
#endif
  return x;
}

// Vectors that begin at a cache line: registers and rows of tiles are as long as one.
template <class T>
struct LineAllocator {
  typedef T value_type;
  LineAllocator() = default;
  template <class U> LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  template <class U> bool operator==(const LineAllocator<U>&) const { return true; }
  template <class U> bool operator!=(const LineAllocator<U>&) const { return false; }
};
template <class T> using Lines = std::vector<T, LineAllocator<T>>;

struct bf16 { uint16_t bits; };
inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { uint32_t b = (uint32_t)x.bits << 16; float f; memcpy(&f, &b, 4); return f; }
inline void from_float(float x, float& out) { out = x; }
inline void from_float(float x, bf16& out) {
  uint32_t b; memcpy(&b, &x, 4);
  out.bits = (x != x) ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
inline vec widen(const float* p) { return load(p); }
inline vec widen(const bf16* p) {
  ivec wide = __builtin_convertvector(*(const hvec*)p, ivec) << 16;
  return (vec)wide;
}

inline vec widen(const int8_t* p) { return __builtin_convertvector(*(const bvec*)p, vec); }

inline vec exp2_fast(vec x) {  // error at most 2 ulp for x in [-126, 0]; 0 below
  const vec least = splat(-126.0f), big = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
  vec r = larger(x, least), whole = (r + big) - big, f = r - whole;
  vec p = splat(1.535336188319500e-4f);
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  ivec scale = (__builtin_convertvector(whole, ivec) + 127) << 23;
  return x < least ? vec{} : p * (vec)scale;
}
inline float exp2_fast(float x) { return exp2_fast(splat(x))[0]; }

inline vec exp2_short(vec x) {
#if REGISTER == 16 && defined(__AVX512F__) && defined(__AVX512DQ__)
  vec f = (vec)_mm512_reduce_ps((__m512)x, 0x9), p = splat(1.3534167e-2f);
  p = p * f + 5.2011464e-2f;
  p = p * f + 2.4144275e-1f;
  p = p * f + 6.9300383e-1f;
  p = p * f + 1.0000026f;
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  x = larger(x, splat(-125.0f));
  const vec big = splat(12582912.0f);
  vec biased = x + big, f = x - (biased - big);
  vec p = splat(9.5701e-3f);
  p = p * f + 5.591786e-2f;
  p = p * f + 2.4024745e-1f;
  p = p * f + 6.9312181e-1f;
  p = p * f + 9.9999926e-1f;
  return (vec)((ivec)p + ((ivec)biased << 23));  // adds to the exponent
#endif
}

// Pairs of bfloat16 in 32 bits, the first in the lower half.
inline ivec load_pairs(const void* p) { ivec x; memcpy(&x, p, sizeof(x)); return x; }
inline ivec splat_pair(const bf16* p) { int x; memcpy(&x, p, sizeof(x)); return ivec{} + x; }
inline ivec round_bits(vec x) { return (ivec)x + 0x8000; }  // bfloat16 in the upper half
inline ivec to_pairs(vec a, vec b) {
  return (ivec)((uvec)round_bits(a) >> 16) | (round_bits(b) & -65536);
}
// Stores the lower halves of numbers below 2^16. GCC does not see that this converts.
inline void store_halves(bf16* p, uvec x) {
#if REGISTER == 16 && defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)x));
#elif REGISTER == 8 && defined(__AVX2__)
  __m256i halves = _mm256_packus_epi32((__m256i)x, _mm256_setzero_si256());
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
#else
  *(hvec*)p = __builtin_convertvector(x, hvec);
#endif
}
inline void store(bf16* p, vec x) { store_halves(p, (uvec)round_bits(x) >> 16); }
// LANES columns of a row and the next one, which counts as zeros if there are less than two rows, as do both if none.
inline ivec pairs_of_rows(const bf16* p, int64_t stride, int rows) {
  hvec a{}, b{};
  if (rows > 0) a = *(const hvec*)p;
  if (rows > 1) b = *(const hvec*)(p + stride);
  return __builtin_convertvector(a, ivec) | __builtin_convertvector(b, ivec) << 16;
}
// Rows of an int8 cache, as in int8_rows.py: D steps, and the size of a step as a float.
template <int D, class T>
void encode(const T* x, int8_t* to) {
  const vec big = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to an integer
  vec most = splat(1e-30f), check{};   // the latter is NaN if a number is not finite
  for (int d = 0; d < D; d += LANES) {
    vec y = widen(x + d);
    most = larger(most, y < 0 ? -y : y);
    check += y - y;
  }
  float size = most[0], sum = check[0];
  for (int i = 1; i < LANES; i++) size = std::max(size, most[i]), sum += check[i];
  const float scale = size / 127 + sum;
  for (int d = 0; d < D; d += LANES) {
    vec steps = (widen(x + d) / scale + big) - big;
    *(bvec*)(to + d) = __builtin_convertvector(__builtin_convertvector(steps, ivec), bvec);
  }
  memcpy(to + D, &scale, sizeof(scale));
}
template <int D, class T>
void decode(const int8_t* row, T* to) {
  float scale;
  memcpy(&scale, row + D, sizeof(scale));
  if (scale != scale) scale = NAN;  // whose bits `store` can round
  for (int d = 0; d < D; d += LANES) store(to + d, widen(row + d) * scale);
}

// sum + the dot products of pairs.
inline vec dot(vec sum, ivec a, ivec b) {
#if REGISTER == 16 && defined(__AVX512BF16__)
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  return sum + (vec)(a << 16) * (vec)(b << 16) + (vec)(a & -65536) * (vec)(b & -65536);
#endif
}

// Indices of shuffles within parts of 128 bits, which are fast, and of whole parts: of two registers, the second of
// which starts at index LANES.
#if REGISTER == 16
constexpr ivec LOW = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
constexpr ivec HIGH = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
constexpr ivec LOW_PAIRS = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
constexpr ivec HIGH_PAIRS = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
constexpr ivec EVEN = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
constexpr ivec ODD = {1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31};
constexpr ivec EVEN_PARTS = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
constexpr ivec ODD_PARTS = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
#else
constexpr ivec LOW = {0, 8, 1, 9, 4, 12, 5, 13}, HIGH = {2, 10, 3, 11, 6, 14, 7, 15};
constexpr ivec LOW_PAIRS = {0, 1, 8, 9, 4, 5, 12, 13}, HIGH_PAIRS = {2, 3, 10, 11, 6, 7, 14, 15};
constexpr ivec EVEN = {0, 2, 8, 10, 4, 6, 12, 14}, ODD = {1, 3, 9, 11, 5, 7, 13, 15};
constexpr ivec EVEN_PARTS = {0, 1, 2, 3, 8, 9, 10, 11}, ODD_PARTS = {4, 5, 6, 7, 12, 13, 14, 15};
#endif

inline void transpose(vec r[LANES]) {  // LANES x LANES
  vec t[LANES];
  for (int i = 0; i < LANES; i += 4) {  // within parts: 4 x 4
    vec a = __builtin_shuffle(r[i], r[i + 1], LOW), b = __builtin_shuffle(r[i], r[i + 1], HIGH);
    vec c = __builtin_shuffle(r[i + 2], r[i + 3], LOW), d = __builtin_shuffle(r[i + 2], r[i + 3], HIGH);
    t[i] = __builtin_shuffle(a, c, LOW_PAIRS);
    t[i + 1] = __builtin_shuffle(a, c, HIGH_PAIRS);
    t[i + 2] = __builtin_shuffle(b, d, LOW_PAIRS);
    t[i + 3] = __builtin_shuffle(b, d, HIGH_PAIRS);
  }
  for (int i = 0; i < 4; i++) {  // parts
    vec a = __builtin_shuffle(t[i], t[i + 4], EVEN_PARTS), b = __builtin_shuffle(t[i], t[i + 4], ODD_PARTS);
#if REGISTER == 16
    vec c = __builtin_shuffle(t[i + 8], t[i + 12], EVEN_PARTS), d = __builtin_shuffle(t[i + 8], t[i + 12], ODD_PARTS);
    r[i] = __builtin_shuffle(a, c, EVEN_PARTS);
    r[i + 4] = __builtin_shuffle(b, d, EVEN_PARTS);
    r[i + 8] = __builtin_shuffle(a, c, ODD_PARTS);
    r[i + 12] = __builtin_shuffle(b, d, ODD_PARTS);
#else
    r[i] = a;
    r[i + 4] = b;
#endif
  }
}

// Lane i of the result: sum of r[i]. Halves the number of rows by adding the even and odd elements of two, then parts.
inline vec sum_rows(vec r[LANES]) {
  for (int half = LANES / 2; half > LANES / 8; half /= 2)
    for (int i = 0; i < half; i++)
      r[i] = __builtin_shuffle(r[2 * i], r[2 * i + 1], EVEN) + __builtin_shuffle(r[2 * i], r[2 * i + 1], ODD);
  for (int half = LANES / 8; half; half /= 2)
    for (int i = 0; i < half; i++)
      r[i] = __builtin_shuffle(r[2 * i], r[2 * i + 1], EVEN_PARTS) + __builtin_shuffle(r[2 * i], r[2 * i + 1], ODD_PARTS);
  return r[0];
}

struct Segment { int32_t lo, hi, first; };
struct Tile { int segment, start, n, active; };  // slots of a segment, and the queries that may read them

// Prefetches keys and values of consecutive tiles into the second-level cache, in the order of memory, at a fixed
// distance before they are read. Requests are spread over the computation: in bursts, they wait for one another.
template <class T, int D>
class Ahead {
  static constexpr int LINE = 64 / sizeof(T), DISTANCE = 128;  // elements of a cache line; slots
  const T *keys, *values;                                      // of the first slot and head
  int64_t stride;
  int heads;
  const Segment* segments;
  const Tile *tile, *end;           // not yet begun
  const T *key = nullptr, *value = nullptr;  // next lines
  int64_t lines = 0, rows = 0;               // left of this row; rows left of this tile
  int64_t budget = 0;                        // lines that may be fetched before the next pass

 public:
  Ahead(const T* keys, const T* values, int64_t stride, int heads, const Segment* segments,
        const std::vector<Tile>& tiles)
      : keys(keys), values(values), stride(stride), heads(heads), segments(segments), tile(tiles.data()),
        end(tiles.data() + tiles.size()) {
    fetch((int64_t)DISTANCE * heads * D / LINE);
  }
  // Before one head of a tile of n slots is computed with: allows as many bytes of all heads together.
  void begin(int n) {
    fetch(budget);
    budget = (int64_t)n * D / LINE;
  }
  // While `slots` keys or values are computed with.
  void advance(int slots) {
    int64_t count = std::min<int64_t>(budget, slots * D / (2 * LINE));
    budget -= count;
    fetch(count);
  }

 private:
  void fetch(int64_t count) {
    while (count > 0 && (lines || next_row())) {
      int64_t some = std::min(count, lines);
      for (int64_t i = 0; i < some; i++) {
        __builtin_prefetch(key + i * LINE, 0, 2);  // into the second level
        __builtin_prefetch(value + i * LINE, 0, 2);
      }
      key += some * LINE;
      value += some * LINE;
      count -= some;
      lines -= some;
    }
  }
  bool next_row() {
    int64_t width = (int64_t)heads * D;
    bool adjoin = stride == width;  // all rows of a tile are one
    if (rows > 0) {
      key += stride - width;
      value += stride - width;
    } else {
      if (tile == end) return false;
      int64_t at = (int64_t)(segments[tile->segment].lo + tile->start) * stride;
      key = keys + at;
      value = values + at;
      rows = adjoin ? 1 : tile->n;
      width *= adjoin ? tile->n : 1;
      tile++;
    }
    rows--;
    lines = (width + LINE - 1) / LINE;
    return true;
  }
};

}  // namespace
