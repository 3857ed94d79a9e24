// y = x W^T + b with the weight packed once, at load, into the order in which the products read it;
// a row of W can still be looked up, so that an embedding can be the head and be in memory once.
// Every element of y is summed over `in` in one order, whatever the number of rows: a row's bits do
// not depend on its neighbours.
//
//   PanelProducts   fp32, AVX512: panels of 16 outputs, all their weights for one input side by side
//   AmxProducts     bf16 on the matrix unit: its right-hand operands, tile after tile
//   DotProducts     AVX2, fp32 and bf16: the rows as they are, for dot products of some rows of x
//                   with some of W at a time; what is bf16 becomes fp32 in the registers
//
// Each offers
//   can(in, out)               whether it takes such a weight
//   kOutputs                   outputs per group; a group's weights are contiguous
//   pack(weight, in, out, to)  from [out][in]
//   row(packed, in, id, to)    W[id] again
//   groups(first, end)         those outputs of all rows

namespace headway {

template <typename T>
struct Product {
  const T* x;       // [rows][in]
  const T* weight;  // packed
  const T* bias;    // [out], or null
  T* y;             // [rows][out]
  int rows, in, out;
};

// Rows that all weights pass before the next ones' turn: what is read of x must stay within the
// second-level cache beside the weights. With 2 MiB of it, anything from 256 KiB to 1 MiB takes the same
// time (Sapphire Rapids, two threads); others have less.
inline int rows_per_block(int rows, int in, int element_bytes) {
  constexpr int64_t kBytes = 1 << 18;
  const int64_t fitting = kBytes / (int64_t(in) * element_bytes);
  const int blocks = fitting < 1 ? rows : int((rows + fitting - 1) / fitting);
  return blocks ? (rows + blocks - 1) / blocks : 0;
}

#if defined(__AVX512F__)

class PanelProducts {
 public:
  static constexpr int kOutputs = kLanes;

  // Few rows are laid out side by side, [in][rows]: what a step of the sums takes of them is then one
  // line, behind one pointer.
  explicit PanelProducts(const Product<float>& product) : p_(product) {
    if (p_.rows > kFewRows) return;
    static thread_local std::vector<float> buffer;
    const size_t elements = size_t(p_.rows) * p_.in;
    if (buffer.size() < elements) buffer.resize(elements);
    side_by_side_ = buffer.data();
    const __mmask16 real = (1u << p_.rows) - 1;
    for (int k = 0; k < p_.in; k += kLanes) {
      __m512i block[kLanes];
      load_transposed(p_.x + k, p_.in, p_.rows, block);
      for (int i = 0; i < kLanes; ++i)
        _mm512_mask_storeu_epi32(buffer.data() + int64_t(k + i) * p_.rows, real, block[i]);
    }
  }

  static bool can(int in, int out) { return in % kLanes == 0 && out % kOutputs == 0; }

  static void pack(const float* weight, int in, int out, float* to) {
    for (int n = 0; n < out; n += kLanes)
      for (int k = 0; k < in; k += kLanes) {
        __m512i block[kLanes];
        load_transposed(weight + int64_t(n) * in + k, in, kLanes, block);
        for (int i = 0; i < kLanes; ++i)
          _mm512_storeu_si512(to + int64_t(n) * in + int64_t(k + i) * kLanes, block[i]);
      }
  }

  static void row(const float* packed, int in, int id, float* to) {
    const float* from = packed + int64_t(id / kLanes) * kLanes * in + id % kLanes;
    for (int k = 0; k < in; ++k) to[k] = from[int64_t(k) * kLanes];
  }

  void groups(int first, int end) const {
    if (p_.rows <= kFewRows) {
      // One panel at a time passes them soonest.
      for (int n = first; n < end; n += kLanes)
        multiply_rows<kFewRows, 1, kFarAhead, true>(p_.rows, 0, n);
      return;
    }
    const int block = rows_per_block(p_.rows, p_.in, sizeof(float));
    for (int row = 0; row < p_.rows; row += block) {
      const int rows = p_.rows - row < block ? p_.rows - row : block;
      int n = first;
      // Three panels share what is read of the rows.
      for (; n + 3 * kLanes <= end; n += 3 * kLanes) panels<3>(row, rows, n);
      for (; n < end; n += kLanes) panels<1>(row, rows, n);
    }
  }

