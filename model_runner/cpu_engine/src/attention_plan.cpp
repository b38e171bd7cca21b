// Divides a pass's attention among threads. Costs are balanced by the longest-first rule; nothing that a thread
// computes depends on who else computes what (see attention.h).
#include <algorithm>
#include <cstdlib>
#include <new>

#include "attention.h"
#include "attention_tile.h"
#include "sizes.h"

namespace pdserve {
namespace {

// Rows of queries that share a tile: enough to make reading it cheap, few enough for the first cache.
constexpr int64_t kQueryRows = 96;
// Entries of at most this many tokens may be split along their keys.
constexpr int32_t kSplitTokens = 8;
// What loading a key costs, in rows of queries.
constexpr int64_t kKeyCost = 8;
// A context is split if it is more than one part in so many of a thread's work.
constexpr int64_t kLargeShare = 4;
// Longer than any context.
constexpr int64_t kNoWindow = int64_t{1} << 40;

}  // namespace

void AlignedFloats::Free::operator()(float* data) const { std::free(data); }

void AlignedFloats::reserve(int64_t size) {
  if (size <= size_) return;
  size_ = 0;
  const int64_t rounded = round_up(size, 16);
  data_.reset(static_cast<float*>(std::aligned_alloc(64, rounded * sizeof(float))));
  if (!data_) throw std::bad_alloc();
  size_ = rounded;
}

void AttentionPlan::prepare(const KVPoolView& pool, int64_t num_heads, int64_t window, const AttentionEntry* entries,
                            int64_t num_entries, const PageTable& table, int nthreads) {
  pool_ = pool;
  num_heads_ = num_heads;
  window_ = window == 0 ? kNoWindow : window;
  entries_.assign(entries, entries + num_entries);
  find_pages(table);
  make_items(nthreads);
  share_out(nthreads);
  reserve(nthreads);
}

// Behind the window of an entry's first token a pool whose pages go back may have none, or another row's: whatever is
// read there, in a tile that begins before the window, is read of page 0, and masked.
void AttentionPlan::find_pages(const PageTable& table) {
  const int64_t size = pool_.page_size;
  const int64_t page_bytes = pool_.page_bytes();
  first_page_.clear();
  page_offsets_.clear();
  for (const AttentionEntry& entry : entries_) {
    first_page_.push_back(static_cast<int64_t>(page_offsets_.size()));
    const int32_t* slots = table.req_to_token + entry.row * table.stride;
    const int64_t seen = table.window_pages == nullptr ? 0 : std::max<int64_t>(0, entry.start + 1 - window_);
    for (int64_t key = 0; key < keys_of(entry); key += size) {
      int64_t page = slots[key] / size;
      if (table.window_pages != nullptr) page = key + size <= seen ? 0 : table.window_pages[page];
      page_offsets_.push_back(page * page_bytes);
    }
  }
}

int32_t AttentionPlan::query_step() const {
  return static_cast<int32_t>(std::max<int64_t>(1, kQueryRows / group()));
}

int32_t AttentionPlan::first_key(const AttentionEntry& entry, int32_t q) const {
  return static_cast<int32_t>(std::max<int64_t>(0, entry.start + q + 1 - window_) / kTile * kTile);
}

void AttentionPlan::make_items(int nthreads) {
  const auto heads = static_cast<int32_t>(pool_.kv_heads);
  const auto cost = [&](int64_t keys, int64_t tokens) { return keys * (kKeyCost + tokens * group()); };
  int64_t total = 0, units = 0;
  for (const AttentionEntry& entry : entries_) {
    total += cost(keys_of(entry) - first_key(entry, 0), entry.q_len);
    units += ceil_div(keys_of(entry), kChunk) - first_key(entry, 0) / kChunk;
  }
  const int32_t step = query_step();
  // Neighbouring heads lie side by side in memory, so one unit takes all of them where there are units enough.
  const int32_t together = nthreads == 1 || units >= 2 * nthreads ? heads : 1;
  int64_t partial_size = 0, num_counters = 0;
  items_.clear();
  splits_.assign(entries_.size(), Split{});
  for (size_t b = 0; b < entries_.size(); ++b) {
    const AttentionEntry& entry = entries_[b];
    const auto keys = static_cast<int32_t>(keys_of(entry));
    const int32_t first = first_key(entry, 0), chunks = ceil_div(keys, kChunk) - first / kChunk;
    const bool decode = entry.q_len <= kSplitTokens;
    const bool large = cost(keys - first, entry.q_len) * kLargeShare * nthreads > total;
    const bool split = decode && large && chunks > 1 && nthreads > 1;
    if (split) {
      splits_[b] = {chunks, first / kChunk, partial_size, num_counters};
      partial_size += splits_[b].num_chunks * heads * entry.q_len * group() * (1 + kLanes + pool_.dim_of_values());
      num_counters += heads * ceil_div(entry.q_len, step);
    }
    const int32_t head_step = decode ? together : 1;
    // The parts end where chunks do, wherever the first one begins.
    for (int32_t key = first, end = 0; key < keys; key = end) {
      end = split ? std::min((key / kChunk + 1) * kChunk, keys) : keys;
      for (int32_t head = 0; head < heads; head += head_step) {
        for (int32_t q = 0; q < entry.q_len; q += step) {
          AttentionItem item{static_cast<int32_t>(b), q, std::min(q + step, entry.q_len), head, head + head_step,
                             key, end, 0};
          if (!split) {
            item.key_begin = first_key(entry, q);
            item.key_end = entry.start + item.q_end;
          }
          item.cost = cost(item.key_end - item.key_begin, item.q_end - q) * head_step;
          items_.push_back(item);
        }
      }
    }
  }
  partials_.reserve(partial_size);
  if (num_counters > counters_size_) {
    counters_ = std::make_unique<std::atomic<int32_t>[]>(num_counters);
    counters_size_ = num_counters;
  }
}

void AttentionPlan::share_out(int nthreads) {
  work_.resize(nthreads);
  for (auto& items : work_) items.clear();
  std::stable_sort(items_.begin(), items_.end(), [](const auto& a, const auto& b) { return a.cost > b.cost; });
  std::vector<int64_t> load(nthreads, 0);
  for (const AttentionItem& item : items_) {
    const auto least = std::min_element(load.begin(), load.end()) - load.begin();
    load[least] += item.cost;
    work_[least].push_back(item);
  }
}

void AttentionPlan::reserve(int nthreads) {
  int64_t rows = 0;
  for (const AttentionItem& item : items_) {
    rows = std::max(rows, (item.q_end - item.q_begin) * group() * (item.head_end - item.head_begin));
  }
  scratch_.resize(nthreads);
  for (auto& scratch : scratch_) scratch.reserve(AttentionScratch::size(rows, pool_.head_dim, pool_.dim_of_values()));
}

}  // namespace pdserve
