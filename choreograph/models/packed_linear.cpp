// Linear layers over packed bfloat16 weights: out (rows, features) = x (rows, in) @ weight.T + bias.
//
// Panels of 64 output features follow one another in memory. In a panel, 32-bit element (i, c) holds input features
// 2i and 2i + 1 of output feature c, as dot products take them, so a step of few tokens streams the weights once, in
// order. Sums are float32.

// A gated product multiplies by the weights of both factors and writes SiLU of the first times the second.

#include "packed_panels.h"

namespace {

// M rows of one panel. bias: of the panel's features, or null.
template <int M>
void product(const bf16* x, int64_t in, const uint32_t* panel, const bf16* bias, const Block& block, int64_t row) {
  __m512 acc[M][C];
  for (int c = 0; c < C; c++) {
    __m512 start = bias ? widen_bf16(bias + c * LANES, lanes(block.count - c * LANES)) : _mm512_setzero_ps();
    for (int m = 0; m < M; m++) acc[m][c] = start;
  }
  for (int64_t i = 0; i < in / 2; i++) {
    __m512bh y[C];
    for (int c = 0; c < C; c++) y[c] = (__m512bh)_mm512_loadu_si512(panel + i * PANEL + c * LANES);
    for (int m = 0; m < M; m++) {
      int32_t pair;
      memcpy(&pair, x + m * in + 2 * i, sizeof(pair));
      __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
      for (int c = 0; c < C; c++) acc[m][c] = _mm512_dpbf16_ps(acc[m][c], value, y[c]);
    }
  }
  for (int m = 0; m < M; m++)
    for (int c = 0; c < C; c++) block.store(acc[m][c], row + m, c * LANES);
}

}  // namespace

// x and out are contiguous; in is even; packed holds ceil(features / 64) panels of in / 2 * 64 elements. Gated: of both
// factors, and features, those of the output, are a multiple of 64.
extern "C" void choreograph_linear(const bf16* x, int64_t rows, int64_t in, const uint32_t* packed, const bf16* bias,
                                   bf16* out, int64_t features, int64_t threads, bool gated) {
  for_each_block(rows, features, threads, gated, out, [=](const Block& block) {
    const uint32_t* panel = packed + block.panel * PANEL * (in / 2);
    const bf16* start = bias ? bias + block.panel * PANEL : nullptr;
    for (int64_t row = 0; row < block.rows; row += WIDE) {
      const bf16* a = x + (block.row + row) * in;
      switch (std::min<int64_t>(WIDE, block.rows - row)) {
        case 6: product<6>(a, in, panel, start, block, row); break;
        case 5: product<5>(a, in, panel, start, block, row); break;
        case 4: product<4>(a, in, panel, start, block, row); break;
        case 3: product<3>(a, in, panel, start, block, row); break;
        case 2: product<2>(a, in, panel, start, block, row); break;
        default: product<1>(a, in, panel, start, block, row);
      }
    }
  });
}

#ifdef WITH_OPERATOR
using Packed = uint32_t;
#define KERNEL choreograph_linear
#define OPERATOR "linear"
#include "packed_operator.h"
#endif
