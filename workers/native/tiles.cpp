// Products of small matrices for chunk attention, in two ways that share one interface:
// FloatTiles on vectors of float, AmxTiles on the matrix unit (bf16 operands, fp32 sums).
//
// Both work on kBlock rows of queries against a tile of kTile keys:
//   pack_keys, pack_values   lay a tile out, missing keys as zeros
//   scores                   [kBlock][kTile] = queries . keys
//   accumulate               [kBlock][head_dim] += probabilities . values
// of the tile's first `seen` keys at least: the others' probabilities are 0 in all rows.

namespace headway {

constexpr int kBlock = 16;

// c[MR][NV vectors] (+)= a[MR][depth] . b[depth][NV vectors]
template <int MR, int NV, bool kAdd>
inline void multiply(const float* a, int lda, const float* b, int ldb, int depth, float* c,
                     int ldc) {
  Floats sum[MR][NV];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) sum[r][v] = kAdd ? load(c + r * ldc + v * kLanes) : Floats{};
  for (int k = 0; k < depth; ++k) {
    Floats row[NV];
    for (int v = 0; v < NV; ++v) row[v] = load(b + k * ldb + v * kLanes);
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < NV; ++v) sum[r][v] += row[v] * a[r * lda + k];
  }
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < NV; ++v) store(c + r * ldc + v * kLanes, sum[r][v]);
}

// kBlock rows and NV vectors, in pieces that fit the registers: sums enough to be always at work.
template <int NV, bool kAdd>
inline void multiply_rows(const float* a, int lda, const float* b, int ldb, int depth, float* c,
                          int ldc) {
#if defined(__AVX512F__)
  constexpr int kRows = NV > 2 ? 4 : 8;
#else
  constexpr int kRows = NV > 1 ? 4 : 8;
#endif
  for (int r = 0; r < kBlock; r += kRows)
    multiply<kRows, NV, kAdd>(a + r * lda, lda, b, ldb, depth, c + r * ldc, ldc);
}

// kBlock rows and any whole number of vectors.
template <bool kAdd>
inline void multiply_block(const float* a, int lda, const float* b, int ldb, int depth, float* c,
                           int ldc, int columns) {
#if defined(__AVX512F__)
  constexpr int kWide = 4;
#else
  constexpr int kWide = 2;
#endif
  int column = 0;
  for (; column + kWide * kLanes <= columns; column += kWide * kLanes)
    multiply_rows<kWide, kAdd>(a, lda, b + column, ldb, depth, c + column, ldc);
  switch ((columns - column) / kLanes) {
    case 1: return multiply_rows<1, kAdd>(a, lda, b + column, ldb, depth, c + column, ldc);
    case 2: return multiply_rows<2, kAdd>(a, lda, b + column, ldb, depth, c + column, ldc);
    case 3: return multiply_rows<3, kAdd>(a, lda, b + column, ldb, depth, c + column, ldc);
  }
}

template <typename T>
class FloatTiles {
 public:
  typedef float Query;
  typedef float Probability;

  explicit FloatTiles(int head_dim) : head_dim_(head_dim) {}

  int query_stride() const { return head_dim_; }

  void copy_query(const T* from, float* to) const {
    for (int d = 0; d < head_dim_; d += kLanes) store(to + d, load(from + d));
  }

  void pack_keys(const T* keys, const int64_t* offsets, int rows) {
#if defined(__AVX512F__)
    for (int j = 0; j < kTile; j += kLanes)
      for (int d = 0; d < head_dim_; d += kLanes) {
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; ++i)
          block[i] = (__m512i)(j + i < rows ? load(keys + offsets[j + i] + d) : Floats{});
        transpose_words(block);
        for (int i = 0; i < kLanes; ++i) _mm512_store_si512(keys_ + (d + i) * kTile + j, block[i]);
      }
#else
    for (int j = 0; j < kTile; ++j)
      for (int d = 0; d < head_dim_; ++d)
        keys_[d * kTile + j] = j < rows ? to_float(keys[offsets[j] + d]) : 0.0f;
#endif
  }

  void pack_values(const T* values, const int64_t* offsets, int rows) {
    for (int j = 0; j < kTile; ++j)
      for (int d = 0; d < head_dim_; d += kLanes)
        store(values_ + j * head_dim_ + d, j < rows ? load(values + offsets[j] + d) : Floats{});
  }

  void scores(const float* queries, int seen, float* out) const {
    const int columns = (seen + kLanes - 1) / kLanes * kLanes;
    multiply_block<false>(queries, head_dim_, keys_, kTile, head_dim_, out, kTile, columns);
  }

  void accumulate(const float* probabilities, int seen, float* acc) const {
    multiply_block<true>(probabilities, kTile, values_, head_dim_, seen, acc, head_dim_,
                         head_dim_);
  }

 private:
  int head_dim_;
  alignas(64) float keys_[kMaxHeadDim * kTile];    // [head_dim][kTile]
  alignas(64) float values_[kTile * kMaxHeadDim];  // [kTile][head_dim]
};

