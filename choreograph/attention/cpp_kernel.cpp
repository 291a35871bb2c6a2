// CPU attention of one layer: packed query rows over slot ranges, with one shift per read.
// All memory is freed when the call returns.
//
// Stored keys are not modified: to read a range at another position, the queries are rotated by -shift.
// A tile of slots is converted to float32, or packed for dot products (cpp_tiles.h), once and used by every reader of
// the range, so a context shared by many requests is read once. Work is split by block of query rows, KV head and KV
// split (consecutive tiles). Rows of a decode step read little per tile and are bound by memory: they are split by tiles
// alone, so that the rows of all KV heads are read in the order of memory, the next ones while a tile is computed with.
// KV splits are merged by their log-sum-exp. Scores are in base 2.

#include "cpp_tiles.h"

namespace {

// window: 0 for none. cap: 0 for none. slopes, sinks: one per head, or null.
struct Shape {
  int rows, heads, groups, share, slot_stride;
  float scale, cap;
  int window;
  const int64_t* positions;
  const float *slopes, *sinks;
};
struct Rotation { const float *cos, *sin; int half, interleaved; };
struct Reader { int32_t row0, row1, shift, limit, step, position; };

// D: head dimension. V = D / LANES vectors per head.
template <class T, int D>
struct Kernel {
  static constexpr int V = D / LANES, TILE = DOTS<T> ? 128 : 64;
  static constexpr int FEW = 6;  // queries up to which packing a tile does not pay

  // s[m][j] = query m . key j, with keys transposed to (D, TILE)
  template <int M>
  static void scores_wide(const float* q, const float* kt, float* s) {
    for (int j = 0; j < TILE; j += SIDE * LANES) {
      vec acc[M][SIDE] = {};
      for (int d = 0; d < D; d++) {
        vec k[SIDE];
        for (int c = 0; c < SIDE; c++) k[c] = load(kt + d * TILE + j + c * LANES);
        for (int m = 0; m < M; m++) {
          vec x = splat(q[m * D + d]);
          for (int c = 0; c < SIDE; c++) acc[m][c] += x * k[c];
        }
      }
      for (int m = 0; m < M; m++)
        for (int c = 0; c < SIDE; c++) store(s + m * TILE + j + c * LANES, acc[m][c]);
    }
  }

  // The same for few queries, directly from the stored keys, LANES keys at a time. LANES
  // partial products are summed across lanes together, so the keys need no transposition.
  static void scores_few(const float* q, int m, const T* keys, int64_t stride, int n, float* s) {
    for (int j = 0; j < n; j += LANES) {
      int count = std::min(LANES, n - j);
      for (int a = 0; a < m; a++) {
        vec part[LANES];
        for (int r = 0; r < LANES; r++) {
          const T* k = keys + (j + std::min(r, count - 1)) * stride;
          part[r] = load(q + a * D) * widen(k);
          for (int i = 1; i < V; i++) part[r] += load(q + a * D + i * LANES) * widen(k + i * LANES);
        }
        transpose(part);
        for (int w = LANES / 2; w; w /= 2) for (int r = 0; r < w; r++) part[r] += part[r + w];
        store(s + a * TILE + j, part[0]);
      }
    }
  }

  // out[m] += p[m] @ values (n, D), up to SIDE registers of a value at once
  template <int M>
  static void mix(const float* p, const float* values, int64_t stride, int n, float* out) {
    constexpr int REST = V % SIDE;
    for (int i = 0; i + SIDE <= V; i += SIDE) mix_some<M, SIDE>(p, values + i * LANES, stride, n, out + i * LANES);
    if constexpr (REST) mix_some<M, REST>(p, values + (V - REST) * LANES, stride, n, out + (V - REST) * LANES);
  }
  template <int M, int C>
  static void mix_some(const float* p, const float* values, int64_t stride, int n, float* out) {
    vec acc[M][C];
    for (int m = 0; m < M; m++) for (int c = 0; c < C; c++) acc[m][c] = load(out + m * D + c * LANES);
    for (int j = 0; j < n; j++) {
      vec v[C];
      for (int c = 0; c < C; c++) v[c] = load(values + j * stride + c * LANES);
      for (int m = 0; m < M; m++) {
        vec x = splat(p[m * TILE + j]);
        for (int c = 0; c < C; c++) acc[m][c] += x * v[c];
      }
    }
    for (int m = 0; m < M; m++) for (int c = 0; c < C; c++) store(out + m * D + c * LANES, acc[m][c]);
  }

