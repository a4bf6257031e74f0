// Dispatch, step 3: waits for a status entry from every rank for every local expert, reads the counts, and clears the
// entries, unless one has another call word: its rows are not those that this rank expects.
#ifndef MOE_DISPATCH_WAIT_H
#define MOE_DISPATCH_WAIT_H

#include "waits.h"

namespace moe {

class DispatchWait {
public:
    __aicore__ inline void Init(const DispatchWaitArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        flags_.Init(pipe, static_cast<uint32_t>(ENTRIES_PER_CHUNK * STATUS_ENTRY_WORDS));
        pipe->InitBuffer(count_buffer_, static_cast<uint32_t>(ENTRIES_PER_CHUNK * sizeof(int32_t)));
        counts_ = count_buffer_.Get<int32_t>();
        waited_.Init(pipe, args.waited_us, ENTRIES_PER_CHUNK);
        report_.Init(pipe, args.report, args_.zone);
    }

    __aicore__ inline void Process() {
        const int64_t total = args_.num_local_experts * static_cast<int64_t>(args_.status.source_extent);
        const Share share = SplitEvenly(total, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        call_ = args_.dispatch_word == 0 ? static_cast<int32_t>(args_.call) : ReadFresh<int32_t>(args_.dispatch_word);
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        for (int64_t first = share.first; first < share.last; first += ENTRIES_PER_CHUNK) {
            const int64_t count = Smaller(ENTRIES_PER_CHUNK, share.last - first);
            const bool complete = WaitForEntries(first, count);
            StoreTimes(first, count);
            const bool same_call = StoreCounts(first, count);
            if (complete && same_call) {
                ClearEntries(first, count);
            }
        }
        report_.Write();
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 1024;

    // Entries are expert-major without gaps: the share of a block is one contiguous piece.
    __aicore__ inline AscendC::GlobalTensor<float> EntriesFrom(int64_t first) const {
        const uint64_t ranks = args_.status.source_extent;
        const uint64_t entry = first;
        return GlobalAt<float>(args_.window + args_.status.At(args_.zone, entry / ranks, entry % ranks));
    }

    __aicore__ inline bool WaitForEntries(int64_t first, int64_t count) {
        const int64_t repeats = (count + FlagCounter::ENTRIES_PER_REPEAT - 1) / FlagCounter::ENTRIES_PER_REPEAT;
        ZeroEntries(repeats * FlagCounter::ENTRIES_PER_REPEAT);
        Order<AscendC::HardEvent::V_MTE2>();
        ExpectAll(count);
        int64_t noted = 0;
        for (PollLoop poll(deadline_, args_.window, first, count); poll.Next();) {
            AscendC::DataCopy(flags_.Entries(), EntriesFrom(first), static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
            const int64_t seen = flags_.SumFirstWords(repeats);
            if (waited_.IsWanted() && seen != noted) {
                waited_.NoteArrivals(flags_.Entries(), 0, count, poll.WaitedUs());
                noted = seen;
            }
            if (seen == count) {
                return true;
            }
            poll.Miss(count - seen);
        }
        return false;
    }

    __aicore__ inline void ExpectAll(int64_t count) {
        for (int64_t i = 0; waited_.IsWanted() && i < count; ++i) {
            waited_.Expect(i);
        }
    }

    __aicore__ inline void StoreTimes(int64_t first, int64_t count) {
        if (waited_.IsWanted()) {
            waited_.NoteMissing(0, count, deadline_.WaitedUs());
            waited_.Store(first, count);
        }
        for (int64_t i = 0; IsTraced() && i < count; ++i) {
            deadline_.TraceWait((first + i) % static_cast<int64_t>(args_.status.source_extent), waited_.At(i));
        }
    }

    // Whether all entries that arrived are of the same call.
    __aicore__ inline bool StoreCounts(int64_t first, int64_t count) {
        bool same_call = true;
        const AscendC::LocalTensor<int32_t> words = flags_.Entries().template ReinterpretCast<int32_t>();
        Order<AscendC::HardEvent::MTE3_S>();
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t entry = static_cast<uint32_t>(i * STATUS_ENTRY_WORDS);
            const bool arrived = words.GetValue(entry + StatusEntry::FLAG) == FLAG_BITS;
            counts_.SetValue(i, arrived ? words.GetValue(entry + StatusEntry::COUNT) : -1);
            if (!arrived) {
                report_.Add(REPORT_TIMEOUT, first + i);
            } else if (words.GetValue(entry + StatusEntry::CALL) != call_) {
                report_.AddMismatch(first + i, call_, words.GetValue(entry + StatusEntry::CALL));
                same_call = false;
            }
        }
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopyPad(GlobalAt<int32_t>(args_.recv_counts)[first], counts_,
                             ExactBytes(count * static_cast<int64_t>(sizeof(int32_t))));
        return same_call;
    }

    __aicore__ inline void ClearEntries(int64_t first, int64_t count) {
        Order<AscendC::HardEvent::S_V>();
        ZeroEntries(count);
        Order<AscendC::HardEvent::V_MTE3>();
        AscendC::DataCopy(EntriesFrom(first), flags_.Entries(), static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline void ZeroEntries(int64_t count) {
        AscendC::Duplicate(flags_.Entries(), 0.0f, static_cast<int32_t>(count * STATUS_ENTRY_WORDS));
    }

    DispatchWaitArgs args_;
    FlagCounter flags_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> count_buffer_;
    AscendC::LocalTensor<int32_t> counts_;
    WaitedTimes waited_;
    Report report_;
    Deadline deadline_;
    int32_t call_ = 0;
};

}  // namespace moe

#endif  // MOE_DISPATCH_WAIT_H
