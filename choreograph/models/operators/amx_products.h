// Products of 2 to 64 rows with row-major weights in bfloat16 by AMX: out = x @ weight^T, with float32 sums.
//
//   int64_t amx_packed_size(int rows, int64_t inputs)
//     Elements of the packed form of an input (rows, inputs).
//
//   void amx_pack(const bf16* x, int64_t row, int rows, int64_t inputs, bf16* packed)
//     Packs x (rows, inputs), whose rows are `row` elements apart. Once per step, for all weights that multiply it.
//
//   void amx_product(const bf16* packed, int rows, int64_t inputs, const bf16* weight, int64_t row, int64_t features,
//                    float* out, int64_t out_row)
//     Writes out[r * out_row + f] for r < rows and f < features. Feature f has the weights weight[f * row] and on. A
//     thread calls it for features of its own, with pointers to the first of them.
//
// inputs: a multiple of 32. features: at least 16. Memory of `packed` is aligned to 64 bytes, for speed. A thread that
// multiplies has called enter_amx(), and has_amx() is true (cpp_amx.h). The sum of an output depends neither on `rows`
// nor on how features are divided.
//
// Weight rows are the left tiles, 16 features by 32 inputs, read where they are; the input has the right tiles, 32
// inputs by 16 rows. So a product has the features in rows, and is transposed when it is stored. Weights of the next 32
// features are fetched into the second-level cache, in the order of memory, while those of 32 are multiplied.

#pragma once

#include "cpp_amx.h"

#if HAS_AMX && REGISTER == 16

namespace {

inline int64_t amx_packed_size(int rows, int64_t inputs) { return (rows + 15) / 16 * 16 * inputs; }

// Groups of 32 rows, the last one of 16 or 32: (inputs / 2, rows) pairs of inputs, zeros in rows beyond the last.
inline void amx_pack(const bf16* x, int64_t row, int rows, int64_t inputs, bf16* packed) {
  for (int first = 0; first < rows; first += 16) {
    int group = first / 32 * 32, columns = rows - group > 16 ? 32 : 16;
    bf16* to = packed + group * inputs + 2 * (first - group);
    for (int64_t k = 0; k < inputs; k += 32) {
      vec r[16] = {};
      for (int i = 0; i < std::min(16, rows - first); i++) memcpy(&r[i], x + (first + i) * row + k, 64);
      transpose(r);
      for (int i = 0; i < 16; i++) store((float*)(to + (k + 2 * i) * columns), r[i]);
    }
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
                        int64_t features, float* out, int64_t out_row) {
  for (int64_t f = 0; f < features; f += 32) {
    int64_t left = features - f, at = left < 16 ? features - 16 : f;  // the last 16 may overlap the ones before
    const bf16* w = weight + at * row;
    const char* ahead = left > 32 ? (const char*)(w + 32 * row) : nullptr;
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

}  // namespace

#endif
