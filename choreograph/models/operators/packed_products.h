// Products of rows with row-major weights by vector registers with output features in their lanes: out = x @ weight^T,
// with float32 sums.
//
// Weights are packed as tiles when they are needed: transposed, so that a register holds an input, or a pair of them,
// of LANES features. All rows of a block are multiplied by the tiles. Sums add inputs in their order whatever the
// number of rows, so results do not depend on the batch.

#pragma once

#include "cpp_vector.h"

#if REGISTER == 16 && (defined(__AVX512BF16__) || defined(EMULATED_DOTS))  // tests emulate them
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

namespace {

constexpr int STRIP = 32;  // rows of prepared inputs are padded to a multiple of it with zeros
constexpr int CHUNK = 64;  // output features that are multiplied at once
constexpr int ROWS_AT_ONCE = 6;
constexpr bool WIDE = LANES == 16;  // 32 registers for sums and operands instead of 16

// Block of weights that is packed at once: tiles of LANES features, and their inputs. Up to FEW rows, products wait for
// memory, so the next block is prefetched. Up to FEWEST rows, tiles stay in registers and are not stored.
struct Size { int tiles; int64_t inputs; };
constexpr Size MANY_ROWS = {WIDE ? 4 : 2, 2048}, FEW_ROWS = {2, 128}, FEWEST_ROWS = {WIDE ? 1 : 2, 128};
constexpr int64_t PACKED_BYTES = (WIDE ? 512 : 192) << 10;  // of weights that are packed once for all rows
constexpr int FEW = 48, FEWEST = WIDE ? 8 : 6;

// How weights of type T are multiplied. Input: of prepared rows. PER_LANE: inputs that one operation adds in a lane.
template <class T>
struct Products {
  typedef float Input;
  static constexpr int PER_LANE = 1;
  static vec weight(const float* w) { return hold(load(w)); }
  static vec input(const float* x) { return hold(splat(*x)); }
  static vec add(vec sum, vec x, vec w) { return sum + x * w; }
};
#if HAS_DOTS
template <>
struct Products<bf16> {
  typedef bf16 Input;
  static constexpr int PER_LANE = 2;
  static ivec weight(const bf16* w) { return hold(load_pairs(w)); }
  static ivec input(const bf16* x) { return hold(splat_pair(x)); }
  static vec add(vec sum, ivec x, ivec w) { return dot(sum, x, w); }
};
#endif
template <class T> using Input = typename Products<T>::Input;
template <class T> constexpr bool WIDENS = std::is_same<T, bf16>::value && std::is_same<Input<T>, float>::value;

// Row i of a packed tile, from 32 bits of LANES features each: as they are, or two numbers that are widened.
template <class T>
inline void store_packed(Input<T>* to, int i, vec x) {
  if constexpr (WIDENS<T>) {
    store(to + i * 2 * LANES, (vec)((ivec)x << 16));
    store(to + (i * 2 + 1) * LANES, (vec)((ivec)x & -65536));
  } else {
    store((float*)to + i * LANES, x);
  }
}

template <class T> constexpr int STEP = LANES * 4 / sizeof(T);  // inputs in a register

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

// Packs weights, rows `row` elements apart, as tiles (count, LANES) of LANES features each, with zeros for what is
// beyond the number of features or inputs. count: a multiple of STEP. next: weights to prefetch meanwhile, or null.
template <class T>
void pack(const T* weight, int64_t row, int tiles, int features, int64_t inputs, int64_t count, const T* next,
          Input<T>* to) {
  for (int f = 0; f < tiles * LANES; f += LANES, weight += LANES * row, to += count * LANES) {
    int64_t k = 0;
    if (features - f >= LANES)
      for (; k + STEP<T> <= std::min(inputs, count); k += STEP<T>) {
        if (next && k * sizeof(T) % 64 == 0)
#pragma GCC unroll 16
          for (int i = 0; i < LANES; i++) __builtin_prefetch(next + (f + i) * row + k);
        pack_tile(weight + k, row, to + k * LANES);
      }
    for (; k < count; k += STEP<T>) {
      alignas(64) T rest[LANES * STEP<T>] = {};
      for (int i = 0; i < std::min(LANES, features - f) && k < inputs; i++)
        std::copy_n(weight + i * row + k, std::min<int64_t>(STEP<T>, inputs - k), rest + i * STEP<T>);
      pack_tile(rest, STEP<T>, to + k * LANES);
    }
  }
}

// Adds the products of R rows with a transposed register of inputs, in the same order as `multiply`.
template <class T, int R>
inline void add_products(const Input<T>* x, int64_t x_row, const vec* tile, vec* sum) {
  using P = Products<T>;
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Input<T>* from = x + r * x_row + i * (STEP<T> / LANES);
      if constexpr (WIDENS<T>) {
        sum[r] = P::add(sum[r], P::input(from), (vec)((ivec)tile[i] << 16));
        sum[r] = P::add(sum[r], P::input(from + 1), (vec)((ivec)tile[i] & -65536));
      } else {
        sum[r] = P::add(sum[r], P::input(from), (decltype(P::weight(x)))tile[i]);
      }
    }
}

