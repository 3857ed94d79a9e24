// Attention of one query token per sequence, reading the pages where they are: one pass over K
// and V with a running maximum (online softmax; Milakov and Gimelshein, 2018), fp32 throughout.

namespace headway {

// Query heads that share a pass over a KV head's tile.
constexpr int kGroupBlock = 4;

// Partial dot products of GB queries with some keys, not yet summed over lanes: every vector of a query
// is read once for all of the keys. parts: [GB][kLanes keys][kLanes].
template <int GB, int Keys, typename T>
inline void partial_dots_of(const T* const (&keys)[Keys], const float* query, int head_dim,
                            float* parts) {
  Floats sum[Keys][GB] = {};
  for (int d = 0; d < head_dim; d += kLanes) {
    Floats q[GB];
    for (int g = 0; g < GB; ++g) q[g] = load(query + g * head_dim + d);
    for (int i = 0; i < Keys; ++i) {
      const Floats key = load(keys[i] + d);
      for (int g = 0; g < GB; ++g) sum[i][g] += key * q[g];
    }
  }
  for (int i = 0; i < Keys; ++i)
    for (int g = 0; g < GB; ++g) store(parts + (g * kLanes + i) * kLanes, sum[i][g]);
}

// The same of `rows` keys; of a number that is no multiple of the step, the last one some times more.
template <int GB, typename T>
inline void partial_dots(const T* keys, const int64_t* offsets, int rows, const float* query,
                         int head_dim, RowsAhead<T>& ahead, float* parts) {
  // As many sums as the registers hold beside the queries: each has to wait for itself.
  constexpr int kKeys = GB * 5 < kRegisters ? 4 : 2;
  for (int j = 0; j < rows; j += kKeys) {
    for (int i = 0; i < kKeys; ++i) ahead.visit();
    const T* some[kKeys];
    for (int i = 0; i < kKeys; ++i) some[i] = keys + offsets[j + i < rows ? j + i : rows - 1];
    partial_dots_of<GB, kKeys>(some, query, head_dim, parts + j * kLanes);
  }
}

#if defined(__AVX512BF16__)
// The same on pairs of bf16; head sizes are multiples of 16, so half a vector may remain.
template <int GB>
inline void partial_dots_bf16(const Bf16* keys, const int64_t* offsets, int rows,
                              const Bf16* query, int head_dim, RowsAhead<Bf16>& ahead,
                              float* parts) {
  constexpr int kPairs = 2 * kLanes;
  const int whole = head_dim / kPairs * kPairs;
  const __mmask32 rest = whole == head_dim ? 0 : 0xffff;
  for (int j = 0; j < rows; ++j) {
    ahead.visit();
    const Bf16* key = keys + offsets[j];
    __m512 sum[GB];
    for (int g = 0; g < GB; ++g) sum[g] = _mm512_setzero_ps();
    for (int d = 0; d < whole; d += kPairs) {
      const __m512bh k = (__m512bh)_mm512_loadu_si512(key + d);
      for (int g = 0; g < GB; ++g) {
        const __m512bh q = (__m512bh)_mm512_loadu_si512(query + g * head_dim + d);
        sum[g] = _mm512_dpbf16_ps(sum[g], q, k);
      }
    }
    if (rest) {
      const __m512bh k = (__m512bh)_mm512_maskz_loadu_epi16(rest, key + whole);
      for (int g = 0; g < GB; ++g) {
        const Bf16* from = query + g * head_dim + whole;
        const __m512bh q = (__m512bh)_mm512_maskz_loadu_epi16(rest, from);
        sum[g] = _mm512_dpbf16_ps(sum[g], q, k);
      }
    }
    for (int g = 0; g < GB; ++g) _mm512_storeu_ps(parts + (g * kLanes + j) * kLanes, sum[g]);
  }
}
#endif

// Queries of one sequence in the form that the dot products want.
template <typename T>
struct Queries;

template <>
struct Queries<float> {
  const float* heads;

  Queries(const float* query, int) : heads(query) {}

  template <int GB>
  void dots(const float* keys, const int64_t* offsets, int rows, int head, int head_dim,
            RowsAhead<float>& ahead, float* parts) const {
    partial_dots<GB>(keys, offsets, rows, heads + head * head_dim, head_dim, ahead, parts);
  }
};

template <>
struct Queries<Bf16> {
#if defined(__AVX512BF16__)
  const Bf16* heads;

  Queries(const Bf16* query, int) : heads(query) {}