#if defined(__AMX_BF16__)

// The operands are rows of pairs: 32 bf16 wide on the left, 16 columns of two on the right.
class AmxTiles {
 public:
  typedef Bf16 Query;
  typedef Bf16 Probability;

  explicit AmxTiles(int head_dim) : head_dim_(head_dim), padded_((head_dim + 31) / 32 * 32) {}

  int query_stride() const { return padded_; }

  void copy_query(const Bf16* from, Bf16* to) const {
    std::memcpy(to, from, head_dim_ * sizeof(Bf16));
    std::memset(to + head_dim_, 0, (padded_ - head_dim_) * sizeof(Bf16));
  }

  // keys_[pair of dimensions][key]: blocks of 16 keys x 16 pairs, transposed.
  void pack_keys(const Bf16* keys, const int64_t* offsets, int rows) {
    for (int pair = 0; pair < padded_ / 2; pair += 16) {
      const int left = head_dim_ / 2 - pair;
      const __mmask16 inside = left >= 16 ? 0xffff : (1u << left) - 1;
      for (int j = 0; j < kTile; j += 16) {
        __m512i block[16];
        for (int i = 0; i < 16; ++i)
          block[i] = j + i < rows
                         ? _mm512_maskz_loadu_epi32(inside, keys + offsets[j + i] + 2 * pair)
                         : _mm512_setzero_si512();
        transpose_words(block);
        for (int i = 0; i < 16; ++i) _mm512_store_si512(keys_ + (pair + i) * kTile + j, block[i]);
      }
    }
  }

  // values_[pair of keys][dimension]
  void pack_values(const Bf16* values, const int64_t* offsets, int rows) {
    for (int j = 0; j < kTile; j += 2)
      for (int d = 0; d < head_dim_; d += 16) {
        const __m512i even = widened(values, offsets, j, rows, d);
        const __m512i odd = _mm512_slli_epi32(widened(values, offsets, j + 1, rows, d), 16);
        _mm512_store_si512(values_ + j / 2 * head_dim_ + d, _mm512_or_si512(even, odd));
      }
  }

  void scores(const Bf16* queries, int seen, float* out) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < padded_; d += 32) {
      const uint32_t* b = keys_ + d / 2 * kTile;
      _tile_loadd(4, queries + d, padded_ * sizeof(Bf16));
      multiply_low(b, kTile * 4);
      if (seen > kTile / 2) multiply_high(b, kTile * 4);
    }
    store_four(out, kTile * 4);
  }

  void accumulate(const Bf16* probabilities, int seen, float* acc) const {
    const int stride = head_dim_ * 4;
    int d = 0;
    for (; d + 64 <= head_dim_; d += 64) {
      _tile_loadd(0, acc + d, stride);
      _tile_loadd(1, acc + d + 16, stride);
      _tile_loadd(2, acc + d + 32, stride);
      _tile_loadd(3, acc + d + 48, stride);
      for (int j = 0; j < seen; j += 32) {
        _tile_loadd(4, probabilities + j, kTile * sizeof(Bf16));
        multiply_low(values_ + j / 2 * head_dim_ + d, stride);
        multiply_high(values_ + j / 2 * head_dim_ + d, stride);
      }
      store_four(acc + d, stride);
    }
    for (; d < head_dim_; d += 16) {
      _tile_loadd(0, acc + d, stride);
      for (int j = 0; j < seen; j += 32) {
        _tile_loadd(4, probabilities + j, kTile * sizeof(Bf16));
        _tile_loadd(5, values_ + j / 2 * head_dim_ + d, stride);
        _tile_dpbf16ps(0, 4, 5);
      }
      _tile_stored(0, acc + d, stride);
    }
  }

 private:
  static __m512i widened(const Bf16* values, const int64_t* offsets, int j, int rows, int d) {
    if (j >= rows) return _mm512_setzero_si512();
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(values + offsets[j] + d)));
  }

  // Tiles 0 and 1, or 2 and 3, += tile 4 . the first, or last, two of four tiles side by side at `b`.
  static void multiply_low(const uint32_t* b, int stride) {
    _tile_loadd(5, b, stride);
    _tile_loadd(6, b + 16, stride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
  }

  static void multiply_high(const uint32_t* b, int stride) {
    _tile_loadd(5, b + 32, stride);
    _tile_loadd(6, b + 48, stride);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 6);
  }

  static void store_four(float* out, int stride) {
    _tile_stored(0, out, stride);
    _tile_stored(1, out + 16, stride);
    _tile_stored(2, out + 32, stride);
    _tile_stored(3, out + 48, stride);
  }

  int head_dim_, padded_;
  MatrixUnit unit_;
  alignas(64) uint32_t keys_[kMaxHeadDim / 2 * kTile];    // [padded / 2][kTile]
  alignas(64) uint32_t values_[kTile / 2 * kMaxHeadDim];  // [kTile / 2][head_dim]
};

#endif

}  // namespace headway
