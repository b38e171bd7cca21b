// What this machine can do at best: bytes read from memory a second, and products a second of each type that the kernels
// multiply in.
// Compiled and loaded by tools/kernels/roofline.py, apart from the kernels that it judges.
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
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

namespace {

// One instruction of each kind of product, repeated on registers; operations are multiplications and additions.
#if defined(__AVX512F__)

struct Floats {
  using Register = __m512;
  static constexpr int kOperations = 32;
  static Register zero() { return _mm512_setzero_ps(); }
  static Register factor(int i) { return _mm512_set1_ps(1.0f + static_cast<float>(i)); }
  static Register step(Register sum, Register a, Register b) { return _mm512_fmadd_ps(a, b, sum); }
};

#else

struct Floats {
  using Register = __m256;
  static constexpr int kOperations = 16;
  static Register zero() { return _mm256_setzero_ps(); }
  static Register factor(int i) { return _mm256_set1_ps(1.0f + static_cast<float>(i)); }
  static Register step(Register sum, Register a, Register b) { return _mm256_fmadd_ps(a, b, sum); }
};

#endif

#if defined(__AVX512BF16__)

struct Pairs {
  using Register = __m512;
  static constexpr int kOperations = 64;
  static Register zero() { return _mm512_setzero_ps(); }
  static Register factor(int i) { return _mm512_castsi512_ps(_mm512_set1_epi32(0x3f803f80 + i)); }
  static Register step(Register sum, Register a, Register b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

#else

// bfloat16 is widened and multiplied as float32.
using Pairs = Floats;

#endif

#if defined(__AVX512VNNI__)

struct Bytes {
  using Register = __m512i;
  static constexpr int kOperations = 128;
  static Register zero() { return _mm512_setzero_si512(); }
  static Register factor(int i) { return _mm512_set1_epi8(static_cast<char>(1 + i)); }
  static Register step(Register sum, Register a, Register b) { return _mm512_dpbusd_epi32(sum, a, b); }
};

#else

// Three instructions: products of bytes to 16 bits, their sums to 32, and the addition. The compiler may not move the
// product, which is always the same, out of the loop.
#if defined(__AVX512BW__)

struct Bytes {
  using Register = __m512i;
  static constexpr int kOperations = 128;
  static Register zero() { return _mm512_setzero_si512(); }
  static Register factor(int i) { return _mm512_set1_epi8(static_cast<char>(1 + i)); }
  static Register step(Register sum, Register a, Register b) {
    asm volatile("" : "+v"(a));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
  }
};

#else

struct Bytes {
  using Register = __m256i;
  static constexpr int kOperations = 64;
  static Register zero() { return _mm256_setzero_si256(); }
  static Register factor(int i) { return _mm256_set1_epi8(static_cast<char>(1 + i)); }
  static Register step(Register sum, Register a, Register b) {
    asm volatile("" : "+x"(a));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
  }
};

#endif
#endif

constexpr int kSums = 12;  // enough for two instructions a cycle, and they fit in sixteen registers

template <class Kind>
inline void step(typename Kind::Register& sum, typename Kind::Register a, typename Kind::Register b) {
  sum = Kind::step(sum, a, b);
  // It stays in its register: GCC copies sums of bytes to another and back, and reading the copies takes longer than
  // the products.
  asm("" : "+v"(sum));
}

template <class Register>
inline float first(Register sum) {
  float number;
  std::memcpy(&number, &sum, sizeof number);
  return number;
}

// The sums are only ever named one by one, or the compiler would keep them in memory.
template <class Kind, int... K>
void multiply_in_registers(int64_t rounds, int i, std::integer_sequence<int, K...>) {
  typename Kind::Register sums[kSums] = {(static_cast<void>(K), Kind::zero())...};
  const auto a = Kind::factor(i), b = Kind::factor(i + 1);
  for (int64_t round = 0; round < rounds; ++round) (step<Kind>(sums[K], a, b), ...);
  sink = (first(sums[K]) + ...);
}

template <class Kind>
int64_t multiply(int64_t rounds, int32_t threads, const int32_t* cpus) {
  on_threads(threads, cpus, [=](int i) {
    multiply_in_registers<Kind>(rounds, i, std::make_integer_sequence<int, kSums>());
  });
  return rounds * kSums * Kind::kOperations;
}

}  // namespace

// Multiplies and adds in registers only; returns the operations of one thread. `kind`: 0 float32, 1 bfloat16, 2 bytes.
PUBLIC int64_t pds_roofline_multiply(int32_t kind, int64_t rounds, int32_t threads, const int32_t* cpus) {
  switch (kind) {
    case 0: return multiply<Floats>(rounds, threads, cpus);
    case 1: return multiply<Pairs>(rounds, threads, cpus);
    default: return multiply<Bytes>(rounds, threads, cpus);
  }
}

// How a kind of product is computed at this level.
PUBLIC const char* pds_roofline_kind(int32_t kind) {
#if defined(__AVX512BF16__)
  if (kind == 1) return "bfloat16 pairs";
#endif
#if defined(__AVX512VNNI__)
  if (kind == 2) return "bytes (VNNI)";
#endif
  return kind == 2 ? "bytes (maddubs)" : "float32 FMA";
}
