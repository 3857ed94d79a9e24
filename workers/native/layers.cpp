// The decoder layers of a step, one kernel after the other without a way back to the caller in
// between: on a decode step that way would cost about as long as a tenth of the work. What is done,
// and in which order, is DecoderLayer of layer.py; the bits are the same.

namespace headway {

// Mirrored by structures in layers.py.
struct LinearView {
  const void* packed;
  const void* bias;  // [out], or null
  int32_t in, out;
};

// weight: null where a layer has no such norm. wide: it is fp32, whatever the model's dtype.
struct NormView {
  const void* weight;
  float eps;
  int32_t wide;
};

// cos, sin of the step's tokens: [tokens][head_dim / 2].
struct AnglesView {
  const float* cos;
  const float* sin;
};

enum Activation : int32_t { kSilu = 0, kGelu = 1 };

struct LayerView {
  NormView attention_norm, mlp_norm, after_attention, after_mlp, head_norm;
  LinearView qkv, attention_out, gate_up, down;
  void* keys;
  void* values;
  int32_t window, angles;  // angles: which of the step's
  int32_t normed_heads, activation;
};

// scratch: scratch_elements() of T. group: null where there is nothing to sum over.
struct StackView {
  const LayerView* layers;
  const AnglesView* angles;
  const int32_t* slots;         // [tokens]
  const int32_t* logits_index;  // [num_logits]: the tokens that logits are wanted of
  Group* group;
  void* scratch;
  int32_t num_layers, tokens, num_logits, width;
};

template <typename T>
class LayerRun {
 public:
  LayerRun(const StackView& stack, const Step& step, const Shape& shape)
      : stack_(stack), step_(step), shape_(shape) {
    const Widths widths(stack, shape);
    T* at = static_cast<T*>(stack.scratch);
    const auto take = [&](int64_t width) {
      T* here = at;
      at += width * rows_of(stack);
      return here;
    };
    normed_ = take(stack.width);
    projected_ = take(stack.width);
    attended_ = take(widths.attended);
    queries_ = take(widths.attended);
    wide_ = take(widths.wide);
    gated_ = take(widths.gated);
  }

  static int64_t scratch_elements(const StackView& stack, const Shape& shape) {
    const Widths widths(stack, shape);
    return rows_of(stack) *
           (2 * int64_t(stack.width) + 2 * widths.attended + widths.wide + widths.gated);
  }

  // hidden: [tokens][width], the residual stream, changed in place -> last, update:
  // [num_logits][width], the stream of those tokens and what is yet to be added to it. Returns what the
  // group's collectives return.
  int run(T* hidden, T* last, T* update) {
    const LayerView* const final = stack_.layers + stack_.num_layers - 1;
    const T* pending = nullptr;
    for (const LayerView* layer = stack_.layers; layer < final; ++layer) {
      attend(*layer, hidden, pending);
      if (const int problem = feed(*layer, attended_, stack_.tokens, hidden, projected_))
        return problem;
      pending = projected_;
    }
    attend(*final, hidden, pending);
    gather(hidden, stack_.width, last);
    gather(attended_, shape_.num_heads * shape_.head_dim, queries_);
    return feed(*final, queries_, stack_.num_logits, last, update);
  }

 private:
  // Logits of a token may be wanted more than once.
  static int64_t rows_of(const StackView& stack) {
    return std::max(stack.tokens, stack.num_logits);
  }

  // Elements per token of what several layers of different widths share.
  struct Widths {
    int64_t attended, wide = 0, gated = 0;

    Widths(const StackView& stack, const Shape& shape)
        : attended(int64_t(shape.num_heads) * shape.head_dim) {
      for (int i = 0; i < stack.num_layers; ++i) {
        const LayerView& layer = stack.layers[i];
        wide = std::max({wide, int64_t(layer.qkv.out), int64_t(layer.gate_up.out)});
        gated = std::max(gated, int64_t(layer.down.in));
      }
    }
  };

