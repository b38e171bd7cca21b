// Runs a plan's work; the arithmetic is in attention_tile.h, the division of work in attention_plan.cpp.
#include "attention.h"

#include <type_traits>

#include "attention_fetch.h"
#include "attention_gather.h"
#include "attention_products.h"
#include "attention_tile.h"
#include "attention_widen.h"
#include "denormals.h"
#include "latent_values.h"

namespace pdserve {
namespace {

// With more rows a tile is computed for so long that the processor's own prefetcher is early enough.
constexpr int kFetchRows = 24;
constexpr float kLog2E = 1.44269504088896341f;

template <class From, class To>
void convert(const From* from, To* to, int64_t size) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, size * sizeof(To));
  } else {
    for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(from + i));
  }
}

template <class To>
void convert_row(const TokenRows& from, int64_t token, int64_t at, To* to, int64_t size) {
  const int64_t index = token * from.stride + at;
  if (from.dtype == DType::kFloat32) {
    convert(static_cast<const float*>(from.data) + index, to, size);
  } else {
    convert(static_cast<const bf16*>(from.data) + index, to, size);
  }
}

// Where the keys of a tile lie: bytes from the pool's begin to each block, for layer 0, head 0.
struct TilePlace {
  int count = 0;  // keys
  int64_t offsets[kTile];
};

}  // namespace

// One thread in one layer.
class AttentionWorker {
 public:
  AttentionWorker(AttentionPlan& plan, int64_t layer, const float* sinks, const TokenRows& q, const TokenRows& out,
                  int tid)
      : plan_(plan), items_(plan.work_[tid]), memory_(plan.scratch_[tid].data()), sinks_(sinks), q_(q), out_(out) {
    const KVPoolView& pool = plan.pool_;
    block_slots_ = std::min<int64_t>(pool.page_size, kBlockSlots);
    slot_bytes_ = pool.slot_bytes();
    head_bytes_ = latent_ ? 0 : pool.page_size * slot_bytes_;
    values_offset_ = latent_ ? 0 : pool.keys_size() * size_of(pool.dtype);
    base_ = static_cast<const char*>(pool.data) + layer * pool.layer_size() * size_of(pool.dtype);
  }

  // `score` makes scores of sixteen products of queries and keys, times log2 e.
  template <class Words, class Scales, class Score>
  void run(const Score& score) {
    if (items_.empty()) return;
    TilePlace places[2];
    int now = 0;
    locate(items_[0], items_[0].key_begin, places[now]);
    for (size_t i = 0; i < items_.size(); ++i) {
      const AttentionItem& item = items_[i];
      const AttentionScratch scratch(memory_, rows_of(item) * heads_of(item), dim_, value_dim_);
      load_queries(item, reinterpret_cast<typename Words::Element*>(scratch.queries));
      for (int32_t key = item.key_begin; key < item.key_end; key += kTile, now ^= 1) {
        // The next tile is fetched while this one is computed.
        TilePlace& next = places[now ^ 1];
        next.count = 0;
        if (key + kTile < item.key_end) {
          locate(item, key + kTile, next);
        } else if (i + 1 < items_.size()) {
          locate(items_[i + 1], items_[i + 1].key_begin, next);
        }
        run_tile<Words, Scales>(item, key, places[now], next, scratch, score);
      }
      if (plan_.splits_[item.entry].num_chunks != 0) {
        leave_part(item, scratch);
      } else {
        write(item, scratch.total);
      }
    }
  }

 private:
  int rows_of(const AttentionItem& item) const { return static_cast<int>((item.q_end - item.q_begin) * group_); }
  static int heads_of(const AttentionItem& item) { return item.head_end - item.head_begin; }

  SoftmaxRows at(const SoftmaxRows& rows, int64_t row) const {
    return {rows.largest + row, rows.sums + row * kLanes, rows.values + row * value_dim_};
  }

  void merge(const SoftmaxRows& rows, const SoftmaxRows& next, int count) const {
    for (int r = 0; r < count; ++r) {
      const SoftmaxRows a = at(rows, r), b = at(next, r);
      merge_row(a.largest, a.sums, a.values, *b.largest, b.sums, b.values, value_dim_);
    }
  }