  // Online softmax step: scores of visible slots [from, to) -> weights; updates running maximum and sum.
  static void softmax_step(float* s, int from, int to, int padded, float& top, float& norm, float* out) {
    int end = (padded + LANES - 1) / LANES * LANES;
    if (from >= to) { std::fill(s, s + end, 0.0f); return; }
    std::fill(s, s + from, -INFINITY);
    std::fill(s + to, s + end, -INFINITY);
    vec most = splat(top), sum{};
    for (int j = 0; j < end; j += LANES) most = larger(most, load(s + j));
    float best = top, total = 0;
    for (int i = 0; i < LANES; i++) best = std::max(best, most[i]);
    for (int j = 0; j < end; j += LANES) {
      vec x = exp2_fast(load(s + j) - best);
      store(s + j, x);
      sum += x;
    }
    for (int i = 0; i < LANES; i++) total += sum[i];
    float keep = exp2_fast(top - best);
    if (keep != 1.0f) for (int i = 0; i < D; i++) out[i] *= keep;
    norm = norm * keep + total;
    top = best;
  }

  static void turn(const float* x, float* y, const float* cos, const float* sin, const Rotation& r) {
    memcpy(y, x, D * sizeof(float));
    if (r.interleaved) turn_pairs<2>(x, x + 1, y, y + 1, cos, sin, r.half);
    else turn_pairs<1>(x, x + r.half, y, y + r.half, cos, sin, r.half);
  }
  template <int NEXT>
  static void turn_pairs(const float* a, const float* b, float* __restrict to_a, float* __restrict to_b,
                         const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {  // rotate by -shift
      to_a[i * NEXT] = a[i * NEXT] * cos[i] + b[i * NEXT] * sin[i];
      to_b[i * NEXT] = b[i * NEXT] * cos[i] - a[i * NEXT] * sin[i];
    }
  }

  // Of all KV heads of an item. query: scaled. plain: as they came. turned and turned_plain: rotated for the readers of
  // a range.
  struct Work {
    std::vector<Tile> tiles;
    std::vector<float> query, turned, keys, values, scores;
#if HAS_DOTS
    std::vector<bf16> plain, turned_plain;
    PackedTile<D, TILE> tile;
#endif
  };

  static int seen(const Reader& r, int row) { return r.limit + r.step * (row - r.row0); }

  // Slots of a range that a query row attends to: from <= slot < to.
  struct Range { int from, to; };
  static Range range(const Shape& s, const Reader& r, int row) {
    Range x{0, seen(r, row)};
    if (s.window) {
      int here = (int)s.positions[row] - r.position;
      x.from = std::min(x.to, std::max(0, here - s.window + 1));
      x.to = std::max(x.from, std::min(x.to, here + s.window));
    }
    return x;
  }

  // Applies soft cap and ALiBi to the scores of slots t <= j < t + n of a range.
  static void shape(const Shape& s, const Reader& r, int row, int head, int t, int n, float* x) {
    if (s.cap) for (int j = 0; j < n; j++) x[j] = s.cap * std::tanh(x[j] / s.cap);
    if (s.slopes) {
      int first = r.position + t - (int)s.positions[row];
      for (int j = 0; j < n; j++) x[j] += s.slopes[head] * BASE2 * (first + j);
    }
  }