  template <int GB>
  void dots(const Bf16* keys, const int64_t* offsets, int rows, int head, int head_dim,
            RowsAhead<Bf16>& ahead, float* parts) const {
    partial_dots_bf16<GB>(keys, offsets, rows, heads + head * head_dim, head_dim, ahead, parts);
  }
#else
  std::vector<float> heads;

  Queries(const Bf16* query, int elements) : heads(elements) {
    for (int i = 0; i < elements; i += kLanes) store(&heads[i], load(query + i));
  }

  template <int GB>
  void dots(const Bf16* keys, const int64_t* offsets, int rows, int head, int head_dim,
            RowsAhead<Bf16>& ahead, float* parts) const {
    partial_dots<GB>(keys, offsets, rows, heads.data() + head * head_dim, head_dim, ahead, parts);
  }
#endif
};

// Vectors of a value that are added to the sums of so many heads at a time: sums in registers, beside a
// value and the probabilities; in numbers that divide most heads.
constexpr int value_vectors(int heads) {
  const int sums = (kRegisters - 4) / heads;
  return sums >= 4 ? 4 : sums >= 2 ? 2 : 1;
}

// acc[GB][head_dim] = acc * keep + probabilities . values, over NV vectors of the head at a time.
template <int GB, int NV, typename T>
inline void add_values(const T* values, const int64_t* offsets, int rows,
                       const float (*probabilities)[kTile], const float* keep, int head_dim,
                       RowsAhead<T>& ahead, float* acc) {
  Floats sum[GB][NV];
  for (int g = 0; g < GB; ++g)
    for (int v = 0; v < NV; ++v) sum[g][v] = load(acc + g * head_dim + v * kLanes) * keep[g];
  for (int j = 0; j < rows; ++j) {
    ahead.visit();
    const T* value = values + offsets[j];
    for (int v = 0; v < NV; ++v) {
      const Floats x = load(value + v * kLanes);
      for (int g = 0; g < GB; ++g) sum[g][v] += x * probabilities[g][j];
    }
  }
  for (int g = 0; g < GB; ++g)
    for (int v = 0; v < NV; ++v) store(acc + g * head_dim + v * kLanes, sum[g][v]);
}

// softcap * tanh(score * scale / softcap), and the scale taken out again.
inline Floats soft_capped(Floats scores, const Shape& shape) {
  const float most = shape.softcap / shape.scale;
  const Floats y = scores * (2.88539008f / most);  // e^(2 x) by 2^y
  // Beyond, tanh is 1 in fp32. A NaN fails both comparisons and stays.
  const Floats low = splat(-64.0f), high = splat(64.0f);
  const Floats safe = y < low ? low : y > high ? high : y;
  return most - 2.0f * most / (1.0f + exp2(safe));
}

// Running state of all heads of one sequence. sum: per lane, added up at the end.
struct DecodeState {
  std::vector<float> peak, acc;
  std::vector<Floats> sum;

