// Streaming stores that arrive only once they are put in order, as late as a processor may have them arrive. A core
// streams rows and then tells others, in each of the ways in which kernels do. Prints the bytes that were not there
// when others were told: for each way, and last what was there without any of them.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "row_copies.h"

namespace moe::emulation {

struct Store {
    uint8_t* to;
    const uint8_t* from;
    uint64_t bytes;
};

inline std::vector<Store> stores_under_way;

inline void StreamLate(uint8_t* to, const uint8_t* from, uint64_t bytes) {
    stores_under_way.push_back({to, from, bytes});
}

inline void LetAllArrive() {
    for (const Store& store : stores_under_way) StreamBytes(store.to, store.from, store.bytes);
    stores_under_way.clear();
}

}  // namespace moe::emulation

#define StreamBytes StreamLate
#define OrderStreamed LetAllArrive
#include "fast_core.h"
#undef StreamBytes
#undef OrderStreamed

namespace {

using moe::emulation::Core;

constexpr uint64_t ROW_BYTES = 14336;
constexpr uint64_t ROWS = 3;
constexpr uint32_t AT = 1024;  // of a row in UB

struct alignas(512) Window {
    uint8_t rows[ROWS][ROW_BYTES];
    uint32_t flag[8];
};

uint64_t Missing(const Window& window, const std::vector<uint8_t>& row) {
    uint64_t missing = 0;
    for (const auto& there : window.rows) {
        for (uint64_t at = 0; at < ROW_BYTES; ++at) missing += there[at] != row[at] ? 1 : 0;
    }
    return missing;
}

// What is missing once others have been told, or, without a way to tell them, once the launch has ended.
uint64_t MissingAfter(const std::function<void(Core&, Window&)>& tell, uint64_t cached_bytes) {
    static moe::emulation::UbMemory ub;
    moe::LaunchSettings settings = moe::SettingsOfThread();
    settings.cached_bytes = cached_bytes;
    moe::emulation::Meeting meeting(1);
    Window window{};
    const std::vector<uint8_t> row(ROW_BYTES, 7);
    uint64_t missing = 0;
    {
        Core core(0, 1, meeting, ub.bytes, settings);
        for (auto& to : window.rows) {
            core.CopyIn({AT}, row.data(), ROW_BYTES);
            core.CopyOut(to, {AT}, ROW_BYTES);
        }
        if (tell) tell(core, window);
        missing = Missing(window, row);
    }
    return tell ? missing : Missing(window, row);
}

}  // namespace

int main() {
    const auto bytes_of = [](Window& window) { return reinterpret_cast<uint8_t*>(window.flag); };
    const std::function<void(Core&, Window&)> ways[] = {
        [&](Core& core, Window& window) { core.CopyOut(bytes_of(window), {0}, 32); },
        [&](Core& core, Window& window) { core.CopyBlocksOut(bytes_of(window), {0}, 1, {32, 24}); },
        [](Core& core, Window& window) { core.ScalarStore(window.flag, 1U); },
        [](Core& core, Window& window) { core.Notify(window.flag, 1); },  // the flag is in the row
        [](Core& core, Window&) { core.SyncAll(); },
        [](Core& core, Window&) {
            try {
                core.Post({});
            } catch (const moe::emulation::CheckFailed&) {  // there are no queues
            }
        },
    };
    for (const auto& way : ways) std::printf("%lu ", MissingAfter(way, 0));
    for (const auto& way : ways) std::printf("%lu ", MissingAfter(way, ROW_BYTES));  // the first row is cached
    std::printf("%lu ", MissingAfter(nullptr, 0));
    const auto nothing = [](Core&, Window&) {};
    std::printf("%lu %lu\n", MissingAfter(nothing, 0), MissingAfter(nothing, 2 * ROW_BYTES));
    return 0;
}
