// Products of rows with row-major weights in bfloat16 by AMX: out = x @ weight^T, with float32 sums.
//
// Few rows, up to AMX_FEW: memory delivers the weights, so they are read where they are.
//
//   int64_t amx_packed_size(int64_t rows, int64_t inputs)
//     Elements of the packed form of an input (rows, inputs), here and below.
//
//   void amx_pack(const bf16* x, int64_t row, int64_t rows, int64_t inputs, int64_t first, bf16* packed)
//     Packs 16 rows of x (rows, inputs) from `first` on, a multiple of 16. Rows are `row` elements apart. All of x is
//     packed once, for all weights that multiply it.
//
//   void amx_product(const bf16* packed, int rows, int64_t inputs, const bf16* weight, int64_t row, int64_t features,
//                    const bf16* next, float* out, int64_t out_row)
//     Writes out[r * out_row + f] for r < rows and f < features. Feature f has the weights weight[f * row] and on. A
//     thread calls it for features of its own, with pointers to the first of them. features: at least 16. next: weights
//     that the thread reads afterwards, or null.
//
// Weight rows are the left tiles, 16 features by 32 inputs, and the input has the right tiles, 32 inputs by 16 rows. So
// a product has the features in rows, and is transposed when it is stored. Weights of the next 32 features are fetched
// into the second-level cache while those of 32 are multiplied.
//
// More rows: weights are packed as right tiles when they are needed, and the rows are the left ones.
//
//   void amx_pack_rows(const bf16* x, int64_t row, int64_t rows, int64_t inputs, int64_t first, bf16* packed)
//     As amx_pack.
//
//   void amx_product_of_packed(const bf16* x, int rows, const bf16* left, const bf16* right, int64_t inputs, float* out)
//     Products of 1 to 32 rows with 16 features from `pack`, and 16 others if `right` is not null: out (32, 32). x: from
//     a row on that is a multiple of 32, at packed + row * inputs. Writes multiples of 16 rows and features.
//
// inputs: a multiple of 32. Packed forms are aligned to 64 bytes, for speed. A thread that multiplies has called
// enter_amx(), and has_amx() is true (cpp_amx.h). The sum of an output depends neither on `rows` nor on how features
// are divided, and is the same for few rows and more.

#pragma once

#include "cpp_amx.h"
#include "packed_products.h"

#if HAS_AMX && HAS_DOTS

