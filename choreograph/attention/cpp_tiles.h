// Products of a block of queries with a tile of keys or values in bfloat16: AVX-512 dot products, or AMX.
//
// A tile is packed once for all queries: 32-bit element (i, c) holds rows 2i and 2i + 1 of column c, as both
// instruction sets take it. Products and sums are float32.

#pragma once

#include "cpp_vector.h"

#if REGISTER == 16 && defined(__AVX512BF16__)
#define HAS_DOTS 1
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#else
#define HAS_DOTS 0
#endif
#ifndef HAS_AMX
#define HAS_AMX 0
#endif

namespace {

template <class T> constexpr bool DOTS = false;

#if HAS_DOTS

template <> constexpr bool DOTS<bf16> = true;

#if HAS_AMX
// Eight tile registers of 16 rows of 64 bytes each. Threads must load the configuration before products.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
inline bool has_amx() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl; Linux saves tiles only on request
  static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return allowed;
}
inline void enter_amx() { static const TileConfig config; if (has_amx()) _tile_loadconfig(&config); }
inline void leave_amx() { if (has_amx()) _tile_release(); }

// 32 rows and `columns` (16 or 32) of a product: 2 x 2 accumulators, 2 tiles of `a` and 2 of `b`.
template <bool ADD, int A, int B, int TO>
void amx_block(const bf16* a, const uint32_t* b, int pairs, bool both, float* to) {
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  if (ADD) {
    _tile_loadd(0, to, TO * 4);
    _tile_loadd(2, to + 16 * TO, TO * 4);
    if (both) { _tile_loadd(1, to + 16, TO * 4); _tile_loadd(3, to + 16 * TO + 16, TO * 4); }
  }
  for (int i = 0; i < pairs; i += 16) {
    _tile_loadd(4, a + 2 * i, A * 2);
    _tile_loadd(5, a + 16 * A + 2 * i, A * 2);
    _tile_loadd(6, b + i * B, B * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if (both) {
      _tile_loadd(7, b + i * B + 16, B * 4);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to, TO * 4);
  _tile_stored(2, to + 16 * TO, TO * 4);
  if (both) { _tile_stored(1, to + 16, TO * 4); _tile_stored(3, to + 16 * TO + 16, TO * 4); }
}
#else
inline bool has_amx() { return false; }
inline void enter_amx() {}
inline void leave_amx() {}
#endif

// M rows and C registers of columns of a product; see `multiply`.
template <int M, int C, bool ADD, int A, int B, int TO>
inline void dot_block(const bf16* a, const uint32_t* b, int pairs, float* to) {
  __m512 acc[M][C];
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) acc[m][c] = ADD ? _mm512_loadu_ps(to + m * TO + c * LANES) : _mm512_setzero_ps();
  for (int i = 0; i < pairs; i++) {
    __m512bh y[C];
    for (int c = 0; c < C; c++) y[c] = (__m512bh)_mm512_loadu_si512(b + i * B + c * LANES);
    for (int m = 0; m < M; m++) {
      int32_t pair;
      memcpy(&pair, a + m * A + 2 * i, sizeof(pair));
      __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      for (int c = 0; c < C; c++) acc[m][c] = _mm512_dpbf16_ps(acc[m][c], x, y[c]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) _mm512_storeu_ps(to + m * TO + c * LANES, acc[m][c]);
}
template <int C, bool ADD, int A, int B, int TO>
void dot_rows(int rows, const bf16* a, const uint32_t* b, int pairs, float* to) {
  for (; rows >= WIDE; rows -= WIDE, a += WIDE * A, to += WIDE * TO)
    dot_block<WIDE, C, ADD, A, B, TO>(a, b, pairs, to);
  switch (rows) {
    case 5: return dot_block<5, C, ADD, A, B, TO>(a, b, pairs, to);
    case 4: return dot_block<4, C, ADD, A, B, TO>(a, b, pairs, to);
    case 3: return dot_block<3, C, ADD, A, B, TO>(a, b, pairs, to);
    case 2: return dot_block<2, C, ADD, A, B, TO>(a, b, pairs, to);
    case 1: return dot_block<1, C, ADD, A, B, TO>(a, b, pairs, to);
  }
}

// to (rows, columns) = [to if ADD] + a (rows, 2 * pairs) @ b (2 * pairs, columns), with `b` packed.
// A, B, TO: elements from row to row. columns and pairs: multiples of 16 and of 8.
template <bool ADD, int A, int B, int TO>
void multiply(int rows, int columns, const bf16* a, const uint32_t* b, int pairs, float* to) {
#if HAS_AMX
  if (rows == 32 && pairs % 16 == 0 && has_amx()) {
    for (int c = 0; c < columns; c += 32) amx_block<ADD, A, B, TO>(a, b + c, pairs, columns - c > 16, to + c);
    return;
  }
#endif
  int c = 0;
  for (; c + 4 * LANES <= columns; c += 4 * LANES) dot_rows<4, ADD, A, B, TO>(rows, a, b + c, pairs, to + c);
  for (; c + 2 * LANES <= columns; c += 2 * LANES) dot_rows<2, ADD, A, B, TO>(rows, a, b + c, pairs, to + c);
  for (; c < columns; c += LANES) dot_rows<1, ADD, A, B, TO>(rows, a, b + c, pairs, to + c);
}

inline __m512 exp2_short(__m512 x) {  // error at most 3e-6 for x <= 0, at least 2^-126
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // in this order NaN stays NaN
  __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(x, whole);
  __m512 p = _mm512_set1_ps(9.5701e-3f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.591786e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4024745e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9312181e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.9999926e-1f));
  return _mm512_scalef_ps(p, whole);
}

// Queries and the packed keys and values of a tile, for heads of D dimensions.
template <int D, int TILE>
struct PackedTile {
  static constexpr int BLOCK = HAS_AMX ? 32 : 4 * WIDE;  // queries per product: a multiple of what `multiply` computes at once
  std::vector<uint32_t> keys = std::vector<uint32_t>(D / 2 * TILE), values = std::vector<uint32_t>(TILE / 2 * D);
  std::vector<float> scores = std::vector<float>(BLOCK * TILE);
  std::vector<bf16> weights = std::vector<bf16>(BLOCK * TILE);
  int width = 0;  // slots, rounded up to 32

  // Packs n <= TILE slots; slots from n to `width` become zeros.
  void pack(const bf16* k, const bf16* v, int64_t stride, int n, Ahead<bf16, D>& next) {
    width = (n + 31) / 32 * 32;
    for (int j = 0; j < width; j += LANES) {
      next.advance(LANES);
      for (int c = 0; c < D / 2; c += LANES) {
        constexpr int REST = D / 2 % LANES;  // pairs in the last columns; 0 or 8
        bool whole = !REST || c + LANES <= D / 2;
        vec r[LANES];
        for (int i = 0; i < LANES; i++) {
          r[i] = vec{};
          if (j + i < n) memcpy(&r[i], k + (j + i) * stride + 2 * c, whole ? 64 : 32);
        }
        transpose(r);
        for (int i = 0; i < (whole ? LANES : REST); i++) store((float*)&keys[(c + i) * TILE + j], r[i]);
      }
    }
    for (int j = 0; j < width; j += 2) {
      if (j % LANES == 0) next.advance(LANES);
      for (int c = 0; c < D; c += 2 * LANES)
        pack_pair(v + j * stride + c, v + (j + 1) * stride + c, n - j, D - c, &values[j / 2 * D + c]);
    }
  }
  // Up to 32 columns of two rows, of which `rows` hold values, as pairs in the first 16 columns and the last 16.
  static void pack_pair(const bf16* a, const bf16* b, int rows, int columns, __m512i& low, __m512i& high) {
    alignas(64) static constexpr uint16_t ORDER[64] = {  // indices of x, and from 32 on of y
        0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
        11, 43, 12, 44, 13, 45, 14, 46, 15, 47, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53,
        22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
    __mmask32 inside = columns >= 2 * LANES ? 0xffffffff : 0xffff;
    __m512i x = _mm512_maskz_loadu_epi16(rows > 0 ? inside : 0, a);
    __m512i y = _mm512_maskz_loadu_epi16(rows > 1 ? inside : 0, b);
    low = _mm512_permutex2var_epi16(x, _mm512_load_si512(ORDER), y);
    if (columns >= 2 * LANES) high = _mm512_permutex2var_epi16(x, _mm512_load_si512(ORDER + 32), y);
  }
  static void pack_pair(const bf16* a, const bf16* b, int rows, int columns, uint32_t* to) {
    __m512i low, high;
    pack_pair(a, b, rows, columns, low, high);
    _mm512_storeu_si512(to, low);
    if (columns >= 2 * LANES) _mm512_storeu_si512(to + LANES, high);
  }

  // `used`: slots that a query of the block sees, rounded up to 32. The others are skipped.
  void score(int rows, int used, const bf16* queries) {
    multiply<false, D, TILE, TILE>(rows, used, queries, keys.data(), D / 2, scores.data());
  }
  void mix(int rows, int used, float* out) {
    multiply<true, TILE, D, D>(rows, D, weights.data(), values.data(), used / 2, out);
  }

  // The same for few queries, directly from n stored rows, without packing.
  void score_few(int rows, int n, const bf16* queries, const bf16* k, int64_t stride, Ahead<bf16, D>& next) {
    for (int j = 0; j < n; j += LANES) {
      next.advance(LANES);
      const bf16* row[LANES];
      for (int r = 0; r < LANES; r++) row[r] = k + std::min(j + r, n - 1) * stride;
      for (int m = 0; m < rows; m++) {
        vec part[LANES];
        for (int r = 0; r < LANES; r++) part[r] = products(queries + m * D, row[r]);
        store(&scores[m * TILE + j], sum_rows(part));
      }
    }
  }
  static vec products(const bf16* a, const bf16* b) {  // of which the lanes' sum is a . b
    __m512 sum = _mm512_setzero_ps();
    for (int c = 0; c + 2 * LANES <= D; c += 2 * LANES)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + c), (__m512bh)_mm512_loadu_si512(b + c));
    if constexpr (D % (2 * LANES)) {
      constexpr int C = D - LANES;
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(a + C))),
                             (__m512bh)_mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)(b + C))));
    }
    return (vec)sum;
  }
  template <int M>
  void mix_few(int n, const bf16* v, int64_t stride, float* out, Ahead<bf16, D>& next) {
    constexpr int C = 4, REST = D / LANES % C;  // registers of columns at once, and in the last columns
    for (int c = 0; c + C * LANES <= D; c += C * LANES)
      mix_columns<M, C>(n, v + c, stride, out + c, next);
    constexpr int DONE = D - REST * LANES;
    if constexpr (REST) mix_columns<M, REST>(n, v + DONE, stride, out + DONE, next);
  }
  template <int M, int C>
  void mix_columns(int n, const bf16* v, int64_t stride, float* out, Ahead<bf16, D>& next) {
    __m512 acc[M][C];
    for (int m = 0; m < M; m++) for (int c = 0; c < C; c++) acc[m][c] = _mm512_loadu_ps(out + m * D + c * LANES);
    for (int j = 0; j < n; j += 2) {
      if (j % LANES == 0) next.advance(LANES);
      __m512i pairs[C + C % 2];
      for (int c = 0; c < C; c += 2) {
        const bf16* row = v + j * stride + c * LANES;
        pack_pair(row, row + stride, n - j, (C - c) * LANES, pairs[c], pairs[c + 1]);
      }
      for (int m = 0; m < M; m++) {
        int32_t pair;
        memcpy(&pair, &weights[m * TILE + j], sizeof(pair));
        __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
        for (int c = 0; c < C; c++) acc[m][c] = _mm512_dpbf16_ps(acc[m][c], x, (__m512bh)pairs[c]);
      }
    }
    for (int m = 0; m < M; m++) for (int c = 0; c < C; c++) _mm512_storeu_ps(out + m * D + c * LANES, acc[m][c]);
  }
  void mix_few(int rows, int n, const bf16* v, int64_t stride, float* out, Ahead<bf16, D>& next) {
    switch (rows) {
      case 6: return mix_few<6>(n, v, stride, out, next);
      case 5: return mix_few<5>(n, v, stride, out, next);
      case 4: return mix_few<4>(n, v, stride, out, next);
      case 3: return mix_few<3>(n, v, stride, out, next);
      case 2: return mix_few<2>(n, v, stride, out, next);
      default: return mix_few<1>(n, v, stride, out, next);
    }
  }

  // Online softmax step of queries m to m + M: scores of visible slots [from, to) -> weights; updates running maxima and
  // sums. Rows are computed together, since one is bound by the latency of its maximum, exponentials and sum.
  template <int M>
  void softmax_step(int m, const int* from, const int* to, int used, float scale, float* top, float* norm, float* out) {
    float* s = &scores[m * TILE];
    bf16* p = &weights[m * TILE];
    __m512 factor = _mm512_set1_ps(scale), most[M], offset[M], sum[M];
    float best[M];
    for (int a = 0; a < M; a++) {
      std::fill(s + a * TILE, s + a * TILE + from[a], -INFINITY);
      std::fill(s + a * TILE + to[a], s + a * TILE + used, -INFINITY);
      most[a] = _mm512_set1_ps(-INFINITY);
      sum[a] = _mm512_setzero_ps();
    }
    for (int j = 0; j < used; j += LANES)
      for (int a = 0; a < M; a++)
        most[a] = _mm512_max_ps(most[a], _mm512_mul_ps(_mm512_loadu_ps(s + a * TILE + j), factor));
    for (int a = 0; a < M; a++) {
      best[a] = std::max(top[a], _mm512_reduce_max_ps(most[a]));
      offset[a] = _mm512_set1_ps(best[a]);
    }
    for (int j = 0; j < used; j += LANES)
      for (int a = 0; a < M; a++) {
        __m512 x = exp2_short(_mm512_fmsub_ps(_mm512_loadu_ps(s + a * TILE + j), factor, offset[a]));
        sum[a] = _mm512_add_ps(sum[a], x);
        _mm256_storeu_si256((__m256i*)(p + a * TILE + j), (__m256i)_mm512_cvtneps_pbh(x));
      }
    for (int a = 0; a < M; a++) {
      float total = _mm512_reduce_add_ps(sum[a]);
      if (best[a] > top[a]) {
        float keep = exp2_fast(top[a] - best[a]);
        norm[a] *= keep;
        for (int i = 0; i < D; i++) out[a * D + i] *= keep;
        top[a] = best[a];
      }
      norm[a] += total;
    }
  }
  // The same for all `rows` queries of a block, some of which may see nothing.
  void softmax_block(int rows, const int* from, const int* to, int used, float scale, float* top, float* norm,
                    float* out) {
    constexpr int M = 8;
    for (int m = 0; m < rows;) {
      bool together = m + M <= rows;
      for (int a = m; together && a < m + M; a++) together = from[a] < to[a];
      if (together) softmax_step<M>(m, from + m, to + m, used, scale, top + m, norm + m, out + m * D);
      else if (from[m] < to[m]) softmax_step<1>(m, from + m, to + m, used, scale, top + m, norm + m, out + m * D);
      else std::fill(&weights[m * TILE], &weights[m * TILE] + used, bf16{0});
      m += together ? M : 1;
    }
  }
};

#else
inline void enter_amx() {}
inline void leave_amx() {}
#endif

}  // namespace