  // Tiles of `size` slots that rows b0 <= r < b1 read: a share of about 1 / stripes of the work.
  static void split(const Shape& s, const Segment* seg, int segs, const Reader* rd, int readers, int b0, int b1,
                    int size, int stripe, int stripes, std::vector<Tile>& tiles) {
    tiles.clear();
    int64_t total = 0, before = 0;
    auto work = [](const Tile& x) { return (int64_t)x.n * (8 + x.active); };
    for (int i = 0; i < segs; i++) {
      int end = i + 1 < segs ? seg[i + 1].first : readers, begin = INT32_MAX, length = 0, active = 0;
      for (int e = seg[i].first; e < end; e++) {
        int r0 = std::max(rd[e].row0, b0), r1 = std::min(rd[e].row1, b1);
        if (r0 >= r1) continue;
        active += (r1 - r0) * s.share;
        if (!s.window) { begin = 0; length = std::max(length, seen(rd[e], r1 - 1)); continue; }
        for (int row = r0; row < r1; row++) {
          Range x = range(s, rd[e], row);
          if (x.from < x.to) { begin = std::min(begin, x.from); length = std::max(length, x.to); }
        }
      }
      for (int t = length ? begin / size * size : 0; t < length; t += size) {
        tiles.push_back({i, t, std::min(size, length - t), active});
        total += work(tiles.back());
      }
    }
    if (stripes == 1) return;
    auto elsewhere = [&](const Tile& x) {
      int64_t middle = before + work(x) / 2;
      before += work(x);
      return middle * stripes / total != stripe;
    };
    tiles.erase(std::remove_if(tiles.begin(), tiles.end(), elsewhere), tiles.end());
  }

  // Rows b0 <= r < b1 of KV heads g0 <= g < g1; acc (g1 - g0, nq, D), top and norm (g1 - g0, nq).
  static void item(const Shape& s, const Rotation& rot, const T* q, int64_t q_row, int64_t q_head, const T* K,
                   const T* Vs, const Segment* seg, int segs, const Reader* rd, int readers, int g0, int g1, int b0,
                   int b1, int size, int stripe, int stripes, Work& w, float* acc, float* top, float* norm) {
    int nq = (b1 - b0) * s.share, all = (g1 - g0) * nq, turned = -1;
    for (int m = 0; m < all; m++) {
      const T* x = q + (b0 + m % nq / s.share) * q_row + ((g0 + m / nq) * s.share + m % s.share) * q_head;
#if HAS_DOTS
      if constexpr (DOTS<T>) { memcpy(&w.plain[(int64_t)m * D], x, D * sizeof(T)); continue; }
#endif
      for (int d = 0; d < D; d++) w.query[(int64_t)m * D + d] = to_float(x[d]) * s.scale;
    }
    std::fill(acc, acc + (int64_t)all * D, 0.0f);
    std::fill(top, top + all, -INFINITY);
    std::fill(norm, norm + all, 0.0f);
    split(s, seg, segs, rd, readers, b0, b1, size, stripe, stripes, w.tiles);
    auto rows_of = [&](size_t i) { return (int64_t)(seg[w.tiles[i].segment].lo + w.tiles[i].start) * s.slot_stride; };
#if HAS_DOTS
    Ahead<T, D> next(K + g0 * D, Vs + g0 * D, s.slot_stride, g1 - g0, seg, w.tiles);
#endif
    for (size_t i = 0; i < w.tiles.size(); i++) {
      auto [segment, t, n, active] = w.tiles[i];
      int first = seg[segment].first, end = segment + 1 < segs ? seg[segment + 1].first : readers;
      if (turned != segment)
        for (int g = g0; g < g1; g++) rotate(s, rot, rd, first, end, b0, b1, (g - g0) * nq, w);
      turned = segment;
      for (int g = g0; g < g1; g++) {
        const T *k = K + rows_of(i) + g * D, *v = Vs + rows_of(i) + g * D;
        int64_t at = (int64_t)(g - g0) * nq;  // first query of the head
        bool wide = active > FEW;
#if HAS_DOTS
        if constexpr (DOTS<T>) {
          next.begin(n);
          if (wide) w.tile.pack(k, v, s.slot_stride, n, next);
          for (int e = first; e < end; e++)
            dot_reader(s, rd[e], g, b0, b1, t, n, k, v, wide, next, at, w, acc + at * D, top + at, norm + at);
          continue;
        }
#endif
        if (wide) widen_keys(k, s.slot_stride, n, w.keys.data());
        Rows values = widen_values(v, s.slot_stride, n, w.values.data());
        for (int e = first; e < end; e++)
          reader(s, rd[e], g, b0, b1, t, n, k, wide, values, at, w, acc + at * D, top + at, norm + at);
      }
    }
  }

