// AMX instructions in plain C++, for processors without them. Included before the kernel's source, in which AVX-512
// registers and dot products are emulated as well.
#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

namespace amx_emulation {

thread_local uint8_t tiles[8][16][64];
thread_local bool configured = false;

inline void load(int tile, const void* from, int64_t stride) {
  for (int i = 0; i < 16; i++) memcpy(tiles[tile][i], (const char*)from + i * stride, 64);
}
inline void store(int tile, void* to, int64_t stride) {
  for (int i = 0; i < 16; i++) memcpy((char*)to + i * stride, tiles[tile][i], 64);
}
inline float widen(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }
inline void multiply(int to, int a, int b) {
  if (!configured) __builtin_trap();  // as a processor does
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum;
      memcpy(&sum, &tiles[to][m][4 * n], 4);
      for (int k = 0; k < 16; k++) {
        uint16_t x[2], y[2];
        memcpy(x, &tiles[a][m][4 * k], 4);
        memcpy(y, &tiles[b][k][4 * n], 4);
        sum += widen(x[0]) * widen(y[0]) + widen(x[1]) * widen(y[1]);
      }
      memcpy(&tiles[to][m][4 * n], &sum, 4);
    }
}

}  // namespace amx_emulation

#define REGISTER 16
#define EMULATED_DOTS
#define __AMX_BF16__ 1
#undef __AVX512BF16__
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_loadconfig
#undef _tile_release
#define _tile_zero(t) memset(amx_emulation::tiles[t], 0, 1024)
#define _tile_loadd(t, from, stride) amx_emulation::load(t, from, stride)
#define _tile_stored(t, to, stride) amx_emulation::store(t, to, stride)
#define _tile_dpbf16ps(to, a, b) amx_emulation::multiply(to, a, b)
#define _tile_loadconfig(config) (amx_emulation::configured = true)
#define _tile_release() (amx_emulation::configured = false)
#undef SYS_arch_prctl
#define SYS_arch_prctl 0
#define syscall(...) 0L
