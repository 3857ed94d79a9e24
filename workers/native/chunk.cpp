// Attention of several query tokens of one sequence (FlashAttention; Dao et al., 2022): keys in
// tiles, a running maximum per row, scores never in memory as a whole. A row is a query token
// with one of the heads that share a KV head, so that sharing makes the products larger.

namespace headway {

// Rows whose results stay in the second-level cache while the keys stream by.
constexpr int kMaxRows = 512;

// Blocks of rows that go through each stage together: what one stage has stored is then in the
// cache, instead of on its way there, when the matrix unit loads it in the next.
constexpr int kTogether = 4;

// How far, in powers of two, a row's scores may be above what is subtracted of them.
constexpr float kSlack = 8.0f;

// State of up to kMaxRows rows (or one token's, if it has more), rounded up to whole blocks.
template <typename Tiles>
struct ChunkState {
  typedef typename Tiles::Query Query;
  std::vector<Query> queries;
  std::vector<float> acc, peak;
  std::vector<Floats> sum;

  void reset(int rows, int query_stride, int head_dim) {
    const int padded = (rows + kBlock - 1) / kBlock * kBlock;
    // Only the rows that fill up the last block are not written by the caller.
    queries.resize(size_t(padded) * query_stride);
    std::memset(queries.data() + size_t(rows) * query_stride, 0,
                size_t(padded - rows) * query_stride * sizeof(Query));
    acc.assign(size_t(padded) * head_dim, 0.0f);
    peak.assign(padded, kMinusInfinity);
    sum.assign(padded, Floats{});
  }
};

// One chunk against one KV head. T: element of the cache.
template <typename T>
struct ChunkCall {
  Shape shape;
  const int32_t* blocks;
  const T* keys;    // at the KV head
  const T* values;  // at the KV head
  const T* query;   // at the first query head of the group and the first token
  T* out;           // likewise
  int64_t query_stride, out_stride;
  int context;  // keys before the first token
  int window;   // keys that a token sees at the most
};

// Scores of a row -> probabilities of keys [hidden, visible) of the tile, 0 for the others.
template <typename Probability>
inline void softmax_row(const Shape& shape, const float* scores, int hidden, int visible,
                        float& peak, Floats& sum, float* acc, Probability* out) {
  const float scale = shape.scale_log2();
  const int head_dim = shape.head_dim;
  Floats x[kTile / kLanes];
  for (int v = 0; v < kTile / kLanes; ++v) x[v] = load(scores + v * kLanes);
  if (shape.softcap > 0)
    for (int v = 0; v < kTile / kLanes; ++v) x[v] = soft_capped(x[v], shape);
  if (visible < kTile || hidden > 0) {
    if (hidden >= kTile) {
      // Nothing seen so far and nothing here: there is no maximum to subtract.
      for (int v = 0; v < kTile / kLanes; ++v) store(out + v * kLanes, Floats{});
      return;
    }
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int v = 0; v < kTile / kLanes; ++v) {
      const Ints key = lane + v * kLanes;
      x[v] = (key < visible) & (key >= hidden) ? x[v] : splat(kMinusInfinity);
    }
  }
  Floats top = x[0];
  for (int v = 1; v < kTile / kLanes; ++v) top = larger(x[v], top);
  const float best = lane_max(top), before = peak;
  // A peak that is a little too low does no harm, and to follow every step would mean a pass over
  // the row's results in most of the first tiles, which the processor cannot foresee.
  if ((best - before) * scale > kSlack) {
    peak = best;
    const float keep = exp2((before - best) * scale);
    sum *= keep;
    for (int d = 0; d < head_dim; d += kLanes) store(acc + d, load(acc + d) * keep);
  }
  for (int v = 0; v < kTile / kLanes; ++v) {
    const Floats p = exp2((x[v] - peak) * scale);
    sum += p;
    store(out + v * kLanes, p);
  }
}

// The tile of keys [begin, begin + kTile), as far as there are `keys`; the chunk sees none before `seen`.
template <typename T>
void chunk_tile(const ChunkCall<T>& call, int begin, int seen, int keys, Tile& tile) {
  const int left = keys - begin;
  tile.rows = left < 0 ? 0 : left < kTile ? left : kTile;
  const int unseen = begin < seen ? seen - begin : 0;
  if (tile.rows == 0) return;
  tile_offsets(call.shape, call.blocks, begin + unseen, tile.rows - unseen, tile.offsets + unseen);
  // Keys that no token sees are not read: any that is seen is packed in their place.
  for (int j = 0; j < unseen; ++j) tile.offsets[j] = tile.offsets[unseen];
}

