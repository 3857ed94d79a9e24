// Drawing under top-k, top-p and min-p: what workers/nucleus.py does, by selection instead of sorting.

namespace headway {

// Per row: arrays of [rows]. See Filters in nucleus.py.
struct Filters {
  const double* temperature;
  const int64_t* top_k;
  const double* top_p;
  const double* min_p;
};

// key: in the canonical order, likelier tokens first, lower ids first among equals; all differ.
struct Candidate {
  uint64_t key;
  double weight;  // 1 for the likeliest token

  int32_t id() const { return int32_t(uint32_t(key)); }
  bool operator<(const Candidate& other) const { return key < other.key; }
};

inline uint64_t canonical_key(float value, int32_t id) {
  const uint32_t bits = bit_cast<uint32_t>(value + 0.0f);  // -0 is 0
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t(~ascending) << 32 | uint32_t(id);
}

// One row of logits under its filters.
template <typename T>
class FilteredRow {
 public:
  FilteredRow(const T* logits, int vocab, float peak, const Filters& filters, int row)
      : logits_(logits),
        vocab_(vocab),
        peak_(peak),
        temperature_(filters.temperature[row]),
        top_k_(filters.top_k[row]),
        top_p_(filters.top_p[row]),
        min_p_(filters.min_p[row]) {}

  // Leaves the kept tokens in `kept`, in no order.
  void keep(std::vector<Candidate>& kept) {
    const int depth = choose_depth();
    if (depth < kDepths) {
      collect(cut(depth), kept);
      if (shorten(kept, bounded_)) return;
    }
    collect(-std::numeric_limits<float>::max(), kept);
    shorten(kept, true);
  }

 private:
  // Nats below the peak at which a search may stop. What is kept is nearly always within the first.
  static constexpr int kDepths = 5;
  static constexpr float kNats[kDepths] = {2.0f, 4.0f, 8.0f, 16.0f, 32.0f};
  // What the sums that choose a depth may be wrong by.
  static constexpr double kMargin = 1e-4;

  bool counts() const { return top_k_ < vocab_; }

  // Rather a little deeper: floats near the peak may be further apart than a nat's hundredth.
  float cut(int depth) const {
    const double below = kNats[depth] * temperature_;
    return float(peak_ - below - (std::abs(double(peak_)) + below) * 2.5e-7);
  }

  // The first depth above which everything kept is found, as far as can be told; kDepths: none.
  int choose_depth() {
    int depth = kDepths;
    if (counts() || top_p_ < 1.0) {
      survey();
      for (depth = 0; depth < kDepths; ++depth)
        if (counts() ? above_[depth] >= top_k_ : mass_[depth] > top_p_ * total_ * (1 + kMargin))
          break;
    }
    // top-p counts shares of all of top-k, also of what min-p drops.
    if (min_p_ <= 0.0 || (counts() && top_p_ < 1.0)) return depth;
    int likely = 0;
    while (likely < kDepths && kNats[likely] < -std::log(min_p_)) ++likely;
    bounded_ = likely <= depth;
    return bounded_ ? likely : depth;
  }

  // How many tokens there are above each depth, and how much they weigh; in all: total_.
  void survey() {
    const Floats zero{};
    Floats counted[kDepths] = {}, weighed[kDepths] = {};
    Floats cuts[kDepths];
    for (int d = 0; d < kDepths; ++d) cuts[d] = splat(cut(d));
    const float scale = float(1.44269504 / temperature_);
    Floats recent{};
    int visits = 0;
    total_ = 0.0;
    for_each_vector(logits_, vocab_, kMinusInfinity, [&](Floats x, int) {
      if (counts()) {
        for (int d = 0; d < kDepths; ++d) counted[d] += x >= cuts[d] ? splat(1.0f) : zero;
        return;
      }
      const Floats weight = exp2((x - peak_) * scale);
      for (int d = 0; d < kDepths; ++d) weighed[d] += x >= cuts[d] ? weight : zero;
      recent += weight;
      // A few at a time: the whole sum has more digits than a float.
      if (++visits % 8 == 0) {
        total_ += lane_sum(recent);
        recent = zero;
      }
    });
    total_ += lane_sum(recent);
    for (int d = 0; d < kDepths; ++d) {
      above_[d] = int64_t(lane_sum(counted[d]));
      mass_[d] = lane_sum(weighed[d]);
    }
  }