  DecodeState(int heads, int head_dim)
      : peak(heads, kMinusInfinity), acc(size_t(heads) * head_dim, 0.0f), sum(heads, Floats{}) {}
};

// Scores -> probabilities against the running maximum. Returns what earlier results keep.
inline float softmax_tile(float* scores, int rows, float scale, float& peak, Floats& sum) {
  Floats top = load(scores);
  for (int j = kLanes; j < rows; j += kLanes) top = larger(load(scores + j), top);
  // A negative scale would turn the order round; spec.scale is positive. The peak is not scaled: a
  // product rounded in one place and not in the other would differ by much where scores are huge.
  const float best = lane_max(top), before = peak;
  peak = best > before ? best : before;
  const float keep = peak == before ? 1.0f : exp2((before - peak) * scale);
  Floats total = sum * keep;
  for (int j = 0; j < rows; j += kLanes) {
    const Floats p = exp2((load(scores + j) - peak) * scale);
    store(scores + j, p);
    total += p;
  }
  sum = total;
  return keep;
}

// One KV head's tile for query heads [head, head + GB).
template <int GB, typename T>
void decode_heads(const Shape& shape, const Queries<T>& queries, int head, const T* keys,
                  const T* values, const Tile& tile, RowsAhead<T>& ahead, DecodeState& state) {
  alignas(64) float parts[GB * kLanes * kLanes];
  alignas(64) float scores[GB][kTile];
  for (int j = 0; j < tile.rows; j += kLanes) {
    const int here = tile.rows - j < kLanes ? tile.rows - j : kLanes;
    if (here < kLanes) {
      // The tail of a sequence: what no key stands for must not win the maximum.
      for (int g = 0; g < GB; ++g)
        for (int i = j; i < j + kLanes; ++i) scores[g][i] = kMinusInfinity;
      std::memset(parts, 0, sizeof(parts));
    }
    queries.template dots<GB>(keys, tile.offsets + j, here, head, shape.head_dim, ahead,
                              parts);
    for (int g = 0; g < GB; ++g) {
      Floats sums = row_sums(parts + g * kLanes * kLanes);
      if (shape.softcap > 0) sums = soft_capped(sums, shape);
      if (here == kLanes)
        store(&scores[g][j], sums);
      else
        std::memcpy(&scores[g][j], &sums, here * sizeof(float));
    }
  }
  float keep[GB];
  for (int g = 0; g < GB; ++g)
    keep[g] = softmax_tile(scores[g], tile.rows, shape.scale_log2(), state.peak[head + g],
                           state.sum[head + g]);
  float* acc = &state.acc[size_t(head) * shape.head_dim];
  int d = 0;
  constexpr int kVectors = value_vectors(GB);
  for (; d + kVectors * kLanes <= shape.head_dim; d += kVectors * kLanes)
    add_values<GB, kVectors>(values + d, tile.offsets, tile.rows, scores, keep, shape.head_dim,
                             ahead, acc + d);
  for (; d < shape.head_dim; d += kLanes)
    add_values<GB, 1>(values + d, tile.offsets, tile.rows, scores, keep, shape.head_dim, ahead,
                      acc + d);
}

// All heads of one tile.
template <typename T>
void decode_tile(const Shape& shape, const Queries<T>& queries, const T* keys, const T* values,
                 const Tile& tile, const Tile& coming, DecodeState& state) {
  const int group = shape.group();
  const int passes = (group + kGroupBlock - 1) / kGroupBlock;
  const int wide = value_vectors(group < kGroupBlock ? group : kGroupBlock) * kLanes;
  const int visits = tile.rows * (1 + (shape.head_dim + wide - 1) / wide);
  RowsAhead<T> ahead(keys, values, shape.row(), coming, shape.num_kv_heads * passes * visits);
  for (int kv = 0; kv < shape.num_kv_heads; ++kv) {
    const T* k = keys + int64_t(kv) * shape.head_dim;
    const T* v = values + int64_t(kv) * shape.head_dim;
    for (int g = 0; g < group; g += kGroupBlock) {
      const int head = kv * group + g;
      switch (group - g) {
        case 1: decode_heads<1>(shape, queries, head, k, v, tile, ahead, state); break;
        case 2: decode_heads<2>(shape, queries, head, k, v, tile, ahead, state); break;
        case 3: decode_heads<3>(shape, queries, head, k, v, tile, ahead, state); break;
        default: decode_heads<kGroupBlock>(shape, queries, head, k, v, tile, ahead, state);
      }
    }
  }
}

inline void fill_tile(const Shape& shape, const Context& context, int begin, int rows, Tile& tile) {
  const int left = context.length - begin;
  tile.rows = left < rows ? left : rows;
  tile_offsets(shape, context.blocks, begin, tile.rows, tile.offsets);
}

// query, out: [heads, head_dim] of one token. next: the sequence whose turn comes after.
template <typename T>
void decode_sequence(const Shape& shape, const Context& context, const Context& next,
                     const T* query, const T* keys, const T* values, T* out) {
  const int head_dim = shape.head_dim;
  DecodeState state(shape.num_heads, head_dim);
  const Queries<T> queries(query, shape.num_heads * head_dim);
  const int rows = tile_rows<T>(shape);
  Tile tiles[2];
  fill_tile(shape, context, context.first, rows, tiles[0]);
  for (int begin = context.first, turn = 0; begin < context.length; begin += rows, turn ^= 1) {
    if (begin + rows < context.length)
      fill_tile(shape, context, begin + rows, rows, tiles[turn ^ 1]);
    else
      fill_tile(shape, next, next.first, rows, tiles[turn ^ 1]);
    decode_tile(shape, queries, keys, values, tiles[turn], tiles[turn ^ 1], state);
  }
  for (int head = 0; head < shape.num_heads; ++head) {
    const float inverse = 1.0f / lane_sum(state.sum[head]);
    for (int d = 0; d < head_dim; d += kLanes) {
      const int64_t at = int64_t(head) * head_dim + d;
      store(out + at, load(&state.acc[at]) * inverse);
    }
  }
}

}  // namespace headway