  // Rotates the queries of the readers of a range; `at`: first query of the KV head.
  static void rotate(const Shape& s, const Rotation& rot, const Reader* rd, int first, int end, int b0, int b1, int at,
                     Work& w) {
    for (int e = first; e < end; e++) {
      int r0 = std::max(rd[e].row0, b0), r1 = std::min(rd[e].row1, b1);
      int64_t row = (int64_t)rd[e].shift * rot.half;
      bool is_unrotated = !rd[e].shift || !rot.half;
#if HAS_DOTS
      if (DOTS<T> && !rd[e].shift) continue;  // read as they came
#endif
      for (int64_t m = at + (r0 - b0) * s.share; m < at + (r1 - b0) * s.share; m++) {
#if HAS_DOTS
        if constexpr (DOTS<T>) {
          float x[D], y[D];
          for (int d = 0; d < D; d++) x[d] = to_float(w.plain[m * D + d]);
          if (is_unrotated) memcpy(y, x, sizeof(x));
          else turn(x, y, rot.cos + row, rot.sin + row, rot);
          for (int d = 0; d < D; d++) from_float(y[d], w.turned_plain[m * D + d]);
          continue;
        }
#endif
        if (is_unrotated) memcpy(&w.turned[m * D], &w.query[m * D], D * sizeof(float));
        else turn(&w.query[m * D], &w.turned[m * D], rot.cos + row, rot.sin + row, rot);
      }
    }
  }

#if HAS_DOTS
  // A reader of the tile, which is packed for wide products.
  static void dot_reader(const Shape& s, const Reader& r, int g, int b0, int b1, int t, int n, const T* k, const T* v,
                         bool wide, Ahead<T, D>& next, int64_t at, Work& w, float* acc, float* top, float* norm) {
    int r0 = std::max(r.row0, b0), r1 = std::min(r.row1, b1);
    trim(s, r, t, n, r0, r1);
    const bf16* q = (r.shift ? w.turned_plain.data() : w.plain.data()) + at * D;
    constexpr int BLOCK = PackedTile<D, TILE>::BLOCK;
    int end = (r1 - b0) * s.share, block = wide ? BLOCK : WIDE, from[BLOCK], to[BLOCK];
    bool is_shaped = s.cap || s.slopes;
    for (int m = (r0 - b0) * s.share; m < end; m += block) {
      int count = std::min(block, end - m), used = 0;
      for (int row = b0 + m / s.share; row <= b0 + (m + count - 1) / s.share; row++)
        used = std::max(used, std::min(range(s, r, row).to - t, n));
      if (used <= 0) continue;
      int exact = used;
      used = (used + 31) / 32 * 32;
      if (wide) w.tile.score(count, used, q + (int64_t)m * D);
      else w.tile.score_few(count, exact, q + (int64_t)m * D, k, s.slot_stride, next);
      for (int a = 0; a < count; a++) {
        int row = b0 + (m + a) / s.share;
        Range x = range(s, r, row);
        from[a] = std::clamp(x.from - t, 0, n);
        to[a] = std::clamp(x.to - t, 0, n);  // may be empty
        if (is_shaped) {
          int shaped = std::min(n, used);
          float* scores = &w.tile.scores[a * TILE];
          for (int j = 0; j < shaped; j++) scores[j] *= s.scale;
          shape(s, r, row, g * s.share + (m + a) % s.share, t, shaped, scores);
        }
      }
      float* sums = acc + (int64_t)m * D;
      w.tile.softmax_block(count, from, to, used, is_shaped ? 1 : s.scale, top + m, norm + m, sums);
      if (wide) w.tile.mix(count, used, sums);
      else w.tile.mix_few(count, exact, v, s.slot_stride, sums, next);
    }
  }
#endif

