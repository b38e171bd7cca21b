// What this machine can do at best: bytes read from memory a second, and bfloat16 (else float32) products a second.
// Compiled and loaded by kernels/roofline.py, apart from the kernels that it judges.
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#define PUBLIC extern "C" __attribute__((visibility("default")))

namespace {

// Runs fn(i) on `threads` threads, each bound to its core.
template <class F>
void on_threads(int threads, const int32_t* cpus, F fn) {
  std::vector<std::thread> running;
  for (int i = 0; i < threads; ++i) {
    running.emplace_back([=] {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpus[i], &one);
      pthread_setaffinity_np(pthread_self(), sizeof one, &one);
      fn(i);
    });
  }
  for (auto& thread : running) thread.join();
}

volatile float sink;

}  // namespace

// `bytes` of memory on huge pages where there are any, all written; null if there are none.
PUBLIC void* pds_roofline_memory(int64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  return memory;
}

// Reads all of it once, each thread its own part. `bytes` is a multiple of 256 times `threads`.
PUBLIC void pds_roofline_read(const void* memory, int64_t bytes, int32_t threads, const int32_t* cpus) {
  on_threads(threads, cpus, [=](int i) {
    constexpr int64_t kAhead = 4096;
    const int64_t part = bytes / threads;
    const char* p = static_cast<const char*>(memory) + i * part;
    __m256i sum[8] = {};
    for (int64_t at = 0; at < part; at += 256) {
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) {
        if (k % 2 == 0) _mm_prefetch(p + at + kAhead + k * 32, _MM_HINT_T0);
        sum[k] = _mm256_or_si256(sum[k], _mm256_load_si256(reinterpret_cast<const __m256i*>(p + at + k * 32)));
      }
    }
    for (int k = 1; k < 8; ++k) sum[0] = _mm256_or_si256(sum[0], sum[k]);
    sink = static_cast<float>(_mm256_extract_epi32(sum[0], 0));
  });
}

// Multiplies and adds in registers only; returns the floating-point operations of one thread.
PUBLIC int64_t pds_roofline_multiply(int64_t rounds, int32_t threads, const int32_t* cpus) {
#if defined(__AVX512BF16__)
  constexpr int kSums = 24, kOperations = 64;
  using Sum = __m512;
#else
  constexpr int kSums = 12, kOperations = 16;
  using Sum = __m256;
#endif
  on_threads(threads, cpus, [=](int i) {
    Sum sums[kSums] = {};
#if defined(__AVX512BF16__)
    const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80 + i), b = (__m512bh)_mm512_set1_epi32(0x3f803f81 + i);
#else
    const __m256 a = _mm256_set1_ps(1.0f + static_cast<float>(i)), b = _mm256_set1_ps(1.5f);
#endif
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
      for (int k = 0; k < kSums; ++k) {
#if defined(__AVX512BF16__)
        sums[k] = _mm512_dpbf16_ps(sums[k], a, b);
#else
        sums[k] = _mm256_fmadd_ps(a, b, sums[k]);
#endif
      }
    }
    float total = 0;
    for (int k = 0; k < kSums; ++k) total += reinterpret_cast<const float*>(&sums[k])[0];
    sink = total;
  });
  return rounds * kSums * kOperations;
}
