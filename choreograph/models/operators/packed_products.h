// Products of rows with row-major weights by vector registers with output features in their lanes: out = x @ weight^T,
// with float32 sums.
//
// Some inputs of CHUNK output features are packed when they are needed, and then multiplied by all rows of a block. Sums
// add inputs in their order whatever the number of rows, so results do not depend on the batch. Where memory delivers
// weights at 10 bytes per cycle or less, packing takes no time of its own: a step of one token is as fast as a copy.

#pragma once

#include "cpp_vector.h"

#if REGISTER == 16 && (defined(__AVX512BF16__) || defined(EMULATED_DOTS))  // tests emulate them
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

namespace {

constexpr int STRIP = 32;         // rows of prepared inputs are padded to a multiple of it with zeros
constexpr int CHUNK = 64;         // output features that are multiplied at once
constexpr int M = 6;              // rows at once
constexpr int C = LANES == 16 ? 4 : 2;  // tiles at once: M * C sums and their operands fit in 32 or 16 registers
constexpr int64_t DEPTH = 2048;   // inputs that are packed at once: they stay in the second-level cache
constexpr int FEW = 48;           // rows up to which memory is what takes time: weights are prefetched, and those of
constexpr int FEW_C = 2;          // fewer features and inputs are packed at once, so that memory is always busy
constexpr int64_t FEW_DEPTH = 128;

// How weights of type T are multiplied. Input: of prepared rows. EACH: inputs in an element of a packed tile.
template <class T>
struct Products {
  typedef float Input;
  static constexpr int EACH = 1;
  static vec weight(const float* w) { return hold(load(w)); }
  static vec input(const float* x) { return hold(splat(*x)); }
  static vec add(vec sum, vec x, vec w) { return sum + x * w; }
};
#if HAS_DOTS
template <>
struct Products<bf16> {
  typedef bf16 Input;
  static constexpr int EACH = 2;
  static ivec weight(const bf16* w) { return hold(load_pairs(w)); }
  static ivec input(const bf16* x) { return hold(splat_pair(x)); }
  static vec add(vec sum, ivec x, ivec w) { return dot(sum, x, w); }
};
#endif
template <class T> using Input = typename Products<T>::Input;

// Row i of a packed tile, from 32 bits of LANES features each: as they are, or two numbers that are widened.
template <class T>
inline void store_packed(Input<T>* to, int i, vec x) {
  if constexpr (std::is_same<T, bf16>::value && std::is_same<Input<T>, float>::value) {
    store(to + i * 2 * LANES, (vec)((ivec)x << 16));
    store(to + (i * 2 + 1) * LANES, (vec)((ivec)x & -65536));
  } else {
    store((float*)to + i * LANES, x);
  }
}

// Packs LANES features by a register of inputs each. Element (i, f) of the tile is an input of feature f.
template <class T>
inline void pack_tile(const T* weight, int64_t row, Input<T>* to) {
  vec r[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) r[i] = load((const float*)(weight + i * row));
  transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) store_packed<T>(to, i, r[i]);
}

// Packs weights, rows `row` elements apart, as tiles (count, LANES) of LANES features each, with zeros for what is beyond
// the number of features or inputs. count: a multiple of STRIP. next: weights to prefetch meanwhile, or null.
template <class T>
void pack(const T* weight, int64_t row, int tiles, int features, int64_t inputs, int64_t count, const T* next,
          Input<T>* to) {
  constexpr int STEP = LANES * 4 / sizeof(T);  // inputs of a register
  for (int f = 0; f < tiles * LANES; f += LANES, weight += LANES * row, to += count * LANES) {
    int64_t k = 0;
    if (features - f >= LANES)
      for (; k + STEP <= std::min(inputs, count); k += STEP) {
        if (next && k * sizeof(T) % 64 == 0)
#pragma GCC unroll 16
          for (int i = 0; i < LANES; i++) __builtin_prefetch(next + (f + i) * row + k);
        pack_tile(weight + k, row, to + k * LANES);
      }
    for (; k < count; k += STEP) {
      T rest[LANES * STEP] = {};
      for (int i = 0; i < std::min(LANES, features - f) && k < inputs; i++)
        std::copy_n(weight + i * row + k, std::min<int64_t>(STEP, inputs - k), rest + i * STEP);
      pack_tile(rest, STEP, to + k * LANES);
    }
  }
}

// to (R, C * LANES) [+]= x (R, count) @ tiles (C, count, LANES).
template <class T, int C, int R>
__attribute__((noinline)) void multiply(const Input<T>* x, int64_t x_row, const Input<T>* tiles, int64_t count, bool add,
                                        float* to) {
  using P = Products<T>;
  vec sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = add ? load(to + r * CHUNK + c * LANES) : vec{};
  for (int64_t k = 0; k < count; k += P::EACH) {
    decltype(P::weight(tiles)) w[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) w[c] = P::weight(tiles + (c * count + k) * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      auto a = P::input(x + r * x_row + k);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = P::add(sum[r][c], a, w[c]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(to + r * CHUNK + c * LANES, sum[r][c]);
}

template <class T, int C>
void multiply_rows(int rows, const Input<T>* x, int64_t x_row, const Input<T>* tiles, int64_t count, bool add, float* to) {
  for (; rows >= M; rows -= M, x += M * x_row, to += M * CHUNK) multiply<T, C, M>(x, x_row, tiles, count, add, to);
  switch (rows) {
    case 5: return multiply<T, C, 5>(x, x_row, tiles, count, add, to);
    case 4: return multiply<T, C, 4>(x, x_row, tiles, count, add, to);
    case 3: return multiply<T, C, 3>(x, x_row, tiles, count, add, to);
    case 2: return multiply<T, C, 2>(x, x_row, tiles, count, add, to);
    case 1: return multiply<T, C, 1>(x, x_row, tiles, count, add, to);
  }
}

// Elements of the memory that `product` needs for tiles.
inline int64_t tiles_size(int64_t inputs) { return CHUNK * std::min(inputs, DEPTH); }

// Products of rows of x, padded to `x_row` elements, with at most CHUNK weights of `inputs`: to (rows, CHUNK). next:
// weights that the thread reads afterwards, or null.
template <class T>
void product(int rows, const Input<T>* x, int64_t x_row, const T* weight, int features, int64_t inputs, const T* next,
             Input<T>* tiles, float* to) {
  bool few = rows <= FEW;
  int64_t depth = few ? FEW_DEPTH : DEPTH;
  for (int f = 0, group = (few ? FEW_C : C) * LANES; f < features; f += group)
    for (int64_t k = 0; k < x_row; k += depth) {
      int64_t count = std::min(depth, x_row - k);
      const T *from = weight + f * inputs + k, *then = next;
      if (k + depth < inputs) then = from + depth;
      else if (f + group < features) then = weight + (f + group) * inputs;
      pack(from, inputs, group / LANES, features - f, inputs - k, count, few ? then : nullptr, tiles);
      auto multiply = few ? multiply_rows<T, FEW_C> : multiply_rows<T, C>;
      multiply(rows, x + k, x_row, tiles, count, k > 0, to + f);
    }
}

}  // namespace
