#include "step.h"

#include <algorithm>
#include <cstring>

namespace pdserve {

int64_t Stepper::run(const StepArgs& args) {
  if (!plan(args)) return -1;
  const int64_t wanted = static_cast<int64_t>(wanted_.size());
  logits_.reserve(wanted * engine_.config().vocab);
  chosen_.resize(wanted);
  for (const AttentionEntry& entry : batch_) {
    int32_t* row = tables_.req_to_token + entry.row * tables_.columns + entry.start;
    std::copy_n(args.out_cache_loc + entry.first_token, entry.q_len, row);
  }
  // Who is late must not clear what another rank has written.
  if (tables_.clear_begun && clear_begun_pages(args) && tables_.shared_heads) engine_.meet();
  ForwardArgs forward{};
  forward.tokens = args.tokens;
  forward.entries = args.entries;
  forward.wanted = wanted;
  forward.scored = wanted;
  forward.input_ids = input_ids_.data();
  forward.positions = positions_.data();
  forward.out_cache_loc = slots_.data();
  forward.wanted_tokens = wanted_.data();
  forward.entry = batch_.data();
  forward.req_to_token = tables_.req_to_token;
  forward.table_stride = tables_.columns;
  forward.window_pages = tables_.window_pages;
  forward.ropes = args.ropes;
  forward.logits = logits_.data();
  forward.layers_done = args.layers_done;
  engine_.forward(forward);
  choose(args);
  return wanted;
}

// Fills what the pass needs; false where the general way has to say what is wrong with the step, or to do more.
bool Stepper::plan(const StepArgs& args) {
  batch_.clear();
  wanted_.clear();
  sampled_rows_.clear();
  sampled_positions_.clear();
  input_ids_.resize(args.tokens);
  positions_.resize(args.tokens);
  slots_.resize(args.tokens);
  int64_t first_token = 0;
  for (int64_t b = 0; b < args.entries; ++b) {
    if (!plan_entry(args, b, first_token)) return false;
    first_token += args.q_lens[b];
  }
  if (first_token != args.tokens) return false;
  for (int64_t t = 0; t < args.tokens; ++t) {
    slots_[t] = args.out_cache_loc[t];
    if (slots_[t] < 0 || slots_[t] >= tables_.slots) return false;
    if (input_ids_[t] < 0 || input_ids_[t] >= engine_.config().vocab) return false;
  }
  return args.tokens > 0;
}

bool Stepper::plan_entry(const StepArgs& args, int64_t b, int64_t first_token) {
  const int64_t row = args.rows[b], start = args.starts[b], q_len = args.q_lens[b], end = start + q_len;
  if (row < 0 || row >= tables_.rows || start < 0 || q_len < 1 || first_token + q_len > args.tokens) return false;
  if (end > tables_.columns || end > args.rotations) return false;
  for (int64_t i = 0; i < q_len; ++i) {
    positions_[first_token + i] = start + i;
    input_ids_[first_token + i] = args.input_ids[first_token + i];
  }
  if (args.use_last[b]) input_ids_[first_token] = tables_.last_tokens[row];
  batch_.push_back({args.rows[b], args.starts[b], args.q_lens[b], static_cast<int32_t>(first_token)});
  if (!args.sample[b]) return true;
  const RowParams& p = tables_.params[row];
  if (p.penalised || p.logprobs >= 0 || end - p.prompt_len < p.min_new_tokens) return false;
  wanted_.push_back(first_token + q_len - 1);
  sampled_rows_.push_back(args.rows[b]);
  sampled_positions_.push_back(end);
  return true;
}

// Whether there are any.
bool Stepper::clear_begun_pages(const StepArgs& args) {
  bool any = false;
  const EngineConfig& config = engine_.config();
  const KVPoolView& pool = config.pool;
  for (const AttentionEntry& entry : batch_) {
    const int64_t used = (entry.start + entry.q_len) % pool.page_size;
    if (used == 0 || used > entry.q_len) continue;
    any = true;
    const int64_t page = args.out_cache_loc[entry.first_token + entry.q_len - 1] / pool.page_size;
    clear_page(pool, page);
    if (tables_.window_pages != nullptr) clear_page(config.window_pool, tables_.window_pages[page]);
  }
  return any;
}

// Of our own heads: other ranks may have begun to fill theirs.
void Stepper::clear_page(const KVPoolView& pool, int64_t page) {
  const int64_t own_heads = pool.is_latent() ? 1 : pool.kv_heads, parts = pool.is_latent() ? 1 : 2;
  const int64_t of_heads = own_heads * pool.page_size * pool.slot_bytes();
  const int64_t all_heads = of_heads / own_heads * pool.pool_heads;
  char* own = static_cast<char*>(pool.data) + page * pool.page_bytes();
  for (int64_t i = 0; i < parts * pool.num_layers; ++i) std::memset(own + i * all_heads, 0, of_heads);
}

void Stepper::choose(const StepArgs& args) {
  const int64_t count = static_cast<int64_t>(wanted_.size()), vocab = engine_.config().vocab;
  const SampledRows sampled{count, tables_.params, sampled_rows_.data(), sampled_positions_.data()};
  sampler_.sample(logits_.data(), vocab, vocab, sampled, chosen_.data(), args.finite);
  for (int64_t i = 0; i < count; ++i) {
    args.next_tokens[i] = static_cast<int32_t>(chosen_[i]);
    tables_.last_tokens[sampled_rows_[i]] = chosen_[i];
  }
}

}  // namespace pdserve
