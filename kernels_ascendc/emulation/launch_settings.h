// The host's settings of its launches: how to wait, how to copy, and where the windows of the group are.
#pragma once

#include <atomic>
#include <cstdint>

#include "paced_link.h"
#include "row_copies.h"
#include "wait_control.h"

namespace moe {

class Nic;

// Windows of a group, all of one size. A doorbell lies behind each one's last byte.
struct WindowGroup {
    const uint64_t* addresses;
    uint64_t count;
    uint64_t window_bytes;
    uint64_t own;  // address of this rank's
};

struct LaunchSettings {
    emulation::RowCopy copy_row;  // through the caches; null: `CopyByLibrary`
    uint64_t cached_bytes;        // of rows that a launch writes through the caches before it uses streaming stores
    uint32_t spins;         // polls with a pause between them
    uint32_t yields;        // then polls that yield in between; then the waiter sleeps
    uint64_t num_groups;
    const WindowGroup* groups;
    WaitControl* control;  // null: waits end at their deadlines only
    PacedLink* link;  // what carries writes to peers; null: they take what the core takes
    Nic* nic;         // of this rank, where peers are reached by queue; or null
    const uint64_t* changes;  // of masks, as kernels see them; behind that word those that the call knows. Or null
    const uint64_t* masked_by;  // addresses of the bytes in which peers say that they mask this rank, with its bit
    uint64_t num_masked_by;
    uint64_t mask_bit;
};

// Whether ranks have been masked that the caller of a plan does not know of. Any thread may mask them.
inline bool AreMasksChanged(const LaunchSettings* settings) {
    if (settings == nullptr || settings->changes == nullptr) return false;
    return __atomic_load_n(settings->changes, __ATOMIC_ACQUIRE) != settings->changes[1];
}

// Whether a peer masks this rank, and so may have written over what has been read in its window until now.
inline bool IsMaskedByPeers(const LaunchSettings& settings) {
    std::atomic_thread_fence(std::memory_order_acquire);
    for (uint64_t i = 0; i < settings.num_masked_by; ++i) {
        const auto* const byte = reinterpret_cast<const uint8_t*>(settings.masked_by[i]);
        if ((__atomic_load_n(byte, __ATOMIC_RELAXED) & settings.mask_bit) != 0) return true;
    }
    return false;
}

// The settings of the calling thread's launches; null for the defaults.
inline const LaunchSettings*& ThreadSettings() {
    thread_local const LaunchSettings* settings = nullptr;
    return settings;
}

// By default no streaming stores, no sleeping on doorbells, no paced link, no queues.
inline const LaunchSettings& SettingsOfThread() {
    static constexpr LaunchSettings defaults{nullptr, UINT64_MAX, 200,     20000,   0, nullptr, nullptr,
                                             nullptr, nullptr,    nullptr, nullptr, 0, 0};
    return ThreadSettings() != nullptr ? *ThreadSettings() : defaults;
}

// The control of this thread's waits, or null, as on threads that run blocks for another thread.
inline WaitControl* ControlOfThread() { return ThreadSettings() != nullptr ? ThreadSettings()->control : nullptr; }

// A window that contains an address, and its group; null for other addresses.
struct FoundWindow {
    const WindowGroup* group;
    uint64_t window;
};

inline FoundWindow WindowOf(const LaunchSettings& settings, const void* pointer) {
    const auto address = reinterpret_cast<uint64_t>(pointer);
    for (uint64_t g = 0; g < settings.num_groups; ++g) {
        const WindowGroup& group = settings.groups[g];
        for (uint64_t i = 0; i < group.count; ++i) {
            // Unsigned: an address before the window becomes one far behind it.
            if (address - group.addresses[i] < group.window_bytes) return {&group, group.addresses[i]};
        }
    }
    return {};
}

}  // namespace moe
