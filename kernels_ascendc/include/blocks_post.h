// FLAG2 of each rank's block, behind its last row; then the posts of those blocks that lie in the out part. It needs no
// barrier of its own: a phase comes after all blocks' copies (PhaseRunner).
//
// A block is one message: its rows and both flags. Where queues keep no order inside a message, FLAG2 has a message and
// a place of its own.
#ifndef MOE_BLOCKS_POST_H
#define MOE_BLOCKS_POST_H

#include "block_format.h"
#include "posts.h"

namespace moe {

class BlocksPost {
public:
    __aicore__ inline void Init(const BlocksPostArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        peers_.Init(args.peers, args.num_ranks);
        pipe->InitBuffer(buffer_, UB_ALIGN);
        if (MayPost()) {
            report_.Init(pipe, args.report, args_.zone);
            poster_.Init(pipe, &peers_, &report_, args.traffic, args.timeout_us);
        }
    }

    __aicore__ inline void Process() {
        WriteFlags();
        if (MayPost()) {
            // A core posts behind its own flags, and all else was there before this phase.
            Order<AscendC::HardEvent::MTE3_S>();
            PostBlocks();
            poster_.WriteTraffic();
            report_.Write();
        }
    }

private:
    __aicore__ inline bool MayPost() const {
        return args_.out_offset != 0;
    }

    __aicore__ inline void WriteFlags() {
        const AscendC::LocalTensor<int32_t> flag = buffer_.Get<int32_t>();
        const int32_t number = RoundNumber(args_);
        for (uint32_t i = 0; i < UNIT_WORDS; ++i) {
            flag.SetValue(i, EndFlagWord(number, i));
        }
        Order<AscendC::HardEvent::S_MTE3>();
        for (int64_t rank = AscendC::GetBlockIdx(); rank < args_.num_ranks; rank += AscendC::GetBlockNum()) {
            const int64_t rows = ReadFresh<int32_t>(args_.rows_to, rank);
            if (!HasPlace(rows)) {
                continue;  // reported where they were to be sent
            }
            const Place place = peers_.PlaceFor(args_, rank);
            const uint64_t block = BlockIn(args_, place.window, place.source);
            const uint32_t flags = static_cast<int64_t>(place.source) == args_.rank ? 1 : 0;
            RaiseFlags(GlobalAt<int32_t>(block + EndOf(rows)), flag, UNIT_WORDS, flags);
        }
    }

    __aicore__ inline bool HasPlace(int64_t rows) const {
        return rows >= 0 && rows <= args_.max_rows;
    }

    // Where FLAG2 is.
    __aicore__ inline uint64_t EndOf(int64_t rows) const {
        return args_.end_offset != 0 ? static_cast<uint64_t>(args_.end_offset) : EndOfRows(args_, rows);
    }

    __aicore__ inline void PostBlocks() {
        for (int64_t i = 0; i < args_.num_ranks; ++i) {
            const int64_t rank = Poster::RankAt(i, args_.rank, args_.num_ranks);
            if (Poster::IsOwner(rank) && peers_.IsQueued(rank)) {
                PostBlock(rank, ReadFresh<int32_t>(args_.rows_to, rank));
            }
        }
    }

    __aicore__ inline void PostBlock(int64_t rank, int64_t rows) {
        if (!HasPlace(rows)) {
            return;
        }
        const uint64_t local = BlockFor(args_, peers_, rank);
        const uint64_t remote = BlockIn(args_, peers_.WindowOf(rank), args_.rank);
        const int64_t payload = rows * args_.payload_bytes;
        const int64_t framing = static_cast<int64_t>(EndOfRows(args_, rows)) - payload;
        if (args_.end_offset == 0) {
            poster_.Put(rank, {local, remote, payload, framing + END_BYTES, 2});
            return;
        }
        const uint64_t end = EndOf(rows);
        if (poster_.Put(rank, {local, remote, payload, framing, 0})) {
            poster_.Put(rank, {local + end, remote + end, 0, END_BYTES, 1});
        }
    }

    static constexpr int64_t END_BYTES = UB_ALIGN;

    BlocksPostArgs args_;
    Peers peers_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
    Poster poster_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_BLOCKS_POST_H
