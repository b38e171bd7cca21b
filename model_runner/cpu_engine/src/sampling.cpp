#include "sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "denormals.h"
#include "isa/masks.h"
#include "simd.h"

namespace pdserve {
namespace {

constexpr int64_t kBlock = 256;       // logits whose weights are summed before they join the float64 sum
// Distances from the largest logit, over temperature, at which the weight so far is measured.
constexpr int kLevels = 8;
constexpr float kLevelStep = 1.5f;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Sixteen logits, the last ones of a row filled up with minus infinity.
Vec load_some(const float* p, int64_t count) {
  if (count >= kLanes) return load(p);
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -kInfinity);
  std::copy(p, p + count, lanes);
  return load(lanes);
}

// Logits over temperature, the largest 0, in the reference's order of operations.
Vec scaled(Vec logits, Vec largest_logit, Vec temperature) { return (logits - largest_logit) / temperature; }

// Bits that order as the numbers do, denormals too, and both zeros alike.
uint32_t key_of(float logit) {
  constexpr uint32_t kMinusZero = 0x80000000u;
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof bits);
  if (bits == kMinusZero) bits = 0;
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Weight of the row, whole and down to each level's distance.
struct Masses {
  double total = 0;
  std::array<double, kLevels> down_to{};
};

Masses measure(const float* logits, int64_t vocab, Vec largest_logit, Vec temperature) {
  Masses masses;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    Vec all = zero();
    Vec part[kLevels];
    for (Vec& sum : part) sum = zero();
    for (int64_t i = begin; i < std::min(begin + kBlock, vocab); i += kLanes) {
      const Vec distance = scaled(load_some(logits + i, vocab - i), largest_logit, temperature);
      const Vec weight = exp(distance);
      all = all + weight;
#pragma GCC unroll 16
      for (int level = 0; level < kLevels; ++level) {
        part[level] = add_where(at_least(distance, broadcast(-kLevelStep * (level + 1))), part[level], weight);
      }
    }
    masses.total += sum(all);
    for (int level = 0; level < kLevels; ++level) masses.down_to[level] += sum(part[level]);
  }
  return masses;
}

}  // namespace

double uniform(uint64_t seed, int64_t position) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t counter = mix(seed + kGolden) + (static_cast<uint64_t>(position) + 1) * kGolden;
  return static_cast<double>(mix(counter) >> 11) * 0x1p-53;
}

Choice largest_logit(const float* logits, int64_t vocab) {
  constexpr int64_t kStride = 1024;
  float best = -kInfinity;
  int64_t best_begin = 0;
  uint32_t broken = 0;
  for (int64_t begin = 0; begin < vocab; begin += kStride) {
    const int64_t end = std::min(begin + kStride, vocab);
    Vec top[4] = {broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity), broadcast(-kInfinity)};
    int64_t i = begin;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const Vec x = load(logits + i + part * kLanes);
        broken |= not_a_number(x);
        top[part] = max(top[part], x);
      }
    }
    for (; i < end; i += kLanes) {
      const Vec x = load_some(logits + i, end - i);
      broken |= not_a_number(x);
      top[0] = max(top[0], x);
    }
    const float block = largest(max(max(top[0], top[1]), max(top[2], top[3])));
    if (block > best) {
      best = block;
      best_begin = begin;
    }
  }
  if (broken != 0 || !std::isfinite(best)) return {0, false};
  int64_t token = best_begin;
  while (logits[token] != best) ++token;
  return {token, true};
}

double log_sum(const float* logits, int64_t vocab) {
  const Choice best = largest_logit(logits, vocab);
  if (!best.finite) return std::numeric_limits<double>::quiet_NaN();
  const Vec top = broadcast(logits[best.token]);
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    Vec all = zero();
    for (int64_t i = begin; i < std::min(begin + kBlock, vocab); i += kLanes) {
      all = all + exp(load_some(logits + i, vocab - i) - top);
    }
    total += sum(all);
  }
  return logits[best.token] + std::log(total);
}

