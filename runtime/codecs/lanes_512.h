// 64 bytes at once, with the instructions that compress and expand.

#if LANES_BITS == 512

namespace {

template <class T>
struct Vector;  // of integers: which are not zero, and moves under that mask

template <>
struct Vector<u64> {
  static u64 nonzero(__m512i v) { return _mm512_test_epi64_mask(v, v); }
  static __m512i compress(u64 m, __m512i v) { return _mm512_maskz_compress_epi64(__mmask8(m), v); }
  static __m512i expand(u64 m, __m512i v) { return _mm512_maskz_expand_epi64(__mmask8(m), v); }
  static __m512i spread(u64 m, u64 one) { return _mm512_maskz_set1_epi64(__mmask8(m), i64(one)); }
  static u64 above(__m512i v, u64 nans) {
    return _mm512_cmpgt_epi64_mask(v, _mm512_setzero_si512()) |
           _mm512_cmpgt_epu64_mask(v, _mm512_set1_epi64(i64(nans)));
  }
};

template <>
struct Vector<u32> {
  static u64 nonzero(__m512i v) { return _mm512_test_epi32_mask(v, v); }
  static __m512i compress(u64 m, __m512i v) { return _mm512_maskz_compress_epi32(__mmask16(m), v); }
  static __m512i expand(u64 m, __m512i v) { return _mm512_maskz_expand_epi32(__mmask16(m), v); }
  static __m512i spread(u64 m, u64 one) { return _mm512_maskz_set1_epi32(__mmask16(m), int(one)); }
  static u64 above(__m512i v, u64 nans) {
    return _mm512_cmpgt_epi32_mask(v, _mm512_setzero_si512()) |
           _mm512_cmpgt_epu32_mask(v, _mm512_set1_epi32(int(nans)));
  }
};

template <>
struct Vector<u16> {
  static u64 nonzero(__m512i v) { return _mm512_test_epi16_mask(v, v); }
  static __m512i compress(u64 m, __m512i v) { return _mm512_maskz_compress_epi16(__mmask32(m), v); }
  static __m512i expand(u64 m, __m512i v) { return _mm512_maskz_expand_epi16(__mmask32(m), v); }
  static __m512i spread(u64 m, u64 one) {
    return _mm512_maskz_set1_epi16(__mmask32(m), short(one));
  }
  static u64 above(__m512i v, u64 nans) {
    return _mm512_cmpgt_epi16_mask(v, _mm512_setzero_si512()) |
           _mm512_cmpgt_epu16_mask(v, _mm512_set1_epi16(short(nans)));
  }
};

template <>
struct Vector<u8> {
  static u64 nonzero(__m512i v) { return _mm512_test_epi8_mask(v, v); }
  static __m512i compress(u64 m, __m512i v) { return _mm512_maskz_compress_epi8(m, v); }
  static __m512i expand(u64 m, __m512i v) { return _mm512_maskz_expand_epi8(m, v); }
};

__m256i narrow(Half, __m512 v) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
__m512 widen(Half, __m256i v) { return _mm512_cvtph_ps(v); }

__m256i narrow(Brain, __m512 v) {
  // not the instruction for it, which takes denormals for zero
  __m512i bits = _mm512_castps_si512(v), high = _mm512_srli_epi32(bits, 16);
  __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __m512i quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
  __mmask16 nan = _mm512_cmpgt_epu32_mask(_mm512_slli_epi32(bits, 1), _mm512_set1_epi32(-0x1000000));
  return _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, _mm512_srli_epi32(up, 16), quiet));
}
__m512 widen(Brain, __m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

template <class T>
struct Load {
  static __m512i load(const T* from) { return _mm512_loadu_si512(from); }
  static void store(T* to, __m512i v) { _mm512_storeu_si512(to, v); }
};

template <class As>
struct LoadRounded {
  static __m512i load(const float* from) {
    __m512i low = _mm512_castsi256_si512(narrow(As{}, _mm512_loadu_ps(from)));
    return _mm512_inserti64x4(low, narrow(As{}, _mm512_loadu_ps(from + 16)), 1);
  }
  static void store(float* to, __m512i v) {
    _mm512_storeu_ps(to, widen(As{}, _mm512_castsi512_si256(v)));
    _mm512_storeu_ps(to + 16, widen(As{}, _mm512_extracti64x4_epi64(v, 1)));
  }
};

template <class T>
struct Lanes<Kept<T>> : Vector<T>, Load<T> {
  using V = __m512i;
  static constexpr i64 count = 64 / sizeof(T);
  static V take(const T* from) { return _mm512_loadu_si512(from); }
  static void put(T* to, V v) { _mm512_storeu_si512(to, v); }
  static void pack(T* to, u64 mask, V v) { put(to, Vector<T>::compress(mask, v)); }
  static V unpack(const T* from, u64 mask) { return Vector<T>::expand(mask, take(from)); }
};

template <class As>
struct Lanes<Rounded<As>> : Vector<u16>, LoadRounded<As> {
  using V = __m512i;
  static constexpr i64 count = 32;
  static V take(const u16* from) { return _mm512_loadu_si512(from); }
  static void put(u16* to, V v) { _mm512_storeu_si512(to, v); }
  static void pack(u16* to, u64 mask, V v) { put(to, compress(mask, v)); }
  static V unpack(const u16* from, u64 mask) { return expand(mask, take(from)); }
};

}  // namespace

#endif
