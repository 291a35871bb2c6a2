// Linear layers over packed 4-bit weights: out (rows, features) = x (rows, in) @ weight.T + bias, x and out bfloat16.
//
// A group of 32 weights of one output feature has a float16 scale and minimum: weight = scale * value + minimum with
// values from 0 to 15, as in the Q4_1 format of GGUF files. Groups of 64 output features follow one another in memory, and
// so do panels of 64 output features, so a step of few tokens streams the weights once, in order. Values become bfloat16
// by a table look-up, which is exact. Products are summed in float32 within a group and then scaled. Rows are computed
// in the same order whatever their number, so results do not depend on the batch.

#include "packed_panels.h"

namespace {

struct alignas(64) Vector { uint32_t words[16]; };

constexpr int GROUP = 32, PAIRS = GROUP / 2, QUADS = PAIRS / 4;
constexpr int AHEAD = 8;  // groups to prefetch; the kernel computes too long on a cache line for hardware to do it

// The weights of 64 output features in one group. A 16-bit word holds the values of one input feature of four pairs, four
// bits each, from the lowest bits on; words 2i and 2i + 1 of a vector are of output feature i.
struct Group {
  uint16_t scales[PANEL], minimums[PANEL];  // float16
  uint16_t values[C][QUADS][2 * LANES];
};
static_assert(sizeof(Group) == 1280);

inline __m512i value_table() {
  alignas(64) uint16_t bits[32];
  for (int i = 0; i < 32; i++) {
    float value = i % 16;
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    bits[i] = word >> 16;
  }
  return _mm512_load_si512(bits);
}

inline __m512 widen_fp16(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}

// Values of pair 4 * quad + i of 16 output features, from the quad's vector.
inline __m512i pair_values(__m512i quad, int i, __m512i table) {
  return _mm512_permutexvar_epi16(_mm512_srli_epi16(quad, 4 * i), table);
}

// Writes the values of one panel as bfloat16: a vector per group, 16 output features and pair.
void unpack(const Group* panel, int64_t groups, Vector* to) {
  const __m512i table = value_table();
  for (int64_t g = 0; g < groups; g++)
    for (int c = 0; c < C; c++)
      for (int q = 0; q < QUADS; q++) {
        __m512i quad = _mm512_loadu_si512(panel[g].values[c][q]);
        for (int i = 0; i < 4; i++) _mm512_store_si512(to++, pair_values(quad, i, table));
      }
}

// M rows of N * 16 output features of a panel, from 16 * first on.
//
// sums: of each group of x, (rows, groups). unpacked: the panel's values, read if UNPACKED. bias: of the panel's
// features, or null. row: the first one's in the block.
template <int M, int N, bool UNPACKED>
void product(const bf16* x, int64_t in, const float* sums, const Group* panel, const Vector* unpacked, int first,
             const bf16* bias, const Block& block, int64_t row) {
  const __m512i table = value_table();
  const int64_t groups = in / GROUP;
  __m512 total[M][N];
  for (int n = 0; n < N; n++) {
    int at = (first + n) * LANES;
    __m512 start = bias ? widen_bf16(bias + at, lanes(block.count - at)) : _mm512_setzero_ps();
    for (int m = 0; m < M; m++) total[m][n] = start;
  }
  for (int64_t g = 0; g < groups; g++, x += GROUP) {
    const Group &group = panel[g], &next = panel[g + AHEAD];
    const Vector* values = unpacked + (g * C + first) * PAIRS;
    __m512 part[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) part[m][n] = _mm512_setzero_ps();
    for (int q = 0; q < QUADS; q++) {
      __m512i quad[N];
      for (int n = 0; n < N && !UNPACKED; n++) {
        quad[n] = _mm512_loadu_si512(group.values[first + n][q]);
        _mm_prefetch((const char*)next.values[first + n][q], _MM_HINT_T1);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        __m512bh y[N];
        for (int n = 0; n < N; n++)
          y[n] = (__m512bh)(UNPACKED ? _mm512_load_si512(values + n * PAIRS + 4 * q + i) : pair_values(quad[n], i, table));
        for (int m = 0; m < M; m++) {
          int32_t pair;
          memcpy(&pair, x + m * in + 8 * q + 2 * i, sizeof(pair));
          __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
          for (int n = 0; n < N; n++) part[m][n] = _mm512_dpbf16_ps(part[m][n], value, y[n]);
        }
      }
    }
    for (int n = 0; n < N; n++) {
      int at = (first + n) * LANES;
      __m512 scale = widen_fp16(group.scales + at), minimum = widen_fp16(group.minimums + at);
      if (!UNPACKED && n % 2 == 0) {
        _mm_prefetch((const char*)(next.scales + at), _MM_HINT_T1);
        _mm_prefetch((const char*)(next.minimums + at), _MM_HINT_T1);
      }
      for (int m = 0; m < M; m++) {
        total[m][n] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sums[m * groups + g]), total[m][n]);
        total[m][n] = _mm512_fmadd_ps(scale, part[m][n], total[m][n]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) block.store(total[m][n], row + m, (first + n) * LANES);
}

// M rows of a panel; arguments as of `product`, with unpacked null where values are read packed.
template <int M>
void panel_rows(const bf16* x, int64_t in, const float* sums, const Group* panel, const Vector* unpacked,
                const bf16* bias, const Block& block, int64_t row) {
  constexpr int N = M <= 2 ? C : C / 2;
  for (int first = 0; first < C; first += N)
    if (unpacked)
      product<M, N, true>(x, in, sums, panel, unpacked, first, bias, block, row);
    else
      product<M, N, false>(x, in, sums, panel, unpacked, first, bias, block, row);
}

float group_sum(const bf16* x) {
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  __m512bh values = (__m512bh)_mm512_loadu_si512(x);
  return _mm512_reduce_add_ps(_mm512_dpbf16_ps(_mm512_setzero_ps(), values, ones));
}

}  // namespace

// x and out are contiguous; in is a multiple of 32; packed holds ceil(features / 64) panels of in / 32 groups. Gated: of
// both factors, and features, those of the output, are a multiple of 64.
extern "C" void choreograph_linear_int4(const bf16* x, int64_t rows, int64_t in, const Group* packed, const bf16* bias,
                                        bf16* out, int64_t features, int64_t threads, bool gated) {
  const int64_t groups = in / GROUP;
  std::vector<float> group_sums(rows * groups);
  for (int64_t i = 0; i < rows * groups; i++) group_sums[i] = group_sum(x + i * GROUP);
  const float* sums = group_sums.data();
  for_each_block(rows, features, threads, gated, out, [=](const Block& block) {
    const Group* panel = packed + block.panel * groups;
    const bf16* start = bias ? bias + block.panel * PANEL : nullptr;
    const Vector* unpacked = nullptr;
    if (block.rows > 2 * WIDE) {
      static thread_local std::vector<Vector> buffer;
      buffer.resize(groups * C * PAIRS);
      unpack(panel, groups, buffer.data());
      unpacked = buffer.data();
    }
    for (int64_t row = 0; row < block.rows; row += WIDE) {
      const bf16* a = x + (block.row + row) * in;
      const float* s = sums + (block.row + row) * groups;
      switch (std::min<int64_t>(WIDE, block.rows - row)) {
        case 6: panel_rows<6>(a, in, s, panel, unpacked, start, block, row); break;
        case 5: panel_rows<5>(a, in, s, panel, unpacked, start, block, row); break;
        case 4: panel_rows<4>(a, in, s, panel, unpacked, start, block, row); break;
        case 3: panel_rows<3>(a, in, s, panel, unpacked, start, block, row); break;
        case 2: panel_rows<2>(a, in, s, panel, unpacked, start, block, row); break;
        default: panel_rows<1>(a, in, s, panel, unpacked, start, block, row);
      }
    }
  });
}

#ifdef WITH_OPERATOR
using Packed = Group;
#define KERNEL choreograph_linear_int4
#define OPERATOR "linear_int4"
#include "packed_operator.h"
#endif
