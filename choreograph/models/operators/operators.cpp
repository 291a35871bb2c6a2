// Operators of decoder layers over the model's own weights, row-major: linear layers with an RMS norm before them and a
// residual or gating behind, norms, and rotary embeddings. Types are float or bfloat16; sums are float32.
//
// Weights are packed while they are multiplied (packed_products.h, amx_products.h), so they need no other layout in
// memory. A step of few tokens streams them once, in order. Results do not depend on the batch.

#include "amx_products.h"

namespace {

constexpr int64_t ROWS_BYTES = (WIDE ? 512 : 192) << 10;  // of rows that a chunk is multiplied by, in the L2 cache
constexpr int64_t AMX_ROWS_BYTES = 1536 << 10;            // the same in tiles

// Memory of a thread, aligned to cache lines and reused by later calls.
template <class T>
struct Buffer {
  std::unique_ptr<T[], void (*)(void*)> data{nullptr, free};
  size_t size = 0;
  T* reserve(size_t count) {
    if (count > size) {
      data.reset((T*)aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64));
      if (!data) throw std::bad_alloc();
      size = count;
    }
    return data.get();
  }
};

template <class T> float rounded(float x) { T y; from_float(x, y); return to_float(y); }
template <class T> vec rounded(vec x) {  // to nearest, ties to even; AVX-512 bfloat16 flushes denormals to zero
  if (std::is_same<T, float>::value) return x;
#if REGISTER == 16 && defined(__AVX512BF16__)
  return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
#endif
  uvec bits = (uvec)x;
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  return x != x ? x : (vec)bits;
}
inline void put(float* to, vec x) { store(to, x); }
inline void put(bf16* to, vec x) {
#if REGISTER == 16 && defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
  store_halves(to, (uvec)rounded<bf16>(x) >> 16);
#endif
}

// RMS norm. With `adds_one`, the factors are 1 + weight (Gemma); otherwise the normalized row is rounded before it is
// multiplied (Llama).
struct Norm { const void* weight; float eps; int32_t adds_one; };

template <class T>
float norm_scale(const T* x, int64_t width, const Norm& norm) {
  vec squares{};
  int64_t i = 0;
  for (; i + LANES <= width; i += LANES) { vec a = widen(x + i); squares += a * a; }
  float sum = 0;
  for (int l = 0; l < LANES; l++) sum += squares[l];
  for (; i < width; i++) sum += to_float(x[i]) * to_float(x[i]);
  return 1.0f / std::sqrt(sum / width + norm.eps);
}

template <class T>
void normalize(const T* x, int64_t width, const Norm& norm, T* to) {
  const T* weight = (const T*)norm.weight;
  float scale = norm_scale(x, width, norm);
  for (int64_t i = 0; i < width; i++) {
    float y = to_float(x[i]) * scale, w = to_float(weight[i]);
    from_float(norm.adds_one ? y * (1.0f + w) : rounded<T>(y) * w, to[i]);
  }
}

// A row as input of products: normalized if there is a norm, and padded with zeros.
template <class T>
void prepare(const T* x, int64_t width, const Norm* norm, Input<T>* to) {
  const T* weight = norm ? (const T*)norm->weight : nullptr;
  float scale = norm ? norm_scale(x, width, *norm) : 1;
  for (int64_t i = 0; i < width; i += STRIP) {
    const T *from = x + i, *factors = weight + i;
    T rest[STRIP] = {}, rest_factors[STRIP] = {};
    if (width - i < STRIP) {
      std::copy_n(from, width - i, rest);
      if (norm) std::copy_n(factors, width - i, rest_factors);
      from = rest, factors = rest_factors;
    }
    for (int s = 0; s < STRIP; s += LANES) {
      vec y = widen(from + s);
      if (norm) {
        vec w = widen(factors + s);
        y = rounded<T>(norm->adds_one ? y * scale * (1.0f + w) : rounded<T>(y * scale) * w);
      }
      put(to + i + s, y);
    }
  }
}

inline vec inverse(vec x) {  // of finite numbers
#if REGISTER == 16 && defined(__AVX512F__)
  vec y = (vec)_mm512_rcp14_ps((__m512)x);
  return y * (2.0f - x * y);
#else
  return 1.0f / x;
#endif
}

