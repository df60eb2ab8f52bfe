// Words, roundings, and what a set of lanes can do. The files of this folder are put one behind the
// other and compiled for the processor at hand: words.h, one of lanes_*.h, packing.cpp.

#include <cstdint>
#include <cstring>

#ifndef WIDEST  // tests compile narrower ones
#define WIDEST 512
#endif
#if WIDEST >= 512 && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VBMI2__)
#define LANES_BITS 512
#elif WIDEST >= 256 && defined(__AVX2__) && defined(__F16C__)
#define LANES_BITS 256
#else
#define LANES_BITS 64
#endif
#if LANES_BITS > 64
#include <immintrin.h>
#endif

namespace {

using i64 = std::int64_t;
using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

constexpr i64 kRow = 128, kMaskBytes = kRow / 8, kAlign = 16;

i64 up_to(i64 n, i64 multiple) { return (n + multiple - 1) / multiple * multiple; }

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits are taken as they are");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// --- float32 to 16 bits and back, to nearest and even -----------------------------------------

struct Half {
  static u16 narrow(float value) {
    u32 bits = bits_as<u32>(value), size = bits & 0x7fffffffu;
    u16 sign = u16((bits >> 16) & 0x8000u);
    if (size > 0x7f800000u) return u16(sign | 0x7e00u);
    if (size >= 0x477ff000u) return u16(sign | 0x7c00u);
    // below the least normal one: one half has float16's least step as its own
    if (size < 0x38800000u)
      return u16(sign | (bits_as<u32>(bits_as<float>(size) + 0.5f) - 0x3f000000u));
    return u16(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13));
  }
  static float widen(u16 value) {
    u32 sign = u32(value & 0x8000u) << 16, size = value & 0x7fffu;
    if (size >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | ((size & 0x3ffu) << 13));
    if (size < 0x400u)
      return bits_as<float>(sign | bits_as<u32>(float(size) * 5.9604644775390625e-8f));
    return bits_as<float>(sign | ((size << 13) + 0x38000000u));
  }
};

struct Brain {
  static u16 narrow(float value) {
    u32 bits = bits_as<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return u16((bits >> 16) | 0x40u);
    return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
  static float widen(u16 value) { return bits_as<float>(u32(value) << 16); }
};

// --- what lies in memory (`Element`) and what is packed (`Word`): the same bits, or rounded ones

template <class T>
struct Kept {
  using Element = T;
  using Word = T;
  static T narrow(T value) { return value; }
  static T widen(T value) { return value; }
};

template <class As>
struct Rounded {
  using Element = float;
  using Word = u16;
  static u16 narrow(float value) { return As::narrow(value); }
  static float widen(u16 value) { return As::widen(value); }
};

// Lanes<Form>, which each of lanes_*.h defines: so many elements at once. Masks have a bit for each,
// the first one lowest. `pack` writes the lanes of a mask one behind the other, and something behind
// them; `unpack` is its reverse. `take` and `put` are words as they are, `load` and `store` elements.
template <class Form>
struct Lanes;

}  // namespace