// Tokens [first, last) of the chunk.
template <typename T, typename Tiles>
void chunk_rows(const ChunkCall<T>& call, int first, int last, Tiles& tiles,
                ChunkState<Tiles>& state) {
  const Shape& shape = call.shape;
  const int group = shape.group(), head_dim = shape.head_dim, stride = tiles.query_stride();
  const int rows = (last - first) * group;
  state.reset(rows, stride, head_dim);
  for (int r = 0; r < rows; ++r)
    tiles.copy_query(call.query + (first + r / group) * call.query_stride + r % group * head_dim,
                     &state.queries[size_t(r) * stride]);
  alignas(64) float scores[kTogether * kBlock * kTile];
  alignas(64) typename Tiles::Probability probabilities[kTogether * kBlock * kTile];
  Tile both[2];
  const int keys = call.context + last, seen = first_seen(call.context + first, call.window);
  // Tiles stand where they stand without a window, however the tokens are cut into chunks.
  const int start = seen / kTile * kTile;
  chunk_tile(call, start, seen, keys, both[0]);
  for (int begin = start, turn = 0; begin < keys; begin += kTile, turn ^= 1) {
    const Tile& tile = both[turn];
    tiles.pack_keys(call.keys, tile.offsets, tile.rows);
    tiles.pack_values(call.values, tile.offsets, tile.rows);
    Tile& next = both[turn ^ 1];
    chunk_tile(call, begin + kTile, seen, keys, next);
    // The first token that sees any key of this tile.
    const int token = begin - call.context > first ? begin - call.context : first;
    const int from = (token - first) * group / kBlock * kBlock;
    // The first token from which on the window is beyond this tile.
    const int64_t beyond = int64_t(begin) + kTile - 1 + call.window - call.context;
    const int until = beyond < last ? int(beyond - first) * group : rows;
    RowsAhead<T> ahead(call.keys, call.values, head_dim, next, until > from ? until - from : 1);
    for (int block = from; block < until; block += kTogether * kBlock) {
      const int left = (until - block + kBlock - 1) / kBlock;
      const int blocks = left < kTogether ? left : kTogether;
      float* acc = &state.acc[size_t(block) * head_dim];
      // How many keys of the tile the last row of a block sees.
      int visible[kTogether];
      for (int b = 0; b < blocks; ++b) {
        const int row = block + (b + 1) * kBlock < rows ? block + (b + 1) * kBlock - 1 : rows - 1;
        const int64_t all = int64_t(call.context) + first + row / group + 1 - begin;
        visible[b] = all < kTile ? int(all) : kTile;
        tiles.scores(&state.queries[size_t(block + b * kBlock) * stride], visible[b],
                     scores + b * kBlock * kTile);
      }
      for (int r = 0; r < blocks * kBlock; ++r) {
        ahead.visit();
        // Rows that only fill the block see what the last row sees.
        const int row = block + r < rows ? block + r : rows - 1;
        const int position = call.context + first + row / group;
        softmax_row(shape, scores + r * kTile, first_seen(position, call.window) - begin,
                    position + 1 - begin, state.peak[block + r], state.sum[block + r],
                    acc + r * head_dim, probabilities + r * kTile);
      }
      for (int b = 0; b < blocks; ++b)
        tiles.accumulate(probabilities + b * kBlock * kTile, visible[b],
                         acc + b * kBlock * head_dim);
    }
  }
  for (int r = 0; r < rows; ++r) {
    T* to = call.out + (first + r / group) * call.out_stride + r % group * head_dim;
    const float inverse = 1.0f / lane_sum(state.sum[r]);
    for (int d = 0; d < head_dim; d += kLanes)
      store(to + d, load(&state.acc[size_t(r) * head_dim + d]) * inverse);
  }
}

// Tokens [first, last) of the chunk of sequence `sequence`.
struct ChunkPart {
  int sequence, first, last;
};

// The chunks [begin, end) of a step in parts that threads can share: no larger than the state, and
// several for each thread, so that none is left with the last one while the others wait. What a token
// gets does not depend on where the cuts are. The dearest part of a chunk, its end, comes first.
inline std::vector<ChunkPart> chunk_parts(const Step& step, const Shape& shape, int begin, int end) {
  constexpr int kPartsPerThread = 2, kLeastRows = kTogether * kBlock;
  const int group = shape.group(), heads = shape.num_kv_heads;
  const int most = kMaxRows / group > 0 ? kMaxRows / group : 1;
  const int wanted = (kPartsPerThread * step.threads + heads - 1) / heads;
  std::vector<ChunkPart> parts;
  for (int s = begin; s < end; ++s) {
    const int count = step.cu_seqlens_q[s + 1] - step.cu_seqlens_q[s];
    const int needed = (count + most - 1) / most;
    const int worthwhile = step.threads > 1 ? count * group / kLeastRows : 1;
    const int share = wanted / (end - begin) < worthwhile ? wanted / (end - begin) : worthwhile;
    const int pieces = needed > share ? needed : share;
    for (int piece = pieces; piece > 0; --piece)
      parts.push_back({s, int(int64_t(count) * (piece - 1) / pieces),
                       int(int64_t(count) * piece / pieces)});
  }
  return parts;
}

// Part of a chunk against one KV head.
template <typename T, typename Tiles>
void attend_chunk(const ChunkCall<T>& call, const ChunkPart& part) {
  static thread_local ChunkState<Tiles> state;
  Tiles tiles(call.shape.head_dim);
  chunk_rows(call, part.first, part.last, tiles, state);
}

}  // namespace headway
