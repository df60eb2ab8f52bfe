// One bit an element, in blocks that threads share: what packs, unpacks and uses masks in a step.

namespace {

constexpr i64 kBlock = i64(1) << 15;  // elements: whole rows

template <class Work>
void by_blocks(i64 n, int threads, Work work) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && n > kBlock)
  for (i64 at = 0; at < n; at += kBlock) work(at, at + kBlock < n ? kBlock : n - at);
}

#if LANES_BITS == 512
__m512i kept(u64 m, __m512i v, u8) { return _mm512_maskz_mov_epi8(m, v); }
__m512i kept(u64 m, __m512i v, u16) { return _mm512_maskz_mov_epi16(__mmask32(m), v); }
__m512i kept(u64 m, __m512i v, u32) { return _mm512_maskz_mov_epi32(__mmask16(m), v); }
__m512i kept(u64 m, __m512i v, u64) { return _mm512_maskz_mov_epi64(__mmask8(m), v); }
#endif

void pack_truths(const u8* from, i64 n, u8* out) {
  i64 at = 0;
#if LANES_BITS == 512
  for (; at + 64 <= n; at += 64) {
    u64 mask = Vector<u8>::nonzero(_mm512_loadu_si512(from + at));
    std::memcpy(out + at / 8, &mask, 8);
  }
#endif
  for (; at + 8 <= n; at += 8) {
    u64 eight;
    std::memcpy(&eight, from + at, 8);
    // each byte is 0 or 1: the product brings byte i's bit to bit 56 + i
    out[at / 8] = u8((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56);
  }
  for (i64 end = up_to(n, kRow); at < end; at += 8) {
    u32 mask = 0;
    for (i64 lane = 0; lane < 8 && at + lane < n; ++lane) mask |= u32(from[at + lane] & 1) << lane;
    out[at / 8] = u8(mask);
  }
}

void unpack_truths(const u8* packed, i64 n, u8 negated, u8* to) {
  i64 at = 0;
#if LANES_BITS == 512
  for (; at + 64 <= n; at += 64) {
    u64 mask;
    std::memcpy(&mask, packed + at / 8, 8);
    _mm512_storeu_si512(to + at, _mm512_maskz_set1_epi8(negated ? ~mask : mask, 1));
  }
#endif
  for (; at < n; ++at) to[at] = u8((packed[at / 8] >> (at % 8) & 1) ^ negated);
}

template <class T>
void keep(const u8* packed, const T* from, i64 n, T* to) {
  i64 at = 0;
#if LANES_BITS == 512
  constexpr i64 lanes = 64 / i64(sizeof(T));
  for (; at + lanes <= n; at += lanes) {
    u64 mask = 0;
    std::memcpy(&mask, packed + at / 8, lanes / 8);
    _mm512_storeu_si512(to + at, kept(mask, _mm512_loadu_si512(from + at), T()));
  }
#endif
  for (; at + 8 <= n; at += 8)
    for (i64 lane = 0; lane < 8; ++lane)
      to[at + lane] = T(T(0) - T(packed[at / 8] >> lane & 1)) & from[at + lane];
  for (; at < n; ++at) to[at] = T(T(0) - T(packed[at / 8] >> (at % 8) & 1)) & from[at];
}

template <class T>
void keep_all(const u8* packed, const void* from, i64 n, void* to, int threads) {
  by_blocks(n, threads, [&](i64 at, i64 count) {
    keep(packed + at / 8, static_cast<const T*>(from) + at, count, static_cast<T*>(to) + at);
  });
}

template <class T>
void pack_all(const void* from, i64 n, u64 nans, u8* out, int threads) {
  by_blocks(n, threads, [&](i64 at, i64 count) {
    pack_signs(static_cast<const T*>(from) + at, count, T(nans), out + at / 8);
  });
}

}  // namespace

extern "C" {

// width 1: truths, 0 or 1 a byte; else as codecs_pack_signs
void codecs_pack_bits(int width, const void* from, i64 n, u64 nans, u8* out, int threads) {
  if (width == 1)
    by_blocks(n, threads, [&](i64 at, i64 count) {
      pack_truths(static_cast<const u8*>(from) + at, count, out + at / 8);
    });
  if (width == 2) pack_all<u16>(from, n, nans, out, threads);
  if (width == 4) pack_all<u32>(from, n, nans, out, threads);
  if (width == 8) pack_all<u64>(from, n, nans, out, threads);
}

void codecs_unpack_bits(const u8* packed, i64 n, int negated, u8* to, int threads) {
  by_blocks(n, threads, [&](i64 at, i64 count) {
    unpack_truths(packed + at / 8, count, u8(negated), to + at);
  });
}

void codecs_keep(int width, const u8* packed, const void* from, i64 n, void* to, int threads) {
  if (width == 2) keep_all<u16>(packed, from, n, to, threads);
  if (width == 4) keep_all<u32>(packed, from, n, to, threads);
  if (width == 8) keep_all<u64>(packed, from, n, to, threads);
}

}  // extern "C"
