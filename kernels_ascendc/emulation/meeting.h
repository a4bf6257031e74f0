// SyncAll among the blocks of one launch.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

#include "block_pool.h"
#include "types.h"

namespace moe::emulation {

struct CheckFailed : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Why the calling thread's last failed launch failed.
inline std::string& LastError() {
    thread_local std::string message;
    return message;
}

// Whether a launch has a core for each of its blocks. If not, it fails.
inline bool HasCoreForEach(uint32_t blocks) {
    if (blocks > 0 && blocks <= AscendC::MAX_VECTOR_CORES) return true;
    LastError() = "a launch has 1 to 48 blocks: SyncAll needs a core for each of them";
    return false;
}

struct alignas(512) UbMemory {
    uint8_t bytes[AscendC::UB_BYTES];
};

class Meeting {
public:
    explicit Meeting(uint32_t blocks) : launch(++launches_), blocks_(blocks) {}

    const uint64_t launch;  // a number that no other launch of this process has

    // Waits until every block has arrived. On hardware a missing block hangs the launch; here it is an error, as soon
    // as one block has ended while another waits. Those that are missing may wait for peers: `look` is called again and
    // again.
    template <typename Look>
    void Wait(const Look& look) {
        const uint64_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == blocks_) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (uint32_t attempt = 0; round_.load(std::memory_order_acquire) == round; ++attempt) {
            ThrowIfFailed();
            const bool one_ended = ended_.load(std::memory_order_acquire) != 0;
            // Read again: the last block may have arrived, and one may have ended, since the loop's test.
            if (one_ended && round_.load(std::memory_order_acquire) == round) {
                throw CheckFailed("SyncAll: some blocks ended without calling it");
            }
            if (IsTimeToLook(attempt)) look();
            Backoff(attempt);
        }
    }

    void Wait() {
        Wait([] {});
    }

    // A block has ended without an error.
    void End() { ended_.fetch_add(1, std::memory_order_acq_rel); }

    // A block failed a check: all others stop at their next check of it.
    void Fail(const std::string& why) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (why_.empty()) why_ = why;
        }
        failed_.store(true, std::memory_order_release);
    }

    void ThrowIfFailed() const {
        if (failed_.load(std::memory_order_acquire)) throw CheckFailed("another block failed");
    }

    bool Failed() const { return failed_.load(std::memory_order_acquire); }

    const std::string& Why() const { return why_; }

private:
    static inline std::atomic<uint64_t> launches_{0};

    const uint32_t blocks_;
    std::atomic<uint64_t> round_{0};
    std::atomic<uint32_t> arrived_{0};
    std::atomic<uint32_t> ended_{0};
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    std::string why_;
};

}  // namespace moe::emulation
