// How often each operator has run, which zone that makes it, and where a full wait must come between: the record, and
// what moe_triton/runtime/rounds.py does with it.
#ifndef MOE_CALLS_ROUNDS_H
#define MOE_CALLS_ROUNDS_H

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace moe::calls {

constexpr uint32_t NUM_OPERATORS = 3;

struct Rounds {
    uint64_t counts[NUM_OPERATORS];
    uint64_t posted[NUM_OPERATORS];
    uint64_t covered[NUM_OPERATORS];
    uint64_t num_zones[NUM_OPERATORS];
    uint64_t sharing[NUM_OPERATORS];
    uint64_t waiting;
    uint64_t on_device;
    uint64_t covered_in_graph;

    uint64_t Zone(uint32_t id) const {
        if (on_device != 0) return 0;
        uint64_t turns = 0;
        for (uint32_t other = 0; other < NUM_OPERATORS; ++other) {
            if ((sharing[id] >> other & 1) != 0) turns += counts[other];
        }
        return turns % num_zones[id];
    }

    bool NeedsWait(uint32_t id, bool capturing) const {
        if (IsWaiting(id)) return false;
        const uint64_t uncovered = counts[id] - covered[id];
        if (on_device != 0) return uncovered > 0 || (covered_in_graph != 0) != capturing;
        return uncovered >= num_zones[id];
    }

    void Begin(uint32_t id) {
        if (IsWaiting(id)) std::memcpy(posted, counts, sizeof(counts));
    }

    void End(uint32_t id, bool succeeded, bool capturing) {
        ++counts[id];
        if (!succeeded || !IsWaiting(id)) return;
        std::memcpy(covered, posted, sizeof(posted));
        covered_in_graph = capturing ? 1 : 0;
    }

private:
    bool IsWaiting(uint32_t id) const { return (waiting >> id & 1) != 0; }
};

// Name, offset and size, as Python tells its own.
#define MOE_ROUNDS_LAYOUT                                                                                         \
    "counts@0+24 posted@24+24 covered@48+24 num_zones@72+24 sharing@96+24 waiting@120+8 on_device@128+8 "        \
    "covered_in_graph@136+8"
static_assert(offsetof(Rounds, counts) == 0 && offsetof(Rounds, posted) == 24 && offsetof(Rounds, covered) == 48);
static_assert(offsetof(Rounds, num_zones) == 72 && offsetof(Rounds, sharing) == 96);
static_assert(offsetof(Rounds, waiting) == 120 && offsetof(Rounds, on_device) == 128);
static_assert(offsetof(Rounds, covered_in_graph) == 136 && sizeof(Rounds) == 144);

}  // namespace moe::calls

#endif  // MOE_CALLS_ROUNDS_H
