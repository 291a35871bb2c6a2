// Linear layers over packed 4-bit weights: out (rows, features) = x (rows, in) @ weight.T + bias, x and out bfloat16.
//
// A group of 32 weights of one output feature has a float16 scale and minimum: weight = scale * value + minimum with
// values from 0 to 15, as in the Q4_1 format of GGUF files. Groups of 64 output features follow one another in memory, and
// so do panels of 64 output features, so a step of few tokens streams the weights once, in order. Values become bfloat16
// or float32, which is exact. Products are summed in float32 within a group and then scaled. Rows are computed in the
// same order whatever their number, so results do not depend on the batch. With AMX this holds for up to 3 rows, which
// vectors multiply, and for more, which tiles multiply: they add the products of a group in another order.

#include "packed_panels.h"

namespace panels {
namespace {

struct alignas(4 * LANES) Vector { uint32_t words[LANES]; };

constexpr int GROUP = 32, PAIRS = GROUP / 2, QUADS = PAIRS / 4;
constexpr int BLOCK = 16, SPLIT = BLOCK / LANES;  // output features that are stored together; vectors of them
constexpr int AHEAD = 8;  // groups to prefetch; the kernel computes too long on a cache line for hardware to do it

// The weights of 64 output features in one group. A 16-bit word holds the values of one input feature of four pairs, four
// bits each, from the lowest bits on; words 2i and 2i + 1 are of output feature i of 16.
struct Group {
  uint16_t scales[PANEL], minimums[PANEL];  // float16
  uint16_t values[PANEL / BLOCK][QUADS][2 * BLOCK];

  const uint16_t* quad(int vector, int q) const { return values[vector / SPLIT][q] + vector % SPLIT * 2 * LANES; }
};
static_assert(sizeof(Group) == 1280);

#ifdef __AVX512BF16__
inline words value_table() {
  alignas(64) uint16_t bits[32];
  for (int i = 0; i < 32; i++) {
    float value = i % 16;
    uint32_t word;
    memcpy(&word, &value, sizeof(word));
    bits[i] = word >> 16;
  }
  return _mm512_load_si512(bits);
}

// Values of pair 4 * quad + i of a vector's output features, from the quad's words.
inline operand pair_values(words quad, int i, int, words table) {
  return (operand)_mm512_permutexvar_epi16(_mm512_srli_epi16(quad, 4 * i), table);
}

inline words as_pairs(operand first, operand) { return (words)first; }

inline float sum_lanes(vec x) { return _mm512_reduce_add_ps(x); }
#else
inline words value_table() { return _mm256_set1_epi32(15); }  // a mask

inline operand pair_values(words quad, int i, int part, words mask) {
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(quad, 4 * i + 16 * part), mask));
}

inline words as_pairs(operand first, operand second) {
  return _mm256_or_si256(_mm256_srli_epi32((words)first, 16), (words)second);
}

inline float sum_lanes(vec x) {
  __m128 half = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  return (half[0] + half[1]) + (half[2] + half[3]);
}
#endif

// Index of a pair of a vector of output features in unpacked values: those of 16 features are a right tile of AMX.
constexpr int at_pair(int vector, int pair) { return (vector / SPLIT * PAIRS + pair) * SPLIT + vector % SPLIT; }

// Writes the values of a group of a panel as pairs of bfloat16. Prefetches those of a later one.
inline void unpack(const Group& group, Vector* to) {
  const words table = value_table();
  for (int v = 0; v < VECTORS; v++)
    for (int q = 0; q < QUADS; q++) {
      words quad = load_words(group.quad(v, q));
      _mm_prefetch((const char*)(&group)[AHEAD].quad(v, q), _MM_HINT_T1);
      for (int i = 0; i < 4; i++) {
        words pairs = as_pairs(pair_values(quad, i, 0, table), pair_values(quad, i, 1, table));
        memcpy(to + at_pair(v, 4 * q + i), &pairs, sizeof(pairs));
      }
    }
}

// Vectors of output features at once, for M rows.
template <int M>
constexpr int WIDTH = M <= 2 / PARTS ? 4 : 2;

