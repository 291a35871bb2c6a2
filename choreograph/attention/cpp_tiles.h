// Products of keys or values with queries in lanes: scores^T = K Q^T and out^T += V^T P^T.
//
// In bfloat16, AVX-512 dot products and AMX multiply pairs of elements with float32 sums. They take the left operand as
// rows, so keys are read where they are stored, and the right one as pairs of its rows. Elsewhere products are float32.

#pragma once

#include "cpp_amx.h"
#include "cpp_vector.h"

namespace {

template <class T> constexpr bool DOTS = false;  // whether pairs of T are multiplied
#if REGISTER == 16 && (defined(__AVX512BF16__) || defined(EMULATED_DOTS))  // tests emulate them
template <> constexpr bool DOTS<bf16> = true;
#endif

constexpr int COLUMNS = LANES == 16 ? 2 : 3;  // registers of queries per product
constexpr int UNIT = 32;                      // keys per packed block of values

// to (rows, C) = keep * to + a (rows, count) @ b (count, C), in C registers of queries; only the product if `keep` is
// null. Element (r, k) of `a` is a[r * row + k * step]. rows: a multiple of 8.
template <int C>
void multiply(int rows, const float* a, int64_t row, int64_t step, const float* b, int count, const vec* keep,
              float* to) {
  constexpr int M = LANES == 16 || C == 1 ? 8 : 4;  // sums and operands fit in registers
  for (int r = 0; r < rows; r += M, a += M * row, to += M * C * LANES) {
    vec sum[M][C];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) sum[m][c] = keep ? load(to + (m * C + c) * LANES) * keep[c] : vec{};
    const float* x = a;
    for (int k = 0; k < count; k++, x += step) {
      vec y[C];
      for (int c = 0; c < C; c++) y[c] = hold(load(b + (k * C + c) * LANES));
      for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) sum[m][c] += splat(x[m * row]) * y[c];
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) store(to + (m * C + c) * LANES, sum[m][c]);
  }
}

// The same with `a` (rows, 2 * pairs) in bfloat16 and `b` packed: element (i, c) holds rows 2i and 2i + 1 of column c.
// `step`: from 32 elements of a row of `a` to the next 32. rows and pairs: multiples of 16.
template <int C>
void multiply(int rows, const bf16* a, int64_t row, int64_t step, const uint32_t* b, int pairs, const vec* keep,
              float* to) {
#if HAS_AMX
  if (has_amx()) {
    ivec changed{};
    for (int c = 0; c < C && keep; c++) changed |= (ivec)(keep[c] != 1.0f);
    for (int i = 0; i < rows * C && any(changed); i++) store(to + i * LANES, load(to + i * LANES) * keep[i % C]);
    if (C == 2 && pairs == 32) return multiply_by_resident(rows, a, row, step, b, keep, to);
    int r = 0;
    for (; r + 32 <= rows; r += 32)
      multiply_tiles<2, C>(a + r * row, row, step, b, pairs, keep, to + r * C * LANES);
    if (r < rows) multiply_tiles<1, C>(a + r * row, row, step, b, pairs, keep, to + r * C * LANES);
    return;
  }
#endif
  constexpr int M = 8;
  for (int r = 0; r < rows; r += M, a += M * row, to += M * C * LANES) {
    vec sum[M][C];
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) sum[m][c] = keep ? load(to + (m * C + c) * LANES) * keep[c] : vec{};
    for (int i = 0; i < pairs; i++) {
      const bf16* x = a + i / 16 * step + i % 16 * 2;
      ivec y[C];
      for (int c = 0; c < C; c++) y[c] = hold(load_pairs(b + (i * C + c) * LANES));
      for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) sum[m][c] = dot(sum[m][c], splat_pair(x + m * row), y[c]);
    }
    for (int m = 0; m < M; m++)
      for (int c = 0; c < C; c++) store(to + (m * C + c) * LANES, sum[m][c]);
  }
}

// Packs `n` rows of values (n, D), as V^T: blocks (D, UNIT) of UNIT rows each, the last one padded with zeros.
template <int D, class Next>
void pack_values(const bf16* v, int64_t stride, int n, bf16* to, Next& next) {
  for (; n > 0; n -= UNIT, v += UNIT * stride, to += UNIT * D)
    for (int d = 0; d < D; d += LANES) {
      next.advance(LANES * UNIT / D * 2);
      vec r[LANES];
      for (int i = 0; i < LANES; i++) r[i] = (vec)pairs_of_rows(v + 2 * i * stride + d, stride, n - 2 * i);
      transpose(r);
      for (int i = 0; i < LANES; i++) store((float*)(to + (d + i) * UNIT), r[i]);
    }
}

}  // namespace
