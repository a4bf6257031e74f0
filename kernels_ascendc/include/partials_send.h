// Combine by hierarchy, step 3: the partial rows of a server's tokens back to it, to the rank that they came from, in
// the order in which they came; behind the last one the end flag. Those of this rank's own tokens lie in its own
// window. The sums were made by an earlier launch.
#pragma once

#include "returns_lost.h"
#include "row_copy.h"

namespace moe {

class PartialsSend : RailKernel<PartialsSendArgs> {
public:
    __aicore__ inline void Init(const PartialsSendArgs& args, AscendC::TPipe* pipe) {
        RailKernel::Init(args, pipe);
        rows_.Init(pipe, args.row_bytes);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_POST);
        if (FirstLost(args_).number < 0) {
            ends_.Begin(RoundNumber(args_), args_.call);
            SendAll();
        }
        poster_.WriteTraffic(true);
        report_.Write();
    }

private:
    __aicore__ inline void SendAll() {
        for (int64_t i = 0; i < args_.num_places; ++i) {
            const int64_t server = rail_.ServerAt(args_.first_place + i);
            if (!rail_.IsOwner(server)) {
                continue;
            }
            const int64_t most = static_cast<int64_t>(args_.slots.index_extent);
            const int64_t count = ReadFresh<int32_t>(args_.rail_counts, server);
            if (count < 0 || count > most) {
                report_.Add(REPORT_BAD_ROW, rail_.RankOn(server));
                continue;
            }
            const uint64_t rows = args_.rows + static_cast<uint64_t>(server * most * args_.row_bytes);
            if (!SendRows(server, rows, Smaller(count, args_.last_row))) {
                return;
            }
            if (args_.last_row >= most && !ends_.Send(args_, rail_, peers_, poster_, server, count)) {
                return;
            }
        }
    }

    // From this launch's first row on. False after the deadline.
    __aicore__ inline bool SendRows(int64_t server, uint64_t rows, int64_t last) {
        const int64_t left = last - args_.first_row;
        const int64_t step = args_.by_token != 0 && server != rail_.Server() ? 1 : Larger<int64_t>(left, 1);
        for (int64_t first = args_.first_row; first < last; first += step) {
            const uint64_t from = rows + static_cast<uint64_t>(first * args_.row_bytes);
            if (server == rail_.Server()) {
                rows_.CopyRows(from, step, args_.window + args_.slots.At(args_.zone, server, first));
            } else if (!PostRows(server, from, first, step)) {
                return false;
            }
        }
        return true;
    }

    // Neighbours, in one message. Nothing is posted before it is there.
    __aicore__ inline bool PostRows(int64_t server, uint64_t rows, int64_t first, int64_t number) {
        const int64_t rank = rail_.RankOn(server);
        const uint64_t out = args_.window + static_cast<uint64_t>(args_.out_offset);
        const uint64_t local = out + args_.slots.At(args_.zone, server, first);
        const uint64_t remote = peers_.WindowOf(rank) + args_.slots.At(args_.zone, rail_.Server(), first);
        rows_.CopyRows(rows, number, local);
        FinishRows();
        const int64_t payload = number * args_.payload_bytes;
        return poster_.Put(static_cast<uint64_t>(rank),
                           {local, remote, payload, number * args_.row_bytes - payload, 0});
    }

    __aicore__ inline void FinishRows() {
        Order<AscendC::HardEvent::MTE3_S>();
    }

    RowCopy rows_;
};

}  // namespace moe