Choice Sampler::sample(const float* logits, int64_t vocab, const RowParams& params, int64_t position) {
  const Choice best = largest_logit(logits, vocab);
  if (!best.finite || params.greedy) return best;
  // At a low temperature much of the vocabulary has weights that small. Next to the best token's, which is 1, they are
  // nothing.
  const FlushDenormals flush;
  const float top = logits[best.token];
  const double u = uniform(params.seed, position);
  const bool everything = params.top_p == std::numeric_limits<double>::infinity();
  if (params.top_k == 0 && everything) return {draw_from_all(logits, vocab, top, params, u), true};
  if (params.top_k > 0) {
    collect(logits, vocab, top_k_threshold(logits, vocab, params.top_k), top, params.temperature);
    keep(first_k(params.top_k));
    double mass = 0;
    for (const Candidate& candidate : candidates_) mass += candidate.weight;
    return {draw_from_candidates(params, mass, u), true};
  }
  const Masses masses = measure(logits, vocab, broadcast(top), broadcast(params.temperature));
  int level = 0;
  // A little more than asked for, so that the rounding of this sum can't leave a token of the nucleus out.
  while (level < kLevels && masses.down_to[level] < params.top_p * masses.total * (1 + 1e-6)) ++level;
  const float distance = level < kLevels ? -kLevelStep * static_cast<float>(level + 1) : -kInfinity;
  const float threshold = top + distance * params.temperature * (1 + 1e-6f) - std::abs(top) * 1e-6f;
  collect(logits, vocab, threshold, top, params.temperature);
  return {draw_from_candidates(params, masses.total, u), true};
}

int64_t Sampler::draw_from_all(const float* logits, int64_t vocab, float top, const RowParams& params, double u) {
  const Vec top_logit = broadcast(top), temperature = broadcast(params.temperature), least = broadcast(params.min_p);
  const auto weights = [&](int64_t i) {
    const Vec weight = exp(scaled(load_some(logits + i, vocab - i), top_logit, temperature));
    return where(at_least(weight, least), weight);
  };
  sums_.clear();
  double total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kBlock) {
    Vec block = zero();
    for (int64_t i = begin; i < std::min(begin + kBlock, vocab); i += kLanes) block = block + weights(i);
    sums_.push_back(total);
    total += sum(block);
  }
  const double target = u * total;
  // The last block that begins at or below the target; then the first token whose sum exceeds it.
  auto block = std::upper_bound(sums_.begin(), sums_.end(), target) - sums_.begin() - 1;
  for (; block >= 0; --block) {
    double cumulative = sums_[block];
    int64_t last = -1;
    for (int64_t i = block * kBlock; i < std::min((block + 1) * kBlock, vocab); i += kLanes) {
      float lanes[kLanes];
      store(lanes, weights(i));
      for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, vocab - i); ++lane) {
        if (lanes[lane] == 0) continue;
        last = i + lane;
        cumulative += lanes[lane];
        if (cumulative > target) return last;
      }
    }
    // Rounding put the target behind the block's own sum: the last token that has a weight.
    if (last >= 0) return last;
  }
  return 0;
}

float Sampler::top_k_threshold(const float* logits, int64_t vocab, int64_t top_k) {
  // Divide the logits into groups, in any way: at least k logits are as large as the k-th largest of the groups'
  // maxima. Lanes of `step` vectors in a row make sixteen groups without a single shuffle.
  const int64_t wanted = std::max<int64_t>(4 * top_k, 512);
  const int64_t step = std::clamp<int64_t>(vocab / wanted, 1, 64) * kLanes;
  if (step == kLanes) return -kInfinity;
  maxima_.clear();
  for (int64_t begin = 0; begin < vocab; begin += step) {
    Vec top = broadcast(-kInfinity);
    for (int64_t i = begin; i < std::min(begin + step, vocab); i += kLanes) {
      top = max(top, load_some(logits + i, vocab - i));
    }
    float lanes[kLanes];
    store(lanes, top);
    maxima_.insert(maxima_.end(), lanes, lanes + kLanes);
  }
  std::nth_element(maxima_.begin(), maxima_.begin() + top_k - 1, maxima_.end(), std::greater<float>());
  return maxima_[top_k - 1];
}

