// The matrix unit of AMX: its configuration, and the transpose that its operands need.

namespace headway {

#if defined(__AVX512F__)

// 16 x 16 words.
inline void transpose_words(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// 16 words each of `rows` rows, zeros for what is missing of 16, transposed. stride: from row to row.
template <typename T>
inline void load_transposed(const T* from, int64_t stride, int rows, __m512i r[16]) {
  for (int i = 0; i < 16; ++i)
    r[i] = i < rows ? _mm512_loadu_si512(from + i * stride) : _mm512_setzero_si512();
  transpose_words(r);
}

#endif

#if defined(__AMX_BF16__)

// What _tile_loadconfig reads: all eight tiles 16 rows of 64 bytes.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  TileConfig() {
    for (int tile = 0; tile < 8; ++tile) {
      bytes[tile] = 64;
      rows[tile] = 16;
    }
  }
};
static_assert(sizeof(TileConfig) == 64, "layout is the processor's");

// The calling thread's unit, configured while this object lives.
class MatrixUnit {
 public:
  MatrixUnit() {
    static const TileConfig config;
    _tile_loadconfig(&config);
  }

  // Other libraries configure the unit for themselves; a left-over state would slow switches.
  ~MatrixUnit() { _tile_release(); }

  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

#else

// There is none to configure.
class MatrixUnit {
 public:
  MatrixUnit() {}
};

#endif

}  // namespace headway
