// What the kernels share: flags, orderings between pipes, tables of indices, kept words, reports.
//
// The protocol has one invariant: a flag is never visible before the data that it announces. It is made
// in nine places only:
//   SendRows::FinishRow                   a flag in the stamp of a row;
//   CountsSend::FinishCounts              a rank's counts, and a flag of the same block;
//   BlockHeaders::FinishCounts            the counts of a block, and FLAG1;
//   ResultRows::FinishRow                 a flag per row;
//   RailRelay::FinishRows                 the entries of a source, behind its rows;
//   BlockPosts::FinishRows                the line of a block, behind its copies for a part;
//   EndFlags::FinishRows                  an end flag, behind what its block copied to this rank itself;
//   CopyBlocksInOrder (platform.h)        a flag in each 512-byte block: the copy itself keeps the order;
//   PhaseRunner (phases.h)                what post_status and blocks_end announce was written by earlier
//                                         phases, each of which ends with a barrier of all pipes, and a SyncAll
//                                         precedes it; or by earlier launches, which end with one, too
//                                         (MOE_LAUNCHER). The same holds for what dispatch_post and combine_post
//                                         post; the flags behind it stay behind it in their queue (posts.h); and
//                                         of the tables ahead of a dispatch (tables_send.h), which its entries and
//                                         headers of counts announce.
#pragma once

#include "kernel_operator.h"
#include "moe_layout.h"
#include "platform.h"

namespace moe {

constexpr int64_t CYCLES_PER_US = 50;
constexpr uint32_t UNIT_WORDS = UB_ALIGN / sizeof(int32_t);

template <typename T>
__aicore__ inline AscendC::GlobalTensor<T> GlobalAt(uint64_t address) {
    AscendC::GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
    return tensor;
}

// A scalar that an earlier kernel, a peer or the host may have written since this core last read its line.
// "If the content may be changed from outside, call DataCacheCleanAndInvalid first": Ascend C, GlobalTensor.GetValue.
template <typename T>
__aicore__ inline T ReadFresh(uint64_t address, int64_t index = 0) {
    const AscendC::GlobalTensor<T> value = GlobalAt<T>(address)[index];
    DropCachedLine(value);
    return value.GetValue(0);
}

// The ranks in the order in which each gets its turn: from the one behind the own rank on. If all began with the same
// rank, what all have for it would come at once, and its port would be the only busy one.
__aicore__ inline int64_t RankAt(int64_t i, int64_t own, int64_t num_ranks) {
    return (own + 1 + i) % num_ranks;
}

// Which turn a rank has in that order.
__aicore__ inline int64_t TurnOf(int64_t rank, int64_t own, int64_t num_ranks) {
    return (rank - own - 1 + num_ranks) % num_ranks;
}

// Where something for a rank is written: in whose window, and as if from whom.
struct Place {
    uint64_t window;
    uint64_t source;
};

// The addresses of all ranks' windows, and how each is reached (moe_triton/core/reach.py). The host writes addresses
// once, before any kernel that reads them, and masks whenever ranks are masked; and the memory had other contents
// before, perhaps the table of a closed buffer. So each kernel drops its cached lines once, and again where it has seen
// that masks have changed.
class Peers {
public:
    __aicore__ inline void Init(uint64_t table, int64_t num_ranks) {
        windows_ = GlobalAt<uint64_t>(table);
        const int64_t first = static_cast<int64_t>(table / sizeof(uint64_t)) % WORDS_PER_LINE;
        for (int64_t rank = 0; rank < num_ranks; rank += WORDS_PER_LINE - (first + rank) % WORDS_PER_LINE) {
            DropCachedLine(windows_[rank]);
        }
    }

    // For copies, or for posts if it is queued.
    __aicore__ inline uint64_t WindowOf(uint64_t rank) const {
        return windows_.GetValue(rank) & ((uint64_t{1} << GONE_BIT) - 1);
    }

    // Whether only posts get there.
    __aicore__ inline bool IsQueued(uint64_t rank) const {
        return (windows_.GetValue(rank) >> QUEUED_BIT & 1) != 0;
    }

    // Whether nothing is sent to it.
    __aicore__ inline bool IsMasked(uint64_t rank) const {
        return (windows_.GetValue(rank) >> MASKED_BIT & 1) != 0;
    }

    // Whether it takes no part itself. Another rank may stand in for it, and pass on what is sent to it.
    __aicore__ inline bool IsGone(uint64_t rank) const {
        return (windows_.GetValue(rank) >> GONE_BIT & 1) != 0;
    }

    // Whether nothing is awaited from it.
    __aicore__ inline bool IsSilent(uint64_t rank) const {
        return (windows_.GetValue(rank) >> SILENT_BIT & 1) != 0;
    }

    // Whether the running call has known that from its beginning. No other thread writes this bit during a call.
    __aicore__ inline bool IsKnownSilent(uint64_t rank) const {
        return (windows_.GetValue(rank) >> KNOWN_BIT & 1) != 0;
    }

    // Whether it is of this rank's server. Where nobody is queued nobody asks, and the table does not say.
    __aicore__ inline bool IsInside(uint64_t rank) const {
        return (windows_.GetValue(rank) >> INSIDE_BIT & 1) != 0;
    }