// x * sigmoid(x), or GELU with its tanh approximation.
inline vec activate(vec x, bool is_gelu) {
  vec z = is_gelu ? x * (1.5957691216057308f + 0.0713548162726009f * x * x) : x;
  return x * inverse(1.0f + exp2_fast(-larger(z * BASE2, splat(-126.0f))));
}

}  // namespace

// Consecutive output features: weights (features, in), biases or null. Mirrors `_Part` in library.py.
struct Part { const void *weight, *bias; int64_t features; };

// Linear layers with one input, the norm before them and what follows. Mirrors `_Linear`.
struct Linear {
  const Part* parts;
  int64_t count;
  const Norm* norm;
  int64_t mode, in, features;
  void (*int4)(const void*, int64_t, int64_t, const void*, const void*, void*, int64_t, int64_t, bool);  // or null
};

// Decoder layer. Mirrors `Layer`.
struct Layer {
  const Linear *qkv, *output, *gated, *down;
  const Norm *attention_norm, *mlp_norm;  // of the outputs of both blocks, or null
  const Norm *query_norm, *key_norm;      // of single heads, or null
  int64_t queries, keys, width;           // heads and their size
  float scale;                            // of attention scores
};

// The attention kernel (cpp_kernel.cpp), for elements of type T.
template <class T>
using Attend = void(const void* plan, float scale, const T* q, int64_t q_head, int64_t q_row, const T* k, int64_t k_head,
                    int64_t k_row, const T* v, int64_t v_head, int64_t v_row, void* keys, void* values, T* out,
                    const float* sinks);

// Inputs of a layer in one step: rotary tables (rows, rotated), the kernel's metadata, and the KV cache of the layer.
// Mirrors `LayerStep`.
struct LayerStep {
  const Layer* layer;
  const void *cos, *sin;
  int64_t rotated;
  const void* plan;
  void *keys, *values;
};

namespace {

enum Mode { PLAIN, SILU, GELU };  // the latter: of the first part, times the second

template <class T>
void apply_norm(const Norm& of, const T* x, int64_t rows, int64_t width, const T* residual, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows >= 16)
  for (int64_t r = 0; r < rows; r++) {
    T* to = out + r * width;
    normalize(x + r * width, width, of, to);
    if (residual)
      for (int64_t i = 0; i < width; i++) from_float(to_float(to[i]) + to_float(residual[r * width + i]), to[i]);
  }
}

// The activation of the first half of each row, times the second: x (rows, 2 * width) -> out (rows, width).
template <class T>
void apply_gate(int mode, const T* x, int64_t rows, int64_t width, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows >= 16)
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i += LANES) {
      const T* from = x + r * 2 * width + i;
      int count = std::min<int64_t>(LANES, width - i);
      float factors[LANES] = {};
      for (int l = 0; l < count; l++) factors[l] = to_float(from[l]);
      store(factors, activate(load(factors), mode == GELU));
      for (int l = 0; l < count; l++)
        from_float(rounded<T>(factors[l]) * to_float(from[width + l]), out[r * width + i + l]);
    }
}

// The packed weight of 4 bits is that of the first part.
template <class T>
void linear_int4(const Linear& of, const T* x, int64_t rows, const T* residual, T* out, int threads) {
  Buffer<T> normalized, product;
  if (of.norm) {
    T* to = normalized.reserve(rows * of.in);
    apply_norm<T>(*of.norm, x, rows, of.in, nullptr, to, threads);
    x = to;
  }
  bool gates = of.mode == SILU && of.features % CHUNK == 0;  // within the product
  T* to = gates || of.mode == PLAIN ? out : product.reserve(rows * of.parts->features);
  int64_t features = gates ? of.features : of.parts->features;
  of.int4(x, rows, of.in, of.parts->weight, of.parts->bias, to, features, threads, gates);
  if (to != out) apply_gate(of.mode, to, rows, of.features, out, threads);
  int64_t count = residual ? rows * of.features : 0;
#pragma omp parallel for num_threads(threads) if (rows >= 16)
  for (int64_t i = 0; i < count; i++) from_float(to_float(out[i]) + to_float(residual[i]), out[i]);
}

