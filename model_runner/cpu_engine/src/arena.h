// Memory that lives as long as the engine: handed out front to back, 64-byte aligned, on huge pages where the system
// has them (4 KiB pages would cost a decode step, which touches every weight, tens of thousands of TLB misses).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
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
    for (void* part : parts_) std::free(part);
  }

  // Zeroed memory; throws std::bad_alloc. Memory that is never written is never taken from the system.
  template <class T>
  T* allocate(size_t count) {
    if (kPartsApart) return static_cast<T*>(allocate_apart(count * sizeof(T)));
    const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > left_) grow(bytes);
    T* result = reinterpret_cast<T*>(next_);
    next_ += bytes;
    left_ -= bytes;
    return result;
  }

 private:
  // For AddressSanitizer (tests/sanitizers), which sees a step beyond a part only if that ends an allocation.
#ifdef PDSERVE_PARTS_APART
  static constexpr bool kPartsApart = true;
#else
  static constexpr bool kPartsApart = false;
#endif
  static constexpr size_t kHugePage = size_t{2} << 20;
  static constexpr size_t kChunk = size_t{64} << 20;

  struct Chunk {
    void* base;
    size_t size;
  };

  void* allocate_apart(size_t bytes) {
    parts_.reserve(parts_.size() + 1);
    void* part = nullptr;
    if (posix_memalign(&part, 64, bytes) != 0) throw std::bad_alloc();
    std::memset(part, 0, bytes);
    parts_.push_back(part);
    return part;
  }

  void grow(size_t bytes) {
    const size_t size = ((bytes > kChunk ? bytes : kChunk) + 2 * kHugePage - 1) / kHugePage * kHugePage;
    chunks_.reserve(chunks_.size() + 1);
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
    chunks_.push_back({base, size});
    madvise(base, size, MADV_HUGEPAGE);
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(base) + kHugePage - 1) / kHugePage * kHugePage;
    next_ = reinterpret_cast<uint8_t*>(begin);
    left_ = reinterpret_cast<uintptr_t>(base) + size - begin;
  }

  std::vector<Chunk> chunks_;
  std::vector<void*> parts_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

}  // namespace pdserve