  static void widen_keys(const T* k, int64_t stride, int n, float* kt) {
    for (int j = 0; j < TILE; j += LANES)
      for (int c = 0; c < V; c++) {
        vec r[LANES];
        for (int i = 0; i < LANES; i++) r[i] = j + i < n ? widen(k + (j + i) * stride + c * LANES) : vec{};
        transpose(r);
        for (int i = 0; i < LANES; i++) store(kt + (c * LANES + i) * TILE + j, r[i]);
      }
  }

  // Values as float32; float32 values are read in place.
  struct Rows { const float* at; int64_t stride; };
  static Rows widen_values(const float* v, int64_t stride, int, float*) { return {v, stride}; }
  static Rows widen_values(const bf16* v, int64_t stride, int n, float* to) {
    for (int j = 0; j < n; j++)
      for (int c = 0; c < V; c++) store(to + j * D + c * LANES, widen(v + j * stride + c * LANES));
    return {to, D};
  }

  // Drops rows that see none of the slots t <= j < t + n of a range from both ends of [r0, r1).
  static void trim(const Shape& s, const Reader& r, int t, int n, int& r0, int& r1) {
    auto blind = [&](int row) { Range x = range(s, r, row); return x.to <= t || x.from >= t + n; };
    while (r0 < r1 && blind(r0)) r0++;
    while (s.window && r0 < r1 && blind(r1 - 1)) r1--;
  }

  static void reader(const Shape& s, const Reader& r, int g, int b0, int b1, int t, int n, const T* k, bool wide,
                     const Rows& values, int64_t at, Work& w, float* acc, float* top, float* norm) {
    int r0 = std::max(r.row0, b0), r1 = std::min(r.row1, b1);
    trim(s, r, t, n, r0, r1);
    int end = (r1 - b0) * s.share;
    for (int m = (r0 - b0) * s.share; m < end; m += WIDE) {
      int count = std::min(WIDE, end - m);
      const float* q = &w.turned[(at + m) * D];
      float* p = w.scores.data();
      if (wide) pick_scores(count, q, w.keys.data(), p);
      else scores_few(q, count, k, s.slot_stride, n, p);
      for (int a = 0; a < count; a++) {
        int row = b0 + (m + a) / s.share;
        Range x = range(s, r, row);
        int from = std::clamp(x.from - t, 0, n), to = std::clamp(x.to - t, 0, n);  // may be empty
        if (s.cap || s.slopes) shape(s, r, row, g * s.share + (m + a) % s.share, t, n, p + a * TILE);
        softmax_step(p + a * TILE, from, to, n, top[m + a], norm[m + a], acc + (int64_t)(m + a) * D);
      }
      pick_mix(count, p, values, n, acc + (int64_t)m * D);
    }
  }