// What follows a product: gate or residual (of PLAIN alone), and rounding. sums, gate: rows of `stride` elements. at: of the first output
// in `out` and `residual`, whose rows have `features` elements.
template <class T, int MODE, bool ADDS>
void finish_rows(const float* sums, const float* gate, int stride, int rows, int width, const T* residual, T* out,
                 int64_t at, int64_t features) {
  auto result = [&](int n, const T* added) {
    vec y = load(sums + n);
    if (MODE != PLAIN) y = rounded<T>(activate(rounded<T>(load(gate + n)), MODE == GELU)) * rounded<T>(y);
    return ADDS ? rounded<T>(y) + widen(added) : y;
  };
  for (int r = 0; r < rows; r++, sums += stride, gate += stride, at += features) {
    int n = 0;
    for (; n + LANES <= width; n += LANES) put(out + at + n, result(n, residual + at + n));
    if (n == width) continue;
    T rest[LANES] = {};
    if (ADDS) std::copy_n(residual + at + n, width - n, rest);
    put(rest, result(n, rest));
    std::copy_n(rest, width - n, out + at + n);
  }
}
template <class T>
void finish_rows(int mode, const float* sums, const float* gate, int stride, int rows, int width, const T* residual,
                 T* out, int64_t at, int64_t features) {
  auto function = mode == SILU ? finish_rows<T, SILU, false> : mode == GELU ? finish_rows<T, GELU, false>
                  : residual   ? finish_rows<T, PLAIN, true> : finish_rows<T, PLAIN, false>;
  function(sums, gate, stride, rows, width, residual, out, at, features);
}

#if HAS_AMX && HAS_DOTS
// Part of a thread in products of many rows, packed by amx_pack_rows. A pair of tiles of weights is packed once for a block
// of rows: 32 output features, or 16 of the gate and those that it multiplies. packed: memory of the thread for them.
void multiply_many_rows(const Linear& of, const bf16* x, int64_t rows, const bf16* residual, bf16* out, bf16* packed,
                        int threads) {
  const int64_t in = of.in;
  const bool gates = of.mode != PLAIN;
  const int step = gates ? 16 : 32;  // output features of a pair
  int64_t pairs = 0, blocks = std::max<int64_t>(1, rows * in * sizeof(bf16) / AMX_ROWS_BYTES);
  for (int p = 0; p < (gates ? 1 : of.count); p++) pairs += (of.parts[p].features + step - 1) / step;
  int64_t height = ((rows + blocks - 1) / blocks + 31) / 32 * 32;
  blocks = (rows + height - 1) / height;
  int64_t items = blocks * pairs, share = std::max<int64_t>(2, items / (32 * threads) / 2 * 2);
#pragma omp for schedule(dynamic, share)
  for (int64_t item = 0; item < items; item++) {
    const Part* part = of.parts;
    int64_t first = item / pairs * height, f = item % pairs * step, start = 0;
    for (; f >= part->features; part++) {
      f -= (part->features + step - 1) / step * step;
      start += part->features;
    }
    int width = std::min<int64_t>(step, part->features - f);
    auto pack_tile = [&](const Part& of_tile, int64_t at, bf16* to) {
      int64_t count = std::min<int64_t>(16, of_tile.features - at);
      pack<bf16>((const bf16*)of_tile.weight + at * in, in, 1, count, in, in, nullptr, to);
    };
    bf16* right = gates || width > 16 ? packed + 16 * in : nullptr;
    pack_tile(*part, f, packed);
    if (right) pack_tile(part[gates], gates ? f : f + 16, right);
    for (int64_t r = first; r < std::min(rows, first + height); r += 32) {
      alignas(64) float sums[32 * 32];
      int count = std::min<int64_t>(32, rows - r);
      amx_product_of_packed(x + r * in, count, packed, right, in, sums);
      auto add = [&](const void* bias, float* to) {
        for (int i = 0; bias && i < count; i++)
          for (int n = 0; n < width; n++) to[i * 32 + n] += to_float(((const bf16*)bias)[f + n]);
      };
      add(part->bias, sums);
      if (gates) add(part[1].bias, sums + 16);
      finish_rows<bf16>(of.mode, sums + (gates ? 16 : 0), sums, 32, count, width, residual, out, r * of.features + start + f,
                        of.features);
    }
  }
}
#endif

