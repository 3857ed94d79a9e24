// y = x W^T + b with the weight as it was loaded, [out][in]: nothing is packed, so a weight is in
// memory once, and an embedding can be the head as well. Every element of y is summed over `in` in
// one order, whatever the number of rows: a row's bits do not depend on its neighbours.
//
//   PanelProducts   fp32: a stretch of some weights is transposed into the first-level cache
//   AmxProducts     bf16 on the matrix unit: y^T = W x^T, W being the operand that lies in rows
//   DotProducts     AVX2, fp32 and bf16: dot products along the rows as they lie, some of x with some
//                   of W at a time; what is bf16 becomes fp32 in the registers
//
// All take the outputs in groups of kOutputs whose weights stay in the nearest caches while all
// rows pass, and ask for the next group's meanwhile.

namespace headway {

// Ask for `bytes` of memory, a multiple of a line, ahead of a stream that no page boundary stops.
inline void prefetch_lines(const void* from, int64_t bytes) {
  const char* at = static_cast<const char*>(from);
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

template <typename T>
struct Product {
  const T* x;       // [rows][in]
  const T* weight;  // [out][in]
  const T* bias;    // [out], or null
  T* y;             // [rows][out]
  int rows, in, out;
};

#if defined(__AVX512F__)

class PanelProducts {
 public:
  static constexpr int kOutputs = 2 * kLanes;

  explicit PanelProducts(const Product<float>& product) : p_(product) {}

  static bool can(int in, int out) { return in % kLanes == 0 && out % kOutputs == 0; }

  // Outputs [first, first + kOutputs) of all rows.
  void group(int first, bool last) const {
    alignas(64) float panel[kDepth * kOutputs];
    const float* weight = p_.weight + int64_t(first) * p_.in;
    const int pieces = (p_.rows + kMostRows - 1) / kMostRows;
    for (int k = 0; k < p_.in; k += kDepth) {
      const int depth = p_.in - k < kDepth ? p_.in - k : kDepth;
      lay_out(weight + k, depth, panel);
      // The stretch that comes next: further along the same rows, or the next rows' first.
      const bool more = k + kDepth < p_.in;
      const int left = p_.in - k - kDepth;
      const float* next = more ? weight + k + kDepth : weight + int64_t(kOutputs) * p_.in;
      const int coming = !more ? (last ? 0 : p_.in < kDepth ? p_.in : kDepth)
                               : (left < kDepth ? left : kDepth);
      for (int piece = 0, asked = 0; piece < pieces; ++piece) {
        const int until = coming ? int64_t(kOutputs) * (piece + 1) / pieces : 0;
        for (; asked < until; ++asked)
          prefetch_lines(next + int64_t(asked) * p_.in, coming * sizeof(float));
        // Pieces of about equal height: a low one would wait for its own sums.
        const int begin = int64_t(p_.rows) * piece / pieces;
        const int end = int64_t(p_.rows) * (piece + 1) / pieces;
        multiply_rows<kMostRows>(end - begin, begin, k, depth, panel, first);
      }
    }
  }

 private:
  static constexpr int kDepth = 256;
  static constexpr int kMostRows = 12;

  // panel: [depth][kOutputs]
  void lay_out(const float* weight, int depth, float* panel) const {
    for (int n = 0; n < kOutputs; n += kLanes)
      for (int k = 0; k < depth; k += kLanes) {
        __m512i block[kLanes];
        for (int i = 0; i < kLanes; ++i)
          block[i] = _mm512_loadu_si512(weight + int64_t(n + i) * p_.in + k);
        transpose_words(block);
        for (int i = 0; i < kLanes; ++i)
          _mm512_store_si512(panel + (k + i) * kOutputs + n, block[i]);
      }
  }

  // The instance for `rows`, at most R.
  template <int R>
  void multiply_rows(int rows, int row, int k, int depth, const float* panel, int first) const {
    if constexpr (R > 1) {
      if (rows < R) return multiply_rows<R - 1>(rows, row, k, depth, panel, first);
    }
    multiply<R>(p_.x + int64_t(row) * p_.in + k, depth, panel, k == 0,
                p_.y + int64_t(row) * p_.out + first, p_.bias ? p_.bias + first : nullptr);
  }

  // y[R][kOutputs] (+)= x[R][depth] . panel. The sums begin with the bias.
  template <int R>
  void multiply(const float* x, int depth, const float* panel, bool begins, float* y,
                const float* bias) const {
    Floats low[R], high[R];
    for (int r = 0; r < R; ++r) {
      const float* from = begins ? bias : y + int64_t(r) * p_.out;
      low[r] = from ? load(from) : Floats{};
      high[r] = from ? load(from + kLanes) : Floats{};
    }
    for (int k = 0; k < depth; ++k) {
      const Floats a = load(panel + k * kOutputs), b = load(panel + k * kOutputs + kLanes);
      for (int r = 0; r < R; ++r) {
        const Floats value = (Floats)_mm512_set1_ps(x[int64_t(r) * p_.in + k]);
        low[r] += value * a;
        high[r] += value * b;
      }
    }
    for (int r = 0; r < R; ++r) {
      store(y + int64_t(r) * p_.out, low[r]);
      store(y + int64_t(r) * p_.out + kLanes, high[r]);
    }
  }

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

  // Outputs [first, first + kOutputs) of all rows.
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

 private:
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

  // Lays out x as the right-hand operand: per 16 rows and 32 inputs a tile of 1 KiB.
  explicit AmxProducts(const Product<Bf16>& product) : p_(product), steps_(product.in / 32) {
    static thread_local std::vector<__m512i> buffer;
    const int blocks = (p_.rows + 15) / 16;
    if (buffer.size() < size_t(blocks) * steps_ * 16) buffer.resize(size_t(blocks) * steps_ * 16);
    x_ = buffer.data();
    for (int block = 0; block < blocks; ++block)
      for (int step = 0; step < steps_; ++step) {
        __m512i* tile = buffer.data() + (int64_t(block) * steps_ + step) * 16;
        for (int i = 0; i < 16; ++i) {
          const int row = block * 16 + i;
          tile[i] = row < p_.rows ? _mm512_loadu_si512(p_.x + int64_t(row) * p_.in + step * 32)
                                  : _mm512_setzero_si512();
        }
        transpose_words(tile);
      }
  }

  static bool can(int in, int out) { return in % 32 == 0 && out % kOutputs == 0; }

  // Outputs [first, first + kOutputs) of all rows. The calling thread has configured its tiles.
  void group(int first, bool last) const {
    const Bf16* weight = p_.weight + int64_t(first) * p_.in;
    // The next group's weights are asked for step by step over all rows: as many requests at once
    // as a group is long would have to wait for each other.
    const int passes = (p_.rows + 31) / 32;
    const int lines = (kOutputs + passes - 1) / passes;
    Stream next = {reinterpret_cast<const char*>(weight + int64_t(kOutputs) * p_.in), lines,
                   last ? 0 : int64_t(kOutputs) * p_.in * int64_t(sizeof(Bf16)) / 64};
    int row = 0;
    for (; row + 16 < p_.rows; row += 32) multiply<2>(weight, row, first, next);
    if (row < p_.rows) multiply<1>(weight, row, first, next);
  }

 private:
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

  // 32 outputs of 16 * MB rows.
  template <int MB>
  void multiply(const Bf16* weight, int row, int first, Stream& next) const {
    _tile_zero(0);
    _tile_zero(1);
    if (MB == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    const __m512i* x = x_ + int64_t(row / 16) * steps_ * 16;
    const int64_t stride = int64_t(p_.in) * sizeof(Bf16);
    for (int step = 0; step < steps_; ++step) {
      _tile_loadd(4, weight + step * 32, stride);
      _tile_loadd(5, weight + 16 * int64_t(p_.in) + step * 32, stride);
      _tile_loadd(6, x + step * 16, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (MB == 2) {
        _tile_loadd(7, x + (steps_ + step) * 16, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      next.ask();
    }
    alignas(64) __m512i sums[MB * 2][16];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (MB == 2) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
    }
    for (int block = 0; block < MB; ++block) {
      const int left = p_.rows - row - block * 16;
      finish(&sums[2 * block][0], left < 16 ? left : 16, row + block * 16, first);
    }
  }

  // sums: two tiles of [16 outputs][16 rows] -> `count` rows of y.
  void finish(__m512i* sums, int count, int row, int first) const {
    transpose_words(sums);
    transpose_words(sums + 16);
    __m512 low = _mm512_setzero_ps(), high = low;
    if (p_.bias) {
      low = (__m512)load(p_.bias + first);
      high = (__m512)load(p_.bias + first + 16);
    }
    Bf16* to = p_.y + int64_t(row) * p_.out + first;
    for (int i = 0; i < count; ++i, to += p_.out) {
      const __m512 a = _mm512_add_ps(_mm512_castsi512_ps(sums[i]), low);
      const __m512 b = _mm512_add_ps(_mm512_castsi512_ps(sums[16 + i]), high);
      _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
    }
  }

  const Product<Bf16> p_;
  const int steps_;
  const __m512i* x_;
};

#endif

// Groups in contiguous shares, so that each thread reads one stretch of memory.
template <typename Products, typename T>
void multiply_all(const Product<T>& product, int threads) {
  const Products products(product);
  const int groups = product.out / Products::kOutputs;
  const int shares = threads < groups ? threads : groups;
  in_parallel(shares, threads, [&](int share) {
    const MatrixUnit unit;
    const int begin = int64_t(groups) * share / shares, end = int64_t(groups) * (share + 1) / shares;
    for (int g = begin; g < end; ++g) products.group(g * Products::kOutputs, g + 1 == end);
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
  static void run(const Product<T>&, int) {}
};
template <typename T>
struct Linear<T, std::void_t<typename ProductsFor<T>::type>> {
  typedef typename ProductsFor<T>::type Products;
  static bool can(int in, int out) { return Products::can(in, out); }
  static void run(const Product<T>& product, int threads) {
    multiply_all<Products>(product, threads);
  }
};

}  // namespace headway
