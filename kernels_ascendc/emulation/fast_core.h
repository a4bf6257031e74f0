// A block in the fast build: every operation happens at once, in the order of the program.
#ifndef MOE_EMULATION_FAST_CORE_H
#define MOE_EMULATION_FAST_CORE_H

#include <atomic>
#include <cstring>

#include "meeting.h"
#include "types.h"

namespace moe::emulation {

class Core {
public:
    Core(uint32_t index, uint32_t count, Meeting& meeting, uint8_t* ub)
        : block(index), blocks(count), meeting_(meeting), ub_(ub) {}

    const uint32_t block;
    const uint32_t blocks;

    uint8_t* Ub(UbAddress address) { return ub_ + address.offset; }

    template <typename Effect>
    void Issue(pipe_t, Effect&& effect) {
        effect();
    }

    // Other processes read and write the same memory: the compiler must neither keep nor move it. On
    // x86 plain stores become visible in order, so nothing more is needed for "data before flag".
    void Copy(pipe_t, uint8_t* to, const uint8_t* from, uint64_t bytes) {
        std::atomic_thread_fence(std::memory_order_acq_rel);
        std::memcpy(to, from, bytes);
        std::atomic_thread_fence(std::memory_order_acq_rel);
    }

    void SetFlag(AscendC::HardEvent, uint64_t) {}
    void WaitFlag(AscendC::HardEvent, uint64_t) {}
    void Barrier(pipe_t) { std::atomic_thread_fence(std::memory_order_seq_cst); }
    void DrainScalar() {}
    void SyncAll() {
        if (blocks > 1) meeting_.Wait();
    }
    void Poll(uint32_t attempt) {
        meeting_.ThrowIfFailed();
        Backoff(attempt);
    }
    void Finish() {}

    static constexpr bool CHECKS = false;
    void Require(bool, const char*) {}

private:
    Meeting& meeting_;
    uint8_t* ub_;
};

inline thread_local Core* current_core = nullptr;

inline Core& ThisCore() { return *current_core; }

}  // namespace moe::emulation

#endif  // MOE_EMULATION_FAST_CORE_H
