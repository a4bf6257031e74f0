// A block in the fast build: every operation takes effect at once, in program order.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "doorbell.h"
#include "launch_settings.h"
#include "meeting.h"
#include "memory.h"
#include "nic.h"
#include "paced_writes.h"
#include "trace.h"
#include "types.h"

namespace moe::emulation {

class Core : public CoreOfBlock {
public:
    Core(uint32_t index, uint32_t count, Meeting& meeting, uint8_t* ub, const LaunchSettings& settings)
        : CoreOfBlock{index, count},
          meeting_(meeting),
          ub_(ub),
          settings_(settings),
          copy_row_(settings.copy_row == nullptr ? CopyByLibrary : settings.copy_row),
          cached_left_(settings.cached_bytes / count),
          paced_(settings.link == nullptr ? nullptr : std::make_unique<PacedWrites>(settings, meeting)) {}

    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;
    ~Core() { PublishRows(); }  // also where the block has failed

    uint8_t* Ub(UbAddress address) {
        Settle();
        return ub_ + address.offset;
    }

    template <typename Effect>
    void Issue(pipe_t, Effect&& effect) {
        effect();
    }

    // A row that only passes through UB is not copied there: copying straight from its source saves one of two passes.
    // Any other access to UB copies it first (`Settle`).
    void CopyIn(UbAddress to, const uint8_t* from, uint64_t bytes) {
        Settle();
        if (bytes >= ROW_BYTES) {
            lazy_ = {from, to.offset, bytes};
        } else {
            CopyInOrder(ub_ + to.offset, from, bytes);
        }
    }

    void CopyOut(uint8_t* to, UbAddress from, uint64_t bytes) {
        const uint8_t* source = ub_ + from.offset;
        if (lazy_.bytes != 0) {
            const uint8_t* settled = ub_ + lazy_.offset;
            const bool inside = source >= settled && source + bytes <= settled + lazy_.bytes;
            const bool disjoint = source + bytes <= settled || settled + lazy_.bytes <= source;
            const bool overwrites = to < lazy_.source + lazy_.bytes && lazy_.source < to + bytes;
            if (inside && !overwrites) {
                source = lazy_.source + (source - settled);
            } else if (!disjoint || overwrites) {
                Settle();
            }
        }
        const bool held = paced_ != nullptr && paced_->Pace(to, bytes);
        if (bytes <= LONGEST_POLLED_BYTES) {
            PublishRows();
            if (held) {
                paced_->Hold(to, source, bytes);
            } else {
                CopyInOrder(to, source, bytes);
            }
        } else if (bytes <= cached_left_) {
            cached_left_ -= bytes;
            CopyInOrder(to, source, bytes, copy_row_);
        } else {
            std::atomic_thread_fence(std::memory_order_acq_rel);
            StreamBytes(to, source, bytes);
            has_streamed_ = true;
        }
    }

    // In what pieces a row goes to so many places, a piece to each of them before the next piece. Through the caches it
    // is copied whole. What is streamed comes from memory once, while stores to several places drain side by side.
    uint64_t PieceBytes(uint64_t bytes, uint32_t places) const {
        constexpr uint64_t STREAMED_PIECE_BYTES = 4096;
        static_assert(STREAMED_PIECE_BYTES > LONGEST_POLLED_BYTES, "a piece is no entry");
        return places > 1 && bytes * places > cached_left_ ? STREAMED_PIECE_BYTES : bytes;
    }

    // Each block's flag after its data: the fences of `CopyInOrder` are the only ordering that peers need.
    void CopyBlocksOut(uint8_t* to, UbAddress from, uint32_t blocks, FlaggedBlock block) {
        Settle();
        PublishRows();
        const uint8_t* source = ub_ + from.offset;
        const bool held = paced_ != nullptr && paced_->Pace(to, uint64_t{blocks} * block.bytes);
        for (uint32_t b = 0; b < blocks; ++b, to += block.bytes, source += block.bytes) {
            std::atomic_thread_fence(std::memory_order_acq_rel);
            copy_row_(to, source, block.data_bytes);
            if (held) {
                paced_->Hold(to + block.data_bytes, source + block.data_bytes, block.bytes - block.data_bytes);
            } else {
                CopyInOrder(to + block.data_bytes, source + block.data_bytes, block.bytes - block.data_bytes);
            }
        }
    }

    void Spoil(UbAddress, uint32_t) {}

    // All that is done is in the order of the program.
    void BeginInstruction(pipe_t, bool = false) {}
    void AccessUb(pipe_t, UbAddress, uint64_t, bool) {}

    // The contents of a freed buffer are not needed any more.
    void Discard(UbAddress buffer, uint32_t bytes) {
        if (lazy_.offset >= buffer.offset && lazy_.offset < buffer.offset + bytes) lazy_.bytes = 0;
    }

    template <typename T>
    T ScalarLoad(const T* from) {
        return __atomic_load_n(from, __ATOMIC_RELAXED);
    }

    template <typename T>
    void ScalarStore(T* to, T value) {
        PublishRows();
        __atomic_store_n(to, value, __ATOMIC_RELAXED);
    }

