// Vectors of float as wide as the target has them, and the few operations that attention needs.
// Written with the compilers' vector extensions, so that one source serves every level; only
// what the extensions cannot say well (reductions across lanes) is spelled out per instruction set.

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headway {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// bfloat16 as it lies in memory: the upper half of a float.
struct Bf16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline Floats splat(float value) {
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = value;
  return v;
}

inline Floats load(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

inline Floats load(const Bf16* from) {
  // Spelled out where it matters: __builtin_convertvector is split into narrow pieces.
#if defined(__AVX512F__)
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
  return (Floats)_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
  return (Floats)_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
#else
  Halves half;
  std::memcpy(&half, from, sizeof(half));
  return bit_cast<Floats>(__builtin_convertvector(half, Words) << 16);
#endif
}

inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof(v)); }

// Round to nearest even; a NaN stays a NaN, whatever its payload.
inline void store(Bf16* to, Floats v) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &half, sizeof(half));
#elif defined(__AVX512F__)
  const __m512i bits = _mm512_castps_si512((__m512)v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_or_epi32(_mm512_add_epi32(bits, bias), nan, bits,
                                               _mm512_set1_epi32(0x400000));
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  std::memcpy(to, &half, sizeof(half));
#else
  Words bits = bit_cast<Words>(v);
  Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Words quiet = (bits >> 16) | 0x40;
  Halves half = __builtin_convertvector(v == v ? rounded : quiet, Halves);
  std::memcpy(to, &half, sizeof(half));
#endif
}

inline float to_float(float x) { return x; }
inline float to_float(Bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

// b where a is smaller; a NaN in `a` stays.
inline Floats larger(Floats a, Floats b) { return a < b ? b : a; }

inline float lane_max(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
#else
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = best < v[i] ? v[i] : best;
  return best;
#endif
}

// Whether a comparison holds in any lane.
inline bool any_lane(Ints v) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, (__m512i)v) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)v) != 0;
#else
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= v[i] != 0;
  return any;
#endif
}

inline float lane_sum(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = v[0];
  for (int i = 1; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// rows[kLanes * kLanes] -> lane i is the sum of row i. Cheaper than one reduction per row.
inline Floats row_sums(const float* rows) {
#if defined(__AVX512F__)
  __m512 quad[4];
  for (int q = 0; q < 4; ++q) {
    const float* r = rows + q * 4 * kLanes;
    __m512 a = _mm512_loadu_ps(r), b = _mm512_loadu_ps(r + kLanes);
    __m512 c = _mm512_loadu_ps(r + 2 * kLanes), d = _mm512_loadu_ps(r + 3 * kLanes);
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    // Per 128-bit lane: the partial sums of a, b, c, d.
    quad[q] = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  }
  __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(quad[0], quad[1], 0x88),
                             _mm512_shuffle_f32x4(quad[0], quad[1], 0xdd));
  __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(quad[2], quad[3], 0x88),
                              _mm512_shuffle_f32x4(quad[2], quad[3], 0xdd));
  return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                               _mm512_shuffle_f32x4(low, high, 0xdd));
#elif defined(__AVX2__)
  __m256 quad[2];
  for (int q = 0; q < 2; ++q) {
    const float* r = rows + q * 4 * kLanes;
    __m256 ab = _mm256_hadd_ps(_mm256_loadu_ps(r), _mm256_loadu_ps(r + kLanes));
    __m256 cd = _mm256_hadd_ps(_mm256_loadu_ps(r + 2 * kLanes), _mm256_loadu_ps(r + 3 * kLanes));
    quad[q] = _mm256_hadd_ps(ab, cd);
  }
  return (Floats)_mm256_add_ps(_mm256_permute2f128_ps(quad[0], quad[1], 0x20),
                               _mm256_permute2f128_ps(quad[0], quad[1], 0x31));
#else
  Floats sums;
  for (int i = 0; i < kLanes; ++i) sums[i] = lane_sum(load(rows + i * kLanes));
  return sums;
#endif
}

// 2^x for x <= 0 (and a little above); 0 below -126, NaN for NaN. Relative error < 3e-7:
// x = n + f with |f| <= 1/2, and a Chebyshev fit of 2^f that is exact at 0.
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
  // The maximum returns its second operand for a NaN. What is too low is masked out, because a
  // result that underflows costs hundreds of cycles.
  const __m512 lowest = _mm512_set1_ps(-126.0f);
  const __mmask16 high_enough = _mm512_cmp_ps_mask((__m512)x, lowest, _CMP_NLT_UQ);
  const Floats safe = (Floats)_mm512_max_ps(lowest, (__m512)x);
  const Floats n = (Floats)_mm512_roundscale_ps((__m512)safe, _MM_FROUND_TO_NEAREST_INT);
#else
  const Floats lowest = splat(-126.0f);
  const Floats safe = x < lowest ? lowest : x;
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = safe + magic;
  const Floats n = shifted - magic;
#endif
  const Floats f = safe - n;
  Floats p = splat(1.3400432653725147e-3f);
  p = p * f + 9.676037356257439e-3f;
  p = p * f + 5.550327152013779e-2f;
  p = p * f + 2.402210682630539e-1f;
  p = p * f + 6.931471824645996e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps(high_enough, (__m512)p, (__m512)n);
#else
  const Words power = (bit_cast<Words>(shifted) + 127u) << 23;
  return x < lowest ? splat(0.0f) : p * bit_cast<Floats>(power);
#endif
}

// 1 / x for normal x whose reciprocal is normal; relative error < 2e-7. Half as long as a division.
inline Floats reciprocal(Floats x) {
#if defined(__AVX512F__)
  const Floats guess = (Floats)_mm512_rcp14_ps((__m512)x);
  return guess * (2.0f - x * guess);
#else
  return 1.0f / x;
#endif
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

}  // namespace headway
