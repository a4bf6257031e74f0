// A block's copies and stores (emulation/fast_core.h), as kernels call them, on one core that is set up before.
#include "fast_core.h"

#include "fence.cpp"

using namespace moe::emulation;

namespace {

UbMemory ub;
alignas(64) uint8_t meeting_memory[sizeof(Meeting)];
alignas(64) uint8_t core_memory[sizeof(Core)];
moe::PacedLink paced;
uint64_t windows[2];
moe::WindowGroup group;
moe::LaunchSettings settings;

Meeting& meeting = reinterpret_cast<Meeting&>(meeting_memory);
Core& core = reinterpret_cast<Core&>(core_memory);

}  // namespace

extern "C" {

void set_up(uint64_t cached_bytes, uint64_t window, uint64_t is_paced) {
    windows[0] = 1;  // this rank's, where nothing is
    windows[1] = window;
    group = {windows, 2, 0x40000, 1};
    paced.bytes_per_second = moe::PacedLink::NS_PER_S;
    paced.latency_ns = 1;
    paced.bucket_bytes = 1 << 30;
    settings = {nullptr, cached_bytes, 0, 0, 1, &group, nullptr, is_paced != 0 ? &paced : nullptr, nullptr};
    new (meeting_memory) Meeting(1);
    new (core_memory) Core(0, 1, meeting, ub.bytes, settings);
}

void fill(uint32_t at, uint32_t bytes, uint8_t value) { std::memset(ub.bytes + at, value, bytes); }
void copy_in(uint32_t at, const uint8_t* from, uint64_t bytes) { core.CopyIn({at}, from, bytes); }
void copy_out(uint8_t* to, uint32_t at, uint64_t bytes) { core.CopyOut(to, {at}, bytes); }
void copy_blocks_out(uint8_t* to, uint32_t at) { core.CopyBlocksOut(to, {at}, 1, {512, 480}); }
void scalar_store(uint64_t* to) { core.ScalarStore(to, uint64_t{1}); }
uint64_t scalar_load(const uint64_t* from) { return core.ScalarLoad(from); }
void barrier() { core.Barrier(PIPE_ALL); }
void notify(const void* flags) { core.Notify(flags, 1); }
void poll_once(const void* window) { core.Poll(0, window, 1, {}); }
void finish() { core.Finish(); }
uint64_t is_masked(const uint8_t* by) {
    const auto place = reinterpret_cast<uint64_t>(by);
    moe::LaunchSettings looks{};
    looks.masked_by = &place;
    looks.num_masked_by = looks.mask_bit = 1;
    return moe::IsMaskedByPeers(looks) ? 1 : 0;
}
uint8_t* doorbell(uint64_t window) { return reinterpret_cast<uint8_t*>(DoorbellBehind(window, 0x40000)); }

// What has no order of its own: Triton's kernels, and Python.
void byte_store(volatile uint8_t* to, uint8_t value) { *to = value; }
void plain_store(volatile uint64_t* to, uint64_t value) { *to = value; }
uint64_t plain_load(const volatile uint64_t* from) { return *from; }
}