  void collect(float least, std::vector<Candidate>& found) {
    found.clear();
    const Floats bound = splat(least);
    for_each_vector(logits_, vocab_, kMinusInfinity, [&](Floats x, int at) {
      const Ints inside = x >= bound;
      if (!any_lane(inside)) return;
      for (int i = 0; i < kLanes; ++i)
        if (inside[i])
          found.push_back({canonical_key(x[i], at + i),
                           std::exp((double(x[i]) - double(peak_)) / temperature_)});
    });
  }

  // Down to what is kept of the candidates. complete: none but them can be. False if others may be.
  bool shorten(std::vector<Candidate>& kept, bool complete) {
    if (counts()) {
      if (int64_t(kept.size()) < top_k_ && !complete) return false;
      if (int64_t(kept.size()) > top_k_) {
        std::nth_element(kept.begin(), kept.begin() + top_k_, kept.end());
        kept.resize(top_k_);
      }
    }
    if (top_p_ < 1.0) {
      const double mass = weight_of(kept.begin(), kept.end());
      const double threshold = top_p_ * (counts() ? mass : total_);
      if (mass >= threshold)
        kept.resize(prefix_of(kept, threshold));
      else if (!complete)
        return false;
    }
    if (min_p_ > 0.0)
      kept.erase(std::remove_if(kept.begin(), kept.end(),
                                [&](const Candidate& c) { return c.weight < min_p_; }),
                 kept.end());
    return true;
  }

  typedef std::vector<Candidate>::const_iterator Place;

  static double weight_of(Place from, Place to) {
    double sum = 0.0;
    for (; from != to; ++from) sum += from->weight;
    return sum;
  }

  // Bring the shortest prefix of the canonical order that weighs `threshold` to the front; its
  // length. A quickselect by weight.
  static size_t prefix_of(std::vector<Candidate>& all, double threshold) {
    constexpr size_t kFew = 64;
    size_t begin = 0, end = all.size();
    double before = 0.0;
    while (end - begin > kFew) {
      const size_t middle = begin + (end - begin) / 2;
      std::nth_element(all.begin() + begin, all.begin() + middle, all.begin() + end);
      const double left = weight_of(all.begin() + begin, all.begin() + middle);
      if (before + left >= threshold) {
        end = middle;
      } else {
        before += left;
        begin = middle;
      }
    }
    std::sort(all.begin() + begin, all.begin() + end);
    while (begin < end && before < threshold) before += all[begin++].weight;
    return begin;
  }

  const T* logits_;
  int vocab_;
  float peak_;
  double temperature_;
  int64_t top_k_;
  double top_p_, min_p_;
  // bounded_: what lies deeper is not likely enough, whatever the other filters say.
  bool bounded_ = false;
  int64_t above_[kDepths];
  double mass_[kDepths], total_ = 0.0;
};

// The winner of the race between the kept tokens, at least one. key: halves of counter_key.
inline int32_t race_of(const std::vector<Candidate>& kept, const uint32_t* key) {
  const Candidate* best = &kept[0];
  float best_speed = -1.0f;
  for (size_t at = 0; at < kept.size(); at += kLanes) {
    const int here = kept.size() - at < size_t(kLanes) ? int(kept.size() - at) : kLanes;
    Ints ids{};
    for (int i = 0; i < here; ++i) ids[i] = kept[at + i].id();
    const Floats noise = race_noise(ids, key[0], key[1]);
    for (int i = 0; i < here; ++i) {
      const Candidate& token = kept[at + i];
      const float speed = float(token.weight) / noise[i];
      if (speed > best_speed || (speed == best_speed && token < *best)) {
        best = &token;
        best_speed = speed;
      }
    }
  }
  return best->id();
}

// ids[rows]: one token per row; 0 where the peak is not finite. keys: [rows][2].
template <typename T>
void draw_filtered(const T* logits, const float* peaks, const Filters& filters,
                   const uint32_t* keys, int rows, int vocab, int32_t* ids, int threads) {
  in_parallel(rows, threads, [&](int r) {
    ids[r] = 0;
    if (!std::isfinite(peaks[r])) return;
    static thread_local std::vector<Candidate> kept;
    FilteredRow<T>(logits + int64_t(r) * vocab, vocab, peaks[r], filters, r).keep(kept);
    ids[r] = race_of(kept, keys + 2 * r);
  });
}

}  // namespace headway
