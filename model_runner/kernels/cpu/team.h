// A team of threads that runs one function on all its members at once.
//
// Life of a member: asleep on a futex -> woken by run() -> fn(tid, size), with barriers inside -> asleep again. The
// caller of run() is member 0, so a team of one has no threads at all. A member that waits spins first, because a
// barrier of a decode step is over in a microsecond or two, and then sleeps, because the member it waits for may have
// been pushed off its core: who keeps spinning there keeps that core's other work waiting for scheduler ticks.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace pdserve {

// One 32-bit word that changes, and threads that wait for the change.
class alignas(64) Signal {
 public:
  uint32_t read() const { return word_.load(std::memory_order_acquire); }

  // Changes the word and wakes who sleeps on it.
  void raise() {
    word_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) {
      syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }
  }

  // Returns once the word is not `old` any more; spins for `spin_ticks` of the time-stamp counter before it sleeps.
  void wait_past(uint32_t old, uint64_t spin_ticks) {
    const uint64_t begin = __rdtsc();
    do {
      for (int i = 0; i < 16; ++i) {
        if (read() != old) return;
        _mm_pause();
      }
    } while (__rdtsc() - begin < spin_ticks);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (word_.load(std::memory_order_seq_cst) == old) {
      syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  uint32_t* address() { return reinterpret_cast<uint32_t*>(&word_); }

  std::atomic<uint32_t> word_{0};
  std::atomic<uint32_t> sleepers_{0};
};

class Team {
 public:
  // `cpus`: a core for each member, or null to leave them where they are. Member 0 is the thread that calls run(), so
  // its entry is not applied here: the caller binds itself. `spin_us`: how long a member waits at a barrier before it
  // sleeps; next to nothing where members outnumber the cores or a quota, as who is waited for can't run meanwhile.
  // Throws where the system gives no more threads, with those that were started ended again.
  Team(int size, const int* cpus, int spin_us)
      : size_(size), barrier_spin_(uint64_t(spin_us) * kTicksPerUs), idle_spin_(std::min(barrier_spin_, kIdleSpin)) {
    try {
      threads_.reserve(size);
      for (int tid = 1; tid < size; ++tid) {
        threads_.emplace_back([this, tid] { serve(tid); });
        if (cpus != nullptr) {
          cpu_set_t one;
          CPU_ZERO(&one);
          CPU_SET(cpus[tid], &one);
          pthread_setaffinity_np(threads_.back().native_handle(), sizeof one, &one);
        }
      }
    } catch (...) {
      // A vector of running threads that is destroyed ends the process.
      stop();
      throw;
    }
  }

  ~Team() { stop(); }

  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Calls fn(tid, size) on every member and returns when all are done. `fn` must not throw. One caller at a time.
  template <class F>
  void run(F&& fn) {
    if (size_ == 1) {
      fn(0, 1);
      return;
    }
    using Function = std::remove_reference_t<F>;
    context_ = const_cast<void*>(static_cast<const void*>(std::addressof(fn)));
    call_ = [](void* context, int tid, int size) { (*static_cast<Function*>(context))(tid, size); };
    start_.raise();
    call_(context_, 0, size_);
    barrier();
  }

  // Every member must call it; none returns before all have. What was written before it is visible after it.
  void barrier() {
    if (size_ == 1) return;
    const uint32_t round = round_.read();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.raise();
    } else {
      round_.wait_past(round, barrier_spin_);
    }
  }

 private:
  // The time-stamp counter runs at 2 to 4 GHz. A member without work waits for a run() for about 10 microseconds.
  static constexpr uint64_t kTicksPerUs = 3000;
  static constexpr uint64_t kIdleSpin = 10 * kTicksPerUs;

  void stop() {
    stop_ = true;
    start_.raise();
    for (auto& thread : threads_) thread.join();
  }

  void serve(int tid) {
    for (uint32_t seen = 0;; ++seen) {
      start_.wait_past(seen, idle_spin_);
      if (stop_) return;
      call_(context_, tid, size_);
      barrier();
    }
  }

  const int size_;
  const uint64_t barrier_spin_;
  const uint64_t idle_spin_;
  Signal start_;
  Signal round_;
  alignas(64) std::atomic<int> arrived_{0};
  void* context_ = nullptr;
  void (*call_)(void*, int, int) = nullptr;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace pdserve
