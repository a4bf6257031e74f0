// Blocks for queued ranks, made in parts of some ranks each and posted part by part: while the first ones are on their
// way, the next ones are made.
//
// Every block of the launch has rows for every rank. Which part it is through with stands in a line of its own in this
// rank's memory, and the block whose queue leads to a rank posts when all lines say so. They have the number of the
// round in them, so that nothing is cleared.
//
// A rank's block is one message: its rows and both flags. Where queues keep no order inside a message, FLAG2 has a
// message and a place of its own.
#pragma once

#include "block_format.h"
#include "posts.h"

namespace moe {

template <typename Args>
class BlockPosts {
public:
    __aicore__ inline void Init(const Args* args, const Peers* peers, Report* report, AscendC::TPipe* pipe) {
        args_ = args;
        peers_ = peers;
        report_ = report;
        if (!MayPost()) {
            return;
        }
        poster_.Init(pipe, peers, report, args->traffic, args->timeout_us);
        flags_.Init(pipe);
        const uint32_t own_words = static_cast<uint32_t>(args->num_parts) * UNIT_WORDS;
        own_ = NewTensor<int32_t>(pipe, own_words);
        AscendC::Duplicate(own_, 0, static_cast<int32_t>(own_words));
        lines_.Init(pipe, AscendC::GetBlockNum() * UNIT_WORDS);
    }

    // Before the first part.
    __aicore__ inline void Begin() {
        if (!MayPost()) {
            return;
        }
        const int32_t number = RoundNumber(*args_);
        flags_.Begin(number);
        base_ = static_cast<uint32_t>(number) * PARTS_OF_A_ROUND;
        Order<AscendC::HardEvent::V_S>();
        for (uint32_t part = 0; part < static_cast<uint32_t>(args_->num_parts); ++part) {
            own_.SetValue(part * UNIT_WORDS, static_cast<int32_t>(base_ + part + 1));
        }
        Order<AscendC::HardEvent::S_MTE3>();
    }

    // Whether the part that is being made has a rank's block.
    __aicore__ inline bool Has(uint64_t rank) const {
        if (args_->num_parts == 1) {
            return true;
        }
        const int64_t place = TurnOf(static_cast<int64_t>(rank), args_->rank, args_->num_ranks);
        const Share places = PlacesOf(part_);
        return place >= places.first && place < places.last;
    }

    // This block has copied all that it has for the part: on to the next one. What all have made is posted.
    __aicore__ inline void EndPart() {
        if (!MayPost()) {
            return;
        }
        FinishRows();
        const uint64_t line = args_->part_lines + static_cast<uint64_t>(AscendC::GetBlockIdx()) * UB_ALIGN;
        RaiseFlags(GlobalAt<int32_t>(line), own_[static_cast<uint32_t>(part_) * UNIT_WORDS], UNIT_WORDS, 1);
        ++part_;
        while (next_ < part_ && (!HasQueue(next_) || IsMade(next_))) {
            PostPart(next_++);
        }
    }

    // After the last part: posts what is left, when the other blocks have made theirs.
    __aicore__ inline void Finish() {
        if (!MayPost()) {
            return;
        }
        while (next_ < args_->num_parts && (!HasQueue(next_) || Await(next_))) {
            PostPart(next_++);
        }
        poster_.WriteTraffic(args_->adds_traffic != 0);
    }

private:
    static constexpr uint32_t PARTS_OF_A_ROUND = MAX_POST_PARTS + 1;

    __aicore__ inline bool MayPost() const {
        return args_->out_offset != 0;
    }

    // MTE3 starts copies in order and may end them in another: a line is written when the rows are there.
    __aicore__ inline void FinishRows() {
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    // Of ranks, in the order in which they are posted to.
    __aicore__ inline Share PlacesOf(int64_t part) const {
        return SplitEvenly(args_->num_ranks, part, args_->num_parts);
    }

    // Whether this block ends, or posts, any block of the part.
    __aicore__ inline bool HasQueue(int64_t part) const {
        const Share places = PlacesOf(part);
        for (int64_t place = places.first; place < places.last; ++place) {
            if (Poster::IsOwner(RankAt(place, args_->rank, args_->num_ranks))) {
                return true;
            }
        }
        return false;
    }

    // By all blocks. What a line had before this round is no part of it.
    __aicore__ inline bool IsMade(int64_t part) {
        BeginLook();
        lines_.Fetch(args_->part_lines, 0, AscendC::GetBlockNum() * UNIT_WORDS);
        for (int64_t block = 0; block < AscendC::GetBlockNum(); ++block) {
            const uint32_t parts = static_cast<uint32_t>(lines_.At(block * UNIT_WORDS)) - base_;
            if (parts <= static_cast<uint32_t>(part) || parts > static_cast<uint32_t>(args_->num_parts)) {
                return false;
            }
        }
        return true;
    }

    // False after the deadline.
    __aicore__ inline bool Await(int64_t part) {
        const int64_t first = RankAt(PlacesOf(part).first, args_->rank, args_->num_ranks);
        // Lines ring no doorbell.
        constexpr uint64_t NO_WINDOW = 0;
        for (PollLoop poll(poster_.Until(), NO_WINDOW, first, 1); poll.Next();) {
            if (IsMade(part)) {
                return true;
            }
        }
        report_->Add(REPORT_TIMEOUT, first);
        return false;
    }

    // Of this block's queues. FLAG2 is written behind what all have made, and posted when it is there.
    __aicore__ inline void PostPart(int64_t part) {
        TraceStep(TRACE_POST);
        const Share places = PlacesOf(part);
        for (int64_t place = places.first; place < places.last; ++place) {
            const int64_t rank = RankAt(place, args_->rank, args_->num_ranks);
            if (Poster::IsOwner(rank)) {
                flags_.Write(*args_, *peers_, rank);
            }
        }
        FinishFlags();
        for (int64_t place = places.first; place < places.last; ++place) {
            const int64_t rank = RankAt(place, args_->rank, args_->num_ranks);
            if (Poster::IsOwner(rank) && peers_->IsQueued(rank)) {
                PostBlock(rank, EndOfBlocks::RowsTo(*args_, rank));
            }
        }
    }

    __aicore__ inline void FinishFlags() {
        Order<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline void PostBlock(int64_t rank, int64_t rows) {
        if (!EndOfBlocks::HasPlace(*args_, rows)) {
            return;
        }
        const uint64_t local = BlockFor(*args_, *peers_, rank);
        const uint64_t remote = BlockIn(*args_, peers_->WindowOf(rank), args_->rank);
        const int64_t payload = rows * args_->payload_bytes;
        const int64_t framing = static_cast<int64_t>(EndOfRows(*args_, rows)) - payload;
        if (args_->end_offset == 0) {
            poster_.Put(rank, {local, remote, payload, framing + EndOfBlocks::BYTES, 2});
            return;
        }
        const uint64_t end = EndOfBlocks::At(*args_, rows);
        if (poster_.Put(rank, {local, remote, payload, framing, 0})) {
            poster_.Put(rank, {local + end, remote + end, 0, EndOfBlocks::BYTES, 1});
        }
    }

    const Args* args_ = nullptr;
    const Peers* peers_ = nullptr;
    Report* report_ = nullptr;
    Poster poster_;
    EndOfBlocks flags_;
    AscendC::LocalTensor<int32_t> own_;  // what this block's line says after each part
    Table lines_;
    uint32_t base_ = 0;  // what a line of no part of this round would say
    int64_t part_ = 0;   // that is being made
    int64_t next_ = 0;   // to be posted
};

}  // namespace moe
