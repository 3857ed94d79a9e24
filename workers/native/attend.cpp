// Attention of a step: decodes one sequence at a time, chunks in parts.

namespace headway {

#if defined(__AMX_BF16__)
template <typename T>
struct TilesFor {
  typedef FloatTiles<T> type;
};
template <>
struct TilesFor<Bf16> {
  typedef AmxTiles type;
};
#else
template <typename T>
struct TilesFor {
  typedef FloatTiles<T> type;
};
#endif

// query: [tokens][heads][head_dim] with query_stride between tokens; out: the same, contiguous.
// window: keys that a query sees at the most, 0 for all.
template <typename T>
void attend(const Step& step, const Shape& shape, int window, const T* query, int64_t query_stride,
            const T* keys, const T* values, T* out) {
  typedef typename TilesFor<T>::type Tiles;
  const int64_t out_stride = int64_t(shape.num_heads) * shape.head_dim;
  if (window == 0) window = kNoWindow;
  const auto context = [&](int s) {
    const int length = step.seqused_k[s];
    return Context{step.block_table + int64_t(s) * step.table_stride,
                   first_seen(length - 1, window), length};
  };
  const auto decode = [&](int s, const Context& next) {
    const int64_t token = step.cu_seqlens_q[s];
    decode_sequence(shape, context(s), next, query + token * query_stride, keys, values,
                    out + token * out_stride);
  };
  in_parallel(step.num_decodes, step.threads, [&](int s) {
    decode(s, s + 1 < step.num_decodes ? context(s + 1) : Context{});
  });
  const auto parts = chunk_parts(step, shape, step.num_decodes, step.num_seqs);
  in_parallel(int(parts.size()) * shape.num_kv_heads, step.threads, [&](int task) {
    const ChunkPart& part = parts[task / shape.num_kv_heads];
    const int s = part.sequence, kv_head = task % shape.num_kv_heads;
    const int64_t head = int64_t(kv_head) * shape.head_dim;
    const int64_t token = step.cu_seqlens_q[s];
    const int count = step.cu_seqlens_q[s + 1] - int(token);
    if (count == 1) {
      // A sequence gets the same bits wherever it stands in the batch.
      if (kv_head == 0) decode(s, Context{});
      return;
    }
    const ChunkCall<T> call = {shape,
                               context(s).blocks,
                               keys + head,
                               values + head,
                               query + token * query_stride + head * shape.group(),
                               out + token * out_stride + head * shape.group(),
                               query_stride,
                               out_stride,
                               step.seqused_k[s] - count,
                               window};
    attend_chunk<T, Tiles>(call, part);
  });
}

}  // namespace headway