// M rows of some vectors of a panel, from vector `first` on.
//
// sums: of each group of x, (rows, groups). unpacked: the panel's values, read if UNPACKED. bias: of the panel's
// features, or null. row: the first one's in the block.
template <int M, bool UNPACKED>
void product(const element* x, int64_t in, const float* sums, const Group* panel, const Vector* unpacked, int first,
             const bf16* bias, const Block& block, int64_t row) {
  constexpr int N = WIDTH<M>;
  const words table = value_table();
  const int64_t groups = in / GROUP;
  vec total[M][N];
  for (int n = 0; n < N; n++) {
    int at = (first + n) * LANES;
    vec start = bias ? widen_bf16(bias + at, block.count - at) : splat(0);
    for (int m = 0; m < M; m++) total[m][n] = start;
  }
  for (int64_t g = 0; g < groups; g++, x += GROUP) {
    const Group &group = panel[g], &next = panel[g + AHEAD];
    const Vector* values = unpacked + g * VECTORS * PAIRS;
    vec sum[M][N];
    for (int m = 0; m < M; m++)
      for (int n = 0; n < N; n++) sum[m][n] = splat(0);
    for (int q = 0; q < QUADS; q++) {
      words quad[N];
      for (int n = 0; n < N && !UNPACKED; n++) {
        quad[n] = load_words(group.quad(first + n, q));
        if (n % SPLIT == 0) _mm_prefetch((const char*)next.quad(first + n, q), _MM_HINT_T1);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
          if (PARTS > 1 && M == WIDE) asm("" ::: "memory");  // load the words again: sums need all other registers
          operand y[N];
          for (int n = 0; n < N; n++)
            y[n] = UNPACKED ? part_of(load_words(values + at_pair(first + n, 4 * q + i)), part)
                            : pair_values(quad[n], i, part, table);
          for (int m = 0; m < M; m++) {
            operand value = input_pair(x + m * in + 8 * q + 2 * i, part);
            for (int n = 0; n < N; n++) sum[m][n] = multiply_add(value, y[n], sum[m][n]);
          }
        }
    }
    for (int n = 0; n < N; n++) {
      int at = (first + n) * LANES;
      vec scale = widen_fp16(group.scales + at), minimum = widen_fp16(group.minimums + at);
      if (!UNPACKED && at % 32 == 0) {
        _mm_prefetch((const char*)(next.scales + at), _MM_HINT_T1);
        _mm_prefetch((const char*)(next.minimums + at), _MM_HINT_T1);
      }
      for (int m = 0; m < M; m++) {
        total[m][n] = fma(minimum, splat(sums[m * groups + g]), total[m][n]);
        total[m][n] = fma(scale, sum[m][n], total[m][n]);
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) block.store(total[m][n], row + m, (first + n) * LANES);
}

float group_sum(const bf16* x) {
  vec sum = splat(0);
  for (int i = 0; i < GROUP; i += LANES) sum = sum + widen_bf16(x + i);
  return sum_lanes(sum);
}

constexpr int MIN_TILE_ROWS = 4;                    // from which on tiles are faster than vectors; as in the tests
constexpr int TILE = 16, TILE_SIZE = TILE * GROUP;  // rows, elements
constexpr int CACHED_ROWS = 64;                     // whose sums stay in the first-level cache

// Copies a row into tiles of 16 rows and a group.
void pack_row(const bf16* x, int64_t row, int64_t groups, bf16* tiles) {
  bf16* to = tiles + row / TILE * groups * TILE_SIZE + row % TILE * GROUP;
  for (int64_t g = 0; g < groups; g++) memcpy(to + g * TILE_SIZE, x + (row * groups + g) * GROUP, GROUP * sizeof(bf16));
}

#if HAS_AMX
// sums (16, 64) = 16 rows times the values of a group, which are in tiles 4 to 7.
inline void multiply_tile(const bf16* tile, float* sums) {
  constexpr int BYTES = PANEL * sizeof(float);
  _tile_loadd(3, tile, GROUP * sizeof(bf16));
  _tile_zero(0); _tile_dpbf16ps(0, 3, 4);
  _tile_zero(1); _tile_dpbf16ps(1, 3, 5);
  _tile_zero(2); _tile_dpbf16ps(2, 3, 6);
  _tile_stored(0, sums, BYTES);
  _tile_zero(0); _tile_dpbf16ps(0, 3, 7);
  _tile_stored(1, sums + TILE, BYTES); _tile_stored(2, sums + 2 * TILE, BYTES); _tile_stored(0, sums + 3 * TILE, BYTES);
}

// Rows of a block from `first` on, at most CACHED_ROWS.
//
// tiles: of the first row. sums: of each group of x, (rows, groups), from the first row on.
void tile_product(const bf16* tiles, const float* sums, int64_t groups, const Group* panel, const bf16* bias,
                  const Block& block, int64_t first) {
  alignas(64) vec total[CACHED_ROWS][VECTORS], products[2][TILE][VECTORS];
  alignas(64) Vector values[VECTORS * PAIRS];
  int rows = std::min<int64_t>(CACHED_ROWS, block.rows - first), count = (rows + TILE - 1) / TILE;
  for (int n = 0; n < VECTORS; n++) {
    vec start = bias ? widen_bf16(bias + n * LANES, block.count - n * LANES) : splat(0);
    for (int r = 0; r < rows; r++) total[r][n] = start;
  }
  unpack(panel[0], values);
  for (int64_t g = 0; g < groups; g++) {
    const char* next = (const char*)(panel + g + AHEAD);
    vec scale[VECTORS], minimum[VECTORS];
    for (int n = 0; n < VECTORS; n++) {
      _mm_prefetch(next + n * 4 * LANES, _MM_HINT_T1);  // a line of scales or minimums
      scale[n] = widen_fp16(panel[g].scales + n * LANES);
      minimum[n] = widen_fp16(panel[g].minimums + n * LANES);
    }
    auto multiply = [&](int t) { multiply_tile(tiles + (t * groups + g) * TILE_SIZE, (float*)products[t % 2]); };
    auto add = [&](int t) {
      for (int r = t * TILE; r < std::min(rows, (t + 1) * TILE); r++) {
        vec sum = splat(sums[r * groups + g]);
#pragma GCC unroll 8
        for (int n = 0; n < VECTORS; n++)
          total[r][n] = fma(scale[n], products[t % 2][r % TILE][n], fma(minimum[n], sum, total[r][n]));
      }
    };
    asm("" ::: "memory");  // GCC does not see that tiles are loaded from values
    _tile_loadd(4, values, 64); _tile_loadd(5, (char*)values + 1024, 64);
    _tile_loadd(6, (char*)values + 2048, 64); _tile_loadd(7, (char*)values + 3072, 64);
    multiply(0);
    if (g + 1 < groups) unpack(panel[g + 1], values);
    for (int t = 1; t < count; t++) {  // vectors of a tile are added while the next one is multiplied
      multiply(t);
      add(t - 1);
    }
    add(count - 1);
  }
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < VECTORS; n++) block.store(total[r][n], first + r, n * LANES);
}
#endif

}  // namespace

