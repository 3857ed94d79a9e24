// Passes over rows that torch would make in several operators: one read, one write each.
// Everything is computed in fp32 and rounded once.

namespace headway {

inline int whole(int n) { return n / kLanes * kLanes; }

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// e^-x by 2^y, with y held below the overflow: sigmoid is 0 there anyway.
inline Floats sigmoid(Floats x) {
  Floats y = x * -1.44269504f;
  const Floats most = splat(126.0f);
  y = y > most ? most : y;
  return reciprocal(1.0f + exp2(y));
}

inline void store(float* to, float x) { *to = x; }
inline void store(Bf16* to, float x) {
  alignas(64) Bf16 rounded[kLanes];
  store(rounded, splat(x));
  *to = rounded[0];
}

// Sum of squares of one row. Four sums, because one would wait for itself.
template <typename T>
inline float squares_of(const T* x, int width) {
  constexpr int kSums = 4;
  const int vectors = whole(width);
  Floats squares[kSums] = {};
  int i = 0;
  for (; i + kSums * kLanes <= vectors; i += kSums * kLanes)
    for (int n = 0; n < kSums; ++n) {
      const Floats v = load(x + i + n * kLanes);
      squares[n] += v * v;
    }
  for (; i < vectors; i += kLanes) squares[0] += load(x + i) * load(x + i);
  float square = 0.0f;
  for (; i < width; ++i) square += to_float(x[i]) * to_float(x[i]);
  return square + lane_sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
}

// out = x / rms(x) * weight of one row; out may be x.
template <typename T, typename W>
inline void norm_row(const T* x, const W* weight, float eps, int width, T* out) {
  const int vectors = whole(width);
  const float scale = 1.0f / std::sqrt(squares_of(x, width) / float(width) + eps);
  for (int i = 0; i < vectors; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (int i = vectors; i < width; ++i)
    store(out + i, to_float(x[i]) * scale * to_float(weight[i]));
}

// out = x / rms(x) * weight; with `residual`, x = x + residual first, which is kept in `sum`.
template <typename T, typename W>
void rms_norm(const T* x, const T* residual, const W* weight, float eps, int rows, int width,
              T* sum, T* out, int threads) {
  const int vectors = whole(width);
  rows_in_parallel(rows, width, threads, [&](int begin, int end) {
    for (int r = begin; r < end; ++r) {
      const int64_t at = int64_t(r) * width;
      const T* from = x + at;
      if (residual) {
        // The norm is taken of the sum as it is kept, so that it does not matter who adds.
        for (int i = 0; i < vectors; i += kLanes)
          store(sum + at + i, load(from + i) + load(residual + at + i));
        for (int i = vectors; i < width; ++i)
          store(sum + at + i, to_float(from[i]) + to_float(residual[at + i]));
        from = sum + at;
      }
      norm_row(from, weight, eps, width, out + at);
    }
  });
}

// heads: [tokens][heads][head_dim], the first `normed` of each token normalised in place.
// weight: [normed][head_dim]
template <typename T, typename W>
void norm_heads(T* heads, const W* weight, float eps, int tokens, int count, int normed,
                int head_dim) {
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < normed; ++h) {
      T* head = heads + (int64_t(t) * count + h) * head_dim;
      norm_row(head, weight + h * head_dim, eps, head_dim, head);
    }
}

struct Silu {
  template <typename F>
  F operator()(F x) const {
    return x * sigmoid(x);
  }
};

// By tanh: x (1 + tanh u) / 2 = x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
struct Gelu {
  template <typename F>
  F operator()(F x) const {
    return x * sigmoid(x * (1.0f + 0.044715f * x * x) * 1.59576912f);
  }
};

// gate_up: [rows][gate | up] -> out: [rows][width], activation(gate) * up.
template <typename Activation, typename T>
void gate_mul(const T* gate_up, int rows, int width, T* out, int threads) {
  const Activation activation;
  const int vectors = whole(width);
  rows_in_parallel(rows, width, threads, [&](int begin, int end) {
    for (int r = begin; r < end; ++r) {
      const T* gate = gate_up + int64_t(r) * 2 * width;
      const T* up = gate + width;
      T* to = out + int64_t(r) * width;
      for (int i = 0; i < vectors; i += kLanes)
        store(to + i, activation(load(gate + i)) * load(up + i));
      for (int i = vectors; i < width; ++i)
        store(to + i, activation(to_float(gate[i])) * to_float(up[i]));
    }
  });
}

// Rotate the pairs (i, i + half) of one head. cos, sin: [half]
template <typename T>
inline void rotate(const T* head, const float* cos, const float* sin, int half, T* out) {
  const int vectors = whole(half);
  for (int i = 0; i < vectors; i += kLanes) {
    const Floats a = load(head + i), b = load(head + half + i);
    const Floats c = load(cos + i), s = load(sin + i);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
  for (int i = vectors; i < half; ++i) {
    const float a = to_float(head[i]), b = to_float(head[half + i]);
    store(out + i, a * cos[i] - b * sin[i]);
    store(out + half + i, b * cos[i] + a * sin[i]);
  }
}

// Tokens [begin, end).
// heads: [tokens][query | key | value heads][head_dim] -> query: [tokens][query heads][head_dim],
// and keys and values into the cache at `slots` (-1: nowhere). angles: [tokens][head_dim / 2].
template <typename T>
void rotate_and_write_some(const Shape& shape, const T* heads, const float* cos, const float* sin,
                      const int32_t* slots, int begin, int end, T* query, T* keys, T* values) {
  const int head_dim = shape.head_dim, half = head_dim / 2;
  const int64_t stride = int64_t(shape.num_heads + 2 * shape.num_kv_heads) * head_dim;
  for (int t = begin; t < end; ++t) {
    const T* from = heads + t * stride;
    const float* c = cos + int64_t(t) * half;
    const float* s = sin + int64_t(t) * half;
    T* to = query + int64_t(t) * shape.num_heads * head_dim;
    for (int h = 0; h < shape.num_heads; ++h)
      rotate(from + h * head_dim, c, s, half, to + h * head_dim);
    if (slots[t] < 0) continue;
    const T* key = from + shape.num_heads * head_dim;
    const int64_t slot = int64_t(slots[t]) * shape.row();
    for (int h = 0; h < shape.num_kv_heads; ++h)
      rotate(key + h * head_dim, c, s, half, keys + slot + h * head_dim);
    std::memcpy(values + slot, key + shape.row(), shape.row() * sizeof(T));
  }
}

template <typename T>
void rotate_and_write(const Shape& shape, const T* heads, const float* cos, const float* sin,
                      const int32_t* slots, int tokens, T* query, T* keys, T* values,
                      int threads) {
  const int64_t width = int64_t(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim;
  rows_in_parallel(tokens, width, threads, [&](int begin, int end) {
    rotate_and_write_some(shape, heads, cos, sin, slots, begin, end, query, keys, values);
  });
}

// key, value: [tokens][kv heads][head_dim] with the given strides between tokens.
template <typename T>
void write_kv(const Shape& shape, const T* key, const T* value, int64_t key_stride,
              int64_t value_stride, const int32_t* slots, int tokens, T* keys, T* values) {
  const size_t bytes = shape.row() * sizeof(T);
  for (int t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    const int64_t slot = int64_t(slots[t]) * shape.row();
    std::memcpy(keys + slot, key + t * key_stride, bytes);
    std::memcpy(values + slot, value + t * value_stride, bytes);
  }
}

}  // namespace headway