 private:
  static constexpr int kFewRows = 16;
  // How far ahead, in floats, a panel is asked for: by the first rows, which find it in memory, and
  // by later ones, which find it in the second-level cache.
  static constexpr int kFarAhead = 4096, kAhead = 1024;

  // [row, row + rows) of x with P panels.
  template <int P>
  void panels(int row, int rows, int first) const {
    // Sums beside P weights and a value of x.
    constexpr int kMost = (kRegisters - P - 2) / P < 16 ? (kRegisters - P - 2) / P : 16;
    const int pieces = (rows + kMost - 1) / kMost;
    for (int piece = 0; piece < pieces; ++piece) {
      // Pieces of about equal height: a low one would wait for its own sums.
      const int begin = row + int64_t(rows) * piece / pieces;
      const int count = row + int64_t(rows) * (piece + 1) / pieces - begin;
      if (piece == 0)
        multiply_rows<kMost, P, kFarAhead, false>(count, begin, first);
      else
        multiply_rows<kMost, P, kAhead, false>(count, begin, first);
    }
  }

  // The instance for `rows`, at most R.
  template <int R, int P, int kDistance, bool kSideBySide>
  void multiply_rows(int rows, int row, int first) const {
    if constexpr (R > 1) {
      if (rows < R) return multiply_rows<R - 1, P, kDistance, kSideBySide>(rows, row, first);
    }
    multiply<R, P, kDistance, kSideBySide>(row, first);
  }

  // y[R][P panels] = x[R][in] . panels. The sums begin with the bias.
  template <int R, int P, int kDistance, bool kSideBySide>
  void multiply(int row, int first) const {
    const float* x = kSideBySide ? side_by_side_ : p_.x + int64_t(row) * p_.in;
    const float* weight = p_.weight + int64_t(first) * p_.in;
    const int64_t panel = int64_t(kLanes) * p_.in;
    Floats sum[R][P];
    for (int p = 0; p < P; ++p) {
      const Floats start = p_.bias ? load(p_.bias + first + p * kLanes) : Floats{};
      for (int r = 0; r < R; ++r) sum[r][p] = start;
    }
    for (int k = 0; k < p_.in; ++k, weight += kLanes, x += kSideBySide ? R : 1) {
      Floats w[P];
      for (int p = 0; p < P; ++p) {
        __builtin_prefetch(weight + p * panel + kDistance, 0, 3);
        w[p] = load(weight + p * panel);
      }
      for (int r = 0; r < R; ++r) {
        const Floats value = (Floats)_mm512_set1_ps(x[kSideBySide ? r : int64_t(r) * p_.in]);
        for (int p = 0; p < P; ++p) sum[r][p] += value * w[p];
      }
    }
    float* y = p_.y + int64_t(row) * p_.out + first;
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < P; ++p) store(y + int64_t(r) * p_.out + p * kLanes, sum[r][p]);
  }

  const float* side_by_side_ = nullptr;
  const Product<float> p_;
};

#endif

#if defined(__AVX2__) && !defined(__AVX512F__)

template <typename T>
class DotProducts {
 public:
  static constexpr int kOutputs = 16;

  // x of bf16 is widened once for all outputs.
  explicit DotProducts(const Product<T>& product) : p_(product) {
    if constexpr (std::is_same_v<T, float>) {
      x_ = p_.x;
    } else {
      static thread_local std::vector<float> buffer;
      const size_t elements = size_t(p_.rows) * p_.in;
      if (buffer.size() < elements) buffer.resize(elements);
      for (size_t i = 0; i < elements; i += kLanes) store(&buffer[i], load(p_.x + i));
      x_ = buffer.data();
    }
  }

  static bool can(int in, int out) { return in % kLanes == 0 && out % kOutputs == 0; }