template <class T>
void linear(const Linear& of, const T* x, int64_t rows, const T* residual, T* out, int threads) {
  if (rows == 0) return;  // the output layer of a step in which no token is sampled
  if (of.int4) return linear_int4<T>(of, x, rows, residual, out, threads);
  typedef Input<T> In;
  const Part* parts = of.parts;
  const Norm* norm = of.norm;
  const int count = of.count, mode = of.mode;
  const int64_t in = of.in;
  int64_t padded = (in + STRIP - 1) / STRIP * STRIP, features = of.features, chunks = 0;
  int outputs = mode == PLAIN ? count : 1;  // parts that have output features
  for (int p = 0; p < outputs; p++) chunks += (parts[p].features + CHUNK - 1) / CHUNK;
  static thread_local Buffer<In> buffer;
  bool copies = norm || padded != in || !std::is_same<T, In>::value;
  In* prepared = copies ? buffer.reserve(rows * padded) : nullptr;
  int64_t height = std::max<int64_t>(ROWS_AT_ONCE, ROWS_BYTES / (std::min(padded, MANY_ROWS.inputs) * sizeof(In)));
#if HAS_AMX && HAS_DOTS
  bool uses_amx = std::is_same<T, bf16>::value && in % 32 == 0 && has_amx();
  static thread_local Buffer<bf16> tiles_buffer;
  bf16* tiles = uses_amx ? tiles_buffer.reserve(amx_packed_size(rows, in)) : nullptr;
  bool packs_tiles = uses_amx && rows > AMX_FEW;
#else
  constexpr bool uses_amx = false, packs_tiles = false;
#endif
  // weights of a chunk are packed once, and rows are finished as they are multiplied
  bool packs_chunks = !uses_amx && packs_once<T>(rows, padded, mode == PLAIN ? CHUNK : 2 * CHUNK);
  if (uses_amx || rows <= FEW) height = rows;  // weights are read once
  if (packs_chunks) height = chunks % threads && chunks < 8 * threads ? (rows + threads - 1) / threads : rows;
  int64_t blocks = (rows + height - 1) / height;
  height = (rows + blocks - 1) / blocks;
  int64_t items = packs_tiles ? 0 : blocks * chunks;  // none: see multiply_many_rows
  int64_t group = items == 0 ? 0 : packs_chunks ? ROWS_AT_ONCE : height;
  bool in_order = uses_amx || rows <= FEW;  // weights in the order of memory
  int64_t share = std::max<int64_t>(1, in_order ? (items + threads - 1) / threads : items / (32 * threads));
#pragma omp parallel num_threads(threads)
  {
    if (copies) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++) {
        In* to = prepared + r * padded;
        prepare(x + r * in, in, norm, to);
      }
    }
    const In* from = copies ? prepared : (const In*)x;
#if HAS_AMX && HAS_DOTS
    if (uses_amx) {
      enter_amx();
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r += 16)
        (packs_tiles ? amx_pack_rows : amx_pack)((const bf16*)from, padded, rows, in, r, tiles);
    }
#endif
    static thread_local Buffer<float> sums_buffer, gate_buffer;
    float* tile = sums_buffer.reserve(group * CHUNK);
    float* gate = mode == PLAIN ? nullptr : gate_buffer.reserve(group * CHUNK);
    static thread_local Buffer<In> weights_buffer;
    In* packed = weights_buffer.reserve(uses_amx ? 32 * in : packs_chunks ? 2 * CHUNK * padded : tiles_size(padded));
#if HAS_AMX && HAS_DOTS
    if (packs_tiles) multiply_many_rows(of, tiles, rows, (const bf16*)residual, (bf16*)out, (bf16*)packed, threads);