namespace {

constexpr int AMX_FEW = 64;

inline int64_t amx_packed_size(int64_t rows, int64_t inputs) { return (rows + 15) / 16 * 16 * inputs; }

// Groups of 32 rows, the last one of 16 or 32: (inputs / 2, rows) pairs of inputs, zeros in rows beyond the last.
inline void amx_pack(const bf16* x, int64_t row, int64_t rows, int64_t inputs, int64_t first, bf16* packed) {
  int64_t group = first / 32 * 32, columns = rows - group > 16 ? 32 : 16;
  bf16* to = packed + group * inputs + 2 * (first - group);
  for (int64_t k = 0; k < inputs; k += 32) {
    vec r[16] = {};
    for (int i = 0; i < std::min<int64_t>(16, rows - first); i++) memcpy(&r[i], x + (first + i) * row + k, 64);
    transpose(r);
    for (int i = 0; i < 16; i++) store((float*)(to + (k + 2 * i) * columns), r[i]);
  }
}

// 16 * R features of a group of up to 16 * C rows.
template <int R, int C, int LINES>
inline void amx_block(const bf16* packed, int rows, int64_t inputs, const bf16* weight, int64_t row, const char* ahead,
                      float* out, int64_t out_row) {
  alignas(64) float sums[R * 16 * C * 16];
  const uint32_t* pairs = (const uint32_t*)packed;
  if (ahead) multiply_tiles<R, C, LINES>(weight, row, 32, pairs, inputs / 2, false, sums, ahead);
  else multiply_tiles<R, C>(weight, row, 32, pairs, inputs / 2, false, sums);
  for (int f = 0; f < R * 16; f += 16)
    for (int m = 0; m < rows; m += 16) {
      vec r[16];
      for (int i = 0; i < 16; i++) r[i] = load(sums + (f + i) * C * 16 + m);
      transpose(r);
      for (int i = 0; i < std::min(16, rows - m); i++) store(out + (m + i) * out_row + f, r[i]);
    }
}

inline void amx_product(const bf16* packed, int rows, int64_t inputs, const bf16* weight, int64_t row,
                        int64_t features, const bf16* next, float* out, int64_t out_row) {
  for (int64_t f = 0, left; f < features; f += left < 32 ? 16 : 32) {
    left = features - f;
    int64_t at = left < 16 ? features - 16 : f;  // the last 16 may overlap the ones before
    const bf16* w = weight + at * row;
    const char* ahead = (const char*)(left > 32 ? w + 32 * row : next);
    for (int m = 0; m < rows; m += 32) {
      int count = std::min(32, rows - m);
      const bf16* x = packed + m * inputs;
      float* to = out + m * out_row + at;
      if (left < 32) {
        if (count > 16) amx_block<1, 2, 0>(x, count, inputs, w, row, nullptr, to, out_row);
        else amx_block<1, 1, 0>(x, count, inputs, w, row, nullptr, to, out_row);
      } else if (rows > 32) {  // each group fetches a half
        const char* half = ahead ? ahead + m / 32 * inputs * 32 : nullptr;
        if (count > 16) amx_block<2, 2, 16>(x, count, inputs, w, row, half, to, out_row);
        else amx_block<2, 1, 16>(x, count, inputs, w, row, half, to, out_row);
      } else {
        if (count > 16) amx_block<2, 2, 32>(x, count, inputs, w, row, ahead, to, out_row);
        else amx_block<2, 1, 32>(x, count, inputs, w, row, ahead, to, out_row);
      }
    }
  }
}

// Tiles of 16 rows and 32 inputs.
inline void amx_pack_rows(const bf16* x, int64_t row, int64_t rows, int64_t inputs, int64_t first, bf16* packed) {
  bf16* to = packed + first * inputs;
  for (int64_t k = 0; k < inputs; k += 32)
    for (int i = 0; i < 16; i++, to += 32) {
      if (first + i < rows) memcpy(to, x + (first + i) * row + k, 64);
      else memset(to, 0, 64);
    }
}

// 16 * R rows times 16 * C features. Tiles of rows are fetched one step ahead: they stream from the second-level cache.
template <int R, int C>
inline void amx_packed_block(const bf16* x, const bf16* left, const bf16* right, int64_t inputs, float* out) {
  const bf16* lower = x + 16 * inputs;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int64_t at = 0; at < 16 * inputs; at += 512) {
    for (int i = 0; i < 512; i += 32) {
      __builtin_prefetch(x + at + 512 + i);
      if (R > 1) __builtin_prefetch(lower + at + 512 + i);
    }
    _tile_loadd(6, left + at, 64);
    _tile_loadd(4, x + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (R > 1) { _tile_loadd(5, lower + at, 64); _tile_dpbf16ps(2, 5, 6); }
    if (C > 1) { _tile_loadd(7, right + at, 64); _tile_dpbf16ps(1, 4, 7); }
    if (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, 128);
  if (C > 1) _tile_stored(1, out + 16, 128);
  if (R > 1) _tile_stored(2, out + 512, 128);
  if (R > 1 && C > 1) _tile_stored(3, out + 528, 128);
}

inline void amx_product_of_packed(const bf16* x, int rows, const bf16* left, const bf16* right, int64_t inputs,
                                  float* out) {
  if (rows > 16 && right) amx_packed_block<2, 2>(x, left, right, inputs, out);
  else if (rows > 16) amx_packed_block<2, 1>(x, left, right, inputs, out);
  else if (right) amx_packed_block<1, 2>(x, left, right, inputs, out);
  else amx_packed_block<1, 1>(x, left, right, inputs, out);
}

}  // namespace

#endif
