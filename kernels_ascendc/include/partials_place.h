// Combine by hierarchy, ahead of step 3: the partial rows of some servers' tokens to the out part, in the order in
// which the tokens came, so that neighbours there are one message; those of this rank's own tokens to its own window.
// The sums were made by an earlier launch. All blocks copy; what they leave is posted by the launch that follows.
#pragma once

#include "rails.h"
#include "row_copy.h"

namespace moe {

class PartialsPlace : Kernel<PartialsPlaceArgs> {
public:
    __aicore__ inline void Init(const PartialsPlaceArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        rail_.Init(args);
        rows_.Init(pipe, args.row_bytes);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_WRITE);
        for (int64_t i = 0; i < args_.num_places; ++i) {
            const int64_t place = args_.first_place + i;
            const int64_t most = static_cast<int64_t>(args_.slots.index_extent);
            const int64_t count = ReadFresh<int32_t>(args_.rail_counts, place);
            if (count >= 0 && count <= most) {  // who sends says so of others
                Place(rail_.ServerAt(place), args_.rows + static_cast<uint64_t>(place * most * args_.row_bytes),
                      Smaller(count, args_.last_row) - args_.first_row);
            }
        }
        report_.Write();
    }

private:
    // This block's share of so many of a server's rows, from this launch's first one on.
    __aicore__ inline void Place(int64_t server, uint64_t rows, int64_t number) {
        const Share share = blocks_.ShareOf(Larger<int64_t>(number, 0));
        const int64_t first = args_.first_row + share.first;
        const uint64_t part = server == rail_.Server() ? 0 : static_cast<uint64_t>(args_.out_offset);
        rows_.CopyRows(rows + static_cast<uint64_t>(first * args_.row_bytes), share.last - share.first,
                       args_.window + part + args_.slots.At(args_.zone, server, first));
    }

    Rail rail_;
    RowCopy rows_;
};

}  // namespace moe
