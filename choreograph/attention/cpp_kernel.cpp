// CPU attention of one layer: packed query rows over slot ranges, with one shift per read.
// All memory is freed when the call returns.
//
// Stored keys are not modified: to read a range at another position, the queries are rotated by -shift.
// A tile of slots is read once for all readers of the range, so a context shared by many requests is read once. Queries
// are in lanes of vector registers (cpp_tiles.h), and blocks of them skip what none of them sees; few queries have code
// of their own. Work is split by block of query rows, KV head and KV split (consecutive tiles). Rows of a decode step
// read little per tile and are bound by memory: they are split by tiles alone, so that the rows of all KV heads are read
// in the order of memory, the next ones while a tile is computed with.
// KV splits are merged by their log-sum-exp. Scores are in base 2.

#include "cpp_tiles.h"

namespace {

// Rows beyond `tokens` are aligned (`AlignedRows`): they have the query of another row. lse: (rows, heads), base 2.
struct AlignedRows { const int32_t* token_of; const float *temperatures, *log_scales; float* lse; };

// window: 0 for none. cap: 0 for none. slopes, sinks: one per head, or null.
struct Shape {
  int rows, heads, groups, share, slot_stride;
  float scale, cap;
  int window;
  const int64_t* positions;
  const float *slopes, *sinks;
  int tokens;
  AlignedRows aligned;
};
struct Rotation { const float *cos, *sin; int half, interleaved; };
struct Reader { int32_t row0, row1, shift, limit, step, position; };

// Queries in lanes that read a range: of each, from <= slot < to; of `all`, every slot from all_from to all_to.
struct Span { int from, to, all_from, all_to; };

// T: of rows that are computed with. S: of stored rows, T or int8_t. Q: of queries and results. D: head dimension.
// V = D / LANES vectors per head.
template <class T, class S, class Q, int D>
struct Kernel {
  static constexpr bool IS_CODED = std::is_same_v<S, int8_t>;
  static constexpr int ROW = D + (IS_CODED ? sizeof(float) : 0);  // elements of a stored row
  using Next = Ahead<S, ROW>;
  using E = std::conditional_t<DOTS<T>, bf16, float>;           // of operands
  using Packed = std::conditional_t<DOTS<T>, uint32_t, float>;  // of queries and weights in lanes; pairs in bfloat16
  static constexpr int V = D / LANES, TILE = DOTS<T> ? 128 : 64;
  static constexpr float SLACK = 8;  // weights grow to 2^SLACK before sums are scaled down: it is seldom needed
  static constexpr int FEW = 6;  // queries up to which lanes for queries do not pay
  static constexpr int DEPTH = DOTS<T> ? (D + 31) / 32 * 32 : D;  // of score products, padded with zeros
  static constexpr int INNER = DOTS<T> ? DEPTH / 2 : D;           // the same in elements of Packed
  static constexpr int STEP = DOTS<T> ? UNIT : 8;                 // keys per product: a multiple
  static constexpr int W = COLUMNS * LANES;                       // queries in lanes per product

  // Few queries read a tile as it is stored, LANES keys at a time: s[a][j] = query a . key j.
  template <int M>
  static void few_scores(const E* q, const T* keys, int64_t stride, int n, float* s, Next& next) {
    for (int j = 0; j < n; j += LANES) {
      next.advance(LANES);
      vec part[M][LANES];
      for (int r = 0; r < LANES; r++) {
        const T* k = keys + std::min(j + r, n - 1) * stride;
        vec sum[M] = {};
        if constexpr (DOTS<T>) {
          for (int d = 0; d + 2 * LANES <= D; d += 2 * LANES)
            for (int a = 0; a < M; a++) sum[a] = dot(sum[a], load_pairs(q + a * D + d), load_pairs(k + d));
          constexpr int REST = D - D % (2 * LANES);
          for (int a = 0; a < M && REST < D; a++) sum[a] += widen(q + a * D + REST) * widen(k + REST);
        } else {
          for (int d = 0; d < D; d += LANES) {
            vec x = hold(widen(k + d));
            for (int a = 0; a < M; a++) sum[a] += widen(q + a * D + d) * x;
          }
        }
        for (int a = 0; a < M; a++) part[a][r] = sum[a];
      }
      for (int a = 0; a < M; a++) store(s + a * TILE + j, sum_rows(part[a]));
    }
  }

