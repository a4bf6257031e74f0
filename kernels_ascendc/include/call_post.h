// Before a call in rounds: what this rank says of it, how many rows it has for every shared rank and expert in all its
// rounds, and an entry that announces both, to all ranks. A rank that has one round only need not expect more: a bell
// tells it. The bell is there before any row or entry of the dispatch that follows.
#pragma once

#include "posts.h"
#include "status_entries.h"

namespace moe {

class CallPost : Kernel<CallPostArgs> {
public:
    __aicore__ inline void Init(const CallPostArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, args.num_ranks);
        pipe->InitBuffer(words_, 2, static_cast<uint32_t>(WORDS_PER_PIECE * sizeof(int32_t)));
        entry_.Init(pipe, 1);
        bell_ = NewTensor<int32_t>(pipe, STATUS_ENTRY_WORDS);
        if (MayPost()) {
            poster_.Init(pipe, &peers_, &report_, args.traffic, args.timeout_us);
        }
    }

    // Each block serves its share of the ranks, and posts to those whose queues it owns.
    __aicore__ inline void Process() {
        entry_.Clear();
        entry_.Set(0, 0, static_cast<int32_t>(args_.call));
        AscendC::Duplicate(bell_, static_cast<int32_t>(args_.bell), static_cast<int32_t>(STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::V_MTE3>();
        Order<AscendC::HardEvent::S_MTE3>();
        share_ = blocks_.ShareOf(args_.num_ranks);
        SendWords(args_.header, CALL_HEADER_WORDS, 0);
        SendWords(args_.shared_counts, args_.num_shared_ranks, CALL_HEADER_WORDS);
        SendWords(args_.counts, args_.num_experts, CALL_HEADER_WORDS + args_.num_shared_ranks);
        FinishWords();
        for (int64_t rank = share_.first; rank < share_.last; ++rank) {
            if (!IsPosted(rank) && !peers_.IsMasked(rank)) {
                const uint64_t window = peers_.WindowOf(rank);
                entry_.Send(0, window + args_.status.At(args_.zone, 0, args_.rank));
                Ring(window);
            }
        }
        if (MayPost()) {
            PostAll();
        }
        report_.Write();
    }

private:
    static constexpr int64_t WORDS_PER_PIECE = 2048;

    __aicore__ inline bool MayPost() const {
        return args_.out_offset != 0;
    }

    __aicore__ inline bool IsPosted(int64_t rank) const {
        return MayPost() && peers_.IsQueued(rank);
    }

    // `count` words to the places from `first` on, in the row of this rank; for a queued rank where they are posted
    // from.
    __aicore__ inline void SendWords(uint64_t source, int64_t count, int64_t first) {
        for (int64_t done = 0; done < count; done += WORDS_PER_PIECE) {
            const AscendC::DataCopyExtParams bytes = ExactWords(Smaller(WORDS_PER_PIECE, count - done));
            AscendC::LocalTensor<int32_t> in = words_.AllocTensor<int32_t>();
            AscendC::DataCopyPad(in, GlobalAt<int32_t>(source)[done], bytes, NoPadding<int32_t>());
            words_.EnQue(in);
            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();
            for (int64_t rank = 0; rank < args_.num_ranks; ++rank) {
                if (IsMine(rank)) {
                    const Place place = peers_.PlaceFor(args_, rank);
                    const uint64_t at = args_.slots.At(args_.zone, place.source, first + done);
                    AscendC::DataCopyPad(GlobalAt<int32_t>(place.window + at), out, bytes);
                }
            }
            words_.FreeTensor(out);
        }
    }

    __aicore__ inline bool IsMine(int64_t rank) const {
        const bool is_own = IsPosted(rank) ? Poster::IsOwner(rank) : rank >= share_.first && rank < share_.last;
        return is_own && !peers_.IsMasked(rank);
    }

    // Each block announces what it copied itself: its own copies have to be complete.
    __aicore__ inline void FinishWords() {
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    // All who ring write the same word.
    __aicore__ inline void Ring(uint64_t window) {
        if (args_.bell != 0) {
            RaiseFlags(GlobalAt<int32_t>(window + args_.bells.At(args_.zone, 0)), bell_, STATUS_ENTRY_WORDS, 1);
        }
    }

    __aicore__ inline void PostAll() {
        TraceStep(TRACE_POST);
        for (int64_t rank = 0; rank < args_.num_ranks; ++rank) {
            if (Poster::IsOwner(rank) && peers_.IsQueued(rank) && !PostTo(rank)) {
                break;
            }
        }
        poster_.WriteTraffic(args_.adds_traffic != 0);
    }

    __aicore__ inline bool PostTo(int64_t rank) {
        constexpr int64_t ENTRY_BYTES = STATUS_ENTRY_BYTES;
        const Place place = peers_.PlaceFor(args_, rank);
        const uint64_t to = peers_.WindowOf(rank);
        const uint64_t words = place.window + args_.slots.At(args_.zone, place.source, 0);
        const uint64_t entry = place.window + args_.status.At(args_.zone, 0, place.source);
        const int64_t count = CALL_HEADER_WORDS + args_.num_shared_ranks + args_.num_experts;
        const int64_t bytes = WholeUnits(count * static_cast<int64_t>(sizeof(int32_t)));
        entry_.Leave(0, entry);
        bool is_posted = poster_.Put(rank, {words, to + args_.slots.At(args_.zone, args_.rank, 0), 0, bytes, 0});
        is_posted =
            is_posted && poster_.Put(rank, {entry, to + args_.status.At(args_.zone, 0, args_.rank), 0, ENTRY_BYTES, 1});
        if (args_.bell == 0 || !is_posted) {
            return is_posted;
        }
        // Of each rank in a place of its own: what was posted before may still be read.
        const uint64_t bell = place.window + args_.bells.At(args_.zone, place.source);
        AscendC::DataCopy(GlobalAt<int32_t>(bell), bell_, STATUS_ENTRY_WORDS);
        Order<AscendC::HardEvent::MTE3_S>();
        return poster_.Put(rank, {bell, to + args_.bells.At(args_.zone, 0), 0, ENTRY_BYTES, 1});
    }

    Peers peers_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> words_;
    StatusEntries entry_;
    AscendC::LocalTensor<int32_t> bell_;
    Poster poster_;
    Share share_{0, 0};
};

}  // namespace moe
