// Dispatch where a token comes once for each rank: the ids of this rank's tokens, and their weights, to every rank. It
// is a launch of its own, ahead of the one that sends rows and flags: what that one announces includes the tables.
//
// To a queued rank they are posted, by the core that posts to it in the next launch: a queue's messages come in order.
#pragma once

#include "posts.h"

namespace moe {

class TablesSend : Kernel<TablesSendArgs> {
public:
    __aicore__ inline void Init(const TablesSendArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, args.num_ranks);
        pipe->InitBuffer(words_, 2, static_cast<uint32_t>(WORDS_PER_PIECE * sizeof(int32_t)));
        if (MayPost()) {
            poster_.Init(pipe, &peers_, &report_, args.traffic, args.timeout_us);
        }
    }

    __aicore__ inline void Process() {
        Copy(args_.row_ids, IDS);
        if (args_.row_weights != 0) {
            Copy(args_.row_weights, WEIGHTS);
        }
        if (MayPost()) {
            Order<AscendC::HardEvent::MTE3_S>();
            Post();
            poster_.WriteTraffic(args_.adds_traffic != 0);
        }
        report_.Write();
    }

private:
    static constexpr int64_t WORDS_PER_PIECE = 4096;
    static constexpr uint64_t IDS = 0;
    static constexpr uint64_t WEIGHTS = 1;

    __aicore__ inline bool MayPost() const {
        return args_.out_offset != 0;
    }

    __aicore__ inline int64_t NumWords() const {
        return args_.num_tokens * args_.topk;
    }

    // A piece is loaded once, for all ranks of this block.
    __aicore__ inline void Copy(uint64_t source, uint64_t table) {
        for (int64_t done = 0; done < NumWords(); done += WORDS_PER_PIECE) {
            const AscendC::DataCopyExtParams bytes = ExactWords(Smaller(WORDS_PER_PIECE, NumWords() - done));
            AscendC::LocalTensor<int32_t> in = words_.AllocTensor<int32_t>();
            AscendC::DataCopyPad(in, GlobalAt<int32_t>(source)[done], bytes, NoPadding<int32_t>());
            words_.EnQue(in);
            AscendC::LocalTensor<int32_t> out = words_.DeQue<int32_t>();
            for (int64_t rank = AscendC::GetBlockIdx(); rank < args_.num_ranks; rank += AscendC::GetBlockNum()) {
                if (peers_.IsMasked(rank)) {
                    continue;
                }
                const Place place = peers_.PlaceFor(args_, rank);
                const uint64_t to = place.window + args_.tables.At(args_.zone, place.source, table);
                AscendC::DataCopyPad(GlobalAt<int32_t>(to)[done], out, bytes);
            }
            words_.FreeTensor(out);
        }
    }

    // What is posted is complete. Ranks without tokens of this one hear nothing.
    __aicore__ inline void Post() {
        TraceStep(TRACE_POST);
        for (int64_t i = 0; i < args_.num_ranks && NumWords() > 0; ++i) {
            const int64_t rank = RankAt(i, args_.rank, args_.num_ranks);
            if (!Poster::IsOwner(rank) || !peers_.IsQueued(rank)) {
                continue;
            }
            if (!PostTable(rank, IDS) || (args_.row_weights != 0 && !PostTable(rank, WEIGHTS))) {
                return;
            }
        }
    }

    // False after the deadline.
    __aicore__ inline bool PostTable(int64_t rank, uint64_t table) {
        const Place place = peers_.PlaceFor(args_, rank);
        const uint64_t local = place.window + args_.tables.At(args_.zone, place.source, table);
        const uint64_t remote = peers_.WindowOf(rank) + args_.tables.At(args_.zone, args_.rank, table);
        const int64_t bytes = NumWords() * static_cast<int64_t>(sizeof(int32_t));
        return poster_.Put(rank, {local, remote, 0, bytes, 0});
    }

    Peers peers_;
    Poster poster_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> words_;
};

}  // namespace moe