  // out[a] += p[a] @ values (n, D), up to SIDE registers of a value at once.
  template <int M>
  static void few_mix(const E* p, const T* values, int64_t stride, int n, float* out, Next& next) {
    constexpr int SIDE = LANES == 16 || M <= 3 ? 4 : 2, REST = V % SIDE, DONE = D - REST * LANES;
    for (int d = 0; d < DONE; d += SIDE * LANES) mix_columns<M, SIDE>(p, values + d, stride, n, out + d, next);
    if constexpr (REST) mix_columns<M, REST>(p, values + DONE, stride, n, out + DONE, next);
  }
  template <int M, int C>
  static void mix_columns(const E* p, const T* values, int64_t stride, int n, float* out, Next& next) {
    vec sum[M][C];
    for (int m = 0; m < M; m++) for (int c = 0; c < C; c++) sum[m][c] = load(out + m * D + c * LANES);
    for (int j = 0; j < n; j += DOTS<T> ? 2 : 1) {
      if (j % LANES == 0) next.advance(LANES);
      const T* row = values + j * stride;
      if constexpr (DOTS<T>) {
        ivec v[C];
        for (int c = 0; c < C; c++) v[c] = pairs_of_rows(row + c * LANES, stride, n - j);
        for (int m = 0; m < M; m++)
          for (int c = 0; c < C; c++) sum[m][c] = dot(sum[m][c], splat_pair(p + m * TILE + j), v[c]);
        continue;
      }
      vec v[C];
      for (int c = 0; c < C; c++) v[c] = hold(widen(row + c * LANES));
      for (int m = 0; m < M; m++)
        for (int c = 0; c < C; c++) sum[m][c] += splat(to_float(p[m * TILE + j])) * v[c];
    }
    for (int m = 0; m < M; m++) for (int c = 0; c < C; c++) store(out + m * D + c * LANES, sum[m][c]);
  }

  static vec exponential(vec x) { return sizeof(T) < sizeof(float) ? exp2_short(x) : exp2_fast(x); }