  static void pack(const T* weight, int in, int out, T* to) {
    std::memcpy(to, weight, int64_t(in) * out * sizeof(T));
  }

  static void row(const T* packed, int in, int id, T* to) {
    std::memcpy(to, packed + int64_t(id) * in, int64_t(in) * sizeof(T));
  }

  // A group's weights stay in the nearest caches while all rows pass, and the next one's are asked
  // for meanwhile.
  void groups(int first, int end) const {
    for (int n = first; n < end; n += kOutputs) group(n, n + kOutputs == end);
  }

 private:
  void group(int first, bool last) const {
    const T* weight = p_.weight + int64_t(first) * p_.in;
    const char* next = reinterpret_cast<const char*>(weight + int64_t(kOutputs) * p_.in);
    const int64_t coming = last ? 0 : int64_t(kOutputs) * p_.in * int64_t(sizeof(T)) / 64;
    const int pieces = (p_.rows + kRows - 1) / kRows;
    int64_t asked = 0;
    for (int piece = 0; piece < pieces; ++piece) {
      // Pieces of about equal height: a low one would wait for its own sums.
      const int begin = int64_t(p_.rows) * piece / pieces;
      const int end = int64_t(p_.rows) * (piece + 1) / pieces;
      const Ahead ahead = {next + asked * 64, coming * (piece + 1) / pieces - asked};
      multiply_rows<kRows>(end - begin, begin, weight, first, ahead);
      asked += ahead.lines;
    }
  }

  // Twelve sums, three of x and one of W are the sixteen registers.
  static constexpr int kRows = 3, kColumns = 4;

  // Lines of the next group's weights to ask for.
  struct Ahead {
    const char* at;
    int64_t lines;
  };

  // The instance for `rows`, at most R.
  template <int R>
  void multiply_rows(int rows, int row, const T* weight, int first, const Ahead& ahead) const {
    if constexpr (R > 1) {
      if (rows < R) return multiply_rows<R - 1>(rows, row, weight, first, ahead);
    }
    alignas(64) float sums[R][kOutputs];
    constexpr int kTurns = kOutputs / kColumns;
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t begin = ahead.lines * turn / kTurns;
      const Ahead share = {ahead.at + begin * 64, ahead.lines * (turn + 1) / kTurns - begin};
      const int column = turn * kColumns;
      multiply<R>(x_ + int64_t(row) * p_.in, weight + int64_t(column) * p_.in, share,
                  &sums[0][column]);
    }
    for (int r = 0; r < R; ++r) {
      T* to = p_.y + int64_t(row + r) * p_.out + first;
      for (int n = 0; n < kOutputs; n += kLanes) {
        Floats sum = load(&sums[r][n]);
        if (p_.bias) sum += load(p_.bias + first + n);
        store(to + n, sum);
      }
    }
  }

  // sums[R][kColumns] = x[R][in] . W[kColumns][in], the rows of sums kOutputs apart.
  template <int R>
  void multiply(const float* x, const T* weight, const Ahead& ahead, float* sums) const {
    Floats sum[R][kColumns] = {};
    const auto step = [&](int k) __attribute__((always_inline)) {
      Floats value[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) value[r] = load(x + int64_t(r) * p_.in + k);
#pragma GCC unroll 4
      for (int n = 0; n < kColumns; ++n) {
        const Floats w = load(weight + int64_t(n) * p_.in + k);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][n] += value[r] * w;
      }
    };
    // Several steps per turn: on a core that two threads share it is instructions that count.
    constexpr int kTurn = 4 * kLanes;
    const int turns = p_.in / kTurn;
    // An even pace: as many requests as a group is long would have to wait for each other.
    const int64_t pace = turns ? (ahead.lines + turns - 1) / turns : 0;
    int64_t asked = 0;
    int k = 0;
    for (; k + kTurn <= p_.in; k += kTurn) {
      for (int64_t i = 0; i < pace && asked < ahead.lines; ++i, ++asked)
        __builtin_prefetch(ahead.at + asked * 64, 0, 2);
#pragma GCC unroll 4
      for (int i = 0; i < kTurn; i += kLanes) step(k + i);
    }
    for (; k < p_.in; k += kLanes) step(k);
    for (int r = 0; r < R; ++r) _mm_store_ps(sums + r * kOutputs, total(sum[r]));
  }

  // The sums over the lanes of four vectors.
  static __m128 total(const Floats v[kColumns]) {
    const __m256 ab = _mm256_hadd_ps((__m256)v[0], (__m256)v[1]);
    const __m256 cd = _mm256_hadd_ps((__m256)v[2], (__m256)v[3]);
    const __m256 abcd = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
  }

  const Product<T> p_;
  const float* x_;
};

