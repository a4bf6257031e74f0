// Combine by hierarchy, step 3: the partial rows of a server's tokens back to it, to the rank that they came from, from
// where an earlier launch has placed them (partials_place); behind the last one the end flag. Those of this rank's own
// tokens are in its window. Where a rank's results are missing the end flag alone goes out, and says so. If one is
// masked, the rows go without its results, and the end flag says that.
#pragma once

#include "returns_lost.h"

namespace moe {

class PartialsSend : RailKernel<PartialsSendArgs> {
public:
    __aicore__ inline void Init(const PartialsSendArgs& args, AscendC::TPipe* pipe) {
        RailKernel::Init(args, pipe);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_POST);
        if (rail_.OwnsAny(args_.first_place, args_.num_places)) {
            Send();
        }
        poster_.WriteTraffic(true);
        report_.Write();
    }

private:
    // Whether no later launch has more of these servers.
    __aicore__ inline bool IsLast() const {
        return args_.last_row >= static_cast<int64_t>(args_.slots.index_extent);
    }

    __aicore__ inline void Send() {
        ends_.Begin(RoundNumber(args_), args_.call);
        const LostRank lost = FirstLost(args_);
        if (lost.number < 0) {
            SendAll();
        } else if (IsLast() && !WaitsAreStopped()) {
            SendLost(args_, rail_, peers_, poster_, ends_, lost);
        }
    }

    __aicore__ inline void SendAll() {
        for (int64_t i = 0; i < args_.num_places; ++i) {
            const int64_t server = rail_.ServerAt(args_.first_place + i);
            if (!rail_.IsOwner(server)) {
                continue;
            }
            const int64_t count = ReadFresh<int32_t>(args_.rail_counts, args_.first_place + i);
            if (count < 0 || count > static_cast<int64_t>(args_.slots.index_extent)) {
                report_.Add(REPORT_BAD_ROW, rail_.RankOn(server));
                continue;
            }
            if (server != rail_.Server() && !SendRows(server, Smaller(count, args_.last_row))) {
                return;
            }
            const int32_t left_out = ReadFresh<int32_t>(args_.left_out, args_.first_place + i);
            if (IsLast() && !ends_.Send(args_, rail_, peers_, poster_, server, count, 0, 0, left_out)) {
                return;
            }
        }
    }

    // From this launch's first row on, neighbours in one message. False after the deadline.
    __aicore__ inline bool SendRows(int64_t server, int64_t last) {
        const uint64_t rank = static_cast<uint64_t>(rail_.RankOn(server));
        for (int64_t first = args_.first_row; first < last; first += args_.message_tokens) {
            const int64_t number = Smaller(args_.message_tokens, last - first);
            const uint64_t local =
                args_.window + static_cast<uint64_t>(args_.out_offset) + args_.slots.At(args_.zone, server, first);
            const uint64_t remote = peers_.WindowOf(rank) + args_.slots.At(args_.zone, rail_.Server(), first);
            const int64_t payload = number * args_.payload_bytes;
            if (!poster_.Put(rank, {local, remote, payload, number * args_.row_bytes - payload, 0})) {
                return false;
            }
        }
        return true;
    }
};

}  // namespace moe