  static void pick_scores(int m, const float* q, const float* kt, float* s) {
    switch (m) {
      case 6: return scores_wide<6>(q, kt, s);
      case 5: return scores_wide<5>(q, kt, s);
      case 4: return scores_wide<4>(q, kt, s);
      case 3: return scores_wide<3>(q, kt, s);
      case 2: return scores_wide<2>(q, kt, s);
      default: return scores_wide<1>(q, kt, s);
    }
  }
  static void pick_mix(int m, const float* p, const Rows& v, int n, float* out) {
    switch (m) {
      case 6: return mix<6>(p, v.at, v.stride, n, out);
      case 5: return mix<5>(p, v.at, v.stride, n, out);
      case 4: return mix<4>(p, v.at, v.stride, n, out);
      case 3: return mix<3>(p, v.at, v.stride, n, out);
      case 2: return mix<2>(p, v.at, v.stride, n, out);
      default: return mix<1>(p, v.at, v.stride, n, out);
    }
  }

  static void run(const Shape& s, const Rotation& rot, const T* q, int64_t q_row, int64_t q_head, const T* K,
                  const T* Vs, T* out, const Segment* seg, int segs, const Reader* rd, int readers, int threads) {
    int block = std::max(1, 192 / s.share), blocks = (s.rows + block - 1) / block;
    bool decode = blocks == 1 || readers >= s.rows;  // few queries a tile: split by tiles only
    int heads = decode ? s.groups : 1, parts = s.groups / heads * blocks, size = TILE, stripes = 1;
    int64_t slots = 0, tiles = 0;
    for (int i = 0; i < segs; i++) slots += seg[i].hi - seg[i].lo, tiles += (seg[i].hi - seg[i].lo + TILE - 1) / TILE;
    if (decode) {
      if (threads > 1) stripes = std::min<int64_t>((threads + parts - 1) / parts, std::max<int64_t>(1, slots / 64));
      while (stripes > 1 && size > 32 && slots < 4 * stripes * size) size /= 2;
    }
    // a few items must divide evenly; many balance themselves
    while (!decode && stripes < 8 && parts < 8 * threads && parts * stripes % threads && stripes < tiles) stripes++;
    while (!decode && parts * stripes < threads && stripes < tiles) stripes++;
    int items = parts * stripes, nq = std::min(block, s.rows) * s.share, all = heads * nq;
    int64_t kept = stripes > 1 ? (int64_t)items * all : 0;  // partial results, merged at the end
    std::unique_ptr<float[]> acc(new float[kept * D]), top(new float[kept]), norm(new float[kept]);
#pragma omp parallel num_threads(threads)
    {
      Work w;
      if (!DOTS<T>) {
        w.query.resize(all * D); w.turned.resize(all * D); w.keys.resize(TILE * D);
        if (sizeof(T) < sizeof(float)) w.values.resize(TILE * D);
        w.scores.resize(WIDE * TILE);
      }
      std::vector<float> own(stripes > 1 ? 0 : (int64_t)all * (D + 2));
#if HAS_DOTS
      if (DOTS<T>) { w.plain.resize(all * D); w.turned_plain.resize(all * D); }
#endif
      enter_amx();
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < items; i++) {
        int stripe = i % stripes, part = i / stripes, g = part % (s.groups / heads) * heads;
        int b = blocks - 1 - part / (s.groups / heads), b0 = b * block, b1 = std::min(s.rows, b0 + block);
        int64_t at = (int64_t)i * all;
        float *sums = own.data(), *most = sums + all * D, *weight = most + all;
        if (stripes > 1) sums = &acc[at * D], most = &top[at], weight = &norm[at];
        item(s, rot, q, q_row, q_head, K, Vs, seg, segs, rd, readers, g, g + heads, b0, b1, size, stripe, stripes, w,
             sums, most, weight);
        int count = (b1 - b0) * s.share;  // queries of a head
        for (int h = 0; h < heads && stripes == 1; h++)
          merge_rows(s, sums + (int64_t)h * count * D, most + h * count, weight + h * count, 1, all, g + h, b0, b1, out);
      }
      leave_amx();
#pragma omp for schedule(static)
      for (int i = 0; i < (stripes > 1 ? s.groups * blocks : 0); i++) {
        int g = i % s.groups, b = blocks - 1 - i / s.groups, b0 = b * block, b1 = std::min(s.rows, b0 + block);
        int part = i / heads;  // of KV heads that were computed together
        int64_t at = (int64_t)part * stripes * all + (int64_t)(g % heads) * (b1 - b0) * s.share;
        merge_rows(s, &acc[at * D], &top[at], &norm[at], stripes, all, g, b0, b1, out);
      }
    }
  }