// to (R, tiles * LANES) = x (R, count) @ weight^T, of rows `row` elements apart. count: a multiple of STEP.
template <class T, int R>
__attribute__((noinline)) void multiply_unpacked(const Input<T>* x, int64_t x_row, const T* weight, int64_t row,
                                                 int64_t count, const T* next, float* to) {
  constexpr int TILES = FEWEST_ROWS.tiles;
  vec sum[TILES][R] = {};
  for (int64_t k = 0; k < count; k += STEP<T>) {
    int64_t then = k + FEWEST_ROWS.inputs;
    const T* ahead = then < count ? weight + then : next + (then - count);
#pragma GCC unroll 2
    for (int c = 0; c < TILES; c++) {
      vec r[LANES];
      int64_t first = c * LANES * row;
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) r[i] = load((const float*)(weight + first + i * row + k));
      if (k * sizeof(T) % 64 == 0)
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) __builtin_prefetch(ahead + first + i * row);
      transpose(r);
      add_products<T, R>(x + k, x_row, r, sum[c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < TILES; c++) store(to + r * CHUNK + c * LANES, sum[c][r]);
}

// to (R, C * LANES) [+]= x (R, count) @ tiles (C, count, LANES).
template <class T, int C, int R>
__attribute__((noinline)) void multiply(const Input<T>* x, int64_t x_row, const Input<T>* tiles, int64_t count,
                                        bool add, float* to) {
  using P = Products<T>;
  vec sum[R][C];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) sum[r][c] = add ? load(to + r * CHUNK + c * LANES) : vec{};
  for (int64_t k = 0; k < count; k += P::PER_LANE) {
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

// Calls f with `number`, from 1 to N, as a constant.
template <int N, class F>
inline void with_constant(int number, F f) {
  if constexpr (N > 1)
    if (number < N) return with_constant<N - 1>(number, f);
  f(std::integral_constant<int, N>());
}

// Elements of the memory that `product` needs for tiles.
inline int64_t tiles_size(int64_t inputs) { return CHUNK * std::min(inputs, MANY_ROWS.inputs); }

// Products of rows of x, padded to `x_row` elements, with at most CHUNK weights of `inputs`: to (rows, CHUNK). next:
// weights that the thread reads afterwards, or null.
template <class T>
void product(int rows, const Input<T>* x, int64_t x_row, const T* weight, int features, int64_t inputs, const T* next,
             Input<T>* tiles, float* to) {
  const Size size = rows <= FEWEST ? FEWEST_ROWS : rows <= FEW ? FEW_ROWS : MANY_ROWS;
  const int group = size.tiles * LANES;
  for (int f = 0; f < features; f += group, to += group, weight += group * inputs) {
    const T* following = f + group < features ? weight + group * inputs : next;
    int64_t k = 0;
    if (rows <= FEWEST && features - f >= group) {
      k = inputs / STEP<T> * STEP<T>;
      with_constant<FEWEST>(rows, [&](auto r) {
        multiply_unpacked<T, r>(x, x_row, weight, inputs, k, following ? following : weight, to);
      });
    }
    for (; k < x_row; k += size.inputs) {
      const int64_t count = std::min(size.inputs, x_row - k);
      const T* then = k + count < inputs ? weight + k + count : following;
      pack(weight + k, inputs, size.tiles, features - f, inputs - k, count, rows <= FEW ? then : nullptr, tiles);
      for (int first = 0, times = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, some; times; times--, first += some) {
        some = (rows - first + times - 1) / times;  // about as many each time
        with_constant<ROWS_AT_ONCE>(some, [&](auto r) {
          auto function = multiply<T, MANY_ROWS.tiles, r>;
          if (size.tiles == 1) function = multiply<T, 1, r>;
          if (size.tiles == 2) function = multiply<T, 2, r>;
          function(x + first * x_row + k, x_row, tiles, count, k > 0, to + first * CHUNK);
        });
      }
    }
  }
}

// Whether weights that multiply rows of `x_row` elements are packed once for all rows. They stay in the L2 cache then.
template <class T>
inline bool packs_once(int64_t rows, int64_t x_row, int64_t features) {
  return rows > FEW && x_row * features * (int64_t)sizeof(Input<T>) <= PACKED_BYTES;
}

// The products of `product` for at most ROWS_AT_ONCE rows. tiles: of pack_chunk.
template <class T>
inline void product_of_packed(int rows, const Input<T>* x, int64_t x_row, const Input<T>* tiles, int features,
                              float* to) {
  for (int f = 0; f < features; f += MANY_ROWS.tiles * LANES)
    with_constant<ROWS_AT_ONCE>(rows, [&](auto r) {
      multiply<T, MANY_ROWS.tiles, r>(x, x_row, tiles + f * x_row, x_row, false, to + f);
    });
}

// Packs at most CHUNK features of weights by all inputs, padded to `count`.
template <class T>
inline void pack_chunk(const T* weight, int features, int64_t inputs, int64_t count, Input<T>* tiles) {
  for (int f = 0; f < features; f += MANY_ROWS.tiles * LANES)
    pack(weight + f * inputs, inputs, MANY_ROWS.tiles, features - f, inputs, count, (const T*)nullptr, tiles + f * count);
}

}  // namespace
