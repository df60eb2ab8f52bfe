// Eight elements, one after the other and without branches.

#if LANES_BITS == 64

namespace {

template <class Form>
struct Lanes {
  using Element = typename Form::Element;
  using Word = typename Form::Word;
  struct V {
    Word words[8];
  };
  static constexpr i64 count = 8;
  static V load(const Element* from) {
    V v;
    for (int i = 0; i < 8; ++i) v.words[i] = Form::narrow(from[i]);
    return v;
  }
  static void store(Element* to, V v) {
    for (int i = 0; i < 8; ++i) to[i] = Form::widen(v.words[i]);
  }
  static V take(const Word* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static void put(Word* to, V v) { std::memcpy(to, &v, sizeof v); }
  static u64 nonzero(V v) {
    u64 mask = 0;
    for (int i = 0; i < 8; ++i) mask |= u64(v.words[i] != 0) << i;
    return mask;
  }
  static void pack(Word* to, u64 mask, V v) {
    for (int i = 0; i < 8; ++i) {
      // written whether or not it is kept: the next one takes its place
      *to = v.words[i];
      to += mask >> i & 1;
    }
  }
  static V unpack(const Word* from, u64 mask) {
    V v;
    for (int i = 0; i < 8; ++i) {
      u64 bit = mask >> i & 1;
      v.words[i] = Word(Word(0) - Word(bit)) & *from;
      from += bit;
    }
    return v;
  }
};

}  // namespace

#endif