  // Writes rows b0 <= r < b1 of KV head g.
  static void merge_rows(const Shape& s, const float* acc, const float* top, const float* norm, int stripes, int nq,
                         int g, int b0, int b1, T* out) {
    for (int m = 0; m < (b1 - b0) * s.share; m++)
      merge(acc, top, norm, stripes, nq, m, s.sinks ? s.sinks + g * s.share + m % s.share : nullptr,
            out + ((int64_t)(b0 + m / s.share) * s.heads + g * s.share + m % s.share) * D);
  }

  // sink: extra softmax logit with a value of zero, or null
  static void merge(const float* acc, const float* top, const float* norm, int stripes, int nq, int m,
                    const float* sink, T* out) {
    float best = -INFINITY, total = 0, sum[D] = {};
    for (int i = 0; i < stripes; i++) best = std::max(best, top[(int64_t)i * nq + m]);
    if (sink) {
      best = std::max(best, *sink * BASE2);
      total = exp2_fast(*sink * BASE2 - best);
    }
    for (int i = 0; i < stripes && best > -INFINITY; i++) {
      int64_t at = (int64_t)i * nq + m;
      float keep = exp2_fast(top[at] - best);
      total += norm[at] * keep;
      if (keep) for (int d = 0; d < D; d++) sum[d] += acc[at * D + d] * keep;
    }
    float inverse = total > 0 ? 1.0f / total : 0.0f;
    for (int d = 0; d < D; d++) from_float(sum[d] * inverse, out[d]);
  }
};

template <class T>
void write(const T* k, int64_t k_row, int64_t k_head, const Shape& s, int width, const int64_t* slots, T* to,
           int threads) {
#pragma omp parallel for num_threads(threads) if (s.rows >= 64)
  for (int r = 0; r < s.rows; r++)
    for (int g = 0; g < s.groups; g++)
      memcpy(to + slots[r] * s.slot_stride + g * width, k + r * k_row + g * k_head, width * sizeof(T));
}

}  // namespace

// Arguments shared by all layers with one attention spec. Mirrors `_CMetadata` in cpp_backend.py.
struct PlanView {
  const int64_t *slots, *positions;
  const int32_t *segments, *readers;
  const float *cos, *sin, *slopes;
  int64_t rows, heads, groups, segment_count, reader_count, half, interleaved, threads, window;
  float softcap;
};

// Strides are in elements. WIDTH (head dimension) and ELEMENT (float or bf16) are compiler definitions.
extern "C" void choreograph_attend(
    const PlanView* p, float scale, const ELEMENT* q, int64_t q_head, int64_t q_row, const ELEMENT* k, int64_t k_head,
    int64_t k_row, const ELEMENT* v, int64_t v_head, int64_t v_row, ELEMENT* keys, ELEMENT* values, ELEMENT* out,
    const float* sinks) {
  int rows = p->rows, heads = p->heads, groups = p->groups;
  Shape s{rows, heads, groups, heads / groups, groups * WIDTH, scale * BASE2, p->softcap * BASE2, (int)p->window,
          p->positions, p->slopes, sinks};
  Rotation rotation{p->cos, p->sin, (int)p->half, (int)p->interleaved};
  write(k, k_row, k_head, s, WIDTH, p->slots, keys, p->threads);
  write(v, v_row, v_head, s, WIDTH, p->slots, values, p->threads);
  Kernel<ELEMENT, WIDTH>::run(s, rotation, q, q_row, q_head, keys, values, out, (const Segment*)p->segments,
                              p->segment_count, (const Reader*)p->readers, p->reader_count, p->threads);
}
