// What a step and its cache look like to the kernels. Mirrored by structures in bindings.py.

namespace headway {

// Keys per tile: what is held in registers, scores and the first-level cache at once.
constexpr int kTile = 64;
constexpr int kMaxHeadDim = 256;
static_assert(kTile % kLanes == 0, "tiles are whole vectors");

// Views of one step; see StepMeta. threads: how many may work on it.
struct Step {
  const int32_t* block_table;
  const int32_t* cu_seqlens_q;
  const int32_t* seqused_k;
  int32_t table_stride;
  int32_t num_seqs;
  int32_t num_decodes;
  int32_t threads;
};

struct Shape {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t block_size;
  float scale;
  float softcap;  // 0: none

  int group() const { return num_heads / num_kv_heads; }
  int64_t row() const { return int64_t(num_kv_heads) * head_dim; }
  // Softmax in base 2: the factor goes into the scale.
  float scale_log2() const { return scale * 1.44269504f; }
};

// How many keys a query sees without a sliding window.
constexpr int kNoWindow = std::numeric_limits<int>::max();

// The first key that the query at `position` sees through a window of so many keys.
inline int first_seen(int position, int window) {
  return position < window ? 0 : position - window + 1;
}

// What the last query of one sequence sees: keys [first, length) and the blocks they are in.
struct Context {
  const int32_t* blocks = nullptr;
  int first = 0;
  int length = 0;
};

// Keys of one sequence that are at work on together. offsets: see tile_offsets.
struct Tile {
  int rows = 0;
  int64_t offsets[kTile];
};

// Where positions [begin, begin + count) of a sequence start in the cache, in elements.
// Positions beyond are left alone: they are never read.
inline void tile_offsets(const Shape& shape, const int32_t* blocks, int begin, int count,
                         int64_t* offsets) {
  int page = begin / shape.block_size, within = begin % shape.block_size;
  for (int j = 0; j < count; ++j) {
    offsets[j] = (int64_t(blocks[page]) * shape.block_size + within) * shape.row();
    if (++within == shape.block_size) {
      within = 0;
      ++page;
    }
  }
}

// Ask for `count` rows of a KV head, to be there when their tile's turn comes. The rows of one head
// lie too far apart for the processor to guess the next one.
template <typename T>
inline void prefetch(const T* head, const int64_t* offsets, int count, int head_dim) {
  constexpr int kLine = 64 / sizeof(T);
  for (int j = 0; j < count; ++j)
    for (int d = 0; d < head_dim; d += kLine) __builtin_prefetch(head + offsets[j] + d, 0, 2);
}

}  // namespace headway
