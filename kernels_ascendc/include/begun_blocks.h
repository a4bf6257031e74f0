// Which blocks of a launch have begun: what all of them look up as they begin must not change before.
//
// A SyncAll would keep each of them waiting for all others. Here one block looks, when it needs to know.
#pragma once

#include "waits.h"

namespace moe {

// A flag of each block in this rank's own memory, zero between launches.
class BegunBlocks {
public:
    // Nothing happens without an address.
    __aicore__ inline void Init(AscendC::TPipe* pipe, uint64_t address) {
        address_ = address;
        if (address != 0) {
            flag_ = NewTensor<float>(pipe, STATUS_ENTRY_WORDS);
        }
    }

    // For the block that waits.
    __aicore__ inline void InitWait(AscendC::TPipe* pipe) {
        words_ = static_cast<uint32_t>(AscendC::GetBlockNum()) * STATUS_ENTRY_WORDS;
        flags_.Init(pipe, words_);
    }

    // By every block, once.
    __aicore__ inline void Raise() {
        if (address_ == 0) {
            return;
        }
        AscendC::Duplicate(flag_, 1.0f, static_cast<int32_t>(STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::V_MTE3>();
        const uint64_t own = static_cast<uint64_t>(AscendC::GetBlockIdx()) * STATUS_ENTRY_BYTES;
        RaiseFlags(GlobalAt<float>(address_ + own), flag_, STATUS_ENTRY_WORDS, 1);
    }

    // Says whether all blocks have begun, and clears their flags for the next launch. They come, whatever peers do: a
    // receiver when it gives up, which takes twice the time-out where the process was paused (`Deadline`), and later by
    // as much as it began late on a busy machine. Not to have waited for one would cost the next launch its zone.
    __aicore__ inline bool Wait(int64_t timeout_us, uint64_t window) {
        Deadline deadline;
        deadline.Start(2 * timeout_us + LATEST_BEGIN_US);
        for (PollLoop poll(deadline, window); poll.Next();) {
            AscendC::DataCopy(flags_.Entries(), GlobalAt<float>(address_), words_);
            if (flags_.SumWords(0, words_) == static_cast<int64_t>(words_)) {
                AscendC::Duplicate(flags_.Entries(), 0.0f, static_cast<int32_t>(words_));
                Order<AscendC::HardEvent::V_MTE3>();
                AscendC::DataCopy(GlobalAt<float>(address_), flags_.Entries(), words_);
                return true;
            }
        }
        return false;
    }

private:
    static constexpr int64_t LATEST_BEGIN_US = 5'000'000;

    uint64_t address_ = 0;
    uint32_t words_ = 0;
    AscendC::LocalTensor<float> flag_;
    FlagCounter flags_;
};

}  // namespace moe