  void locate(const AttentionItem& item, int32_t key, TilePlace& place) const {
    const int64_t size = plan_.pool_.page_size;
    place.count = std::min(kTile, item.key_end - key);
    const int64_t* page = plan_.page_offsets_.data() + plan_.first_page_[item.entry] + key / size;
    int64_t offset = key % size;
    for (int i = 0; i < blocks_of(place); ++i) {
      place.offsets[i] = *page + offset * slot_bytes_;
      offset += block_slots_;
      if (offset == size) {
        offset = 0;
        ++page;
      }
    }
  }

  int blocks_of(const TilePlace& place) const {
    return static_cast<int>(ceil_div(place.count, block_slots_));
  }

  template <class Element>
  void load_queries(const AttentionItem& item, Element* queries) const {
    const int64_t width = group_ * dim_;
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      for (int32_t token = item.q_begin; token < item.q_end; ++token, queries += width) {
        convert_row(q_, plan_.entries_[item.entry].first_token + token, head * width, queries, width);
      }
    }
  }

  // What the heads of a tile share.
  struct HeadPass {
    const AttentionItem& item;
    int32_t key;
    int keys;
    const SoftmaxRows& state;
    const AttentionScratch& scratch;
  };

  template <class Scales, class Words, class Score>
  void run_head(const HeadPass& pass, int32_t head, const BlockTile<Words>& tile, const Score& score) const {
    const int rows = rows_of(pass.item);
    const int64_t row = static_cast<int64_t>(head - pass.item.head_begin) * rows;
    const auto* queries = reinterpret_cast<const typename Words::Element*>(pass.scratch.queries);
    for (int r = 0; r < rows; r += kBlockRows) {
      run_block<Words, Scales>(pass.item, pass.key, pass.keys, r, std::min(kBlockRows, rows - r),
                               queries + (row + r) * dim_, at(pass.state, row + r), pass.scratch, tile, score);
    }
  }

  template <class Words, class Scales, class Score>
  void run_tile(const AttentionItem& item, int32_t key, const TilePlace& place, const TilePlace& next,
                const AttentionScratch& scratch, const Score& score) const {
    const int rows = rows_of(item);
    const bool first_chunk = key / kChunk == item.key_begin / kChunk;
    const SoftmaxRows& state = first_chunk ? scratch.total : scratch.chunk;
    if (key % kChunk == 0 || key == item.key_begin) reset(state, rows * heads_of(item), value_dim_);
    TileFetch ahead;
    ahead.begin(base_ + item.head_begin * head_bytes_, next.offsets, rows <= kFetchRows ? blocks_of(next) : 0,
                block_slots_ * slot_bytes_, latent_ ? 1 : heads_of(item),
                plan_.pool_.page_size * slot_bytes_, values_offset_);
    const HeadPass pass{item, key, place.count, state, scratch};
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      const char* base = base_ + head * head_bytes_;
      if constexpr (std::is_same_v<Scales, NoScales>) {
        // All heads read the same latent rows.
        const bool copied = latent_ && head > item.head_begin;
        run_head<Scales>(pass, head, find_tile<Words>(base, place, scratch, copied, ahead), score);
      } else {
        const ByteBlocks blocks = find_bytes(base, place, scratch);
        if (rows > kBlockRows) {
          run_head<Scales>(pass, head, widen_tile<Words>(blocks, place.count, scratch, ahead), score);
        } else {
          with_codec(plan_.pool_.dtype, [&](auto codec) {
            using Bytes = typename Narrow<Words, decltype(codec)>::type;
            run_head<Scales>(pass, head, find_narrow<Bytes>(blocks, place.count, ahead), score);
          });
        }
      }
    }
    const bool chunk_ends = (key + kTile) % kChunk == 0 || key + kTile >= item.key_end;
    if (chunk_ends && !first_chunk) merge(scratch.total, scratch.chunk, rows * heads_of(item));
  }

  // One head's tile, where it is, or put together where pages are smaller than a block; `copied`: it has been already.
  template <class Words>
  BlockTile<Words> find_tile(const char* base, const TilePlace& place, const AttentionScratch& scratch,
                             bool copied, TileFetch& ahead) const {
    constexpr int kRows = kBlockSlots / Words::kGroup;
    BlockTile<Words> tile{{}, {}, dim_, value_dim_, ahead};
    auto* keys = reinterpret_cast<uint32_t*>(scratch.keys);
    auto* values = reinterpret_cast<uint32_t*>(scratch.values);
    const int64_t words = dim_ / Words::kGroup;
    const bool in_place = block_slots_ == kBlockSlots;
    for (int i = 0; i * kBlockSlots < place.count; ++i) {
      const char* block = base + place.offsets[i];
      tile.keys[i] = in_place ? reinterpret_cast<const uint32_t*>(block) : keys + i * words * kBlockSlots;
      tile.values[i] = in_place && !latent_ ? reinterpret_cast<const uint32_t*>(block + values_offset_)
                                            : values + i * kRows * value_dim_;
    }
    if (copied) return tile;
    if (!in_place) {
      const int slots = static_cast<int>(block_slots_);
      for (int i = 0; i < blocks_of(place); ++i) {
        gather_keys(reinterpret_cast<const uint32_t*>(base + place.offsets[i]), slots, words, i * slots, keys);
      }
      if (!latent_) gather_values<Words>(base + values_offset_, place.offsets, slots, place.count, dim_, values);
    }
    if (latent_) copy_values(tile, place.count, values);
    if (Words::kGroup == 2 && place.count % 2 != 0) clear_neighbour(tile, place.count, values);
    return tile;
  }

  // One head's bytes, where they are, or put together where pages are smaller than a block; and their scales.
  ByteBlocks find_bytes(const char* base, const TilePlace& place, const AttentionScratch& scratch) const {
    const int slots = static_cast<int>(block_slots_), count = place.count;
    const int64_t scales = slots * dim_, block_bytes = kBlockSlots * dim_;
    const DType type = plan_.pool_.dtype;
    copy_scales(type, base + scales, place.offsets, slots, count, scratch.key_scales);
    copy_scales(type, base + values_offset_ + scales, place.offsets, slots, count, scratch.value_scales);
    uint8_t *keys = scratch.bytes, *values = scratch.bytes + kTile * dim_;
    const auto* first = reinterpret_cast<const uint8_t*>(base);
    ByteBlocks blocks;
    const bool in_place = slots == kBlockSlots;
    for (int i = 0; i * kBlockSlots < count; ++i) {
      blocks.keys[i] = in_place ? first + place.offsets[i] : keys + i * block_bytes;
      blocks.values[i] = in_place ? first + values_offset_ + place.offsets[i] : values + i * block_bytes;
    }
    if (!in_place) {
      for (int i = 0; i < blocks_of(place); ++i) {
        gather_keys(reinterpret_cast<const uint16_t*>(first + place.offsets[i]), slots, dim_ / 2, i * slots,
                    reinterpret_cast<uint16_t*>(keys));
      }
      gather_byte_values(first + values_offset_, place.offsets, slots, count, dim_, values);
    }
    if (count % 2 != 0) clear_neighbour(blocks, count, values);
    return blocks;
  }

  // As below.
  void clear_neighbour(ByteBlocks& blocks, int count, uint8_t* copies) const {
    const int block = (count - 1) / kBlockSlots;
    const int64_t bytes = (count - 1) % kBlockSlots * dim_;
    uint8_t* copy = copies + block * kBlockSlots * dim_;
    if (blocks.values[block] != copy) std::memcpy(copy, blocks.values[block], bytes + 2 * dim_);
    for (int64_t d = 0; d < dim_; ++d) copy[bytes + 2 * d + 1] = 0;
    blocks.values[block] = copy;
  }

  // The same as words, which are widened as they are multiplied.
  template <class Words>
  BlockTile<Words> find_narrow(const ByteBlocks& blocks, int count, TileFetch& ahead) const {
    BlockTile<Words> tile{{}, {}, dim_, value_dim_, ahead};
    for (int i = 0; i * kBlockSlots < count; ++i) {
      tile.keys[i] = reinterpret_cast<const uint32_t*>(blocks.keys[i]);
      tile.values[i] = reinterpret_cast<const uint32_t*>(blocks.values[i]);
    }
    return tile;
  }

  // The same as wide copies.
  template <class Words>
  BlockTile<Words> widen_tile(const ByteBlocks& blocks, int count, const AttentionScratch& scratch,
                              TileFetch& ahead) const {
    const DType type = plan_.pool_.dtype;
    BlockTile<Words> tile{{}, {}, dim_, value_dim_, ahead};
    for (int i = 0; i * kBlockSlots < count; ++i) {
      const int64_t at = i * kBlockSlots * dim_ / Words::kGroup;
      const int pairs = (std::min(kBlockSlots, count - i * kBlockSlots) + 1) / 2;
      auto *keys = reinterpret_cast<uint32_t*>(scratch.keys) + at, *values = reinterpret_cast<uint32_t*>(scratch.values) + at;
      widen<Words>(type, blocks.keys[i], dim_ / 2, kBlockSlots, keys);
      widen<Words>(type, blocks.values[i], pairs, dim_, values);
      tile.keys[i] = keys;
      tile.values[i] = values;
    }
    return tile;
  }

  // Not inlined: it would crowd the loops of models whose values lie apart.
  template <class Words>
  __attribute__((noinline)) void copy_values(const BlockTile<Words>& tile, int count, uint32_t* values) const {
    constexpr int kRows = kBlockSlots / Words::kGroup;
    for (int i = 0; i * kBlockSlots < count; ++i) {
      values_of_keys(tile.keys[i], value_dim_, Words{}, values + i * kRows * value_dim_);
    }
  }

  // The last key's neighbour in a pair may be anything, and 0 times anything may be NaN: the products read a copy.
  template <class Words>
  void clear_neighbour(BlockTile<Words>& tile, int count, uint32_t* copy) const {
    const uint32_t*& last = tile.values[(count - 1) / kBlockSlots];
    const int64_t words = (count - 1) % kBlockSlots / 2 * value_dim_;
    if (block_slots_ == kBlockSlots && !latent_) {
      std::memcpy(copy, last, (words + value_dim_) * sizeof(uint32_t));
      last = copy;
    } else {
      copy += last - copy;  // is one already
    }
    for (int64_t d = words; d < words + value_dim_; ++d) copy[d] &= 0xffff;
  }

  // Rows [r, r + count) of the item's head over one tile.
  template <class Words, class Scales, class Score>
  void run_block(const AttentionItem& item, int32_t key, int tile_keys, int r, int count,
                 const typename Words::Element* queries, const SoftmaxRows& state,
                 const AttentionScratch& scratch, const BlockTile<Words>& tile, const Score& score) const {
    using Element = typename Words::Element;
    // Row r sees the keys of the tile from `hidden(r)` on, below `visible(r)`. Where that is none of them, as it may be
    // for some rows of the block, what is computed leaves the row as it was, to the last bit.
    const int64_t first = plan_.entries_[item.entry].start + item.q_begin + 1 - key;
    const auto visible = [&](int row) { return std::min<int64_t>(tile_keys, first + row / group_); };
    const auto hidden = [&](int row) { return std::max<int64_t>(0, first + row / group_ - plan_.window_); };
    const int64_t most = visible(r + count - 1);
    if (most <= 0 || hidden(r) >= tile_keys) return;
    const int vecs = static_cast<int>((most + kLanes - 1) / kLanes);
    tile.score(count, reinterpret_cast<const uint32_t*>(queries), vecs, scratch.scores);
    auto* weights = reinterpret_cast<Element*>(scratch.weights);
    const Scales scales(scratch);
    float factors[kBlockRows];
    for (int i = 0; i < count; ++i) {
      const int seen = static_cast<int>(std::max<int64_t>(0, visible(r + i)));
      const int unseen = static_cast<int>(std::min<int64_t>(hidden(r + i), tile_keys));
      factors[i] = softmax_row(scratch.scores + i * kTile, vecs, {unseen, seen}, scales, score, state.largest + i,
                               state.sums + i * kLanes, weights + i * kTile);
    }
    tile.weigh(count, reinterpret_cast<const uint32_t*>(weights), most, state.values, factors);
  }

  // Rows of all heads of the item, divided by their sums.
  void write(const AttentionItem& item, const SoftmaxRows& rows) const {
    int64_t row = 0;
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      for (int32_t token = item.q_begin; token < item.q_end; ++token) {
        for (int64_t g = 0; g < group_; ++g, ++row) {
          const int64_t query_head = head * group_ + g;
          const int64_t index = (plan_.entries_[item.entry].first_token + token) * out_.stride + query_head * value_dim_;
          const Vec scale = broadcast(1.0f / (sum(load(rows.sums + row * kLanes)) + sink(query_head, rows.largest[row])));
          const float* values = rows.values + row * value_dim_;
          if (out_.dtype == DType::kFloat32) {
            scale_row(values, scale, static_cast<float*>(out_.data) + index);
          } else {
            scale_row(values, scale, static_cast<bf16*>(out_.data) + index);
          }
        }
      }
    }
  }

  // The weight of the head's sink, beside weights that are relative to the largest score.
  float sink(int64_t query_head, float largest) const {
    if (sinks_ == nullptr) return 0.0f;
    // With such a weight nothing is left of the others; a larger one need not be a number.
    constexpr float kMost = 120.0f;
    const float score = sinks_[query_head] * kLog2E - largest;
    // A NaN stays one.
    return first_lane(exp2(broadcast(score > kMost ? kMost : score)));
  }

  template <class Out>
  void scale_row(const float* values, Vec scale, Out* out) const {
    for (int64_t d = 0; d < value_dim_; d += kLanes) store(out + d, load(values + d) * scale);
  }

  // Leaves one chunk's rows for whoever finishes the context's last chunk, which joins them in order. A long entry's
  // queries come in blocks: each has its own place among the entry's rows, and its own count.
  void leave_part(const AttentionItem& item, const AttentionScratch& scratch) const {
    const AttentionPlan::Split& split = plan_.splits_[item.entry];
    const int64_t rows = rows_of(item), row_size = 1 + kLanes + value_dim_;
    const int64_t all_rows = plan_.entries_[item.entry].q_len * group_, first_row = item.q_begin * group_;
    const int64_t kv_heads = plan_.pool_.kv_heads;
    const auto part = [&](int64_t chunk, int64_t head) {
      const int64_t row = (chunk * kv_heads + head) * all_rows + first_row;
      float* memory = plan_.partials_.data() + split.first_partial + row * row_size;
      return SoftmaxRows{memory, memory + rows, memory + rows * (1 + kLanes)};
    };
    const auto copy = [&](const SoftmaxRows& to, const SoftmaxRows& from) {
      std::memcpy(to.largest, from.largest, rows * sizeof(float));
      std::memcpy(to.sums, from.sums, rows * kLanes * sizeof(float));
      std::memcpy(to.values, from.values, rows * value_dim_ * sizeof(float));
    };
    const int64_t first_counter = split.first_counter + item.q_begin / plan_.query_step() * kv_heads;
    for (int32_t head = item.head_begin; head < item.head_end; ++head) {
      const int64_t row = (head - item.head_begin) * rows;
      copy(part(item.key_begin / kChunk - split.first_chunk, head), at(scratch.total, row));
      std::atomic<int32_t>& done = plan_.counters_[first_counter + head];
      if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < split.num_chunks) continue;
      // The next layer counts anew; a barrier lies between.
      done.store(0, std::memory_order_relaxed);
      copy(scratch.total, part(0, head));
      for (int32_t chunk = 1; chunk < split.num_chunks; ++chunk) {
        merge(scratch.total, part(chunk, head), static_cast<int>(rows));
      }
      AttentionItem whole = item;
      whole.head_begin = head;
      whole.head_end = head + 1;
      write(whole, scratch.total);
    }
  }

  AttentionPlan& plan_;
  const std::vector<AttentionItem>& items_;
  float* memory_;
  const float* sinks_;
  const TokenRows& q_;
  const TokenRows& out_;
  const int64_t dim_ = plan_.pool_.head_dim;
  const int64_t value_dim_ = plan_.pool_.dim_of_values();
  const bool latent_ = plan_.pool_.is_latent();
  const int64_t group_ = plan_.group();
  int64_t block_slots_, slot_bytes_, head_bytes_, values_offset_;
  const char* base_;
};

