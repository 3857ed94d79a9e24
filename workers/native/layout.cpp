// A step's rows written into its buffers; see workers/layout.py, which this is the fast form of.

namespace headway {

// Mirrored by LayoutView in native/layout.py. Of the sequences: token_ids [lanes][token_stride],
// blocks [lanes][table_stride]. The buffers hold int32; block_table: [seqs][table_stride].
struct Layout {
  const int32_t* sequence_tokens;
  const int32_t* sequence_blocks;
  const int64_t* lengths;
  const int64_t* num_blocks;
  const uint8_t* ended;
  int32_t* cu_seqlens_q;
  int32_t* seqused_k;
  int32_t* block_table;
  int32_t* slot_mapping;
  int32_t* positions;
  int32_t* token_ids;
  int32_t* logits_index;
  int32_t* token_lanes;
  int32_t* sampled;
  int32_t token_stride, table_stride, block_size, most_tokens;
};

// What is known of the step then; see LaidOut.
struct LaidOut {
  int32_t num_tokens, num_decodes, num_sampled, max_q, max_k, unread;
};

struct RowFields {
  int64_t lane, start, count, samples;

  int64_t end() const { return start + count; }
};

constexpr int kFits = -1, kTooManyTokens = -2;
constexpr int32_t kUnreadToken = -1;

// Compared so that no sum can overflow.
inline bool fits(const Layout& layout, const RowFields& row) {
  const int64_t length = layout.lengths[row.lane];
  if (row.count < 1 || row.start < 0 || row.count > length || row.start > length - row.count)
    return false;
  if (row.end() > layout.num_blocks[row.lane] * layout.block_size) return false;
  return row.samples == int64_t(row.end() == length && !layout.ended[row.lane]);
}

// Returns kFits, kTooManyTokens (num_tokens says how many), or the first row that does not fit.
inline int lay_out(const Layout& layout, const RowFields* rows, int count, int all_pages,
                   LaidOut& result) {
  result = {};
  int64_t tokens = 0;
  for (int i = 0; i < count; ++i) {
    if (!fits(layout, rows[i])) return i;
    tokens += rows[i].count;
    if (result.max_k < rows[i].end()) result.max_k = int32_t(rows[i].end());
    if (result.max_q < rows[i].count) result.max_q = int32_t(rows[i].count);
  }
  result.num_tokens = int32_t(tokens);
  if (tokens > layout.most_tokens) return kTooManyTokens;
  while (result.num_decodes < count && rows[result.num_decodes].count == 1) ++result.num_decodes;
  const int needed = (result.max_k + layout.block_size - 1) / layout.block_size;
  const size_t width = sizeof(int32_t) * (needed < all_pages ? all_pages : needed);
  int32_t at = 0;
  layout.cu_seqlens_q[0] = 0;
  for (int i = 0; i < count; ++i) {
    const RowFields& row = rows[i];
    const int32_t* tokens_of = layout.sequence_tokens + row.lane * layout.token_stride;
    const int32_t* blocks = layout.sequence_blocks + row.lane * layout.table_stride;
    int32_t page = int32_t(row.start / layout.block_size);
    int32_t within = int32_t(row.start % layout.block_size);
    for (int64_t position = row.start; position < row.end(); ++position, ++at) {
      layout.token_lanes[at] = int32_t(row.lane);
      layout.positions[at] = int32_t(position);
      layout.token_ids[at] = tokens_of[position];
      result.unread |= tokens_of[position] == kUnreadToken;
      layout.slot_mapping[at] = blocks[page] * layout.block_size + within;
      if (++within == layout.block_size) {
        within = 0;
        ++page;
      }
    }
    layout.cu_seqlens_q[i + 1] = at;
    layout.seqused_k[i] = int32_t(row.end());
    std::memcpy(layout.block_table + int64_t(i) * layout.table_stride, blocks, width);
    if (row.samples) {
      layout.logits_index[result.num_sampled] = at - 1;
      layout.sampled[result.num_sampled++] = int32_t(row.lane);
    }
  }
  return kFits;
}

}  // namespace headway
