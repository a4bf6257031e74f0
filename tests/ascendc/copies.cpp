// Copies of every length at every alignment, against byte by byte: what is copied, and nothing beside it.
#include <cstdint>
#include <cstdio>
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

}  // namespace

int main() {
    using namespace moe::emulation;
    const uint64_t ahead = All([](uint8_t* to, const uint8_t* from, uint64_t n) { CopyAhead(to, from, n); });
    const uint64_t stream = All([](uint8_t* to, const uint8_t* from, uint64_t n) { StreamBytes(to, from, n); });
    const uint64_t usual = All([](uint8_t* to, const uint8_t* from, uint64_t n) { CopyBytes(to, from, n); });
    std::printf("%lu %lu %lu\n", ahead, stream, usual);
    return 0;
}
