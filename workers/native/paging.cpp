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

// Keys per tile for rows of this size: two tiles of keys and values, the one at work and the one that
// is being fetched, must stay in the second-level cache of a small core. Where AVX2 is the best there
// is, that cache and the fetches under way at a time are fewer: 24 KiB take 0.6 to 1.0 of the time
// of 64 there (Zen 3, one and two threads).
template <typename T>
inline int tile_rows(const Shape& shape) {
#if defined(__AVX512F__)
  constexpr int64_t kBytes = 64 << 10;
#else
  constexpr int64_t kBytes = 24 << 10;
#endif
  const int64_t fitting = kBytes / (2 * shape.row() * int64_t(sizeof(T))) / kLanes * kLanes;
  return int(fitting < kLanes ? kLanes : fitting > kTile ? kTile : fitting);
}

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

// Asks for the rows of the next tile, to be there when its turn comes, in the order in which they lie
// in memory. A head's own rows are too far apart for the processor to guess the next one; whole rows,
// all KV heads, it recognises as a stream, and reads further ahead than we could. A few lines at a
// time: a core has some tens of requests under way, and what it asks for beyond them makes the loads
// that are needed now wait as well.
template <typename T>
class RowsAhead {
 public:
  // row: elements of a row. visits: how often visit() will be called.
  RowsAhead(const T* keys, const T* values, int64_t row, const Tile& tile, int visits)
      : keys_(keys), values_(values), tile_(tile), visits_(visits) {
    row_lines_ = int((row * int64_t(sizeof(T)) + 63) / 64);
    lines_ = int64_t(tile.rows) * 2 * row_lines_;
  }

  // As many lines more as are due.
  void visit() {
    for (due_ += lines_; due_ >= visits_; due_ -= visits_) {
      if (left_ == 0 && !next_row()) return;
      __builtin_prefetch(at_, 0, 2);
      at_ += 64;
      --left_;
    }
  }

 private:
  // A key's row, then its value's. False after the last.
  bool next_row() {
    if (rows_ == 2 * tile_.rows) return false;
    const T* row = (rows_ & 1 ? values_ : keys_) + tile_.offsets[rows_ / 2];
    at_ = reinterpret_cast<const char*>(row);
    left_ = row_lines_;
    ++rows_;
    return true;
  }

  const T* keys_;
  const T* values_;
  const Tile& tile_;
  const char* at_ = nullptr;
  int64_t lines_, due_ = 0;
  int visits_, row_lines_, left_ = 0, rows_ = 0;
};

}  // namespace headway
