// Dispatch, step 3: waits for a status entry from every rank for every local expert, takes the counts
// out, and clears the entries.
#ifndef MOE_DISPATCH_WAIT_H
#define MOE_DISPATCH_WAIT_H

#include "flags.h"

namespace moe {

class DispatchWait {
public:
    __aicore__ inline void Init(const DispatchWaitArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        pipe->InitBuffer(entry_buffer_, static_cast<uint32_t>(ENTRIES_PER_CHUNK * STATUS_ENTRY_BYTES));
        entries_ = entry_buffer_.Get<float>();
        pipe->InitBuffer(count_buffer_, static_cast<uint32_t>(ENTRIES_PER_CHUNK * sizeof(int32_t)));
        counts_ = count_buffer_.Get<int32_t>();
        pipe->InitBuffer(work_buffer_, WORK_BYTES);
        work_ = work_buffer_.Get<float>();
        pipe->InitBuffer(sum_buffer_, UB_ALIGN);
        sum_ = sum_buffer_.Get<float>();
        report_.Init(pipe, args.report);
    }

    __aicore__ inline void Process() {
        const int64_t total = args_.num_local_experts * static_cast<int64_t>(args_.status.source_extent);
        const Share share = SplitEvenly(total, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        deadline_.Start(args_.timeout_us);
        for (int64_t first = share.first; first < share.last; first += ENTRIES_PER_CHUNK) {
            const int64_t count = Smaller(ENTRIES_PER_CHUNK, share.last - first);
            const bool complete = WaitForEntries(first, count);
            StoreCounts(first, count);
            if (complete) {
                ClearEntries(first, count);
            }
        }
        report_.Write();
    }

private:
    // A vector instruction takes 256 bytes, eight entries, at a time, and repeats up to 255 times.
    static constexpr int64_t ENTRIES_PER_CHUNK = 1024;
    static constexpr int64_t ENTRIES_PER_REPEAT = 8;
    static constexpr uint32_t WORK_BYTES = 1024;
    // Of every entry's eight words only the first is the flag; the next one is a count, no float.
    static constexpr uint64_t FLAG_WORDS = 0x0101010101010101ULL;

    // Entries are expert-major without gaps: the share of a block is one contiguous piece.
    __aicore__ inline AscendC::GlobalTensor<float> EntriesFrom(int64_t first) const {
        const uint64_t ranks = args_.status.source_extent;
        const uint64_t entry = static_cast<uint64_t>(first);
        return GlobalAt<float>(args_.window + args_.status.At(static_cast<uint64_t>(args_.zone), entry / ranks,
                                                              entry % ranks));
    }

    __aicore__ inline bool WaitForEntries(int64_t first, int64_t count) {
        const int64_t repeats = (count + ENTRIES_PER_REPEAT - 1) / ENTRIES_PER_REPEAT;
        ZeroEntries(repeats * ENTRIES_PER_REPEAT);
        Order<AscendC::HardEvent::V_MTE2>();
        for (Looks looks(deadline_); looks.Next();) {
            if (CountFlags(first, count, repeats) == count) {
                return true;
            }
        }
        return false;
    }

    __aicore__ inline int64_t CountFlags(int64_t first, int64_t count, int64_t repeats) {
        const uint64_t mask[2] = {FLAG_WORDS, 0};
        AscendC::DataCopy(entries_, EntriesFrom(first), static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::MTE2_V>();
        AscendC::ReduceSum(sum_, entries_, work_, mask, static_cast<int32_t>(repeats),
                           static_cast<int32_t>(ENTRIES_PER_REPEAT));
        Order<AscendC::HardEvent::V_S>();
        return static_cast<int64_t>(sum_.GetValue(0));
    }

    __aicore__ inline void StoreCounts(int64_t first, int64_t count) {
        const AscendC::LocalTensor<int32_t> words = entries_.template ReinterpretCast<int32_t>();
        Order<AscendC::HardEvent::MTE3_S>();
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t word = static_cast<uint32_t>(i * STATUS_ENTRY_WORDS);
            const bool arrived = words.GetValue(word) == FLAG_BITS;
            counts_.SetValue(static_cast<uint32_t>(i), arrived ? words.GetValue(word + 1) : -1);
            if (!arrived) {
                report_.Add(REPORT_TIMEOUT, first + i);
            }
        }
        Order<AscendC::HardEvent::S_MTE3>();
        // Neighbouring blocks write the words before and after: not a byte more than our own.
        const AscendC::DataCopyExtParams bytes{1, static_cast<uint32_t>(count * sizeof(int32_t)), 0, 0, 0};
        const uint64_t offset = static_cast<uint64_t>(first);
        AscendC::DataCopyPad(GlobalAt<int32_t>(args_.recv_counts)[offset], counts_, bytes);
    }

    __aicore__ inline void ClearEntries(int64_t first, int64_t count) {
        Order<AscendC::HardEvent::S_V>();
        ZeroEntries(count);
        Order<AscendC::HardEvent::V_MTE3>();
        AscendC::DataCopy(EntriesFrom(first), entries_, static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline void ZeroEntries(int64_t count) {
        AscendC::Duplicate(entries_, 0.0f, static_cast<int32_t>(count * STATUS_ENTRY_WORDS));
    }

    DispatchWaitArgs args_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> entry_buffer_;
    AscendC::LocalTensor<float> entries_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> count_buffer_;
    AscendC::LocalTensor<int32_t> counts_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> work_buffer_;
    AscendC::LocalTensor<float> work_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> sum_buffer_;
    AscendC::LocalTensor<float> sum_;
    Report report_;
    Deadline deadline_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_WAIT_H
