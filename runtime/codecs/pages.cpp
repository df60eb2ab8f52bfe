// Checksums of pages. Every step is reversible, so pages that differ within 8 bytes never agree;
// others do with a chance of one in 2^64.

namespace {

constexpr i64 kPage = 4096;
constexpr u64 kFactor = 0x9e3779b185ebca87u;  // odd
constexpr int kTurn = 29;

typedef u64 Words __attribute__((vector_size(64)));

// several at once: each waits for its own multiplications
template <int together>
void sum_pages(const u8* from, u64* sums) {
  Words held[together];
  for (Words& words : held)
    for (int lane = 0; lane < 8; ++lane) words[lane] = kFactor * u64(2 * lane + 1);
  for (i64 at = 0; at < kPage; at += i64(sizeof(Words)))
    for (int page = 0; page < together; ++page) {
      Words words;
      std::memcpy(&words, from + page * kPage + at, sizeof words);
      words ^= held[page];
      held[page] = (words << kTurn | words >> (64 - kTurn)) * kFactor;
    }
  for (int page = 0; page < together; ++page) {
    u64 sum = 0;
    for (int lane = 0; lane < 8; ++lane) {
      sum ^= held[page][lane];
      sum = (sum << kTurn | sum >> (64 - kTurn)) * kFactor;
    }
    sums[page] = sum + !sum;
  }
}

}  // namespace

// 0 is no page's
extern "C" void codecs_sum_pages(const u8* from, i64 pages, u64* sums) {
  i64 page = 0;
  for (; page + 4 <= pages; page += 4) sum_pages<4>(from + page * kPage, sums + page);
  for (; page < pages; ++page) sum_pages<1>(from + page * kPage, sums + page);
}
