// Copies of every length at every alignment, against byte by byte: what is copied, and nothing beside it. And blocks
// that are copied while they are written: words come in an order on which flags rely.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "memory.h"

namespace {

constexpr uint64_t MARGIN = 128;

template <typename Copy>
uint64_t Wrong(uint64_t bytes, uint64_t to_shift, uint64_t from_shift, const Copy& copy) {
    std::vector<uint8_t> from(bytes + 2 * MARGIN), to(bytes + 2 * MARGIN, 0xee);
    for (uint64_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i * 31 + i / 251 + 1);
    std::vector<uint8_t> expected = to;
    for (uint64_t i = 0; i < bytes; ++i) expected[MARGIN + to_shift + i] = from[MARGIN + from_shift + i];
    copy(to.data() + MARGIN + to_shift, from.data() + MARGIN + from_shift, bytes);
    return to == expected ? 0 : 1;
}

template <typename Copy>
uint64_t All(const Copy& copy) {
    uint64_t wrong = 0;
    for (uint64_t bytes = 0; bytes < 3000; bytes += bytes % 64 < 3 ? 1 : 29) {
        for (const uint64_t shift : {0, 1, 16, 32, 63}) wrong += Wrong(bytes, shift, 64 - shift, copy);
    }
    for (const uint64_t bytes : {7168, 14336, 14336 + 32, 65536}) wrong += Wrong(bytes, 32, 0, copy);
    return wrong;
}

// Of blocks, wherever in a cache line their words begin, and those of which a polled copy consists.
template <typename Copy>
uint64_t AllBlocks(const Copy& copy) {
    uint64_t wrong = 0;
    for (uint64_t to = 0; to < 64; to += 8) {
        for (uint64_t from = 0; from < 64; from += 8) wrong += Wrong(32, to, from, copy);
    }
    return wrong;
}

struct Block {
    uint64_t words[4];
};

// One thread writes a number into all words of a block, then the next one, while another thread reads the block.
// The number of blocks in which a flag came before what it announces: one in the fourth word, as a header's, before any
// other word; one in the third word, as a stamp's, before the first two; one in the first, as an entry's, before the
// second one.
uint64_t OutOfOrder(uint64_t shift, std::chrono::milliseconds time) {
    alignas(64) static uint8_t shared[128];
    std::memset(shared, 0, sizeof(shared));
    std::atomic<bool> is_over{false};
    std::thread writer([&] {
        for (uint64_t number = 1; !is_over.load(std::memory_order_relaxed); ++number) {
            const Block block{{number, number, number, number}};
            moe::emulation::CopyBlock(shared + shift, reinterpret_cast<const uint8_t*>(&block));
            std::atomic_thread_fence(std::memory_order_acq_rel);
        }
    });
    uint64_t wrong = 0;
    const auto end = std::chrono::steady_clock::now() + time;
    while (std::chrono::steady_clock::now() < end) {
        for (int i = 0; i < 1000; ++i) {
            Block seen;
            moe::emulation::CopyBlock(reinterpret_cast<uint8_t*>(&seen), shared + shift);
            std::atomic_thread_fence(std::memory_order_acq_rel);
            const auto [first, second, third, fourth] = seen.words;
            wrong += fourth > third || third > first || first > second ? 1 : 0;
        }
    }
    is_over = true;
    writer.join();
    return wrong;
}

}  // namespace

int main() {
    using namespace moe::emulation;
    const uint64_t ahead = All([](uint8_t* to, const uint8_t* from, uint64_t n) { CopyAhead(to, from, n); });
    const uint64_t stream = All([](uint8_t* to, const uint8_t* from, uint64_t n) { StreamBytes(to, from, n); });
    const uint64_t usual = All([](uint8_t* to, const uint8_t* from, uint64_t n) { CopyBytes(to, from, n); });
    const uint64_t block = AllBlocks([](uint8_t* to, const uint8_t* from, uint64_t) { CopyBlock(to, from); });
    uint64_t out_of_order = 0;
    for (const uint64_t shift : {0, 8, 16, 24, 32, 40, 48, 56}) {
        out_of_order += OutOfOrder(shift, std::chrono::milliseconds(100));
    }
    std::printf("%lu %lu %lu %lu %lu\n", ahead, stream, usual, block, out_of_order);
    return 0;
}
