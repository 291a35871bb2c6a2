// Linear layers over packed bfloat16 weights: out (rows, features) = x (rows, in) @ weight.T + bias.
//
// Panels of 64 output features follow one another in memory. In a panel, 32-bit element (i, c) holds input features
// 2i and 2i + 1 of output feature c, as dot products take them, so a step of few tokens streams the weights once, in
// order. Sums are float32.
//
// A gated product multiplies by the weights of both factors and writes SiLU of the first times the second.

#include "packed_panels.h"

namespace {

// Vectors of output features at once, for M rows.
template <int M>
constexpr int WIDTH = PARTS == 1 || M == 1 ? VECTORS : VECTORS / 4;

// M rows of N vectors of a panel, from vector `first` on.
//
// words: of its first pair of input features. stride: words from one pair to the next. bias: of the panel's features, or
// null.
template <int M, int N>
void product(const element* x, int64_t in, const uint32_t* words, int64_t stride, int first, const bf16* bias,
             const Block& block, int64_t row) {
  vec start[N], sums[M][N], acc[M][N];  // `acc` stays in registers, because no loop that is not unrolled indexes it
  for (int n = 0; n < N; n++) {
    int at = (first + n) * LANES;
    start[n] = bias ? widen_bf16(bias + at, block.count - at) : splat(0);
  }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) acc[m][n] = start[n];
#pragma GCC unroll 4
  for (int64_t i = 0; i < in / 2; i++, words += stride)
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      if (PARTS > 1 && M == WIDE) asm("" ::: "memory");  // load the words again: sums need all other registers
      operand y[N];
      for (int n = 0; n < N; n++) y[n] = part_of(load_words(words + n * LANES), part);
      for (int m = 0; m < M; m++) {
        operand value = input_pair(x + m * in + 2 * i, part);
        for (int n = 0; n < N; n++) acc[m][n] = multiply_add(value, y[n], acc[m][n]);
      }
    }
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sums[m][n] = acc[m][n];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) block.store(sums[m][n], row + m, (first + n) * LANES);
}

// Copies a panel N vectors after the other, so that each of these parts is read in order and stays in the first-level cache.
template <int N>
const uint32_t* rearrange(const uint32_t* panel, int64_t in) {
  struct alignas(64) Line { uint32_t words[16]; };
  static thread_local std::vector<Line> buffer;
  buffer.resize(in / 2 * PANEL / 16);
  uint32_t* to = buffer[0].words;
  for (int64_t i = 0; i < in / 2; i++)
    for (int first = 0; first < VECTORS; first += N)
      memcpy(to + (first * (in / 2) + i * N) * LANES, panel + i * PANEL + first * LANES, 4 * N * LANES);
  return to;
}

}  // namespace

// x and out are contiguous; in is even; packed holds ceil(features / 64) panels of in / 2 * 64 elements. Gated: of both
// factors, and features, those of the output, are a multiple of 64.
extern "C" void choreograph_linear(const bf16* x, int64_t rows, int64_t in, const uint32_t* packed, const bf16* bias,
                                   bf16* out, int64_t features, int64_t threads, bool gated) {
  for_each_block(rows, features, threads, gated, out, [=](const Block& block) {
    const uint32_t* panel = packed + block.panel * PANEL * (in / 2);
    const bf16* start = bias ? bias + block.panel * PANEL : nullptr;
    const element* a = inputs(x, in, block);
    const uint32_t* parts = nullptr;
    if (PARTS > 1 && block.rows > 1) parts = rearrange<WIDTH<WIDE>>(panel, in);
    for_rows(block.rows, [&]<int M>(int64_t begin, int64_t end) {
      constexpr int N = WIDTH<M>;
      for (int first = 0; first < VECTORS; first += N)
        for (int64_t row = begin; row < end; row += M) {
          const element* from = a + row * in;
          if (N < VECTORS)
            product<M, N>(from, in, parts + first * (in / 2) * LANES, N * LANES, first, start, block, row);
          else
            product<M, N>(from, in, panel, PANEL, first, start, block, row);
        }
    });
  });
}

#ifdef WITH_OPERATOR
using Packed = uint32_t;
#define KERNEL choreograph_linear
#define OPERATOR "linear"
#include "packed_operator.h"
#endif
