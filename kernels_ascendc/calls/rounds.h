// How often each operator has run, which zone that makes it, and where a full wait must come between: the record, and
// what moe_triton/runtime/rounds.py does with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace moe::calls {

constexpr uint32_t NUM_OPERATORS = 3;

// A plan's result where ranks have been masked while it ran: above all numbers of phases, and below that of the launch
// before which it has stopped.
constexpr int64_t MASKS_CHANGED = int64_t{1} << 32;

using PerOperator = uint64_t[NUM_OPERATORS];
// clang-format off
#define MOE_ROUNDS(each)                                                                                  \
    each(PerOperator, counts) each(PerOperator, posted) each(PerOperator, covered) each(PerOperator, num_zones) \
    each(PerOperator, sharing) each(uint64_t, waiting) each(uint64_t, on_device) each(uint64_t, covered_in_graph)
// clang-format on

struct Rounds {
#define MOE_EACH(type, name) type name;
    MOE_ROUNDS(MOE_EACH)
#undef MOE_EACH

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

    // Name, offset and size of each field, as Python tells its own.
    static std::string Layout() {
        std::string layout;
#define MOE_EACH(type, name) \
    layout += " " #name "@" + std::to_string(offsetof(Rounds, name)) + "+" + std::to_string(sizeof(type));
        MOE_ROUNDS(MOE_EACH)
#undef MOE_EACH
        return layout.substr(1);
    }

private:
    bool IsWaiting(uint32_t id) const { return (waiting >> id & 1) != 0; }
};

}  // namespace moe::calls
