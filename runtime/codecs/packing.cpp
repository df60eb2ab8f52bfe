// Packing, unpacking, casts and counts of flat memory; layout.py says where things lie, reference.py
// what they mean. Nothing is assumed of addresses.

namespace {

// --- one row of 128 elements -------------------------------------------------------------------
// Both may go over the end of `values` by what the row could have had: 128 words in all.

template <class Form>
i64 pack_row(const typename Form::Element* from, u8* masks, typename Form::Word* values) {
  using L = Lanes<Form>;
  typename Form::Word* to = values;
  for (i64 at = 0; at < kRow; at += L::count) {
    typename L::V v = L::load(from + at);
    u64 mask = L::nonzero(v);
    std::memcpy(masks + at / 8, &mask, L::count / 8);
    L::pack(to, mask, v);
    to += __builtin_popcountll(mask);
  }
  return to - values;
}

template <class Form>
void unpack_row(const typename Form::Word* values, const u8* masks, typename Form::Element* to) {
  using L = Lanes<Form>;
  for (i64 at = 0; at < kRow; at += L::count) {
    u64 mask = 0;
    std::memcpy(&mask, masks + at / 8, L::count / 8);
    L::store(to + at, L::unpack(values, mask));
    values += __builtin_popcountll(mask);
  }
}

i64 kept_in(const u8* masks) {
  u64 halves[2];
  std::memcpy(halves, masks, sizeof halves);
  return __builtin_popcountll(halves[0]) + __builtin_popcountll(halves[1]);
}

// --- whole pieces ------------------------------------------------------------------------------

struct Places {
  i64 rows, masks_at, values_at;
  explicit Places(i64 elements)
      : rows((elements + kRow - 1) / kRow),
        masks_at(up_to(4 * (rows + 1), kAlign)),
        values_at(masks_at + kMaskBytes * rows) {}
};

template <class Form>
i64 pack(const void* x, i64 elements, u8* out) {
  using Element = typename Form::Element;
  using Word = typename Form::Word;
  Places places(elements);
  const Element* from = static_cast<const Element*>(x);
  Word* values = reinterpret_cast<Word*>(out + places.values_at);
  u8* masks = out + places.masks_at;
  u32 total = 0;
  std::memset(out + places.masks_at - kAlign, 0, kAlign);
  for (i64 row = 0; row < places.rows; ++row, masks += kMaskBytes) {
    std::memcpy(out + 4 * row, &total, 4);
    i64 left = elements - row * kRow;
    if (left >= kRow) {
      total += u32(pack_row<Form>(from + row * kRow, masks, values + total));
      continue;
    }
    Element padded[kRow] = {};
    Word kept[kRow];
    std::memcpy(padded, from + row * kRow, left * sizeof(Element));
    i64 count = pack_row<Form>(padded, masks, kept);
    std::memcpy(values + total, kept, count * sizeof(Word));
    total += u32(count);
  }
  std::memcpy(out + 4 * places.rows, &total, 4);
  return places.values_at + i64(total) * i64(sizeof(Word));
}

// 0, or −1 for what cannot have been packed: nothing outside of either side is touched
template <class Form>
i64 unpack(const u8* packed, i64 nbytes, void* out, i64 elements) {
  using Element = typename Form::Element;
  using Word = typename Form::Word;
  Places places(elements);
  if (nbytes < places.values_at) return -1;
  Element* to = static_cast<Element*>(out);
  const Word* values = reinterpret_cast<const Word*>(packed + places.values_at);
  const u8* masks = packed + places.masks_at;
  i64 held = (nbytes - places.values_at) / i64(sizeof(Word)), total = 0;
  for (i64 row = 0; row < places.rows; ++row, masks += kMaskBytes) {
    i64 count = kept_in(masks), left = elements - row * kRow;
    if (total + count > held) return -1;
    if (left >= kRow && total + kRow <= held) {
      unpack_row<Form>(values + total, masks, to + row * kRow);
    } else {
      Word kept[kRow] = {};
      Element padded[kRow];
      std::memcpy(kept, values + total, count * sizeof(Word));
      unpack_row<Form>(kept, masks, padded);
      i64 wanted = left < kRow ? left : kRow;
      for (i64 bit = wanted; bit < kRow; ++bit)
        if (masks[bit / 8] >> (bit % 8) & 1) return -1;
      std::memcpy(to + row * kRow, padded, wanted * sizeof(Element));
    }
    total += count;
  }
  u32 said;
  std::memcpy(&said, packed + 4 * places.rows, 4);
  return i64(said) == total ? 0 : -1;
}

template <class As>
void cast_down(const float* from, i64 n, u16* to) {
  i64 at = 0;
  using L = Lanes<Rounded<As>>;
  for (; at + L::count <= n; at += L::count) L::put(to + at, L::load(from + at));
  for (; at < n; ++at) to[at] = As::narrow(from[at]);
}

template <class As>
void cast_up(const u16* from, i64 n, float* to) {
  i64 at = 0;
  using L = Lanes<Rounded<As>>;
  for (; at + L::count <= n; at += L::count) L::store(to + at, L::take(from + at));
  for (; at < n; ++at) to[at] = As::widen(from[at]);
}

// bit: not (x <= 0). The bits of such an x are above zero, or, unsigned, above minus infinity's
template <class T>
bool above(T bits, T nans) {
  constexpr T sign = T(T(1) << (8 * sizeof(T) - 1));
  return (bits != 0 && !(bits & sign)) || bits > nans;
}

template <class T>
void pack_signs(const T* from, i64 n, T nans, u8* out) {
  i64 at = 0;
#if LANES_BITS == 512
  constexpr i64 lanes = 64 / i64(sizeof(T));
  for (; at + lanes <= n; at += lanes) {
    u64 mask = Vector<T>::above(_mm512_loadu_si512(from + at), nans);
    std::memcpy(out + at / 8, &mask, lanes / 8);
  }
#endif
  for (i64 end = up_to(n, kRow); at < end; at += 8) {
    u32 mask = 0;
    for (i64 lane = 0; lane < 8 && at + lane < n; ++lane)
      mask |= u32(above<T>(from[at + lane], nans)) << lane;
    out[at / 8] = u8(mask);
  }
}

template <class T>
void unpack_signs(const u8* packed, i64 n, T one, T* to) {
  i64 at = 0;
#if LANES_BITS == 512
  constexpr i64 lanes = 64 / i64(sizeof(T));
  for (; at + lanes <= n; at += lanes) {
    u64 mask = 0;
    std::memcpy(&mask, packed + at / 8, lanes / 8);
    _mm512_storeu_si512(to + at, Vector<T>::spread(mask, one));
  }
#endif
  for (; at < n; ++at) to[at] = T(T(0) - T(packed[at / 8] >> (at % 8) & 1)) & one;
}

template <class T>
i64 count(const T* from, i64 n) {
  i64 at = 0, found = 0;
  using L = Lanes<Kept<T>>;
  for (; at + L::count <= n; at += L::count)
    found += __builtin_popcountll(L::nonzero(L::take(from + at)));
  for (; at < n; ++at) found += from[at] != 0;
  return found;
}

template <class T>
i64 count_rows(const T* from, i64 n, const i64* rows, i64 picked) {
  if (!rows) return count<T>(from, n);
  i64 found = 0;
  for (i64 i = 0; i < picked; ++i) found += count<T>(from + rows[i] * kRow, kRow);
  return found;
}

}  // namespace

