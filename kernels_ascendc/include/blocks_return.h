// Combine by blocks, step 1: to each rank a header, and the results of its rows in the order in which they came in its
// block: by expert. FLAG2 follows when all blocks' copies are complete: by blocks_end. Blocks that are posted are made
// in the out part, and get FLAG2 here (block_posts.h).
#pragma once

#include "block_posts.h"
#include "row_copy.h"
#include "source_starts.h"

namespace moe {

class BlocksReturn : Kernel<BlocksReturnArgs> {
public:
    __aicore__ inline void Init(const BlocksReturnArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        peers_.Init(args.peers, args.num_ranks);
        starts_.Init(pipe, args.num_ranks);
        ends_.Init(pipe, static_cast<uint32_t>(ENTRIES_PER_CHUNK));
        headers_.Init(args_, pipe);
        posts_.Init(&args_, &peers_, &report_, pipe);
        rows_.Init(pipe, args.row_step);
    }

    __aicore__ inline void Process() {
        KeepWord(args_.combine_kind, args_.kind);
        posts_.Begin();
        const Share share = blocks_.ShareOf(NumResults(args_, report_));
        for (int64_t part = 0; part < args_.num_parts; ++part) {
            SendRows(share);
            if (part == 0) {  // all blocks' sizes are known
                headers_.Send(args_, static_cast<int32_t>(args_.call), peers_, *this);
            }
            posts_.EndPart();
        }
        posts_.Finish();
        report_.Write();
    }

    // For BlockHeaders.
    __aicore__ inline int64_t Fill(int64_t rank) {
        const int64_t rows = starts_.Of(rank);
        headers_.SetCount(0, rows);
        return rows;
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 2048;

    // This block's share of the rows, or what of it has its turn. It walks all entries: the places of its own rows
    // follow from those before, the sizes of blocks from all.
    __aicore__ inline void SendRows(const Share& share) {
        TraceStep(TRACE_WRITE);
        starts_.Clear();
        int64_t row = 0;
        for (int64_t first = 0; first < args_.num_entries; first += ENTRIES_PER_CHUNK) {
            const int64_t last = Smaller(first + ENTRIES_PER_CHUNK, args_.num_entries);
            ends_.Fetch(args_.recv_offsets, first, last - first);
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

    // Rows that are neighbours here are neighbours there.
    __aicore__ inline void SendEntry(int64_t source, const Share& rows, const Share& share) {
        const Share own = {Larger(rows.first, share.first), Smaller(rows.last, share.last)};
        if (own.first >= own.last || !posts_.Has(source) || peers_.IsMasked(source)) {
            return;
        }
        const int64_t place = starts_.Of(source) + own.first - rows.first;
        const int64_t number = own.last - own.first;
        if (place + number > args_.max_rows) {
            report_.Add(REPORT_BAD_ROW, own.first, number);
            return;
        }
        const uint64_t block = BlockFor(args_, peers_, source);
        rows_.CopyRows(args_.rows + static_cast<uint64_t>(own.first * args_.row_step), number,
                       block + EndOfRows(args_, place));
    }

    Peers peers_;
    SourceStarts starts_;
    Table ends_;
    BlockHeaders headers_;
    RowCopy rows_;
    BlockPosts<BlocksReturnArgs> posts_;
};

}  // namespace moe
