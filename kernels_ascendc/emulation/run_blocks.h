// Launches: every block a thread with a UB of its own; a failed check becomes the launch's result.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "block_pool.h"
#include "launch_settings.h"
#include "meeting.h"
#include "trace.h"

namespace moe::emulation {

#ifdef MOE_EMULATION_STRICT
// Of the next launch that this thread makes.
inline uint64_t& Seed() {
    thread_local uint64_t seed = 0;
    return seed;
}
#endif

inline uint8_t* ThreadUb() {
    thread_local const std::unique_ptr<UbMemory> memory(new UbMemory);
    return memory->bytes;
}

// Runs `kernel()` on every block. Returns 0, or 1 when a check failed (`LastError` says which). The stream is
// the launch's `TracedLaunch`, or null where nothing is traced or profiled.
template <typename Kernel>
int RunBlocks(uint32_t blocks, Kernel&& kernel, const void* stream = nullptr) {
    if (!HasCoreForEach(blocks)) return 1;
    Meeting meeting(blocks);
    const LaunchSettings& settings = SettingsOfThread();
#ifdef MOE_EMULATION_STRICT
    const uint64_t seed = Seed()++;
    // Its operations take effect in an order of their own: times mean nothing there.
    if (settings.link != nullptr) {
        LastError() = "the strict build has no paced link";
        return 1;
    }
#endif
    ParallelFor(blocks, [&](uint32_t block) {
        TracedBlock traced(static_cast<const TracedLaunch*>(stream), block);
#ifdef MOE_EMULATION_STRICT
        Core core(block, blocks, meeting, ThreadUb(), settings.nic, seed);
#else
        Core core(block, blocks, meeting, ThreadUb(), settings);
#endif
        core.traced = traced.IsOn() ? &traced : nullptr;
        if (settings.control != nullptr) {
            core.flown = settings.control->flown;
            core.step = static_cast<uint32_t>(settings.control->first);
        }
        Core* const outer = current_core;
        current_core = &core;
        try {
            kernel();
            core.Finish();
            meeting.End();
        } catch (const std::exception& error) {
            meeting.Fail("block " + std::to_string(block) + ": " + error.what());
        }
        current_core = outer;
    });
    if (meeting.Failed()) {
        LastError() = meeting.Why();
        return 1;
    }
    return 0;
}

}  // namespace moe::emulation