    // A host keeps its caches coherent.
    void CleanAndInvalidate(const void*) {}
    void CleanAndInvalidateAll() {}

    void SetFlag(AscendC::HardEvent, uint64_t) {}
    void WaitFlag(AscendC::HardEvent, uint64_t) {}
    void Barrier(pipe_t) { std::atomic_thread_fence(std::memory_order_seq_cst); }
    void DrainScalar() {}
    void SyncAll() {
        EndWaits();
        PublishRows();
        if (paced_ != nullptr) paced_->Drain();
        if (blocks > 1) meeting_.Wait([this] { LookUpForOthers(); });
    }

    // Between two polls of the flags of `awaited`, of which `missing` were not set, in the window that `window` points
    // into.
    void Poll(uint32_t attempt, const void* window, uint64_t missing, Awaited awaited) {
        meeting_.ThrowIfFailed();
        if (paced_ != nullptr) paced_->Drain();
        if (settings_.control != nullptr && IsTimeToLookUp(attempt)) {
            LookUp(*settings_.control, awaited);
        }
        if (attempt < settings_.spins) {
            CpuPause();
            return;
        }
        Doorbell* const bell = DoorbellOf(settings_, window);
        if (attempt < settings_.spins + settings_.yields || bell == nullptr) {
            is_count_known_ = false;
            Backoff(attempt);
            return;
        }
        if (is_count_known_) {
            bell->SleepUntil(count_before_look_ + missing);
        }
        count_before_look_ = bell->count.load();
        is_count_known_ = true;
    }

    void BeginLook() {}
    void Mark(uint32_t) {}

    // Whether all waits are to end.
    bool IsStopped() const { return settings_.control != nullptr && settings_.control->IsStopped(); }

    // A copy with flags may be a row: a token to this rank's own server has its number in its head, which says that the
    // token before it is there.
    void Notify(const void* flags, uint64_t number) {
        PublishRows();
        if (paced_ != nullptr && paced_->HoldsRing(flags, number)) return;
        if (Doorbell* const bell = DoorbellOf(settings_, flags)) bell->Ring(number);
    }

    bool Post(const PostItem& item) {
        PublishRows();
        return PostTo(settings_.nic, meeting_, block, item);
    }

    void BeginPhase(uint32_t number) {
        EndWaits();
        phase_ = number;
    }

    void Finish() {
        EndWaits();
        if (paced_ != nullptr) paced_->Drain();
    }

    void Require(bool, const char*) {}

private:
    // The size from which a copy counts as a row.
    static constexpr uint64_t ROW_BYTES = 1024;

    // Not in the first polls, so that a flag that arrives soon is seen without delay.
    bool IsTimeToLookUp(uint32_t attempt) const {
        constexpr uint32_t SPINS_PER_LOOK = 4096;
        constexpr uint32_t YIELDS_UNTIL_LOOK = 64;
        if (attempt < settings_.spins) return attempt % SPINS_PER_LOOK == SPINS_PER_LOOK - 1;
        // Each of them may take a tenth of a second on a loaded machine.
        return attempt - settings_.spins >= std::min(settings_.yields, YIELDS_UNTIL_LOOK);
    }

    void LookUp(WaitControl& control, Awaited awaited) {
        control.Note(block, phase_, awaited);
        has_noted_ = true;
        // Blocks on other threads run inside their caller's launch, and must not enter Python.
        if (ThreadSettings() == &settings_) LookUpFromWait(control);
    }

    // It waits for nobody until it polls again.
    void EndWaits() {
        if (has_noted_) {
            settings_.control->Forget(block);
            has_noted_ = false;
        }
    }

    // While other blocks wait.
    void LookUpForOthers() const {
        if (settings_.control != nullptr && ThreadSettings() == &settings_) LookUpFromWait(*settings_.control);
    }

    // Before anything that tells others that rows are there.
    void PublishRows() {
        if (has_streamed_) {
            OrderStreamed();
            has_streamed_ = false;
        }
    }

    struct Lazy {
        const uint8_t* source;
        uint32_t offset;
        uint64_t bytes;
    };

    void Settle() {
        if (lazy_.bytes != 0) {
            CopyInOrder(ub_ + lazy_.offset, lazy_.source, lazy_.bytes, copy_row_);
            lazy_.bytes = 0;
        }
    }

    Meeting& meeting_;
    uint8_t* ub_;
    const LaunchSettings& settings_;
    const RowCopy copy_row_;
    uint64_t cached_left_;
    bool has_streamed_ = false;
    bool has_noted_ = false;  // for whom it waits
    uint32_t phase_ = 0;      // of the launch
    const std::unique_ptr<PacedWrites> paced_;  // null without a paced link
    uint64_t count_before_look_ = 0;
    bool is_count_known_ = false;
    Lazy lazy_{};
};

// Read several times per row, so it is worth one of the few words that a loaded library may have at a fixed
// thread-local offset.
#if defined(__GNUC__)
__attribute__((tls_model("initial-exec")))
#endif
inline thread_local Core* current_core = nullptr;

inline Core& ThisCore() { return *current_core; }

}  // namespace moe::emulation
