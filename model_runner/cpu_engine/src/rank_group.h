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
// Logits go in slices of kLogitRows, so that a prompt whose logits are all wanted takes no more of this memory, which stays,
// than a step does. These halves take turns from slice to slice of a pass.
//
// The memory is zeroed when it is made. Each rank's process leaves its number there. A rank that waits for a second looks
// whether one of the others on its host has ended: its own process can't go on then. Neither can it if one hangs or was
// stopped, so it waits for `patience` seconds at most. Only a rank that already sleeps counts them.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "linear.h"
#include "sizes.h"
#include "team.h"

namespace pdserve {

// What ranks meet for. kParts: `count` floats of each; kLogits: `count` rows; kStored: keys and values.
enum class Exchange : int32_t { kParts, kLogits, kStored };

constexpr int64_t kLogitRows = kTileRows;  // in an exchange of logits

// The lead's: brings what this host's ranks have written to the others' memory, and theirs to ours. Exchanges of logits are
// numbered within a pass.
using Carry = void (*)(Exchange what, uint32_t exchange, int64_t count);

// Ends this process: `rank`, of this host, has ended.
using Gone = void (*)(int32_t rank);

// Ends this process: a rank of this host has not come to a meeting for `seconds`, and has not ended.
using Late = void (*)(int32_t seconds);

// How many of the ranks are on this host, what carries between hosts (null on all but their leads), and what is called when
// one of the ranks here has ended, or has not come for `patience` seconds.
struct Host {
  int ranks;
  Carry carry;
  Gone gone;
  Late late;
  int32_t patience;
};

// What is exchanged: floats of a part of a sum, and of a row of logits.
struct ExchangeSizes {
  int64_t part_floats, vocab;
};

// Whether a process has ended, though nothing has collected it yet. 0: one that is still to come, which has not.
inline bool has_ended(pid_t pid) {
  if (pid == 0) return false;
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return errno == ESRCH;
  pollfd ended{fd, POLLIN, 0};
  const bool result = poll(&ended, 1, 0) == 1;
  close(fd);
  return result;
}

class RankGroup {
 public:
  // Of memory for `size` ranks' parts, and logits of all.
  static size_t bytes(int size, const ExchangeSizes& sizes) {
    const int64_t floats = size * stride_of(sizes.part_floats) + kLogitRows * sizes.vocab;
    return head_bytes(size) + 2 * sizeof(float) * floats;
  }

  RankGroup(void* memory, int rank, int size, const ExchangeSizes& sizes, Host host)
      : meeting_(static_cast<Meeting*>(memory)),
        parts_(reinterpret_cast<float*>(static_cast<char*>(memory) + head_bytes(size))),
        rank_(rank),
        size_(size),
        sizes_(sizes),
        host_(host) {
    process_of(rank % host.ranks).store(getpid(), std::memory_order_release);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t part_floats() const { return sizes_.part_floats; }  // room of a part

  // Rank `rank`'s part in an exchange; exchanges are numbered by each rank alike. Those of one follow each other.
  float* part(uint32_t exchange, int rank) const {
    return parts_ + ((exchange & 1) * size_ + rank) * stride_of(sizes_.part_floats);
  }

  // kLogitRows of them, one memory for all ranks, which write to it and meet. By the slice's number in its pass.
  float* logits(uint32_t slice) const {
    return parts_ + 2 * size_ * stride_of(sizes_.part_floats) + (slice & 1) * kLogitRows * sizes_.vocab;
  }

  // By one thread of each rank; returns when all ranks have come. What was written before it is visible after it.
  void meet(Spin spin, Exchange what, uint32_t exchange, int64_t count) {
    meet_here(spin);
    if (host_.ranks == size_ || what == Exchange::kStored) return;
    if (host_.carry != nullptr) host_.carry(what, exchange, count);
    meet_here(spin);
  }

 private:
  struct Meeting {
    SignalOf<Reach::kHost> round;
    alignas(kLine) std::atomic<uint32_t> arrived;
  };
  // The meeting, and the number of each rank's process on this host.
  static size_t head_bytes(int size) { return round_up(sizeof(Meeting) + size * sizeof(std::atomic<pid_t>), 4096); }
  static constexpr std::chrono::seconds kLookEvery{1};

  std::atomic<pid_t>& process_of(int local) const { return reinterpret_cast<std::atomic<pid_t>*>(meeting_ + 1)[local]; }

  void meet_here(Spin spin) {
    const uint32_t round = meeting_->round.read();
    if (meeting_->arrived.fetch_add(1, std::memory_order_acq_rel) == static_cast<uint32_t>(host_.ranks - 1)) {
      meeting_->arrived.store(0, std::memory_order_relaxed);
      meeting_->round.raise();
    } else {
      int32_t looks = 0;
      meeting_->round.wait_past(round, spin, kLookEvery, [this, &looks] {
        look_for_ended_ranks();
        // Looks are counted and not read from the clock: an instance that was stopped as a whole may go on.
        if (++looks * kLookEvery.count() >= host_.patience) host_.late(host_.patience);
      });
    }
  }

  void look_for_ended_ranks() const {
    for (int local = 0; local < host_.ranks; ++local) {
      if (has_ended(process_of(local).load(std::memory_order_acquire))) host_.gone(rank_ - rank_ % host_.ranks + local);
    }
  }

  static int64_t stride_of(int64_t floats) { return round_up(floats, kLine / sizeof(float)); }

  Meeting* const meeting_;
  float* const parts_;
  const int rank_, size_;
  const ExchangeSizes sizes_;
  const Host host_;
};

}  // namespace pdserve
