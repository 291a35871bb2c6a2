// AMX: configuration of tile registers, and products of pairs of bfloat16 with float32 sums.

#pragma once

#include "cpp_vector.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

namespace {

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

// to (16 * R, 16 * C) = [to if add] + a (16 * R, 2 * pairs) @ b (2 * pairs, 16 * C), for R and C of 1 and 2. Sums are
// in tiles 0 to 3, `a` in 4 and 5, `b` in 6 and 7.
//
// Rows of `a` are `row` elements apart, and `step` is from 32 elements of a row to the next 32. `b` is packed: element
// (i, c) of 32 bits holds rows 2i and 2i + 1 of column c. pairs: a multiple of 16. LINES: cache lines from `ahead` on
// that are fetched into the second level for each 32 elements.
template <int R, int C, int LINES = 0>
void multiply_tiles(const bf16* a, int64_t row, int64_t step, const uint32_t* b, int pairs, bool add, float* to,
                    const char* ahead = nullptr) {
  constexpr int BYTES = C * 64;  // bytes of a row of `b` and `to`
  float* lower = to + 256 * C;
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  if (add) {
    _tile_loadd(0, to, BYTES);
    if (C > 1) _tile_loadd(1, to + 16, BYTES);
    if (R > 1) _tile_loadd(2, lower, BYTES);
    if (R > 1 && C > 1) _tile_loadd(3, lower + 16, BYTES);
  }
  for (int i = 0; i < pairs; i += 16, a += step, b += 256 * C) {
    for (int l = 0; l < LINES; l++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    _tile_loadd(6, b, BYTES);
    _tile_loadd(4, a, row * 2);
    _tile_dpbf16ps(0, 4, 6);
    if (R > 1) { _tile_loadd(5, a + 16 * row, row * 2); _tile_dpbf16ps(2, 5, 6); }
    if (C > 1) { _tile_loadd(7, b + 16, BYTES); _tile_dpbf16ps(1, 4, 7); }
    if (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, to, BYTES);
  if (C > 1) _tile_stored(1, to + 16, BYTES);
  if (R > 1) _tile_stored(2, lower, BYTES);
  if (R > 1 && C > 1) _tile_stored(3, lower + 16, BYTES);
}

// The same for 32 pairs and C = 2, whose four tiles of `b` stay in registers. rows: a multiple of 16.
inline void multiply_by_resident(int rows, const bf16* a, int64_t row, int64_t step, const uint32_t* b, bool add,
                                 float* to) {
  _tile_loadd(4, b, 128); _tile_loadd(5, b + 16, 128); _tile_loadd(6, b + 512, 128); _tile_loadd(7, b + 528, 128);
  for (int r = 0; r < rows; r += 16, a += 16 * row, to += 512) {
    if (add) { _tile_loadd(0, to, 128); _tile_loadd(1, to + 16, 128); }
    else { _tile_zero(0); _tile_zero(1); }
    _tile_loadd(2, a, row * 2);
    _tile_loadd(3, a + step, row * 2);
    _tile_dpbf16ps(0, 2, 4); _tile_dpbf16ps(1, 2, 5);
    _tile_dpbf16ps(0, 3, 6); _tile_dpbf16ps(1, 3, 7);
    _tile_stored(0, to, 128); _tile_stored(1, to + 16, 128);
  }
}
#else
inline bool has_amx() { return false; }
inline void enter_amx() {}
inline void leave_amx() {}
#endif

}  // namespace
