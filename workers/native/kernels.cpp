// The library's entry points; see bindings.py, which declares the same signatures. The one file
// that is compiled: the others are parts of it.

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

// clang-format off
#include "simd.cpp"
#include "pool.cpp"
#include "paging.cpp"
#include "decode.cpp"
#include "matrix.cpp"
#include "tiles.cpp"
#include "products.cpp"
#include "chunk.cpp"
#include "attend.cpp"
#include "elementwise.cpp"
#include "sampling.cpp"
#include "nucleus.cpp"
#include "collective.cpp"
#include "layout.cpp"
#include "layers.cpp"
// clang-format on

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#endif

using headway::Bf16;
using headway::Shape;
using headway::Step;

#define HEADWAY_EXPORT __attribute__((visibility("default")))

extern "C" {

// 0 when the library can run here; the matrix unit has to be asked for once per process.
HEADWAY_EXPORT int headway_prepare() {
#if defined(__AMX_BF16__)
  const int kRequestPermission = 0x1023, kTileData = 18;
  return int(syscall(SYS_arch_prctl, kRequestPermission, kTileData));
#else
  return 0;
#endif
}

HEADWAY_EXPORT int headway_lay_out(const headway::Layout* layout, const headway::RowFields* rows,
                                   int32_t count, int32_t all_pages, headway::LaidOut* result) {
  return headway::lay_out(*layout, rows, count, all_pages, *result);
}

#define HEADWAY_ENTRY_POINTS(T, suffix)                                                          \
  HEADWAY_EXPORT void headway_attend_##suffix(const Step* step, const Shape* shape, int32_t window, const T* query, \
                               int64_t query_stride, const T* keys, const T* values, T* out) {   \
    headway::attend(*step, *shape, window, query, query_stride, keys, values, out);              \
  }                                                                                              \
  HEADWAY_EXPORT void headway_write_kv_##suffix(const Shape* shape, const T* key, const T* value,               \
                                 int64_t key_stride, int64_t value_stride, const int32_t* slots, \
                                 int32_t tokens, T* keys, T* values) {                           \
    headway::write_kv(*shape, key, value, key_stride, value_stride, slots, tokens, keys,         \
                      values);                                                                   \
  }                                                                                              \
  HEADWAY_EXPORT void headway_rotate_and_write_##suffix(const Shape* shape, const T* heads, const float* cos,   \
                                         const float* sin, const int32_t* slots, int32_t tokens, \
                                         T* query, T* keys, T* values, int32_t threads) {        \
    headway::rotate_and_write(*shape, heads, cos, sin, slots, tokens, query, keys, values,       \
                              threads);                                                          \
  }                                                                                              \
  HEADWAY_EXPORT void headway_silu_mul_##suffix(const T* gate_up, int32_t rows, int32_t width, T* out, int32_t threads) {        \
    headway::gate_mul<headway::Silu>(gate_up, rows, width, out, threads);                                 \
  }                                                                                              \
  HEADWAY_EXPORT void headway_gelu_mul_##suffix(const T* gate_up, int32_t rows, int32_t width, T* out, int32_t threads) {        \
    headway::gate_mul<headway::Gelu>(gate_up, rows, width, out, threads);                                 \
  }

#define HEADWAY_SAMPLING(T, suffix)                                                              \
  HEADWAY_EXPORT void headway_largest_##suffix(const T* logits, int32_t rows, int32_t vocab,     \
                                               float* peaks, int32_t* ids, int32_t threads) {    \
    headway::largest(logits, rows, vocab, peaks, ids, threads);                                  \
  }                                                                                              \
  HEADWAY_EXPORT void headway_race_##suffix(const T* logits, const float* peaks,                 \
                                            const float* temperatures, const uint32_t* keys,     \
                                            int32_t rows, int32_t vocab, int32_t* ids,           \
                                            int32_t threads) {                                   \
    headway::race(logits, peaks, temperatures, keys, rows, vocab, ids, threads);                 \
  }                                                                                              \
  HEADWAY_EXPORT void headway_draw_filtered_##suffix(                                            \
      const T* logits, const float* peaks, const double* temperatures, const int64_t* top_k,     \
      const double* top_p, const double* min_p, const uint32_t* keys, int32_t rows,              \
      int32_t vocab, int32_t* ids, int32_t threads) {                                            \
    headway::draw_filtered(logits, peaks, {temperatures, top_k, top_p, min_p}, keys, rows,       \
                           vocab, ids, threads);                                                 \
  }

