// Memory for torch's tensors on the CPU, from malloc's plain call.
//
// torch wants each block on a border of 64 bytes. An aligned allocation of glibc cuts it out of a
// longer block and frees both ends, so what a freed tensor leaves is too short for the next one of
// its size. Here the ends stay with the block: the address to free lies just before the data.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr std::uintptr_t kBorder = 64;          // as torch's own allocator has it
constexpr std::uintptr_t kBefore = sizeof(void*);
constexpr std::size_t kBeside = kBorder + kBefore;
constexpr std::size_t kAddresses = std::size_t{1} << 47;

void*& block_of(void* data) {
  return *reinterpret_cast<void**>(reinterpret_cast<std::uintptr_t>(data) - kBefore);
}

void give_back(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(block_of(data));
}

class PlainBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    void* data = nbytes == 0 ? nullptr : take(nbytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }

 private:
  static void* take(std::size_t nbytes) {
    // malloc is not even asked for what no address reaches: when it fails, glibc moves the thread
    // to another arena for good, whose memory it does not give back
    void* block = nbytes > kAddresses ? nullptr : std::malloc(nbytes + kBeside);
    if (block == nullptr) c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
    // the words of torch's own allocator: people and libraries look for them
    TORCH_CHECK(block != nullptr, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ",
                nbytes, " bytes. Error code 12 (Cannot allocate memory)");
    const auto first = reinterpret_cast<std::uintptr_t>(block) + kBefore;
    void* data = reinterpret_cast<void*>((first + kBorder - 1) & ~(kBorder - 1));
    block_of(data) = block;
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return data;
  }
};

}  // namespace

extern "C" void offcompile_use_plain_blocks() {
  static PlainBlocks* blocks = new PlainBlocks();  // outlives every tensor
  c10::SetCPUAllocator(blocks, 255);
}