#endif
#pragma omp for schedule(dynamic, share)
    for (int64_t item = 0; item < items; item++) {
      int64_t first = item / chunks * height, end = std::min(rows, first + height), chunk = item % chunks, start = 0;
      int p = 0;
      for (;; p++) {
        int64_t of_part = (parts[p].features + CHUNK - 1) / CHUNK;
        if (chunk < of_part) break;
        chunk -= of_part;
        start += parts[p].features;
      }
      int64_t f0 = chunk * CHUNK;
      int width = std::min<int64_t>(CHUNK, parts[p].features - f0);
      auto pack_part = [&](const Part& part, In* to) {
        pack_chunk<T>((const T*)part.weight + f0 * in, width, in, padded, to);
      };
      if (packs_chunks) pack_part(parts[mode == PLAIN ? p : 1], packed);
      if (packs_chunks && mode != PLAIN) pack_part(parts[0], packed + CHUNK * padded);
      for (int64_t r0 = first; r0 < end; r0 += group) {
        int count = std::min(group, end - r0);
        auto compute = [&](const Part& part, float* to, const Part& next, int64_t next_f0) {
          const T* weight = (const T*)part.weight + f0 * in;
          const T* ahead = next_f0 < next.features ? (const T*)next.weight + next_f0 * in : nullptr;
#if HAS_AMX && HAS_DOTS
          if (uses_amx && width >= 16)
            amx_product(tiles, count, in, (const bf16*)weight, in, width, (const bf16*)ahead, to, CHUNK);
          else if (uses_amx) {  // a tile of features, zeros beyond the last
            memcpy(packed, weight, width * in * sizeof(T));
            memset(packed + width * in, 0, (16 - width) * in * sizeof(T));
            amx_product(tiles, count, in, (const bf16*)packed, in, 16, (const bf16*)ahead, to, CHUNK);
          }
          else
#endif
          if (packs_chunks)
            product_of_packed<T>(count, from + r0 * padded, padded, packed + (to == gate ? CHUNK * padded : 0), width, to);
          else
            product(count, from + r0 * padded, padded, weight, width, in, ahead, packed, to);
          const T* bias = (const T*)part.bias;
          for (int r = 0; bias && r < count; r++)
            for (int n = 0; n < width; n++) to[r * CHUNK + n] += to_float(bias[f0 + n]);
        };
        if (mode != PLAIN) compute(parts[0], gate, parts[1], f0);
        compute(parts[mode == PLAIN ? p : 1], tile, parts[mode == PLAIN ? p : 0], f0 + CHUNK);
        finish_rows<T>(mode, tile, gate, CHUNK, count, width, residual, out, r0 * features + start + f0, features);
      }
    }
    if (uses_amx) leave_amx();
  }
}

// In place, x as `before_attention` gives it: the norms of queries and keys, where there are any, then their rotation.
// cos, sin: (rows, rotated) as transformers computes them, whose halves are equal.
template <class T>
void rotate(const Layer& of, T* x, int64_t rows, const T* cos, const T* sin, int rotated, int threads) {
  int half = rotated / 2;
#pragma omp parallel for num_threads(threads) if (rows >= 16)
  for (int64_t r = 0; r < rows; r++)
    for (int h = 0; h < of.queries + of.keys; h++) {
      T* head = x + r * of.qkv->features + h * of.width;
      const T *c = cos + r * rotated, *s = sin + r * rotated;
      if (const Norm* norm = h < of.queries ? of.query_norm : of.key_norm) normalize(head, of.width, *norm, head);
      for (int i = 0; i < half; i++) {
        float a = to_float(head[i]), b = to_float(head[half + i]);
        from_float(a * to_float(c[i]) - b * to_float(s[i]), head[i]);
        from_float(b * to_float(c[half + i]) + a * to_float(s[half + i]), head[half + i]);
      }
    }
}

// Queries, keys and values of all heads, rotated: (rows, (queries + 2 * keys) * width).
template <class T>
void before_attention(const Layer& of, const T* x, int64_t rows, const T* cos, const T* sin, int rotated, T* out,
                      int threads) {
  linear<T>(*of.qkv, x, rows, nullptr, out, threads);
  rotate(of, out, rows, cos, sin, rotated, threads);
}

