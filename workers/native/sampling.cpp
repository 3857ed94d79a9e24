// Passes over the logits of a row: the likeliest token, and the race of workers/race.py.

namespace headway {

// The best value so far per lane, and where it was: the lowest position of equals.
struct Leaders {
  Floats value;
  Ints at;

  explicit Leaders(float worst) : value(splat(worst)), at(Ints{}) {}

  void offer(Floats candidate, Ints position) {
    const Ints better = candidate > value;
    value = better ? candidate : value;
    at = better ? position : at;
  }

  // Over all lanes.
  void winner(float& best, int32_t& position) const {
    best = value[0];
    position = at[0];
    for (int i = 1; i < kLanes; ++i)
      if (value[i] > best || (value[i] == best && at[i] < position)) {
        best = value[i];
        position = at[i];
      }
  }
};

inline Ints counting() {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane;
}

// A whole number of vectors of a row, then what remains with `filler` behind it.
template <typename T, typename Visit>
inline void for_each_vector(const T* row, int count, float filler, const Visit& visit) {
  const int vectors = whole(count);
  for (int i = 0; i < vectors; i += kLanes) visit(load(row + i), i);
  if (vectors == count) return;
  alignas(64) float rest[kLanes];
  for (int i = 0; i < kLanes; ++i)
    rest[i] = vectors + i < count ? to_float(row[vectors + i]) : filler;
  visit(load(rest), vectors);
}

// peaks[rows], ids[rows]: the maximum and its lowest position; NaN where the row holds one.
template <typename T>
void largest(const T* logits, int rows, int vocab, float* peaks, int32_t* ids, int threads) {
  const Ints lane = counting();
  in_parallel(rows, threads, [&](int r) {
    Leaders leaders(kMinusInfinity);
    // Not finite, or nothing: x - x is NaN for NaN and for both infinities.
    Ints odd = Ints{};
    for_each_vector(logits + int64_t(r) * vocab, vocab, kMinusInfinity, [&](Floats x, int at) {
      leaders.offer(x, lane + at);
      odd |= x != x;
    });
    leaders.winner(peaks[r], ids[r]);
    for (int i = 0; i < kLanes; ++i)
      if (odd[i]) peaks[r] = std::numeric_limits<float>::quiet_NaN();
  });
}

// murmur3's finaliser.
inline Words mixed(Words bits) {
  bits = (bits ^ (bits >> 16)) * 0x85EBCA6Bu;
  bits = (bits ^ (bits >> 13)) * 0xC2B2AE35u;
  return bits ^ (bits >> 16);
}

// Natural logarithm of normal numbers in (0, 1]; relative error < 3e-7 but for the cancellation
// near 1. x = m 2^e with m in [sqrt(1/2), sqrt(2)), and log m = 2 artanh((m - 1) / (m + 1)).
inline Floats log_of_share(Floats x) {
  const Words bits = bit_cast<Words>(x);
  const Words shifted = bits - 0x3f3504f3u;  // sqrt(1/2): the exponent changes there
  const Ints exponent = bit_cast<Ints>(shifted) >> 23;
  const Floats m = bit_cast<Floats>(bits - bit_cast<Words>(exponent << 23));
  const Floats t = (m - 1.0f) / (m + 1.0f), square = t * t;
  Floats series = splat(2.0f / 9.0f);
  series = series * square + 2.0f / 7.0f;
  series = series * square + 2.0f / 5.0f;
  series = series * square + 2.0f / 3.0f;
  series = series * square + 2.0f;
  return __builtin_convertvector(exponent, Floats) * 0.693147181f + series * t;
}

// -log(1 - u), u in (0, 1], with u's relative precision: 1 - u is rounded, and the quotient of what
// was meant and what it came to makes up for that (Kahan).
inline Floats exponential(Floats u) {
  const Floats rest = 1.0f - u, taken = 1.0f - rest;
  const Floats infinite = splat(std::numeric_limits<float>::infinity());
  const Floats e = -log_of_share(rest) * (u / taken);
  return taken == 0.0f ? u : rest <= 0.0f ? infinite : e;
}

// Exponentially distributed noise of tokens. low, high: halves of counter_key.
inline Floats race_noise(Ints ids, uint32_t low, uint32_t high) {
  const Words first = mixed((bit_cast<Words>(ids) * 0x9E3779B1u) ^ low);
  const Words bits = mixed(first ^ high) & 0x7fffffffu;
  const Floats noise = __builtin_convertvector(bit_cast<Ints>(bits), Floats);
  return exponential((noise + 0.5f) * (1.0f / 2147483648.0f));
}

// The winner of each row's race. keys: [rows][2], halves of counter_key. scale: [rows], 1 / T.
template <typename T>
void race(const T* logits, const float* peaks, const float* temperatures, const uint32_t* keys,
          int rows, int vocab, int32_t* ids, int threads) {
  const Ints lane = counting();
  in_parallel(rows, threads, [&](int r) {
    Leaders leaders(-1.0f);
    const uint32_t low = keys[2 * r], high = keys[2 * r + 1];
    const float peak = peaks[r], temperature = temperatures[r];
    for_each_vector(logits + int64_t(r) * vocab, vocab, kMinusInfinity, [&](Floats x, int at) {
      const Ints position = lane + at;
      const Floats weight = exp2((x - peak) / temperature * 1.44269504f);
      leaders.offer(weight / race_noise(position, low, high), position);
    });
    float unused;
    leaders.winner(unused, ids[r]);
  });
}

}  // namespace headway
