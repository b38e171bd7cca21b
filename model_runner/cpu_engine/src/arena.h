// Memory that lives as long as the engine: handed out front to back, 64-byte aligned, on huge pages where the system
// has them (4 KiB pages would cost a decode step, which touches every weight, tens of thousands of TLB misses).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace pdserve {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  ~Arena() {
    for (const auto& chunk : chunks_) munmap(chunk.base, chunk.size);
  }

  // Zeroed memory; throws std::bad_alloc. Memory that is never written is never taken from the system.
  template <class T>
  T* allocate(size_t count) {
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > left_) grow(bytes);
    T* result = reinterpret_cast<T*>(next_);
    next_ += bytes;
    left_ -= bytes;
    return result;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kChunk = size_t{64} << 20;

  struct Chunk {
    void* base;
    size_t size;
  };

  void grow(size_t bytes) {
    const size_t size = ((bytes > kChunk ? bytes : kChunk) + 2 * kHugePage - 1) / kHugePage * kHugePage;
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    chunks_.push_back({base, size});
    madvise(base, size, MADV_HUGEPAGE);
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(base) + kHugePage - 1) / kHugePage * kHugePage;
    next_ = reinterpret_cast<uint8_t*>(begin);
    left_ = reinterpret_cast<uintptr_t>(base) + size - begin;
  }

  std::vector<Chunk> chunks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace pdserve