// What follows attention; `x` is the input of the layer, and may be `out`.
template <class T>
void after_attention(const Layer& of, const T* attended, const T* x, int64_t rows, T* out, int threads) {
  Buffer<T> hidden_buffer, inner_buffer;
  int64_t width = of.output->features;
  T *hidden = hidden_buffer.reserve(rows * width), *inner = inner_buffer.reserve(rows * of.gated->features);
  auto block = [&](const Linear& last, const Norm* norm, const T* input, const T* residual, T* to) {
    linear<T>(last, input, rows, norm ? nullptr : residual, to, threads);
    if (norm) apply_norm<T>(*norm, to, rows, width, residual, to, threads);
  };
  block(*of.output, of.attention_norm, attended, x, hidden);
  linear<T>(*of.gated, hidden, rows, nullptr, inner, threads);
  block(*of.down, of.mlp_norm, inner, hidden, out);
}

// Consecutive layers in one call, in place. All have as many heads, and heads of one size.
template <class T>
void all_layers(const LayerStep* steps, int64_t count, Attend<T>* attend, T* x, int64_t rows, int threads) {
  static thread_local Buffer<T> joint_buffer, attended_buffer;  // kept: calls have few rows
  for (const LayerStep* step = steps; step < steps + count; step++) {
    const Layer& of = *step->layer;
    int64_t width = of.width, row = of.qkv->features;
    T *joint = joint_buffer.reserve(rows * row), *attended = attended_buffer.reserve(rows * of.queries * width);
    before_attention<T>(of, x, rows, (const T*)step->cos, (const T*)step->sin, step->rotated, joint, threads);
    const T *keys = joint + of.queries * width, *values = keys + of.keys * width;
    attend(step->plan, of.scale, joint, width, row, keys, width, row, values, width, row, step->keys, step->values,
           attended, nullptr);
    after_attention<T>(of, attended, x, rows, x, threads);
  }
}

}  // namespace

#define OPERATORS(T, NAME)                                                                                            \
  extern "C" void choreograph_linear_##NAME(const Linear* of, const T* x, int64_t rows, const T* residual, T* out,    \
                                            int64_t threads) {                                                        \
    linear<T>(*of, x, rows, residual, out, threads);                                                                  \
  }                                                                                                                   \
  extern "C" void choreograph_norm_##NAME(const Norm* of, const T* x, int64_t rows, int64_t width, const T* residual, \
                                          T* out, int64_t threads) {                                                  \
    apply_norm<T>(*of, x, rows, width, residual, out, threads);                                                       \
  }                                                                                                                   \
  extern "C" void choreograph_gate_##NAME(int64_t mode, const T* x, int64_t rows, int64_t width, T* out,              \
                                          int64_t threads) {                                                          \
    apply_gate<T>(mode, x, rows, width, out, threads);                                                                \
  }                                                                                                                   \
  extern "C" void choreograph_rotate_##NAME(const Layer* of, T* x, int64_t rows, const T* cos, const T* sin,          \
                                            int64_t rotated, int64_t threads) {                                       \
    rotate<T>(*of, x, rows, cos, sin, rotated, threads);                                                              \
  }                                                                                                                   \
  extern "C" void choreograph_before_attention_##NAME(const Layer* of, const T* x, int64_t rows, const T* cos,        \
                                                      const T* sin, int64_t rotated, T* out, int64_t threads) {       \
    before_attention<T>(*of, x, rows, cos, sin, rotated, out, threads);                                               \
  }                                                                                                                   \
  extern "C" void choreograph_after_attention_##NAME(const Layer* of, const T* attended, const T* x, int64_t rows,    \
                                                     T* out, int64_t threads) {                                       \
    after_attention<T>(*of, attended, x, rows, out, threads);                                                         \
  }                                                                                                                   \
  extern "C" void choreograph_layers_##NAME(const LayerStep* steps, int64_t count, Attend<T>* attend, T* x,           \
                                            int64_t rows, int64_t threads) {                                          \
    all_layers<T>(steps, count, attend, x, rows, threads);                                                            \
  }
OPERATORS(float, float)
OPERATORS(bf16, bf16)