#endif

#if defined(__AMX_BF16__)

class AmxProducts {
 public:
  static constexpr int kOutputs = 32;

  explicit AmxProducts(const Product<Bf16>& product) : p_(product) {
    const int whole = p_.rows / kHigh * kHigh, left = p_.rows - whole;
    if (left == 0) return;
    // Tiles are read whole: the last rows from where there are zeros after them.
    static thread_local std::vector<Bf16> buffer;
    const int64_t elements = int64_t(kHigh) * p_.in, real = int64_t(left) * p_.in;
    if (int64_t(buffer.size()) < elements) buffer.resize(elements);
    std::memcpy(buffer.data(), p_.x + int64_t(whole) * p_.in, real * sizeof(Bf16));
    std::memset(buffer.data() + real, 0, (elements - real) * sizeof(Bf16));
    last_rows_ = buffer.data();
  }

  static bool can(int in, int out) { return in % kDeep == 0 && out % kOutputs == 0; }

  // Per 32 outputs and 32 inputs two tiles of 1 KiB: [pair of inputs][output][2].
  static void pack(const Bf16* weight, int in, int out, Bf16* to) {
    for (int n = 0; n < out; n += kHigh)
      for (int k = 0; k < in; k += kDeep) {
        __m512i tile[16];
        load_transposed(weight + int64_t(n) * in + k, in, kHigh, tile);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + place(in, n, k) + 32 * i, tile[i]);
      }
  }

  static void row(const Bf16* packed, int in, int id, Bf16* to) {
    for (int k = 0; k < in; k += kDeep) {
      const Bf16* from = packed + place(in, id, k) + 2 * (id % kHigh);
      for (int i = 0; i < kDeep; i += 2) std::memcpy(to + k + i, from + 16 * i, 2 * sizeof(Bf16));
    }
  }

  // The calling thread has configured its tiles.
  void groups(int first, int end) const {
    const int most = rows_per_block(p_.rows, p_.in, sizeof(Bf16));
    const int block = (most + 2 * kHigh - 1) / (2 * kHigh) * (2 * kHigh);
    for (int row = 0; row < p_.rows; row += block) {
      const int until = p_.rows - row < block ? p_.rows : row + block;
      for (int n = first; n < end; n += kOutputs) group(row, until, n, n + kOutputs == end);
    }
  }

 private:
  // Rows and bytes / 2 of a tile.
  static constexpr int kHigh = 16, kDeep = 32;

  // Memory to ask for, so many lines at a time, until none is left.
  struct Stream {
    const char* at;
    int lines;
    int64_t left;

    void ask() {
      if (left <= 0) return;
      for (int i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
      at += lines * 64;
      left -= lines;
    }
  };

  // Where the tile of output n and input k begins.
  static int64_t place(int in, int n, int k) {
    const int64_t group = int64_t(n / kOutputs) * kOutputs * in;
    return group + (k / kDeep * 2 + n % kOutputs / kHigh) * int64_t(kHigh * kDeep);
  }

  // The next group's weights are asked for step by step over the rows: as many requests at once as
  // a group is long would have to wait for each other.
  void group(int row, int until, int first, bool last) const {
    const Bf16* weight = p_.weight + int64_t(first) * p_.in;
    const int passes = (until - row + 2 * kHigh - 1) / (2 * kHigh);
    const int lines = (kOutputs + passes - 1) / passes;
    Stream next = {reinterpret_cast<const char*>(weight + int64_t(kOutputs) * p_.in), lines,
                   last ? 0 : int64_t(kOutputs) * p_.in * int64_t(sizeof(Bf16)) / 64};
    for (; row + kHigh < until; row += 2 * kHigh) multiply<2>(weight, row, first, next);
    if (row < until) multiply<1>(weight, row, first, next);
  }

  const Bf16* rows_at(int row) const {
    return row + kHigh <= p_.rows ? p_.x + int64_t(row) * p_.in : last_rows_;
  }

  // 32 outputs of 16 * MB rows.
  template <int MB>
  void multiply(const Bf16* weight, int row, int first, Stream& next) const {
    _tile_zero(0);
    _tile_zero(1);
    if (MB == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const Bf16* low = rows_at(row);
    const Bf16* high = MB == 2 ? rows_at(row + kHigh) : low;
    const int64_t stride = int64_t(p_.in) * sizeof(Bf16);
    for (int k = 0; k < p_.in; k += kDeep) {
      _tile_loadd(6, weight + 2 * kHigh * k, 64);
      _tile_loadd(7, weight + 2 * kHigh * k + kHigh * kDeep, 64);
      _tile_loadd(4, low + k, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (MB == 2) {
        _tile_loadd(5, high + k, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      next.ask();
    }
    alignas(64) float sums[2 * MB][kHigh * 16];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (MB == 2) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    }
    for (int block = 0; block < MB; ++block) {
      const int left = p_.rows - row - block * kHigh;
      finish(sums[2 * block], sums[2 * block + 1], left < kHigh ? left : kHigh,
             row + block * kHigh, first);
    }
  }

  // Two tiles of [16 rows][16 outputs] -> `count` rows of y.
  void finish(const float* low, const float* high, int count, int row, int first) const {
    Floats a{}, b{};
    if (p_.bias) {
      a = load(p_.bias + first);
      b = load(p_.bias + first + 16);
    }
    Bf16* to = p_.y + int64_t(row) * p_.out + first;
    for (int i = 0; i < count; ++i, to += p_.out) {
      const __m512 left = (__m512)(load(low + 16 * i) + a), right = (__m512)(load(high + 16 * i) + b);
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(right, left));
    }
  }

  const Product<Bf16> p_;
  const Bf16* last_rows_ = nullptr;
};

#endif

// Groups in contiguous shares, so that each thread reads one stretch of memory.
template <typename Products, typename T>
void multiply_all(const Product<T>& product, int threads) {
  if (product.rows == 0) return;
  const Products products(product);
  const int groups = product.out / Products::kOutputs;
  const int shares = threads < groups ? threads : groups;
  in_parallel(shares, threads, [&](int share) {
    const MatrixUnit unit;
    const int begin = int64_t(groups) * share / shares, end = int64_t(groups) * (share + 1) / shares;
    products.groups(begin * Products::kOutputs, end * Products::kOutputs);
  });
}

#if defined(__AVX512F__)
template <typename T>
struct ProductsFor;
template <>
struct ProductsFor<float> {
  typedef PanelProducts type;
};
#elif defined(__AVX2__)
template <typename T>
struct ProductsFor {
  typedef DotProducts<T> type;
};
#else
template <typename T>
struct ProductsFor;
#endif
#if defined(__AMX_BF16__)
template <>
struct ProductsFor<Bf16> {
  typedef AmxProducts type;
};
#endif

template <typename T, typename = void>
struct Linear {
  static bool can(int, int) { return false; }
  static void pack(const T*, int, int, T*) {}
  static void row(const T*, int, int, T*) {}
  static void run(const Product<T>&, int) {}
};
template <typename T>
struct Linear<T, std::void_t<typename ProductsFor<T>::type>> {
  typedef typename ProductsFor<T>::type Products;
  static bool can(int in, int out) { return Products::can(in, out); }
  static void pack(const T* weight, int in, int out, T* to) { Products::pack(weight, in, out, to); }
  static void row(const T* packed, int in, int id, T* to) { Products::row(packed, in, id, to); }
  static void run(const Product<T>& product, int threads) {
    multiply_all<Products>(product, threads);
  }
};

}  // namespace headway