// Types: 1, 2, 4, 8 are words of so many bytes; 10 is float32 rounded to float16, 11 to bfloat16.

extern "C" {

int codecs_lanes_bits() { return LANES_BITS; }

i64 codecs_pack(int type, const void* x, i64 elements, u8* out) {
  switch (type) {
    case 1: return pack<Kept<u8>>(x, elements, out);
    case 2: return pack<Kept<u16>>(x, elements, out);
    case 4: return pack<Kept<u32>>(x, elements, out);
    case 8: return pack<Kept<u64>>(x, elements, out);
    case 10: return pack<Rounded<Half>>(x, elements, out);
    case 11: return pack<Rounded<Brain>>(x, elements, out);
    default: return -1;
  }
}

i64 codecs_unpack(int type, const u8* packed, i64 nbytes, void* out, i64 elements) {
  switch (type) {
    case 1: return unpack<Kept<u8>>(packed, nbytes, out, elements);
    case 2: return unpack<Kept<u16>>(packed, nbytes, out, elements);
    case 4: return unpack<Kept<u32>>(packed, nbytes, out, elements);
    case 8: return unpack<Kept<u64>>(packed, nbytes, out, elements);
    case 10: return unpack<Rounded<Half>>(packed, nbytes, out, elements);
    case 11: return unpack<Rounded<Brain>>(packed, nbytes, out, elements);
    default: return -1;
  }
}

void codecs_cast_down(int type, const void* from, i64 n, void* to) {
  if (type == 10) cast_down<Half>(static_cast<const float*>(from), n, static_cast<u16*>(to));
  if (type == 11) cast_down<Brain>(static_cast<const float*>(from), n, static_cast<u16*>(to));
}

void codecs_cast_up(int type, const void* from, i64 n, void* to) {
  if (type == 10) cast_up<Half>(static_cast<const u16*>(from), n, static_cast<float*>(to));
  if (type == 11) cast_up<Brain>(static_cast<const u16*>(from), n, static_cast<float*>(to));
}

// `nans`: minus infinity's bits, above which (with the sign) only NaN lies
void codecs_pack_signs(int width, const void* from, i64 n, u64 nans, u8* out) {
  if (width == 2) pack_signs(static_cast<const u16*>(from), n, u16(nans), out);
  if (width == 4) pack_signs(static_cast<const u32*>(from), n, u32(nans), out);
  if (width == 8) pack_signs(static_cast<const u64*>(from), n, u64(nans), out);
}

void codecs_unpack_signs(int width, const u8* packed, i64 n, u64 one, void* to) {
  if (width == 2) unpack_signs(packed, n, u16(one), static_cast<u16*>(to));
  if (width == 4) unpack_signs(packed, n, u32(one), static_cast<u32*>(to));
  if (width == 8) unpack_signs(packed, n, u64(one), static_cast<u64*>(to));
}

i64 codecs_count(int width, const void* from, i64 n, const i64* rows, i64 picked) {
  switch (width) {
    case 1: return count_rows(static_cast<const u8*>(from), n, rows, picked);
    case 2: return count_rows(static_cast<const u16*>(from), n, rows, picked);
    case 4: return count_rows(static_cast<const u32*>(from), n, rows, picked);
    case 8: return count_rows(static_cast<const u64*>(from), n, rows, picked);
    default: return -1;
  }
}

}  // extern "C"