    // The out part of this rank's own window mirrors the other one: what is to be posted to a rank lies there as if it
    // had come from it.
    template <typename Args>
    __aicore__ inline Place PlaceFor(const Args& args, uint64_t rank) const {
        if (args.out_offset != 0 && IsQueued(rank)) {
            return {args.window + static_cast<uint64_t>(args.out_offset), rank};
        }
        return {WindowOf(rank), static_cast<uint64_t>(args.rank)};
    }

private:
    static constexpr int64_t WORDS_PER_LINE = 64 / sizeof(uint64_t);

    AscendC::GlobalTensor<uint64_t> windows_;
};

// The number of the round that this launch belongs to: one more than that of the round before. It is not zero, as
// fresh memory is. Flags are made of it, so that no round ends by a flag of another one, whatever that one left behind,
// and nothing has to be cleared.
template <typename Args>
__aicore__ inline int32_t RoundNumber(const Args& args) {
    const int32_t before = ReadFresh<int32_t>(args.numbers, args.zone);
    return before >= INT32_MAX || before < 0 ? 1 : before + 1;
}

// Reads the zone from memory, if the arguments say where: the launches of a captured graph have the same arguments
// in every replay.
template <typename Args>
__aicore__ inline void FindZone(Args& args) {
    if (args.zone_at != 0) {
        args.zone = ReadFresh<int32_t>(args.zone_at);
    }
}

template <typename T>
__aicore__ inline T Smaller(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
__aicore__ inline T Larger(T a, T b) {
    return a < b ? b : a;
}

// Bytes in UB of a copy that ends anywhere.
__aicore__ inline int64_t WholeUnits(int64_t bytes) {
    constexpr int64_t UNIT = UB_ALIGN;
    return (bytes + UNIT - 1) / UNIT * UNIT;
}

// [first, last) of a block.
struct Share {
    int64_t first;
    int64_t last;
};

__aicore__ inline Share SplitEvenly(int64_t total, int64_t part, int64_t parts) {
    return {total * part / parts, total * (part + 1) / parts};
}

// The blocks that share a kernel's work: those of its launch, or of its phase (phases.h).
struct Blocks {
    int64_t index;  // of this one
    int64_t number;

    __aicore__ static inline Blocks OfLaunch() {
        return {AscendC::GetBlockIdx(), AscendC::GetBlockNum()};
    }

    __aicore__ inline Share ShareOf(int64_t total) const {
        return SplitEvenly(total, index, number);
    }
};

// Later work on the event's second pipe waits for earlier work on its first pipe.
template <AscendC::HardEvent event>
__aicore__ inline void Order() {
    const AscendC::TEventID id = GetTPipePtr()->FetchEventID(event);
    AscendC::SetFlag<event>(id);
    AscendC::WaitFlag<event>(id);
}

// Exactly this many contiguous bytes: the neighbouring ones may belong to another block.
__aicore__ inline AscendC::DataCopyExtParams ExactBytes(int64_t bytes) {
    return {1, static_cast<uint32_t>(bytes), 0, 0, 0};
}

// The same of 32-bit words.
__aicore__ inline AscendC::DataCopyExtParams ExactWords(int64_t count) {
    return ExactBytes(count * static_cast<int64_t>(sizeof(int32_t)));
}

template <typename T>
__aicore__ inline AscendC::DataCopyPadExtParams<T> NoPadding() {
    return {false, 0, 0, 0};
}

// In UB, with memory of its own.
template <typename T>
__aicore__ inline AscendC::LocalTensor<T> NewTensor(AscendC::TPipe* pipe, int64_t elements) {
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
    pipe->InitBuffer(buffer, static_cast<uint32_t>(elements * static_cast<int64_t>(sizeof(T))));
    return buffer.Get<T>();
}

// A contiguous part of an int32 array for scalar reads: one copy to UB instead of a slow load per index.
class Table {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t max_entries) {
        entries_ = NewTensor<int32_t>(pipe, max_entries);
    }

    // In memory that somebody else has.
    __aicore__ inline void Use(const AscendC::LocalTensor<int32_t>& entries) {
        entries_ = entries;
    }

    // Between Order<S_MTE2> (earlier reads are over) and Order<MTE2_S> (the entries are there).
    __aicore__ inline void Load(uint64_t address, int64_t first, int64_t count) {
        first_ = first;
        AscendC::DataCopyPad(entries_, GlobalAt<int32_t>(address)[first], ExactWords(count), NoPadding<int32_t>());
    }

    // Where nothing else is loaded with them: the entries are there when it returns.
    __aicore__ inline void Fetch(uint64_t address, int64_t first, int64_t count) {
        Order<AscendC::HardEvent::S_MTE2>();
        Load(address, first, count);
        Order<AscendC::HardEvent::MTE2_S>();
    }

    __aicore__ inline int32_t At(int64_t index) const {
        return entries_.GetValue(index - first_);
    }

    // From now on this is the number of the first entry: of those that are loaded, or set.
    __aicore__ inline void Begin(int64_t first) {
        first_ = first;
    }

    __aicore__ inline void Set(int64_t index, int32_t value) const {
        entries_.SetValue(index - first_, value);
    }

    // The first entries. When it returns they may be set again, or others loaded.
    __aicore__ inline void Store(uint64_t address, int64_t count) const {
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopyPad(GlobalAt<int32_t>(address)[first_], entries_, ExactWords(count));
        Order<AscendC::HardEvent::MTE3_S>();
    }

    // For vector instructions: from the first one that is loaded.
    __aicore__ inline const AscendC::LocalTensor<int32_t>& Entries() const {
        return entries_;
    }

private:
    AscendC::LocalTensor<int32_t> entries_;
    int64_t first_ = 0;
};

// Keeps a word in this rank's own memory that later launches read. The first of the blocks writes it.
__aicore__ inline void KeepWord(uint64_t address, int64_t word, const Blocks& blocks = Blocks::OfLaunch()) {
    if (address == 0 || blocks.index != 0) {
        return;
    }
    const AscendC::LocalTensor<int32_t> words = NewTensor<int32_t>(GetTPipePtr(), 1);
    words.SetValue(0, static_cast<int32_t>(word));
    Order<AscendC::HardEvent::S_MTE3>();
    AscendC::DataCopyPad(GlobalAt<int32_t>(address), words, ExactWords(1));
}

// By the wait: the next round, in the other zone, goes on from it. No block of this round reads that word.
template <typename Args>
__aicore__ inline void KeepNumber(const Args& args, int32_t number) {
    KeepWord(args.numbers + (1 - args.zone) * sizeof(int32_t), number);
}

// What went wrong in this block. A block without an error writes nothing: the host zeroes reports, before every run or,
// if it does not wait for runs to end, once.
class Report {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, uint64_t address, int64_t zone) {
        address_ = address;
        zone_ = zone;
        words_ = NewTensor<int32_t>(pipe, BLOCK_REPORT_WORDS);
    }

