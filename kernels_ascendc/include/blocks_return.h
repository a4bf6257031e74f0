// Combine by blocks, step 1: to each rank a header, and the results of its rows in the order in which they came in its
// block: by expert. FLAG2 follows, by blocks_post, when all blocks' copies are complete.
#ifndef MOE_BLOCKS_RETURN_H
#define MOE_BLOCKS_RETURN_H

#include "block_format.h"
#include "row_copy.h"
#include "source_starts.h"

namespace moe {

class BlocksReturn {
public:
    __aicore__ inline void Init(const BlocksReturnArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        report_.Init(pipe, args.report, args_.zone);
        peers_.Init(args.peers, args.num_ranks);
        starts_.Init(pipe, args.num_ranks);
        ends_.Init(pipe, static_cast<uint32_t>(ENTRIES_PER_CHUNK));
        header_.Init(args_, pipe);
        sizes_.Init(pipe, static_cast<uint32_t>(args.num_ranks));
        kept_.Init(pipe);
        rows_.Init(pipe, args.row_step);
    }

    __aicore__ inline void Process() {
        kept_.Keep(args_.combine_kind, static_cast<int32_t>(args_.kind));
        SendRows();
        SendHeaders();
        report_.Write();
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 2048;

    // This block's share of the rows. It walks all entries: the places of its own rows follow from those before, the
    // sizes of blocks from all.
    __aicore__ inline void SendRows() {
        TraceStep(TRACE_WRITE);
        starts_.Clear();
        const Share share = SplitEvenly(NumRows(), AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        int64_t row = 0;
        for (int64_t first = 0; first < args_.num_entries; first += ENTRIES_PER_CHUNK) {
            const int64_t last = Smaller(first + ENTRIES_PER_CHUNK, args_.num_entries);
            Order<AscendC::HardEvent::S_MTE2>();
            ends_.Load(args_.recv_offsets, first, last - first);
            Order<AscendC::HardEvent::MTE2_S>();
            for (int64_t entry = first; entry < last; ++entry) {
                const int64_t source = entry % args_.num_ranks;
                // Callers hold the sums: none makes us read past our own rows, or backwards.
                const int64_t end = Larger(row, Smaller<int64_t>(ends_.At(entry), args_.capacity));
                SendEntry(source, {row, end}, share);
                starts_.AddTo(source, end - row);
                row = end;
            }
        }
    }

    __aicore__ inline int64_t NumRows() {
        const int64_t rows = ReadFresh<int32_t>(args_.recv_offsets, args_.num_entries - 1);
        if (rows >= 0 && rows <= args_.capacity) {
            return rows;
        }
        if (AscendC::GetBlockIdx() == 0) {
            report_.Add(REPORT_BAD_ROW, rows < 0 ? 0 : args_.capacity, rows < 0 ? 1 : rows - args_.capacity);
        }
        return rows < 0 ? 0 : args_.capacity;
    }

    // Rows that are neighbours here are neighbours there.
    __aicore__ inline void SendEntry(int64_t source, const Share& rows, const Share& share) {
        const Share own = {Larger(rows.first, share.first), Smaller(rows.last, share.last)};
        if (own.first >= own.last) {
            return;
        }
        const int64_t place = starts_.Of(source) + own.first - rows.first;
        const int64_t number = own.last - own.first;
        if (place + number > args_.max_rows) {
            report_.Add(REPORT_BAD_ROW, own.first, number);
            return;
        }
        const uint64_t block = BlockIn(args_, peers_.WindowOf(source), args_.rank);
        rows_.CopyRows(args_.rows + static_cast<uint64_t>(own.first * args_.row_step), number,
                       block + EndOfRows(args_, place));
    }

    // Each block those of its share of ranks.
    __aicore__ inline void SendHeaders() {
        TraceStep(TRACE_FLAG);
        const Share ranks = SplitEvenly(args_.num_ranks, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        if (ranks.first == ranks.last) {
            return;
        }
        header_.Begin(args_, static_cast<int32_t>(args_.call));
        sizes_.Begin(ranks.first);
        for (int64_t rank = ranks.first; rank < ranks.last; ++rank) {
            header_.BeginNext();
            header_.SetCount(0, starts_.Of(rank));
            sizes_.Set(rank, static_cast<int32_t>(starts_.Of(rank)));
            header_.Send(BlockIn(args_, peers_.WindowOf(rank), args_.rank));
        }
        sizes_.Store(args_.rows_to, ranks.last - ranks.first);
    }

    BlocksReturnArgs args_;
    Peers peers_;
    SourceStarts starts_;
    Table ends_;
    BlockHeader header_;
    Table sizes_;
    KeptWord kept_;
    RowCopy rows_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_BLOCKS_RETURN_H