// x and out are contiguous; in is a multiple of 32; packed holds ceil(features / 64) panels of in / 32 groups. Gated: of
// both factors, and features, those of the output, are a multiple of 64.
extern "C" void choreograph_linear_int4(const bf16* x, int64_t rows, int64_t in, const Group* packed, const bf16* bias,
                                        bf16* out, int64_t features, int64_t threads, bool gated) {
  const int64_t groups = in / GROUP;
  static thread_local Lines<float> group_sums;
  static thread_local Lines<bf16> tile_buffer;
  group_sums.resize(rows * groups);
  float* sums = group_sums.data();
  bf16* tiles = nullptr;
  if (rows >= MIN_TILE_ROWS && has_amx()) {  // products of rows beyond the last one are not read
    tile_buffer.resize((rows + TILE - 1) / TILE * TILE * in);
    tiles = tile_buffer.data();
  }
  for_each_row(rows, threads, [=](int64_t row) {
    for (int64_t g = 0; g < groups; g++) sums[row * groups + g] = group_sum(x + row * in + g * GROUP);
    if (tiles) pack_row(x, row, groups, tiles);
  });
  for_each_block(rows, features, threads, gated, out, [=](const Block& block) {
    const Group* panel = packed + block.panel * groups;
    const bf16* start = bias ? bias + block.panel * PANEL : nullptr;
#if HAS_AMX
    if (tiles) {
      enter_amx();
      for (int64_t first = 0, at = block.row; first < block.rows; first += CACHED_ROWS, at += CACHED_ROWS)
        tile_product(tiles + at * in, sums + at * groups, groups, panel, start, block, first);
      return leave_amx();
    }
#endif
    const Vector* unpacked = nullptr;
    if (block.rows > 2 * WIDE) {
      static thread_local std::vector<Vector> buffer;
      buffer.resize(groups * VECTORS * PAIRS);
      for (int64_t g = 0; g < groups; g++) unpack(panel[g], &buffer[g * VECTORS * PAIRS]);
      unpacked = buffer.data();
    }
    const element* a = inputs(x, in, block);
    for_rows(block.rows, [&]<int M>(int64_t begin, int64_t end) {
      for (int first = 0; first < VECTORS; first += WIDTH<M>)
        for (int64_t row = begin; row < end; row += M) {
          const element* from = a + row * in;
          const float* s = sums + (block.row + row) * groups;
          if (unpacked)
            product<M, true>(from, in, s, panel, unpacked, first, start, block, row);
          else
            product<M, false>(from, in, s, panel, nullptr, first, start, block, row);
        }
    });
  });
}

}  // namespace panels
