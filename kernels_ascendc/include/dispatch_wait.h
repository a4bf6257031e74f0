// Dispatch, step 3: until the entry of every source is there; their counts out, the entries cleared.
#ifndef MOE_DISPATCH_WAIT_H
#define MOE_DISPATCH_WAIT_H

#include "platform.h"

namespace moe {

class DispatchWait {
public:
    __aicore__ inline explicit DispatchWait(const DispatchWaitArgs& args)
        : args_(args), deadline_(args.timeout_us), report_(args.report) {
        pipe_.InitBuffer(entries_, ENTRIES_AT_ONCE * STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(zeros_, ENTRIES_AT_ONCE * STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(counts_, ENTRIES_AT_ONCE * sizeof(int32_t));
        pipe_.InitBuffer(sum_, STATUS_ENTRY_BYTES);
        pipe_.InitBuffer(work_, ENTRIES_AT_ONCE * sizeof(float));
    }

    __aicore__ inline void Process() {
        AscendC::Duplicate(zeros_.Get<float>(), 0.0f, ENTRIES_AT_ONCE * static_cast<int32_t>(WORDS_PER_ENTRY));
        Synchronize<HardEvent::V_MTE3>();
        const uint64_t total = static_cast<uint64_t>(args_.num_local_experts) * args_.status.source_extent;
        const Range range = Share(total, static_cast<uint64_t>(AscendC::GetBlockIdx()),
                                  static_cast<uint64_t>(AscendC::GetBlockNum()));
        for (uint64_t first = range.begin; first < range.end; first += ENTRIES_AT_ONCE) {
            const uint64_t last = first + ENTRIES_AT_ONCE < range.end ? first + ENTRIES_AT_ONCE : range.end;
            const auto count = static_cast<uint32_t>(last - first);
            const bool complete = WaitFor(first, count);
            TakeCounts(first, count);
            if (complete) {
                Clear(first, count);
            } else {
                // Uncleared entries and counts of -1 are how the host finds out who is missing.
                report_.Write(REPORT_TIMEOUT, first, count);
            }
            // UB is written again in the next round.
            Synchronize<HardEvent::MTE3_S>();
        }
    }

private:
    // ReduceSum takes at most 255 repeats.
    static constexpr uint32_t ENTRIES_AT_ONCE = 128;

    // Entries are contiguous, expert by expert.
    __aicore__ inline GlobalTensor<float> Entries(uint64_t first) const {
        const uint64_t at = args_.status.At(static_cast<uint64_t>(args_.zone), 0, first);
        return Global<float>(args_.window + at);
    }

    // Sums the flags, 1.0 each, until none is missing.
    __aicore__ inline bool WaitFor(uint64_t first, uint32_t count) {
        const LocalTensor<float> entries = entries_.Get<float>();
        for (uint32_t attempt = 0;; ++attempt) {
            const bool passed = deadline_.Passed();
            AscendC::DataCopy(entries, Entries(first), count * WORDS_PER_ENTRY);
            Synchronize<HardEvent::MTE2_V>();
            AscendC::ReduceSum(sum_.Get<float>(), entries, work_.Get<float>(), 1, static_cast<int32_t>(count), 1);
            Synchronize<HardEvent::V_S>();
            if (sum_.Get<float>().GetValue(0) == static_cast<float>(count)) {
                return true;
            }
            if (passed) {
                return false;
            }
            PollPause(attempt);
        }
    }

    __aicore__ inline void TakeCounts(uint64_t first, uint32_t count) {
        const LocalTensor<float> flags = entries_.Get<float>();
        const LocalTensor<int32_t> words = entries_.Get<int32_t>();
        const LocalTensor<int32_t> counts = counts_.Get<int32_t>();
        for (uint32_t i = 0; i < count; ++i) {
            const bool there = flags.GetValue(i * WORDS_PER_ENTRY) == 1.0f;
            counts.SetValue(i, there ? words.GetValue(i * WORDS_PER_ENTRY + 1) : -1);
        }
        Synchronize<HardEvent::S_MTE3>();
        AscendC::DataCopyPad(Global<int32_t>(args_.recv_counts)[first], counts,
                             {1, static_cast<uint32_t>(count * sizeof(int32_t)), 0, 0, 0});
    }

    __aicore__ inline void Clear(uint64_t first, uint32_t count) {
        AscendC::DataCopy(Entries(first), zeros_.Get<float>(), count * WORDS_PER_ENTRY);
    }

    const DispatchWaitArgs args_;
    Deadline deadline_;
    Report report_;
    AscendC::TPipe pipe_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> entries_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> zeros_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> counts_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> sum_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_WAIT_H