    // Whether this block has reported in an earlier run: then peers are gone, and it does not wait for them again.
    __aicore__ inline bool IsOld() const {
        return ReadFresh<int32_t>(address_, OffsetOfBlock()) != 0;
    }

    // Whether there is something to report.
    __aicore__ inline bool IsWanted() const {
        return number_ != 0;
    }

    // There is room for one code: the first, or a mismatch.
    __aicore__ inline void Add(uint32_t code, int64_t index, int64_t number = 1) {
        const bool is_first_mismatch = code == REPORT_MISMATCH && code_ != REPORT_MISMATCH;
        if (number_ == 0 || is_first_mismatch) {
            code_ = code;
            first_ = index;
            number_ = 0;
        }
        if (code == code_) {
            number_ += number;
        }
    }

    // An entry with another call word.
    __aicore__ inline void AddMismatch(int64_t index, int32_t expected, int32_t found) {
        if (code_ != REPORT_MISMATCH) {
            expected_call_ = expected;
            found_call_ = found;
        }
        Add(REPORT_MISMATCH, index);
    }

    // If reports are kept, an earlier mismatch is the cause of later timeouts: it is not overwritten.
    __aicore__ inline void Write() {
        if (number_ == 0 || ReadFresh<int32_t>(address_, OffsetOfBlock()) == static_cast<int32_t>(REPORT_MISMATCH)) {
            return;
        }
        for (uint32_t i = 0; i < BLOCK_REPORT_WORDS; ++i) {
            words_.SetValue(i, 0);
        }
        words_.SetValue(BlockReport::CODE, static_cast<int32_t>(code_));
        words_.SetValue(BlockReport::FIRST, static_cast<int32_t>(first_));
        words_.SetValue(BlockReport::NUMBER, static_cast<int32_t>(number_));
        words_.SetValue(BlockReport::ZONE, static_cast<int32_t>(zone_));
        words_.SetValue(BlockReport::EXPECTED_CALL, expected_call_);
        words_.SetValue(BlockReport::FOUND_CALL, found_call_);
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopy(GlobalAt<int32_t>(address_)[OffsetOfBlock()], words_, BLOCK_REPORT_WORDS);
    }

private:
    __aicore__ static inline int64_t OffsetOfBlock() {
        return AscendC::GetBlockIdx() * static_cast<int64_t>(BLOCK_REPORT_WORDS);
    }

    AscendC::LocalTensor<int32_t> words_;
    uint64_t address_ = 0;
    int64_t zone_ = 0;
    uint32_t code_ = 0;
    int64_t first_ = 0;
    int64_t number_ = 0;
    int32_t expected_call_ = 0;
    int32_t found_call_ = 0;
};

// What kernels have in common: their arguments, with the zone of this run, and who runs them.
template <typename Args>
class Kernel {
protected:
    __aicore__ inline void Init(const Args& args, AscendC::TPipe* pipe, const Blocks& blocks = Blocks::OfLaunch()) {
        args_ = args;
        FindZone(args_);
        report_.Init(pipe, args.report, args_.zone);
        blocks_ = blocks;
    }

    Args args_;
    Report report_;
    Blocks blocks_ = Blocks::OfLaunch();
};

}  // namespace moe
