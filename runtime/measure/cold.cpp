// Takes memory out of the processor's caches, all of them, without changing what is in it.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr std::uintptr_t kLine = 64;

inline void put_out(std::uintptr_t at) {
#if defined(__CLFLUSHOPT__)
  _mm_clflushopt(reinterpret_cast<void*>(at));
#else
  _mm_clflush(reinterpret_cast<void*>(at));
#endif
}

inline std::uintptr_t line_bytes() { return kLine; }
inline void finish() { _mm_mfence(); }

}  // namespace

#elif defined(__aarch64__)

namespace {

inline void put_out(std::uintptr_t at) { asm volatile("dc civac, %0" : : "r"(at) : "memory"); }

inline std::uintptr_t line_bytes() {
  std::uint64_t type;
  asm volatile("mrs %0, ctr_el0" : "=r"(type));
  return std::uintptr_t{4} << ((type >> 16) & 15);  // of the shortest line, in words
}

inline void finish() { asm volatile("dsb ish" : : : "memory"); }

}  // namespace

#else
#error "how this processor's caches are emptied is not known"
#endif

extern "C" void offcompile_cool(const void* begin, std::size_t nbytes) {
  const std::uintptr_t line = line_bytes();
  const auto first = reinterpret_cast<std::uintptr_t>(begin);
  for (auto at = first & ~(line - 1); at < first + nbytes; at += line) put_out(at);
  finish();
}
