// Sampling for many rows at once, and as Python calls it.
#include <atomic>
#include <exception>
#include <new>

#include "api.h"
#include "sampling.h"
#include "team.h"

namespace pdserve {

RowSampler::RowSampler(Team* team) : team_(team), samplers_(team == nullptr ? 1 : team->capacity()) {}

void RowSampler::sample(const float* logits, int64_t vocab, int64_t stride, const SampledRows& sampled, int64_t* tokens,
                        uint8_t* finite) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&](int tid, int) {
    try {
      for (int64_t i = next++; i < sampled.count; i = next++) {
        const RowParams& params = sampled.params[sampled.rows == nullptr ? i : sampled.rows[i]];
        const Choice choice = samplers_[tid].sample(logits + i * stride, vocab, params, sampled.positions[i]);
        tokens[i] = choice.token;
        finite[i] = choice.finite;
      }
    } catch (const std::exception&) {
      failed = true;
    }
  };
  if (team_ == nullptr || sampled.count == 1) {
    work(0, 1);
  } else {
    team_->run(work);
  }
  if (failed) throw std::bad_alloc();
}

void log_sum_rows(Team* team, const float* logits, int64_t vocab, int64_t stride, const int64_t* rows, int64_t count,
                  double* sums) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int, int) {
    for (int64_t i = next++; i < count; i = next++) sums[i] = log_sum(logits + rows[i] * stride, vocab);
  };
  if (team == nullptr || count <= 1) {
    work(0, 1);
  } else {
    team->run(work);
  }
}

}  // namespace pdserve

using namespace pdserve;

// Returns -1 when memory runs out.
PDS_API int32_t pds_sample(void* team, const float* logits, int64_t rows, int64_t vocab, int64_t stride,
                           const RowParams* params, const int64_t* positions, int64_t* tokens, uint8_t* finite) {
  try {
    const SampledRows sampled{rows, params, nullptr, positions};
    RowSampler(static_cast<Team*>(team)).sample(logits, vocab, stride, sampled, tokens, finite);
  } catch (const std::exception&) {
    return -1;
  }
  return 0;
}

PDS_API void pds_log_sums(void* team, const float* logits, int64_t vocab, int64_t stride, const int64_t* rows,
                          int64_t count, double* sums) {
  log_sum_rows(static_cast<Team*>(team), logits, vocab, stride, rows, count, sums);
}
