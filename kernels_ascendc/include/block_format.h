// What lies in the block that a rank writes for a peer: a header {counts, call word, FLAG1}, rows, FLAG2.
//
// Both flags are made of the round's number, so that nothing has to be cleared: FLAG1 stands where nothing but headers
// ever is; FLAG2 stands where an earlier round may have left rows, and is more than a word, which rows may hold.
#pragma once

#include "flags.h"

namespace moe {

template <typename Args>
__aicore__ inline uint64_t BlockIn(const Args& args, uint64_t window, uint64_t rank) {
    return window + args.peer_blocks.At(args.zone, rank);
}

// Where this rank's block for a rank is made: in that rank's window; or in the out part of its own, to be posted.
template <typename Args>
__aicore__ inline uint64_t BlockFor(const Args& args, const Peers& peers, uint64_t rank) {
    const Place place = peers.PlaceFor(args, rank);
    return BlockIn(args, place.window, place.source);
}

// Where the rows of a block end, if there are so many.
template <typename Args>
__aicore__ inline uint64_t EndOfRows(const Args& args, int64_t rows) {
    return static_cast<uint64_t>(args.rows_offset + rows * args.row_step);
}

// Word i of FLAG2: see moe_triton/schemes/a2_fullmesh/layout.py.
__aicore__ inline int32_t EndFlagWord(int32_t number, uint32_t i) {
    uint32_t word = static_cast<uint32_t>(number) * 0x9E3779B1U + i * 0x85EBCA77U;
    word = (word ^ word >> 15) * 0xC2B2AE3DU;
    return static_cast<int32_t>(word ^ word >> 13);
}

// FLAG2, the same words for all ranks of a round.
class EndOfBlocks {
public:
    static constexpr int64_t BYTES = UB_ALIGN;

    __aicore__ inline void Init(AscendC::TPipe* pipe) {
        flag_ = NewTensor<int32_t>(pipe, UNIT_WORDS);
    }

    // Once, before any other work on it.
    __aicore__ inline void Begin(int32_t number) {
        for (uint32_t i = 0; i < UNIT_WORDS; ++i) {
            flag_.SetValue(i, EndFlagWord(number, i));
        }
        Order<AscendC::HardEvent::S_MTE3>();
    }

    // Behind a rank's last row, when all of them are there.
    template <typename Args>
    __aicore__ inline void Write(const Args& args, const Peers& peers, uint64_t rank) {
        const int64_t rows = RowsTo(args, rank);
        if (!HasPlace(args, rows) || peers.IsMasked(rank)) {
            return;  // reported where they were to be sent; or sent to nobody
        }
        const Place place = peers.PlaceFor(args, rank);
        const uint64_t block = BlockIn(args, place.window, place.source);
        // Nobody looks at what is to be posted.
        const uint32_t flags = static_cast<int64_t>(place.source) == args.rank ? 1 : 0;
        RaiseFlags(GlobalAt<int32_t>(block + At(args, rows)), flag_, UNIT_WORDS, flags);
    }

    // In the block for a rank.
    template <typename Args>
    __aicore__ static inline int64_t RowsTo(const Args& args, uint64_t rank) {
        return ReadFresh<int32_t>(args.rows_to, static_cast<int64_t>(rank));
    }

    template <typename Args>
    __aicore__ static inline bool HasPlace(const Args& args, int64_t rows) {
        return rows >= 0 && rows <= args.max_rows;
    }

    // From a block's beginning to FLAG2.
    template <typename Args>
    __aicore__ static inline uint64_t At(const Args& args, int64_t rows) {
        return args.end_offset != 0 ? static_cast<uint64_t>(args.end_offset) : EndOfRows(args, rows);
    }

private:
    AscendC::LocalTensor<int32_t> flag_;
};

// Headers made in UB, one at a time, and written to a block each; and how many rows each block gets.
class BlockHeaders {
public:
    template <typename Args>
    __aicore__ inline void Init(const Args& args, AscendC::TPipe* pipe) {
        words_ = static_cast<uint32_t>(args.header_words);
        flag_unit_ = static_cast<uint32_t>(args.flag_word) / UNIT_WORDS * UNIT_WORDS;
        header_ = NewTensor<int32_t>(pipe, words_);
        sizes_.Init(pipe, static_cast<uint32_t>(args.num_ranks));
    }

    // To the ranks of this block's share. `source.Fill(rank)` sets a rank's counts, and returns its rows.
    template <typename Args, typename Source>
    __aicore__ inline void Send(const Args& args, int32_t call, const Peers& peers, Source& source) {
        TraceStep(TRACE_FLAG);
        const Share ranks = Blocks::OfLaunch().ShareOf(args.num_ranks);
        if (ranks.first == ranks.last) {
            return;
        }
        Begin(args, call);
        sizes_.Begin(ranks.first);
        for (int64_t rank = ranks.first; rank < ranks.last; ++rank) {
            // The copies of the header before may still read.
            Order<AscendC::HardEvent::MTE3_S>();
            sizes_.Set(rank, static_cast<int32_t>(source.Fill(rank)));
            if (peers.IsMasked(rank)) {
                continue;
            }
            const Place place = peers.PlaceFor(args, rank);
            // Nobody looks at what is to be posted.
            const uint32_t flags = static_cast<int64_t>(place.source) == args.rank ? 1 : 0;
            SendTo(BlockIn(args, place.window, place.source), flags);
        }
        sizes_.Store(args.rows_to, ranks.last - ranks.first);
    }

    __aicore__ inline void SetCount(int64_t i, int64_t count) {
        header_.SetValue(static_cast<uint32_t>(i), static_cast<int32_t>(count));
    }

private:
    // The same for all peers.
    template <typename Args>
    __aicore__ inline void Begin(const Args& args, int32_t call) {
        AscendC::Duplicate(header_, 0, static_cast<int32_t>(words_));
        Order<AscendC::HardEvent::V_S>();
        header_.SetValue(static_cast<uint32_t>(args.call_word), call);
        header_.SetValue(static_cast<uint32_t>(args.flag_word), RoundNumber(args));
    }

    // All that has no flag first.
    __aicore__ inline void SendTo(uint64_t block, uint32_t flags) {
        Order<AscendC::HardEvent::S_MTE3>();
        if (flag_unit_ > 0) {
            AscendC::DataCopy(GlobalAt<int32_t>(block), header_, flag_unit_);
            FinishCounts();
        }
        RaiseFlags(GlobalAt<int32_t>(block)[flag_unit_], header_[flag_unit_], UNIT_WORDS, flags);
    }

    // MTE3 starts copies in order and may end them in another: FLAG1 starts when the counts are there.
    __aicore__ inline void FinishCounts() {
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    AscendC::LocalTensor<int32_t> header_;
    Table sizes_;
    uint32_t words_ = 0;
    uint32_t flag_unit_ = 0;
};

}  // namespace moe
