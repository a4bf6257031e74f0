// Combine by hierarchy, step 1: the results of each entry to the rank of this server that relayed its rows. In that
// rank's window they lie where the rows lay in the slots of all of this server's ranks: by source, expert and number.
// A flag for the whole rank follows (post_status).
#pragma once

#include "rails.h"
#include "row_copy.h"

namespace moe {

class ServerReturn : Kernel<ServerReturnArgs> {
public:
    __aicore__ inline void Init(const ServerReturnArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        rail_.Init(args);
        peers_.Init(args.peers, args.num_servers * args.ranks_per_server);
        ends_.Init(pipe, static_cast<uint32_t>(ENTRIES_PER_CHUNK));
        rows_.Init(pipe, args.row_bytes);
        traffic_.Init(pipe, args.traffic);
    }

    // This block's share of the rows; it walks all entries up to its last one.
    __aicore__ inline void Process() {
        TraceStep(TRACE_WRITE);
        const Share share = blocks_.ShareOf(NumResults(args_, report_));
        int64_t row = 0;
        for (int64_t first = 0; first < args_.num_entries && row < share.last; first += ENTRIES_PER_CHUNK) {
            const int64_t last = Smaller(first + ENTRIES_PER_CHUNK, args_.num_entries);
            ends_.Fetch(args_.recv_offsets, first, last - first);
            for (int64_t entry = first; entry < last && row < share.last; ++entry) {
                // Callers hold the sums: none makes us read past our own rows, or backwards.
                const int64_t end = Larger(row, Smaller<int64_t>(ends_.At(entry), args_.capacity));
                SendEntry(entry, {row, end}, share);
                row = end;
            }
        }
        traffic_.Write(args_.adds_traffic != 0);
        report_.Write();
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 2048;

    // Rows that are neighbours here are neighbours there.
    __aicore__ inline void SendEntry(int64_t entry, const Share& rows, const Share& share) {
        const Share own = {Larger(rows.first, share.first), Smaller(rows.last, share.last)};
        if (own.first >= own.last) {
            return;
        }
        const int64_t ranks = args_.num_servers * args_.ranks_per_server;
        const int64_t source = entry % ranks;
        const uint64_t server = static_cast<uint64_t>(source / args_.ranks_per_server);
        const uint64_t expert = static_cast<uint64_t>(rail_.Number() * (args_.num_entries / ranks) + entry / ranks);
        const uint64_t number = static_cast<uint64_t>(own.last - own.first);
        const uint64_t first = static_cast<uint64_t>(own.first - rows.first);
        const uint64_t zone = args_.zone;
        if (!args_.slots.Contains(zone, server, expert, first + number - 1)) {
            report_.Add(REPORT_BAD_ROW, own.first, own.last - own.first);
            return;
        }
        const int64_t number_of_relay = source % args_.ranks_per_server;
        const uint64_t relay = static_cast<uint64_t>(rail_.Neighbour(number_of_relay));
        if (number_of_relay != rail_.Number()) {
            traffic_.Add(Traffic::PAYLOAD_INSIDE, static_cast<int64_t>(number) * args_.row_bytes);
        }
        rows_.CopyRows(args_.rows + static_cast<uint64_t>(own.first * args_.row_bytes), own.last - own.first,
                       peers_.WindowOf(relay) + args_.slots.At(zone, server, expert, first));
    }

    Rail rail_;
    Peers peers_;
    Table ends_;
    RowCopy rows_;
    TrafficWords traffic_;
};

}  // namespace moe
