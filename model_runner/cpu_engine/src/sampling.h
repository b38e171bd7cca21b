// Chooses the next token of each row of logits, without sorting the vocabulary: the order of rules, the order of equals
// and the inverted distribution are those of sampling/rules.py, which is the reference.
//
// Weights are float32, their sums float64 in vocabulary order. The reference sums some of them as float32, so the two
// may differ where the row's uniform number lies within rounding (about 1e-7) of a border between two tokens. A
// row's token depends on that row alone.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace pdserve {

class Team;

// ROW_PARAMS of row_params.py, a NumPy dtype with C's alignment: fields of SamplingParams (messages/sampling.py), then others.
struct RowParams {
  uint64_t seed;
  int64_t min_new_tokens;
  float temperature;
  double top_p;   // infinity: everything
  int64_t top_k;  // 0: the whole vocabulary
  float min_p;
  float frequency_penalty;
  float presence_penalty;
  float repetition_penalty;
  int64_t prompt_len;
  int32_t logprobs;  // negative: none wanted
  bool greedy;
  bool penalised;
};

// Rows that sample a token each.
struct SampledRows {
  int64_t count;
  const RowParams* params;
  const int32_t* rows;       // [count]: where in params those of each are; null: one after another
  const int64_t* positions;  // [count]: of the tokens to be sampled
};

struct Choice {
  int64_t token;
  bool finite;  // false: NaN, +inf or nothing but -inf in the row; the token means nothing
};

// The lowest id of the largest logit.
Choice largest_logit(const float* logits, int64_t vocab);

// The logarithm of the sum of the row's exponentials; NaN if the row is not finite.
double log_sum(const float* logits, int64_t vocab);

// One number in [0, 1), of 53 random bits, for each (seed, position).
double uniform(uint64_t seed, int64_t position);

// One thread's memory: the tokens that may be kept.
class Sampler {
 public:
  // The token at `position`.
  Choice sample(const float* logits, int64_t vocab, const RowParams& params, int64_t position);

 private:
  struct Candidate {
    uint32_t key;  // grows with the logit
    int32_t id;
    float weight;
  };

  // What is kept of the candidates: keys above `key`, and the first `equals` of those equal to it.
  struct Border {
    uint32_t key;
    int64_t equals;
  };

  int64_t draw_from_all(const float* logits, int64_t vocab, float largest, const RowParams& params, double u);
  int64_t draw_from_candidates(const RowParams& params, double mass, double u);
  float top_k_threshold(const float* logits, int64_t vocab, int64_t top_k);
  void collect(const float* logits, int64_t vocab, float threshold, float largest, float temperature);
  template <class Enough>
  Border find_border(Enough enough);
  Border first_k(int64_t k);
  Border nucleus(double limit);
  void keep(Border border);

  // As many as the vocabulary has tokens, and never filled with zeros, which would cost more than the rest.
  class Candidates {
   public:
    void reserve(int64_t size) {
      if (size > capacity_) memory_.reset(new Candidate[size]), capacity_ = size;
    }
    void cut(Candidate* end) { size_ = end - begin(); }
    Candidate* begin() const { return memory_.get(); }
    Candidate* end() const { return begin() + size_; }

   private:
    std::unique_ptr<Candidate[]> memory_;
    int64_t capacity_ = 0;
    int64_t size_ = 0;
  };

  Candidates candidates_;
  Candidates open_;
  std::vector<float> maxima_;
  std::vector<double> sums_;
};

// Chooses tokens for many rows at once, on a team's threads or, without one, on the caller's. Its memory, of 12 bytes and
// more for each token of the vocabulary and thread, stays from one step to the next.
class RowSampler {
 public:
  explicit RowSampler(Team* team);

  // Tokens and whether each row was finite, [count]: rows of float32 logits, `stride` elements apart. Throws
  // std::bad_alloc.
  void sample(const float* logits, int64_t vocab, int64_t stride, const SampledRows& sampled, int64_t* tokens,
              uint8_t* finite);

 private:
  Team* const team_;
  std::vector<Sampler> samplers_;  // by thread
};

// `log_sum` of those `rows` of the logits, [count], shared out in the same way.
void log_sum_rows(Team* team, const float* logits, int64_t vocab, int64_t stride, const int64_t* rows, int64_t count,
                  double* sums);

}  // namespace pdserve