  // Online softmax step of one query: scores of visible slots [from, to) -> weights p; updates its maximum and sum.
  static void few_softmax(float* s, int from, int to, int n, float factor, float& top, float& norm, float* out, E* p) {
    int end = (n + LANES - 1) / LANES * LANES;
    if (from >= to) { std::fill(p, p + end, E{}); return; }
    std::fill(s, s + from, -INFINITY);
    std::fill(s + to, s + end, -INFINITY);
    vec most = splat(-INFINITY), sum{};
    for (int j = 0; j < end; j += LANES) most = larger(most, load(s + j));
    float best = most[0], total = 0;
    for (int i = 1; i < LANES; i++) best = std::max(best, most[i]);
    best = std::max(top, best * factor);
    for (int j = 0; j < end; j += LANES) {
      vec x = exponential(load(s + j) * factor - best);
      store(p + j, x);
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

  // Of all KV heads of an item. query: as it came, or scaled in float32; turned: rotated for the readers of a range.
  // In lanes, of each head: sums^T in blocks (D, W) of queries, their maxima and norms, and queries^T (INNER, W).
  struct Work {
    std::vector<Tile> tiles;
    Lines<T> decoded_keys = Lines<T>(TILE * D), decoded_values = decoded_keys;
    Lines<E> query, turned, keys, values, few_weights;
    Lines<Packed> laid, weights;
    Lines<float> scores, sums, top, norm;
    std::vector<int> from, to;  // of each query of a head, in slots of a range
    std::vector<int> turned_by, laid_by;  // shift of each row in `turned`, 0 for none, and in `laid`, -1 for none
    std::vector<float> distance;  // the range's position minus the query's
    std::vector<Span> spans;    // of each block of W queries
    bool is_wide = false;  // whether sums are used

    Work(int queries, int heads) : query((int64_t)queries * heads * D), turned(query.size()) {
      scores.resize(std::max(W, FEW) * TILE);
      few_weights.resize(DOTS<T> ? FEW * TILE : 0);
    }
    void make_room(int queries, int heads) {  // for queries in lanes
      int64_t padded = (queries + LANES - 1) / LANES * LANES;
      keys.resize(TILE * DEPTH);
      values.resize(TILE * D);
      weights.resize(DOTS<T> ? TILE / 2 * W : 0);
      laid.resize(heads * padded * INNER);
      sums.assign(heads * padded * D, 0.0f);
      top.assign(heads * padded, -INFINITY);
      norm.assign(heads * padded, 0.0f);
      from.resize(padded);
      to.resize(padded);
      distance.resize(padded);
      spans.resize((padded + W - 1) / W);
      is_wide = true;
      std::fill(laid_by.begin(), laid_by.end(), -1);
    }
  };

  // Values of ranges that many queries read, packed once for all of them: (groups, units, D, UNIT).
  struct Values {
    const E* at;               // null: none
    const int64_t* first;      // unit of each range, or -1
    int64_t units;
    const E* of(int segment, int t, int g) const {
      return at && first[segment] >= 0 ? at + (g * units + first[segment] + t / UNIT) * UNIT * D : nullptr;
    }
  };

  // Short ranges that are read alike, joined: a row reads as many of them as are before it, so it reads a prefix.
  struct Chains {
    std::vector<Segment> segments;  // of a chain: from 0 to its length
    std::vector<Reader> readers;
    std::vector<int32_t> slots;
    std::vector<int64_t> at;  // of each segment: its first slot in `slots`, or -1 if it is no chain
    bool joins = false;
    Chains(const Segment* seg, int segs, const Reader* rd, int count) {
      auto end = [&](int i) { return i + 1 < segs ? seg[i + 1].first : count; };
      auto is_whole = [&](int i) {
        const Reader& r = rd[seg[i].first];
        return end(i) == seg[i].first + 1 && !r.step && r.limit == seg[i].hi - seg[i].lo;
      };
      for (int i = 0, next; i < segs; i = next) {
        const Reader& r = rd[seg[i].first];
        for (next = i + 1; next < segs && is_whole(i) && is_whole(next); next++) {
          const Reader &a = rd[seg[next - 1].first], &b = rd[seg[next].first];
          if (a.shift != b.shift || a.row1 != b.row1 || a.row0 > b.row0) break;
        }
        int first = readers.size(), length = 0;
        if (next == i + 1) {
          readers.insert(readers.end(), rd + seg[i].first, rd + end(i));
          segments.push_back({seg[i].lo, seg[i].hi, first});
          at.push_back(-1);
          continue;
        }
        joins = true;
        at.push_back(slots.size());
        for (int k = i; k < next; k++) {
          for (int slot = seg[k].lo; slot < seg[k].hi; slot++) slots.push_back(slot);
          length += seg[k].hi - seg[k].lo;
          int from = rd[seg[k].first].row0, to = k + 1 < next ? rd[seg[k + 1].first].row0 : r.row1;
          if (from < to) readers.push_back({from, to, r.shift, length, 0, r.position});
        }
        segments.push_back({0, length, first});
      }
    }
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

  static vec cap(vec x, float cap) {  // cap * tanh(x / cap)
    vec size = x < 0 ? -x : x, y = exp2_fast(size * (-2 * BASE2 / cap));
    vec tanh = (1 - y) / (1 + y) * cap;
    return x < 0 ? -tanh : tanh;
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

  // Rows b0 <= r < b1 of KV heads g0 <= g < g1; acc (g1 - g0, nq, D), top and norm (g1 - g0, nq). `packed`: values of
  // the ranges that have an offset, or null.
  static void item(const Shape& s, const Rotation& rot, const Q* q, int64_t q_row, int64_t q_head, const S* K,
                   const S* Vs, const Segment* seg, int segs, const Reader* rd, int readers, int g0, int g1, int b0,
                   int b1, int size, int stripe, int stripes, const Values& packed, const Chains* chains, Work& w,
                   float* acc, float* top, float* norm) {
    int nq = (b1 - b0) * s.share, heads = g1 - g0, all = heads * nq, prepared = -1;
    for (int m = 0; m < all; m++) {
      int row = b0 + m % nq / s.share, extra = row - s.tokens;
      int token = extra < 0 ? row : s.aligned.token_of[extra];
      const Q* x = q + token * q_row + ((g0 + m / nq) * s.share + m % s.share) * q_head;
      float factor = (DOTS<T> ? 1 : s.scale) / (extra < 0 ? 1 : s.aligned.temperatures[extra]);
      for (int d = 0; d < D; d++) from_float(to_float(x[d]) * factor, w.query[(int64_t)m * D + d]);
    }
    std::fill(acc, acc + (int64_t)all * D, 0.0f);
    std::fill(top, top + all, -INFINITY);
    std::fill(norm, norm + all, 0.0f);
    w.is_wide = false;
    w.turned_by.assign(b1 - b0, 0);
    w.laid_by.resize(b1 - b0);
    split(s, seg, segs, rd, readers, b0, b1, size, stripe, stripes, w.tiles);
    static const std::vector<Tile> none;
    const auto& prefetched = packed.at || chains || sizeof(S) == sizeof(float) ? none : w.tiles;  // it does not pay in float32
    Next next(K + g0 * ROW, Vs + g0 * ROW, s.slot_stride, heads, seg, prefetched);
    for (auto [segment, t, n, active] : w.tiles) {
      int first = seg[segment].first, end = segment + 1 < segs ? seg[segment + 1].first : readers;
      bool wide = active > FEW;
      if (wide && !w.is_wide) w.make_room(nq, heads);
      if (prepared != segment) {
        rotate(s, rot, rd, first, end, b0, b1, heads, w);
        if (wide) lay(s, rot, rd, first, end, b0, b1, heads, w);
        prepared = segment;
      }
      int64_t row = (int64_t)(seg[segment].lo + t) * s.slot_stride;
      const int32_t* slots = chains && chains->at[segment] >= 0 ? &chains->slots[chains->at[segment] + t] : nullptr;
      int64_t stride = IS_CODED || slots ? D : s.slot_stride;
      if (slots) row = 0;
      for (int g = g0; g < g1; g++) {
        const E* ready = wide ? packed.of(segment, t, g) : nullptr;
        const T* k = rows(K + row + g * ROW, slots, s.slot_stride, n, w.decoded_keys);
        const T* v = ready ? nullptr : rows(Vs + row + g * ROW, slots, s.slot_stride, n, w.decoded_values);
        int64_t at = (int64_t)(g - g0) * nq;  // first query of the head
        next.begin(n);
        if (wide) {
          tile(s, g, g - g0, nq, t, n, k, v, stride, ready, next, w);
          continue;
        }
        for (int e = first; e < end; e++)
          few(s, rd[e], queries(rot, rd[e], w) + at * D, g, b0, b1, t, n, k, v, stride, next, w, acc + at * D,
              top + at, norm + at);
      }
    }
    if (w.is_wide) fold(nq, heads, w, acc, top, norm);
  }

  // Rotates the queries of the readers of a range, unless they are as for the range before.
  static void rotate(const Shape& s, const Rotation& rot, const Reader* rd, int first, int end, int b0, int b1,
                     int heads, Work& w) {
    for (int e = first; e < end; e++) {
      if (!rd[e].shift || !rot.half) continue;  // read as they came
      const float *cos = rot.cos + (int64_t)rd[e].shift * rot.half, *sin = rot.sin + (int64_t)rd[e].shift * rot.half;
      for (int row = std::max(rd[e].row0, b0) - b0; row < std::min(rd[e].row1, b1) - b0; row++) {
        if (w.turned_by[row] == rd[e].shift) continue;
        w.turned_by[row] = rd[e].shift;
        for (int i = 0; i < heads * s.share; i++) {
          int64_t m = ((int64_t)i / s.share * (b1 - b0) + row) * s.share + i % s.share;
          float x[D], y[D];
          for (int d = 0; d < D; d++) x[d] = to_float(w.query[m * D + d]);
          turn(x, y, cos, sin, rot);
          for (int d = 0; d < D; d++) from_float(y[d], w.turned[m * D + d]);
        }
      }
    }
  }
  static const E* queries(const Rotation& rot, const Reader& r, const Work& w) {
    return r.shift && rot.half ? w.turned.data() : w.query.data();
  }

  // What queries in lanes need of a range: their own ranges, and themselves, transposed.
  static void lay(const Shape& s, const Rotation& rot, const Reader* rd, int first, int end, int b0, int b1, int heads,
                  Work& w) {
    int nq = (b1 - b0) * s.share, padded = w.from.size();
    bool is_laid = true;
    std::fill(w.from.begin(), w.from.end(), 0);
    std::fill(w.to.begin(), w.to.end(), 0);
    std::vector<const E*> source(nq, w.query.data());
    for (int e = first; e < end; e++)
      for (int row = std::max(rd[e].row0, b0); row < std::min(rd[e].row1, b1); row++) {
        Range x = range(s, rd[e], row);
        is_laid &= w.laid_by[row - b0] == rd[e].shift;
        for (int m = (row - b0) * s.share; m < (row - b0 + 1) * s.share; m++) {
          w.from[m] = x.from;
          w.to[m] = x.to;
          w.distance[m] = rd[e].position - (int)s.positions[row];
          source[m] = queries(rot, rd[e], w);
        }
      }
    for (int m = nq; m < padded; m++) w.from[m] = w.from[nq - 1], w.to[m] = w.to[nq - 1];
    for (int m = 0; m < padded; m += W) {
      Span& x = w.spans[m / W] = {INT32_MAX, 0, 0, INT32_MAX};
      for (int i = m; i < std::min(m + W, padded); i++) {
        if (w.from[i] < w.to[i]) x.from = std::min(x.from, w.from[i]), x.to = std::max(x.to, w.to[i]);
        x.all_from = std::max(x.all_from, w.from[i]);
        x.all_to = std::min(x.all_to, w.to[i]);
      }
    }
    if (is_laid) return;
    std::fill(w.laid_by.begin(), w.laid_by.end(), 0);
    for (int e = first; e < end; e++)
      for (int row = std::max(rd[e].row0, b0); row < std::min(rd[e].row1, b1); row++) w.laid_by[row - b0] = rd[e].shift;
    for (int h = 0; h < heads; h++)
      for (int m = 0; m < padded; m += LANES) {
        int block = m / W * W, width = std::min(W, padded - block);
        Packed* to = &w.laid[((int64_t)h * padded + block) * INNER + m - block];
        for (int k = 0; k < INNER; k += LANES) {
          constexpr int SIZE = sizeof(Packed);
          vec r[LANES] = {};
          for (int i = 0; i < std::min(LANES, nq - m); i++)
            memcpy(&r[i], (const char*)(source[m + i] + ((int64_t)h * nq + m + i) * D) + k * SIZE,
                   std::min<int>(LANES * SIZE, D * sizeof(E) - k * SIZE));
          transpose(r);
          for (int i = 0; i < LANES; i++) store((float*)(to + (k + i) * width), r[i]);
        }
      }
  }

  // Rows of a tile as they are computed with: where they are stored, or decoded or gathered from `slots`, D elements
  // apart.
  static const T* rows(const S* stored, const int32_t* slots, int64_t stride, int n, Lines<T>& copy) {
    if constexpr (!IS_CODED)
      if (!slots) return stored;
    for (int j = 0; j < n; j++) {
      const S* row = stored + (slots ? slots[j] : j) * stride;
      if constexpr (IS_CODED) decode<D>(row, &copy[j * D]);
      else memcpy(&copy[j * D], row, D * sizeof(T));
    }
    return copy.data();
  }

  // Keys and values of a tile as operands of products: elements from row to row, and from step to step. Both are
  // copied, since rows whose distance is a power of two would displace one another in the first-level cache.
  struct Operand { const E* at; int64_t row, step; };
  static Operand key_operand(const T* k, int64_t stride, int n, Work& w) {
    int rows = (n + STEP - 1) / STEP * STEP;
    for (int j = 0; j < n; j++) {
      if constexpr (DOTS<T>) memcpy(&w.keys[j * DEPTH], k + j * stride, D * sizeof(E));
      else for (int d = 0; d < D; d += LANES) store(&w.keys[j * DEPTH + d], widen(k + j * stride + d));
    }
    std::fill(w.keys.data() + n * DEPTH, w.keys.data() + rows * DEPTH, E{});
    return {w.keys.data(), DEPTH, DOTS<T> ? UNIT : 1};
  }
  static Operand value_operand(const T* v, int64_t stride, int n, const E* packed, Next& next, Work& w) {
    if constexpr (DOTS<T>) {
      if (!packed) pack_values<D>(v, stride, n, w.values.data(), next);
      return {packed ? packed : w.values.data(), UNIT, UNIT * D};
    } else {
      for (int j = 0; j < n; j++)
        for (int d = 0; d < D; d += LANES) store(&w.values[j * D + d], widen(v + j * stride + d));
      return {w.values.data(), 1, D};
    }
  }

  // Queries in lanes of head h of an item attend to slots t <= j < t + n of a range.
  static void tile(const Shape& s, int g, int h, int nq, int t, int n, const T* k, const T* v,
                   int64_t stride, const E* packed, Next& next, Work& w) {
    int padded = w.from.size();
    Operand keys = key_operand(k, stride, n, w);
    Operand values = value_operand(v, stride, n, packed, next, w);
    for (int m = 0; m < padded; m += W) {
      int lo = std::max(w.spans[m / W].from - t, 0) / STEP * STEP, hi = std::min(w.spans[m / W].to - t, n);
      if (lo >= hi) continue;
      Operand some_keys = keys, some_values = values;
      some_keys.at += lo * keys.row;
      some_values.at += lo / (DOTS<T> ? UNIT : 1) * values.step;
      switch (std::min(W, padded - m) / LANES) {
        case 1: block<1>(s, g, h, m, t + lo, hi - lo, some_keys, some_values, w); break;
        case 2: block<2>(s, g, h, m, t + lo, hi - lo, some_keys, some_values, w); break;
        default: block<COLUMNS>(s, g, h, m, t + lo, hi - lo, some_keys, some_values, w);
      }
    }
  }
  template <int C>
  static void block(const Shape& s, int g, int h, int m, int t, int n, Operand keys, Operand values, Work& w) {
    int rows = (n + STEP - 1) / STEP * STEP;
    int64_t at = (int64_t)h * w.from.size() + m;
    float* scores = w.scores.data();
    multiply<C>(rows, keys.at, keys.row, keys.step, &w.laid[at * INNER], INNER, nullptr, scores);
    bool is_shaped = s.cap || s.slopes;
    if (is_shaped) shape_lanes<C>(s, g, m, t, n, scores, w);
    vec keep[C];
    if (!DOTS<T>) rows = n;
    softmax<C>(scores, rows, m, t, DOTS<T> && !is_shaped ? s.scale : 1.0f, w, &w.top[at], &w.norm[at], keep);
    const Packed* weights = DOTS<T> ? w.weights.data() : (const Packed*)(void*)scores;
    multiply<C>(D, values.at, values.row, values.step, weights, DOTS<T> ? rows / 2 : rows, keep, &w.sums[at * D]);
  }
  template <int C>
  static void shape_lanes(const Shape& s, int g, int m, int t, int n, float* scores, const Work& w) {
    for (int c = 0; c < C; c++) {
      vec slope{}, distance = load(&w.distance[m + c * LANES]) + (float)t;
      const float* slopes = s.slopes ? s.slopes + g * s.share : nullptr;
      for (int i = 0; i < LANES && slopes; i++) slope[i] = slopes[(m + c * LANES + i) % s.share] * BASE2;
      for (int j = 0; j < n; j++) {
        float* at = scores + (j * C + c) * LANES;
        vec x = load(at) * (DOTS<T> ? s.scale : 1.0f);
        if (s.cap) x = cap(x, s.cap);
        store(at, x + slope * (distance + (float)j));
      }
    }
  }
  // Online softmax step: scores of slots t <= j < t + rows, of which queries see their ranges -> weights; updates
  // maxima and norms. keep: factors of the sums so far.
  template <int C>
  static void softmax(float* scores, int rows, int m, int t, float factor, Work& w, float* top, float* norm,
                      vec* keep) {
    ivec from[C], to[C];
    vec most[2][C], sum[C], least[C];
    Span span = w.spans[m / W];
    for (int c = 0; c < C; c++) {
      memcpy(&from[c], &w.from[m + c * LANES], sizeof(ivec));
      memcpy(&to[c], &w.to[m + c * LANES], sizeof(ivec));
      most[0][c] = most[1][c] = splat(-INFINITY);
      sum[c] = vec{};
    }
    for (int j = 0; j < rows; j++) {
      bool whole = t + j >= span.all_from && t + j < span.all_to;
      for (int c = 0; c < C; c++) {
        float* at = scores + (j * C + c) * LANES;
        vec x = load(at);
        if (!whole) store(at, x = (from[c] <= t + j) & (to[c] > t + j) ? x : splat(-INFINITY));
        most[j % 2][c] = larger(most[j % 2][c], x);
      }
    }
    for (int c = 0; c < C; c++) {
      vec before = load(top + c * LANES), best = larger(before, larger(most[0][c], most[1][c]) * factor);
      if (DOTS<T>) best = best <= before + SLACK ? before : best;
      least[c] = larger(best, splat(-1e30f));  // finite, also for queries that have seen nothing
      keep[c] = exp2_fast(before - least[c]);
      store(top + c * LANES, best);
    }
    if constexpr (DOTS<T>) {
      for (int j = 0; j < rows; j += 2)
        for (int c = 0; c < C; c++) {
          vec x = exponential(load(scores + (j * C + c) * LANES) * factor - least[c]);
          vec y = exponential(load(scores + ((j + 1) * C + c) * LANES) * factor - least[c]);
          store((float*)&w.weights[(j / 2 * C + c) * LANES], (vec)to_pairs(x, y));
          sum[c] += x + y;
        }
    } else {
      for (int j = 0; j < rows; j++)
        for (int c = 0; c < C; c++) {
          float* at = scores + (j * C + c) * LANES;
          vec x = exponential(load(at) - least[c]);
          store(at, x);
          sum[c] += x;
        }
    }
    for (int c = 0; c < C; c++) store(norm + c * LANES, load(norm + c * LANES) * keep[c] + sum[c]);
  }

  // Adds the sums of queries in lanes to those by query.
  static void fold(int nq, int heads, const Work& w, float* acc, float* top, float* norm) {
    int64_t padded = w.from.size();
    for (int h = 0; h < heads; h++)
      for (int m = 0; m < nq; m += LANES) {
        int block = m / W * W, width = std::min<int>(W, padded - block), count = std::min(LANES, nq - m);
        float keep[LANES], add[LANES];
        for (int i = 0; i < count; i++) {
          int64_t lane = h * padded + m + i, query = (int64_t)h * nq + m + i;
          float best = std::max(top[query], w.top[lane]), base = std::max(best, -1e30f);
          keep[i] = exp2_fast(top[query] - base);
          add[i] = exp2_fast(w.top[lane] - base);
          norm[query] = norm[query] * keep[i] + w.norm[lane] * add[i];
          top[query] = best;
        }
        for (int d = 0; d < D; d += LANES) {
          vec r[LANES];
          for (int i = 0; i < LANES; i++) r[i] = load(&w.sums[(h * padded + block) * D + (d + i) * width + m - block]);
          transpose(r);
          for (int i = 0; i < count; i++) {
            float* to = acc + ((int64_t)h * nq + m + i) * D + d;
            store(to, load(to) * keep[i] + r[i] * add[i]);
          }
        }
      }
  }

  // Drops rows that see none of the slots t <= j < t + n of a range from both ends of [r0, r1).
  static void trim(const Shape& s, const Reader& r, int t, int n, int& r0, int& r1) {
    auto blind = [&](int row) { Range x = range(s, r, row); return x.to <= t || x.from >= t + n; };
    while (r0 < r1 && blind(r0)) r0++;
    while (s.window && r0 < r1 && blind(r1 - 1)) r1--;
  }

  // A reader of a tile with few queries.
  static void few(const Shape& s, const Reader& r, const E* q, int g, int b0, int b1, int t, int n, const T* k,
                  const T* v, int64_t stride, Next& next, Work& w, float* acc, float* top, float* norm) {
    int r0 = std::max(r.row0, b0), r1 = std::min(r.row1, b1);
    trim(s, r, t, n, r0, r1);
    int end = (r1 - b0) * s.share;
    for (int m = (r0 - b0) * s.share; m < end; m += FEW) {
      auto block = [&](auto count) {
        few_queries<count.value>(s, r, q, g, b0, m, t, n, k, v, stride, next, w, acc, top, norm);
      };
      switch (std::min(FEW, end - m)) {
        case 6: block(std::integral_constant<int, 6>()); break;
        case 5: block(std::integral_constant<int, 5>()); break;
        case 4: block(std::integral_constant<int, 4>()); break;
        case 3: block(std::integral_constant<int, 3>()); break;
        case 2: block(std::integral_constant<int, 2>()); break;
        default: block(std::integral_constant<int, 1>());
      }
    }
  }
  template <int M>
  static void few_queries(const Shape& s, const Reader& r, const E* q, int g, int b0, int m, int t, int n, const T* k,
                          const T* v, int64_t stride, Next& next, Work& w, float* acc, float* top, float* norm) {
    float *scores = w.scores.data(), *sums = acc + (int64_t)m * D;
    E* weights = DOTS<T> ? w.few_weights.data() : (E*)scores;
    few_scores<M>(q + (int64_t)m * D, k, stride, n, scores, next);
    for (int a = 0; a < M; a++) {
      int row = b0 + (m + a) / s.share;
      Range x = range(s, r, row);
      int from = std::clamp(x.from - t, 0, n), to = std::clamp(x.to - t, 0, n);  // may be empty
      float factor = DOTS<T> ? s.scale : 1.0f, *own = scores + a * TILE;
      if (s.cap || s.slopes) {
        float slope = s.slopes ? s.slopes[g * s.share + (m + a) % s.share] * BASE2 : 0;
        int distance = r.position + t - (int)s.positions[row];
        for (int j = 0; j < n; j += LANES) {
          vec y = load(own + j) * factor;
          store(own + j, s.cap ? cap(y, s.cap) : y);
        }
        for (int j = 0; j < n; j++) own[j] += slope * (distance + j);
        factor = 1;
      }
      few_softmax(own, from, to, n, factor, top[m + a], norm[m + a], sums + a * D, weights + a * TILE);
    }
    few_mix<M>(weights, v, stride, n, sums, next);
  }

  static void run(const Shape& s, const Rotation& rot, const Q* q, int64_t q_row, int64_t q_head, const S* K,
                  const S* Vs, Q* out, const Segment* seg, int segs, const Reader* rd, int readers, int threads) {
    int block = std::max(1, 192 / s.share), blocks = (s.rows + block - 1) / block;
    bool decode = blocks == 1 || readers >= s.rows;  // few queries a tile: split by tiles only
    int heads = decode ? s.groups : 1, parts = s.groups / heads * blocks, size = TILE, stripes = 1;
    std::optional<Chains> chains;
    if (!decode && !s.window && !s.slopes) {
      chains.emplace(seg, segs, rd, readers);
      seg = chains->segments.data(), rd = chains->readers.data();
      segs = chains->segments.size(), readers = chains->readers.size();
    }
    const Chains* joined = chains && chains->joins ? &*chains : nullptr;
    int64_t slots = 0, tiles = 0;
    for (int i = 0; i < segs; i++) slots += seg[i].hi - seg[i].lo, tiles += (seg[i].hi - seg[i].lo + TILE - 1) / TILE;
    if (decode) {
      if (threads > 1) stripes = std::min<int64_t>((threads + parts - 1) / parts, std::max<int64_t>(1, slots / 64));
      while (stripes > 1 && size > 32 && slots < 4 * stripes * size) size /= 2;
    }
    // a few items must divide evenly; many balance themselves
    while (!decode && stripes < 8 && parts < 8 * threads && parts * stripes % threads && stripes < tiles) stripes++;
    while (!decode && parts * stripes < threads && stripes < tiles) stripes++;
    if (!decode) size = 64;
    int items = parts * stripes, nq = std::min(block, s.rows) * s.share, all = heads * nq;
    int64_t kept = stripes > 1 ? (int64_t)items * all : 0;  // partial results, merged at the end
    Lines<float> acc(kept * D), top(kept), norm(kept);
    std::vector<int64_t> first(segs, -1);
    std::vector<Tile> units;  // of packed values
    for (int i = 0; i < segs && DOTS<T> && !decode; i++) {
      int end = i + 1 < segs ? seg[i + 1].first : readers, length = seg[i].hi - seg[i].lo, active = 0;
      for (int e = seg[i].first; e < end; e++) active += (rd[e].row1 - rd[e].row0) * s.share;
      if (active <= FEW) continue;
      first[i] = units.size();
      for (int t = 0; t < length; t += UNIT) units.push_back({i, t, std::min(UNIT, length - t), active});
    }
    int64_t count = units.size();
    Lines<E> values(count * s.groups * UNIT * D);
    Values packed{count ? values.data() : nullptr, first.data(), count};
#pragma omp parallel num_threads(threads)
    {
      Work w(nq, heads);
      Lines<float> own(stripes > 1 ? 0 : (int64_t)all * (D + 2));
      if constexpr (DOTS<T>) {
        Next none(K, Vs, 0, 0, seg, {});
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count * s.groups; i++) {
          Tile x = units[i % count];
          const int32_t* chain = joined && joined->at[x.segment] >= 0 ? &joined->slots[joined->at[x.segment]] : nullptr;
          const S* stored = Vs + (chain ? 0 : (int64_t)(seg[x.segment].lo + x.start) * s.slot_stride) + i / count * ROW;
          const T* v = rows(stored, chain ? chain + x.start : nullptr, s.slot_stride, x.n, w.decoded_values);
          pack_values<D>(v, IS_CODED || chain ? D : s.slot_stride, x.n, &values[i * UNIT * D], none);
        }
      }
      enter_amx();
#pragma omp for schedule(dynamic, 1)
      for (int i = 0; i < items; i++) {
        int stripe = i % stripes, part = i / stripes, g = part % (s.groups / heads) * heads;
        int b = blocks - 1 - part / (s.groups / heads), b0 = b * block, b1 = std::min(s.rows, b0 + block);
        int64_t at = (int64_t)i * all;
        float *sums = own.data(), *most = sums + all * D, *weight = most + all;
        if (stripes > 1) sums = &acc[at * D], most = &top[at], weight = &norm[at];
        item(s, rot, q, q_row, q_head, K, Vs, seg, segs, rd, readers, g, g + heads, b0, b1, size, stripe, stripes,
             packed, joined, w, sums, most, weight);
        int m = (b1 - b0) * s.share;  // queries of a head
        for (int h = 0; h < heads && stripes == 1; h++)
          merge_rows(s, sums + (int64_t)h * m * D, most + h * m, weight + h * m, 1, all, g + h, b0, b1, out);
      }
      leave_amx();
#pragma omp for schedule(static)
      for (int i = 0; i < (stripes > 1 ? s.groups * blocks : 0); i++) {
        int g = i % s.groups, b = blocks - 1 - i / s.groups, b0 = b * block, b1 = std::min(s.rows, b0 + block);
        int part = i / heads;  // of KV heads that were computed together
        int64_t at = (int64_t)part * stripes * all + (int64_t)(g % heads) * (b1 - b0) * s.share;
        merge_rows(s, &acc[at * D], &top[at], &norm[at], stripes, all, g, b0, b1, out);
      }
#pragma omp for schedule(static)
      for (int extra = 0; extra < s.rows - s.tokens; extra++)
        for (int h = 0; h < s.heads; h++) merge_aligned(s, extra, h, out);
    }
  }

  // Adds what an aligned row attends to to the result of its token.
  static void merge_aligned(const Shape& s, int extra, int h, Q* out) {
    int64_t at = (int64_t)s.aligned.token_of[extra] * s.heads + h, from = (int64_t)(s.tokens + extra) * s.heads + h;
    float own = s.aligned.lse[at], other = s.aligned.lse[from];
    if (other == -INFINITY) return;
    other = other * s.aligned.temperatures[extra] + s.aligned.log_scales[extra] * BASE2;
    float best = std::max(own, other), keep = exp2_fast(own - best), add = exp2_fast(other - best);
    float inverse = 1.0f / (keep + add);
    for (int d = 0; d < D; d++)
      from_float((to_float(out[at * D + d]) * keep + to_float(out[from * D + d]) * add) * inverse, out[at * D + d]);
  }

  // Writes rows b0 <= r < b1 of KV head g.
  static void merge_rows(const Shape& s, const float* acc, const float* top, const float* norm, int stripes, int nq,
                         int g, int b0, int b1, Q* out) {
    for (int m = 0; m < (b1 - b0) * s.share; m++) {
      int row = b0 + m / s.share, head = g * s.share + m % s.share;
      int64_t at = (int64_t)row * s.heads + head;
      merge(acc, top, norm, stripes, nq, m, s.sinks && row < s.tokens ? s.sinks + head : nullptr, out + at * D,
            s.aligned.lse ? s.aligned.lse + at : nullptr);
    }
  }

  // sink: extra softmax logit with a value of zero, or null. lse: where the log-sum-exp goes, or null.
  static void merge(const float* acc, const float* top, const float* norm, int stripes, int nq, int m,
                    const float* sink, Q* out, float* lse) {
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
    if (lse) *lse = total > 0 ? best + std::log2(total) : -INFINITY;
  }
};

template <int D, int ROW, class Q, class S>
void write(const Q* k, int64_t k_row, int64_t k_head, const Shape& s, const int64_t* slots, S* to, int threads) {
#pragma omp parallel for num_threads(threads) if (s.tokens >= 64)
  for (int r = 0; r < s.tokens; r++)
    for (int g = 0; g < s.groups; g++) {
      const Q* x = k + r * k_row + g * k_head;
      S* row = to + slots[r] * s.slot_stride + g * ROW;
      if constexpr (std::is_same_v<S, Q>) memcpy(row, x, D * sizeof(Q));
      else encode<D>(x, row);
    }
}

}  // namespace

// Arguments shared by all layers with one attention spec. Mirrors `_CMetadata` in cpp_backend.py.
struct PlanView {
  const int64_t *slots, *positions;
  const int32_t *segments, *readers;
  const float *cos, *sin, *slopes;
  const int32_t* token_of;
  const float *temperatures, *log_scales;
  int64_t tokens, rows, heads, groups, segment_count, reader_count, half, interleaved, threads, window;
  float softcap;
};

// Strides are in elements. WIDTH (head dimension), ELEMENT (float or bf16) and STORED (ELEMENT, or int8_t for the rows of
// int8_rows.py) are compiler definitions.
extern "C" void choreograph_attend(
    const PlanView* p, float scale, const ELEMENT* q, int64_t q_head, int64_t q_row, const ELEMENT* k, int64_t k_head,
    int64_t k_row, const ELEMENT* v, int64_t v_head, int64_t v_row, STORED* keys, STORED* values, ELEMENT* out,
    const float* sinks) {
  int rows = p->rows, heads = p->heads, groups = p->groups;
  using Decoded = std::conditional_t<DOTS<ELEMENT>, bf16, float>;
  using Attention = Kernel<std::conditional_t<std::is_same_v<STORED, int8_t>, Decoded, STORED>, STORED, ELEMENT, WIDTH>;
  constexpr int ROW = Attention::ROW;
  Shape s{rows, heads, groups, heads / groups, groups * ROW, scale * BASE2, p->softcap * BASE2, (int)p->window,
          p->positions, p->slopes, sinks, (int)p->tokens, {p->token_of, p->temperatures, p->log_scales, nullptr}};
  Lines<float> lse((rows - p->tokens > 0 ? (int64_t)rows : 0) * heads);
  if (rows > p->tokens) s.aligned.lse = lse.data();
  Rotation rotation{p->cos, p->sin, (int)p->half, (int)p->interleaved};
  write<WIDTH, ROW>(k, k_row, k_head, s, p->slots, keys, p->threads);
  write<WIDTH, ROW>(v, v_row, v_head, s, p->slots, values, p->threads);
  Attention::run(s, rotation, q, q_row, q_head, keys, values, out, (const Segment*)p->segments,
                              p->segment_count, (const Reader*)p->readers, p->reader_count, p->threads);
}
