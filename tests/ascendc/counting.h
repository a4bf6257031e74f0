// Counts what each block of a launch does, in a build of the kernels that tests/ascendc/counting.py patches.
#ifndef MOE_TESTS_COUNTING_H
#define MOE_TESTS_COUNTING_H

#include <array>
#include <cstdint>

namespace moe::emulation {

// In the order of counting.py's NAMES.
enum Counter : uint32_t {
    LOADS,
    LOAD_BYTES,
    STORES,
    STORE_BYTES,
    SENT_BYTES,
    SCALAR_LOCAL,
    SCALAR_GLOBAL,
    LINES,
    DROPPED,
    VECTOR,
    BARRIERS,
    NUM_COUNTERS,
};

struct Counting {
    static constexpr uint64_t MAX_WINDOWS = 64;

    std::array<std::array<uint64_t, NUM_COUNTERS>, 48> blocks{};
    // Windows of other ranks: first address and the one behind the last.
    std::array<std::array<uint64_t, 2>, MAX_WINDOWS> others{};
    uint64_t num_others = 0;
};

inline Counting& TheCounting() {
    static Counting counting;
    return counting;
}

// Of a block: false while it looks for what others have yet to do.
inline bool& IsCounting() {
    thread_local bool is_counting = true;
    return is_counting;
}

inline void Count(uint32_t block, Counter counter, uint64_t number = 1) {
    if (!IsCounting()) return;
    TheCounting().blocks[block][counter] += number;
}

inline void CountStored(uint32_t block, const void* to, uint64_t bytes) {
    const Counting& counting = TheCounting();
    const auto address = reinterpret_cast<uint64_t>(to);
    Count(block, STORE_BYTES, bytes);
    for (uint64_t i = 0; i < counting.num_others; ++i) {
        if (address >= counting.others[i][0] && address < counting.others[i][1]) Count(block, SENT_BYTES, bytes);
    }
}

}  // namespace moe::emulation

#endif  // MOE_TESTS_COUNTING_H
