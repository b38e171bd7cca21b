// What the tensor-parallel ranks of one host share: memory that each one's process has mapped, and a place to meet.
//
// An exchange: every rank writes its part -> all meet -> every rank reads all parts, in the order of the ranks, so that
// a sum is the same on each, whoever came first. Two halves take turns: who writes for the next exchange can't disturb
// who still reads for this one, and before it writes for the one after that, all have met again. So an exchange costs
// one meeting.
//
// Ranks on other hosts have memory like it of their own. Where there are any, the lead of this host's ranks carries what
// is exchanged over to the others' memory, and theirs to this, once all have come; then the host's meet again.
//
// The memory is zeroed when it is made. A rank that dies leaves the others waiting: whoever started them ends them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sizes.h"
#include "team.h"

namespace pdserve {

// What ranks meet for. kParts: `count` floats of each; kLogits: `count` rows; kStored: keys and values.
enum class Exchange : int32_t { kParts, kLogits, kStored };

// The lead's: brings what this host's ranks have written to the others' memory, and theirs to ours.
using Carry = void (*)(Exchange what, uint32_t exchange, int64_t count);

// How many of the ranks are on this host, and what carries between hosts: null on all but their leads.
struct Host {
  int ranks;
  Carry carry;
};

class RankGroup {
 public:
  // Of memory for `size` ranks' parts of so many floats each, and logits of all.
  static size_t bytes(int size, int64_t part_floats, int64_t logits_floats) {
    return kHead + sizeof(float) * (2 * size * stride_of(part_floats) + logits_floats);
  }

  RankGroup(void* memory, int rank, int size, int64_t part_floats, Host host)
      : meeting_(static_cast<Meeting*>(memory)),
        parts_(reinterpret_cast<float*>(static_cast<char*>(memory) + kHead)),
        rank_(rank),
        size_(size),
        part_floats_(part_floats),
        host_(host) {}

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t part_floats() const { return part_floats_; }  // room of a part

  // Rank `rank`'s part in an exchange; exchanges are numbered by each rank alike. Those of one follow each other.
  float* part(uint32_t exchange, int rank) const {
    return parts_ + ((exchange & 1) * size_ + rank) * stride_of(part_floats_);
  }

  // One for all ranks, which write to it and meet.
  float* logits() const { return parts_ + 2 * size_ * stride_of(part_floats_); }

  // By one thread of each rank; returns when all ranks have come. What was written before it is visible after it.
  void meet(uint64_t spin_ticks, Exchange what, uint32_t exchange, int64_t count) {
    meet_here(spin_ticks);
    if (host_.ranks == size_ || what == Exchange::kStored) return;
    if (host_.carry != nullptr) host_.carry(what, exchange, count);
    meet_here(spin_ticks);
  }

 private:
  struct Meeting {
    SignalOf<Reach::kHost> round;
    alignas(kLine) std::atomic<uint32_t> arrived;
  };
  static constexpr size_t kHead = 4096;
  static_assert(sizeof(Meeting) <= kHead);

  void meet_here(uint64_t spin_ticks) {
    const uint32_t round = meeting_->round.read();
    if (meeting_->arrived.fetch_add(1, std::memory_order_acq_rel) == static_cast<uint32_t>(host_.ranks - 1)) {
      meeting_->arrived.store(0, std::memory_order_relaxed);
      meeting_->round.raise();
    } else {
      meeting_->round.wait_past(round, spin_ticks);
    }
  }

  static int64_t stride_of(int64_t floats) { return round_up(floats, kLine / sizeof(float)); }

  Meeting* const meeting_;
  float* const parts_;
  const int rank_, size_;
  const int64_t part_floats_;
  const Host host_;
};

}  // namespace pdserve
