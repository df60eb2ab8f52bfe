// Eight elements at once, moved by shuffles that a table of all 256 masks names.

#if LANES_BITS == 256

namespace {

struct Shuffles {
  u8 together[256][8] = {}, apart[256][8] = {};
  constexpr Shuffles() {
    for (int mask = 0; mask < 256; ++mask)
      for (int i = 0, to = 0; i < 8; ++i)
        if (mask >> i & 1) {
          apart[mask][i] = u8(to);
          together[mask][to++] = u8(i);
        }
  }
};
constexpr Shuffles kShuffles;

__m128i eight(const u8* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }

__m256i lanes32(u64 mask) {  // all bits of the lanes of a mask
  __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask)), each), each);
}
__m128i lanes16(u64 mask) {
  __m128i each = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(short(mask)), each), each);
}

template <class T>
struct Vector;

template <>
struct Vector<u32> {
  using V = __m256i;
  static V take(const u32* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static void put(u32* to, V v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), v); }
  static u64 nonzero(V v) {
    __m256i zero = _mm256_cmpeq_epi32(v, _mm256_setzero_si256());
    return u64(~_mm256_movemask_ps(_mm256_castsi256_ps(zero)) & 0xff);
  }
  static void pack(u32* to, u64 m, V v) {
    __m256i from = _mm256_cvtepu8_epi32(eight(kShuffles.together[m]));
    put(to, _mm256_permutevar8x32_epi32(v, from));
  }
  static V unpack(const u32* values, u64 m) {
    __m256i from = _mm256_cvtepu8_epi32(eight(kShuffles.apart[m]));
    return _mm256_and_si256(_mm256_permutevar8x32_epi32(take(values), from), lanes32(m));
  }
};

template <>
struct Vector<u64> {  // twice four, each as pairs of 32 bits
  using Pairs = Vector<u32>;
  struct V {
    __m256i low, high;
  };
  static const u32* as32(const u64* p) { return reinterpret_cast<const u32*>(p); }
  static V take(const u64* from) { return {Pairs::take(as32(from)), Pairs::take(as32(from + 4))}; }
  static void put(u64* to, V v) {
    Pairs::put(reinterpret_cast<u32*>(to), v.low);
    Pairs::put(reinterpret_cast<u32*>(to + 4), v.high);
  }
  static u64 four(__m256i v) {
    __m256i zero = _mm256_cmpeq_epi64(v, _mm256_setzero_si256());
    return u64(~_mm256_movemask_pd(_mm256_castsi256_pd(zero)) & 0xf);
  }
  static u64 nonzero(V v) { return four(v.low) | four(v.high) << 4; }
  static u64 twice(u64 m) {  // each of four bits, doubled
    m = (m | m << 2) & 0x33;
    m = (m | m << 1) & 0x55;
    return m | m << 1;
  }
  static void pack(u64* to, u64 m, V v) {
    Pairs::pack(reinterpret_cast<u32*>(to), twice(m & 0xf), v.low);
    to += __builtin_popcountll(m & 0xf);
    Pairs::pack(reinterpret_cast<u32*>(to), twice(m >> 4), v.high);
  }
  static V unpack(const u64* from, u64 m) {
    const u64* high = from + __builtin_popcountll(m & 0xf);
    return {Pairs::unpack(as32(from), twice(m & 0xf)), Pairs::unpack(as32(high), twice(m >> 4))};
  }
};

template <>
struct Vector<u16> {
  using V = __m128i;
  static V take(const u16* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static void put(u16* to, V v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), v); }
  static u64 nonzero(V v) {
    __m128i zero = _mm_cmpeq_epi16(v, _mm_setzero_si128());
    return u64(~_mm_movemask_epi8(_mm_packs_epi16(zero, zero)) & 0xff);
  }
  static V shuffle(const u8* lanes, V v) {  // lane i is the bytes 2i and 2i + 1
    __m128i lane = _mm_cvtepu8_epi16(eight(lanes));
    __m128i pair = _mm_mullo_epi16(lane, _mm_set1_epi16(0x0202));
    return _mm_shuffle_epi8(v, _mm_add_epi16(pair, _mm_set1_epi16(0x0100)));
  }
  static void pack(u16* to, u64 m, V v) { put(to, shuffle(kShuffles.together[m], v)); }
  static V unpack(const u16* from, u64 m) {
    return _mm_and_si128(shuffle(kShuffles.apart[m], take(from)), lanes16(m));
  }
};

template <>
struct Vector<u8> {
  using V = __m128i;
  static V take(const u8* from) { return eight(from); }
  static void put(u8* to, V v) { _mm_storel_epi64(reinterpret_cast<__m128i*>(to), v); }
  static u64 nonzero(V v) {
    return u64(~_mm_movemask_epi8(_mm_cmpeq_epi8(v, _mm_setzero_si128())) & 0xff);
  }
  static void pack(u8* to, u64 m, V v) {
    put(to, _mm_shuffle_epi8(v, eight(kShuffles.together[m])));
  }
  static V unpack(const u8* from, u64 m) {
    __m128i spread = _mm_shuffle_epi8(take(from), eight(kShuffles.apart[m]));
    return _mm_and_si128(spread, _mm_packs_epi16(lanes16(m), lanes16(m)));
  }
};

__m128i narrow(Half, __m256 v) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
__m256 widen(Half, __m128i v) { return _mm256_cvtph_ps(v); }

__m128i narrow(Brain, __m256 v) {
  __m256i bits = _mm256_castps_si256(v), high = _mm256_srli_epi32(bits, 16);
  __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  __m256i nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f800000));
  __m256i words = _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), quiet, nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  return _mm256_castsi256_si128(packed);
}
__m256 widen(Brain, __m128i v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

template <class T>
struct Lanes<Kept<T>> : Vector<T> {
  static constexpr i64 count = 8;
  static typename Vector<T>::V load(const T* from) { return Vector<T>::take(from); }
  static void store(T* to, typename Vector<T>::V v) { Vector<T>::put(to, v); }
};

template <class As>
struct Lanes<Rounded<As>> : Vector<u16> {
  static constexpr i64 count = 8;
  static __m128i load(const float* from) { return narrow(As{}, _mm256_loadu_ps(from)); }
  static void store(float* to, __m128i v) { _mm256_storeu_ps(to, widen(As{}, v)); }
};

}  // namespace

#endif
