// One entry to every rank, this one included: what earlier phases of the launch, and earlier launches of the stream,
// wrote is there.
//
// It needs no barrier of its own: a phase comes after all blocks' copies (PhaseRunner), and a kernel starts when the
// one before it on the stream has ended, and each of ours ends when its copies have (MOE_LAUNCHER). To a queued rank it
// is posted, by the core that has posted to it before: what that one posted is there.
#pragma once

#include "posts.h"
#include "status_entries.h"

namespace moe {

class PostStatus : Kernel<PostStatusArgs> {
public:
    __aicore__ inline void Init(const PostStatusArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, args.num_ranks);
        entry_.Init(pipe, 1);
        if (MayPost()) {
            poster_.Init(pipe, &peers_, &report_, args.traffic, args.timeout_us);
        }
    }

    __aicore__ inline void Process() {
        entry_.Clear();
        entry_.Set(0, args_.count == 0 ? 0 : ReadFresh<int32_t>(args_.count), static_cast<int32_t>(args_.call));
        KeepWord(args_.combine_kind, args_.kind);
        Order<AscendC::HardEvent::S_MTE3>();
        const uint64_t at = args_.status.At(args_.zone, 0, args_.rank);
        const Share share = blocks_.ShareOf(args_.num_ranks);
        for (int64_t i = share.first; i < share.last; ++i) {
            const int64_t rank = RankAt(i, args_.rank, args_.num_ranks);
            if (!peers_.IsMasked(rank) && (!MayPost() || !peers_.IsQueued(rank))) {
                entry_.Send(0, peers_.WindowOf(rank) + at);
            }
        }
        if (MayPost()) {
            Post(at);
        }
    }

private:
    __aicore__ inline bool MayPost() const {
        return args_.out_offset != 0;
    }

    __aicore__ inline void Post(uint64_t at) {
        TraceStep(TRACE_POST);
        constexpr int64_t ENTRY_BYTES = STATUS_ENTRY_BYTES;
        for (int64_t i = 0; i < args_.num_ranks; ++i) {
            const int64_t rank = RankAt(i, args_.rank, args_.num_ranks);
            if (!Poster::IsOwner(rank) || !peers_.IsQueued(rank)) {
                continue;
            }
            const Place place = peers_.PlaceFor(args_, rank);
            const uint64_t entry = place.window + args_.status.At(args_.zone, 0, place.source);
            entry_.Leave(0, entry);
            if (!poster_.Put(rank, {entry, peers_.WindowOf(rank) + at, 0, ENTRY_BYTES, 1})) {
                break;
            }
        }
        poster_.WriteTraffic(true);
        report_.Write();
    }

    Peers peers_;
    StatusEntries entry_;
    Poster poster_;
};

}  // namespace moe
