// Which hint suits this processor, asked once when the library is loaded.
#include "fetch.h"

#include <cpuid.h>

#include <atomic>

#include "api.h"

namespace pdserve {
namespace {

// Weights are not worth keeping in the larger caches, which a step would otherwise sweep clean of everything else: code
// and data of the other processes of the instance included. The non-temporal hint says so, and AMD's processors heed it
// at no cost (Zen 5). Intel's, measured on Cascade Lake, take nearly twice as long for a product with it: such a line goes
// past the second-level cache, and when it has left the first before its use, memory is asked for it again. There, and
// wherever nobody has measured, lines go into all caches.
FetchHint suits_processor() {
  unsigned highest, b, c, d;
  const bool amd = __get_cpuid(0, &highest, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx &&
                   d == signature_AMD_edx;
  return amd ? FetchHint::kNonTemporal : FetchHint::kAllCaches;
}

std::atomic<FetchHint> chosen{suits_processor()};

}  // namespace

FetchHint fetch_hint() { return chosen.load(std::memory_order_relaxed); }

void set_fetch_hint(FetchHint hint) { chosen.store(hint, std::memory_order_relaxed); }

PDS_API int32_t pds_fetch_hint() { return static_cast<int32_t>(fetch_hint()); }

PDS_API void pds_set_fetch_hint(int32_t hint) { set_fetch_hint(static_cast<FetchHint>(hint)); }

}  // namespace pdserve
