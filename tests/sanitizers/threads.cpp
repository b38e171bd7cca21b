// What threads and ranks do together, as a program of its own: ThreadSanitizer sees every access in it.
//
// Each part writes to plain memory before a barrier, and reads what the others wrote after it. A barrier that lets a
// thread through too early is a data race, and mostly a wrong sum.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "rank_group.h"
#include "sampling.h"
#include "team.h"

using namespace pdserve;

namespace {

void check(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

// Barriers within runs, and runs after each other; with and without spinning.
void run_team(int size, int spin_us) {
  Team team(size, nullptr, spin_us);
  std::vector<int64_t> written(size), sums(size);
  for (int64_t run = 1; run <= 200; ++run) {
    team.run([&](int tid, int) {
      for (int64_t round = 0; round < 5; ++round) {
        written[tid] = run * 10 + round;
        team.barrier();
        sums[tid] = 0;
        for (int64_t value : written) sums[tid] += value;
        team.barrier();
        check(sums[tid] == size * (run * 10 + round), "sum of a team");
      }
    });
    check(sums[0] == size * (run * 10 + 4), "sum after a run");
  }
}

// Runs of fewer members than there are, in an order in which members that are left out miss several.
void run_resized_team(int capacity, int spin_us) {
  Team team(capacity, nullptr, spin_us);
  std::vector<int64_t> written(capacity);
  for (int64_t run = 1; run <= 600; ++run) {
    const int size = static_cast<int>(1 + run * run % 7 % capacity);
    team.set_size(size);
    std::fill(written.begin(), written.end(), 0);
    team.run([&](int tid, int members) {
      check(members == size && tid < size, "members of a resized team");
      written[tid] = run;
      team.barrier();
      if (tid == 0) {
        for (int i = 0; i < capacity; ++i) check(written[i] == (i < size ? run : 0), "work of a resized team");
      }
    });
  }
}

constexpr int kRanks = 3, kThreads = 2;
constexpr int64_t kFloats = 100, kVocab = 40, kRows = 250;
constexpr int32_t kPatience = 300;  // seconds, counted by ranks that sleep

// Exchanges of sums, and logits in slices, as a pass has them.
void run_rank(void* memory, int rank) {
  const auto fail = [](int32_t) { std::abort(); };
  RankGroup group(memory, rank, kRanks, {kFloats, kVocab}, {kRanks, nullptr, fail, fail, kPatience});
  Team team(kThreads, nullptr, 1);
  team.run([&](int tid, int size) {
    const auto meet = [&](Exchange what, uint32_t exchange, int64_t count) {
      team.barrier();
      if (tid == 0) group.meet(team.barrier_spin(), what, exchange, count);
      team.barrier();
    };
    uint32_t exchange = 0;
    for (int pass = 0; pass < 30; ++pass) {
      for (int layer = 0; layer < 4; ++layer, ++exchange) {
        const Range own = share(kFloats, tid, size);
        float* part = group.part(exchange, rank);
        for (int64_t i = own.begin; i < own.end; ++i) part[i] = static_cast<float>(exchange + rank);
        meet(Exchange::kParts, exchange, kFloats);
        for (int64_t i = own.begin; i < own.end; ++i) {
          float sum = 0;
          for (int other = 0; other < kRanks; ++other) sum += group.part(exchange, other)[i];
          check(sum == static_cast<float>(kRanks * exchange + 3), "sum of ranks");
        }
      }
      const int64_t slices = ceil_div(kRows, kLogitRows);
      for (int64_t slice = 0; slice < slices; ++slice) {
        const Range rows = share(kRows, slice, slices), columns = share(kVocab, rank * size + tid, kRanks * size);
        float* logits = group.logits(static_cast<uint32_t>(slice));
        const auto value = static_cast<float>(pass * slices + slice);
        for (int64_t row = 0; row < rows.size(); ++row) {
          for (int64_t i = columns.begin; i < columns.end; ++i) logits[row * kVocab + i] = value;
        }
        meet(Exchange::kLogits, static_cast<uint32_t>(slice), rows.size());
        const Range own = share(rows.size(), tid, size);
        for (int64_t i = own.begin * kVocab; i < own.end * kVocab; ++i) check(logits[i] == value, "logits");
      }
    }
  });
}

void run_ranks() {
  const size_t bytes = RankGroup::bytes(kRanks, {kFloats, kVocab});
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check(memory != MAP_FAILED, "memory of the ranks");
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back(run_rank, memory, rank);
  for (std::thread& rank : ranks) rank.join();
  munmap(memory, bytes);
}

// Threads that share out the rows of a step; the same tokens as one alone.
void sample() {
  constexpr int64_t kCount = 40, kTokens = 500;
  std::vector<float> logits(kCount * kTokens);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(i * 7919 % 1000) / 100;
  RowParams params{};
  params.temperature = 1;
  params.top_p = 0.9;
  params.repetition_penalty = 1;
  std::vector<RowParams> all(kCount, params);
  std::vector<int64_t> positions(kCount, 5), alone(kCount), together(kCount);
  for (int64_t i = 0; i < kCount; ++i) all[i].seed = i;
  std::vector<uint8_t> finite(kCount);
  const SampledRows rows{kCount, all.data(), nullptr, positions.data()};
  RowSampler(nullptr).sample(logits.data(), kTokens, kTokens, rows, alone.data(), finite.data());
  Team team(3, nullptr, 1);
  RowSampler sampler(&team);
  for (int step = 0; step < 10; ++step) {
    sampler.sample(logits.data(), kTokens, kTokens, rows, together.data(), finite.data());
    check(together == alone, "tokens");
  }
}

}  // namespace

int main() {
  for (int size : {1, 2, 3, 5}) {
    for (int spin_us : {0, 50}) run_team(size, spin_us);
    for (int spin_us : {0, 50}) run_resized_team(size, spin_us);
  }
  run_ranks();
  sample();
  std::puts("done");
}