namespace {

// Bytes are widened to the words that multiply best with the queries: all of theirs are numbers of bfloat16.
template <class Score>
void run(AttentionWorker& worker, DType pool, DType queries, const Score& score) {
  if (pool == DType::kFloat32) {
    worker.run<FloatWords, NoScales>(score);
  } else if (pool == DType::kBFloat16) {
    worker.run<PairWords, NoScales>(score);
  } else if (queries == DType::kBFloat16 && kMultipliesPairs) {
    worker.run<PairWords, TileScales>(score);
  } else {
    worker.run<FloatWords, TileScales>(score);
  }
}

}  // namespace

void attention_run(AttentionPlan& plan, int64_t layer, const Scoring& scoring, const TokenRows& q, const TokenRows& out,
                   int tid) {
  const FlushDenormals flush;
  AttentionWorker worker(plan, layer, scoring.sinks, q, out, tid);
  const float scale = scoring.scale, cap = scoring.softcap;
  if (cap == 0.0f) {
    run(worker, plan.pool_dtype(), q.dtype, [=](Vec x) { return x * broadcast(scale * kLog2E); });
  } else {
    run(worker, plan.pool_dtype(), q.dtype,
        [=](Vec x) { return broadcast(cap * kLog2E) * tanh(x * broadcast(scale / cap)); });
  }
}

}  // namespace pdserve