  // Into attended_.
  void attend(const LayerView& layer, T* hidden, const T* pending) {
    norm_after_adding(layer.attention_norm, pending, hidden, stack_.tokens);
    multiply(layer.qkv, normed_, stack_.tokens, wide_);
    if (layer.head_norm.weight)
      with_weight(layer.head_norm, [&](const auto* weight) {
        norm_heads(wide_, weight, layer.head_norm.eps, stack_.tokens,
                   shape_.num_heads + 2 * shape_.num_kv_heads, layer.normed_heads,
                   shape_.head_dim);
      });
    T* keys = static_cast<T*>(layer.keys);
    T* values = static_cast<T*>(layer.values);
    const AnglesView& angles = stack_.angles[layer.angles];
    rotate_and_write(shape_, wide_, angles.cos, angles.sin, stack_.slots, stack_.tokens, queries_,
                     keys, values, step_.threads);
    headway::attend(step_, shape_, layer.window, queries_,
                    int64_t(shape_.num_heads) * shape_.head_dim, keys, values, attended_);
  }

  // update: what is to be added to `hidden` afterwards.
  int feed(const LayerView& layer, const T* attended, int rows, T* hidden, T* update) {
    if (const int problem = summed(layer.attention_out, attended, rows, projected_)) return problem;
    norm_if_any(layer.after_attention, projected_, rows);
    norm_after_adding(layer.mlp_norm, projected_, hidden, rows);
    multiply(layer.gate_up, normed_, rows, wide_);
    if (layer.activation == kGelu)
      gate_mul<Gelu>(wide_, rows, layer.down.in, gated_, step_.threads);
    else
      gate_mul<Silu>(wide_, rows, layer.down.in, gated_, step_.threads);
    if (const int problem = summed(layer.down, gated_, rows, update)) return problem;
    norm_if_any(layer.after_mlp, update, rows);
    return kOk;
  }

  // hidden += x if there is one; the norm of the sum into normed_.
  void norm_after_adding(const NormView& norm, const T* x, T* hidden, int rows) {
    if (x)
      normalise(norm, x, hidden, rows, normed_);
    else
      normalise(norm, hidden, nullptr, rows, normed_);
  }

  void norm_if_any(const NormView& norm, T* x, int rows) {
    if (norm.weight) normalise(norm, x, nullptr, rows, x);
  }

  // out = the norm of x; with a `residual`, x is added to it first.
  void normalise(const NormView& norm, const T* x, T* residual, int rows, T* out) {
    with_weight(norm, [&](const auto* weight) {
      rms_norm<T>(x, residual, weight, norm.eps, rows, stack_.width, residual, out, step_.threads);
    });
  }

  template <typename Call>
  static void with_weight(const NormView& norm, const Call& call) {
    if (norm.wide)
      call(static_cast<const float*>(norm.weight));
    else
      call(static_cast<const T*>(norm.weight));
  }

  void multiply(const LinearView& linear, const T* x, int rows, T* y) {
    Linear<T>::run({x, static_cast<const T*>(linear.packed), static_cast<const T*>(linear.bias), y,
                    rows, linear.in, linear.out},
                   step_.threads);
  }

  int summed(const LinearView& linear, const T* x, int rows, T* y) {
    multiply(linear, x, rows, y);
    return stack_.group ? all_reduce(*stack_.group, y, int64_t(rows) * linear.out) : kOk;
  }

  // The rows that logits are wanted of.
  void gather(const T* from, int width, T* to) {
    for (int i = 0; i < stack_.num_logits; ++i)
      std::memcpy(to + int64_t(i) * width, from + int64_t(stack_.logits_index[i]) * width,
                  width * sizeof(T));
  }

  const StackView& stack_;
  const Step& step_;
  const Shape& shape_;
  T *normed_, *projected_, *attended_, *queries_, *wide_, *gated_;
};

}  // namespace headway