void Sampler::collect(const float* logits, int64_t vocab, float threshold, float top, float temperature) {
  candidates_.reserve(vocab);
  Candidate* next = candidates_.begin();
  const Vec limit = broadcast(threshold), top_logit = broadcast(top), divisor = broadcast(temperature);
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const Vec x = load_some(logits + i, vocab - i);
    uint32_t mask = at_least(x, limit);
    if (vocab - i < kLanes) mask &= (1u << (vocab - i)) - 1;
    if (mask == 0) continue;
    float weights[kLanes];
    store(weights, exp(scaled(x, top_logit, divisor)));
    for (; mask != 0; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      *next++ = {key_of(logits[i + lane]), static_cast<int32_t>(i + lane), weights[lane]};
    }
  }
  candidates_.cut(next);
}

// Finds where the candidates, best first, are enough: a radix search, eight bits of the key at a time.
// `enough(count, mass)` says so of those that come before a candidate. Returns the last candidate kept.
template <class Enough>
Sampler::Border Sampler::find_border(Enough enough) {
  constexpr int kBits = 8;
  constexpr uint32_t kBins = 1u << kBits;
  struct Bin {
    double mass;
    int64_t count;
  };
  std::array<Bin, kBins> bins;
  int64_t count = 0;
  double mass = 0;
  for (int shift = 32 - kBits; shift >= 0; shift -= kBits) {
    const Candidates& from = shift == 32 - kBits ? candidates_ : open_;
    bins.fill({0, 0});
    for (const Candidate& candidate : from) {
      Bin& bin = bins[(candidate.key >> shift) & (kBins - 1)];
      bin.mass += candidate.weight;
      ++bin.count;
    }
    // The last bin that is not passed: whatever comes before the next one is enough, or there is no next one.
    uint32_t at = kBins, last = kBins;
    while (at-- > 0) {
      if (bins[at].count == 0) continue;
      if (last != kBins) {
        if (enough(count + bins[last].count, mass + bins[last].mass)) break;
        count += bins[last].count;
        mass += bins[last].mass;
      }
      last = at;
    }
    const auto inside = [&](const Candidate& c) { return ((c.key >> shift) & (kBins - 1)) == last; };
    if (&from == &candidates_) open_.reserve(bins[last].count);
    open_.cut(std::copy_if(from.begin(), from.end(), open_.begin(), inside));
  }
  int64_t equals = 0;
  for (const Candidate& candidate : open_) {
    if (count + equals > 0 && enough(count + equals, mass)) break;
    mass += candidate.weight;
    ++equals;
  }
  return {open_.begin()->key, equals};
}

Sampler::Border Sampler::first_k(int64_t k) {
  return find_border([k](int64_t count, double) { return count >= k; });
}

Sampler::Border Sampler::nucleus(double limit) {
  return find_border([limit](int64_t, double mass) { return mass >= limit; });
}

void Sampler::keep(Border border) {
  const auto drop = [&border](const Candidate& candidate) {
    if (candidate.key != border.key) return candidate.key < border.key;
    return border.equals-- <= 0;
  };
  // In order of ids, so that the first of equals stay; remove_if promises to look at each element once.
  candidates_.cut(std::remove_if(candidates_.begin(), candidates_.end(), drop));
}

int64_t Sampler::draw_from_candidates(const RowParams& params, double mass, double u) {
  if (params.top_p < 1) keep(nucleus(params.top_p * mass));
  double total = 0;
  // The best token's weight is 1, and is kept whatever min_p is.
  for (Candidate& candidate : candidates_) {
    if (candidate.weight < std::min(params.min_p, 1.0f)) candidate.weight = 0;
    total += candidate.weight;
  }
  const double target = u * total;
  double cumulative = 0;
  int64_t last = 0;
  for (const Candidate& candidate : candidates_) {
    if (candidate.weight == 0) continue;
    last = candidate.id;
    cumulative += candidate.weight;
    if (cumulative > target) break;
  }
  return last;
}

}  // namespace pdserve