// can_linear: 1 when the others take weights of this shape. pack: weight [out][in] -> to, as many
// elements. packed_rows: y[i] = W[ids[i]]; -1, or the first i whose id there is not.
#define HEADWAY_LINEAR(T, suffix)                                                                \
  HEADWAY_EXPORT int headway_can_linear_##suffix(int32_t in, int32_t out) {                      \
    return headway::Linear<T>::can(in, out);                                                     \
  }                                                                                              \
  HEADWAY_EXPORT void headway_pack_##suffix(const T* weight, int32_t in, int32_t out, T* to) {   \
    headway::Linear<T>::pack(weight, in, out, to);                                               \
  }                                                                                              \
  HEADWAY_EXPORT int headway_packed_rows_##suffix(const T* packed, const int32_t* ids,           \
                                                  int32_t count, int32_t in, int32_t out, T* y) { \
    for (int32_t i = 0; i < count; ++i) {                                                        \
      if (ids[i] < 0 || ids[i] >= out) return i;                                                 \
      headway::Linear<T>::row(packed, in, ids[i], y + int64_t(i) * in);                          \
    }                                                                                            \
    return -1;                                                                                   \
  }                                                                                              \
  HEADWAY_EXPORT void headway_linear_##suffix(const T* x, const T* packed, const T* bias,        \
                                              int32_t rows, int32_t in, int32_t out,             \
                                              int32_t threads, T* y) {                           \
    headway::Linear<T>::run({x, packed, bias, y, rows, in, out}, threads);                       \
  }

// W: of the norms' weights.
#define HEADWAY_NORMS(T, W, suffix)                                                              \
  HEADWAY_EXPORT void headway_rms_norm_##suffix(const T* x, const T* residual, const W* weight,  \
                                                float eps, int32_t rows, int32_t width, T* sum,  \
                                                T* out, int32_t threads) {                       \
    headway::rms_norm(x, residual, weight, eps, rows, width, sum, out, threads);                 \
  }                                                                                              \
  HEADWAY_EXPORT void headway_norm_heads_##suffix(T* heads, const W* weight, float eps,          \
                                                  int32_t tokens, int32_t count, int32_t normed, \
                                                  int32_t head_dim) {                            \
    headway::norm_heads(heads, weight, eps, tokens, count, normed, head_dim);                    \
  }

// Decoder layers, see layers.cpp.
#define HEADWAY_LAYERS(T, suffix)                                                                \
  HEADWAY_EXPORT int64_t headway_layers_scratch_##suffix(const headway::StackView* stack,        \
                                                         const Shape* shape) {                   \
    return headway::LayerRun<T>::scratch_elements(*stack, *shape);                               \
  }                                                                                              \
  HEADWAY_EXPORT int headway_layers_##suffix(const headway::StackView* stack, const Step* step,  \
                                             const Shape* shape, T* hidden, T* last,             \
                                             T* update) {                                        \
    return headway::LayerRun<T>(*stack, *step, *shape).run(hidden, last, update);                \
  }

HEADWAY_ENTRY_POINTS(float, float32)
HEADWAY_ENTRY_POINTS(Bf16, bfloat16)
HEADWAY_SAMPLING(float, float32)
HEADWAY_SAMPLING(Bf16, bfloat16)
HEADWAY_LINEAR(float, float32)
HEADWAY_LINEAR(Bf16, bfloat16)
HEADWAY_LAYERS(float, float32)
HEADWAY_LAYERS(Bf16, bfloat16)
HEADWAY_NORMS(float, float, float32_float32)
HEADWAY_NORMS(Bf16, Bf16, bfloat16_bfloat16)
HEADWAY_NORMS(Bf16, float, bfloat16_float32)
}
