// Combine by hierarchy, step 1: the results of each entry to the rank of this server that relayed its rows. In that
// rank's window they lie where the rows lay in the slots of all of this server's ranks: by source, expert and number.
// A launch has those of the sources on some servers; a flag for the whole rank follows (post_status), one for each.
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
        const int64_t all = NumResults(args_, report_);
        const bool has_all_servers = args_.num_places == args_.num_servers;
        Walk(blocks_.ShareOf(has_all_servers ? all : Walk({0, 0}, true)), false);
        traffic_.Write(args_.adds_traffic != 0);
        report_.Write();
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 2048;

    // Sends this block's share of what this launch has, or counts all of it. Returns how many rows it has passed.
    __aicore__ inline int64_t Walk(const Share& share, bool only_counts) {
        int64_t row = 0;
        int64_t passed = 0;
        for (int64_t first = 0; first < args_.num_entries && (only_counts || passed < share.last);
             first += ENTRIES_PER_CHUNK) {
            const int64_t last = Smaller(first + ENTRIES_PER_CHUNK, args_.num_entries);
            ends_.Fetch(args_.recv_offsets, first, last - first);
            for (int64_t entry = first; entry < last && (only_counts || passed < share.last); ++entry) {
                // Callers hold the sums: none makes us read past our own rows, or backwards.
                const int64_t end = Larger(row, Smaller<int64_t>(ends_.At(entry), args_.capacity));
                if (end > row && IsOfPlaces(entry)) {
                    const Share own = {row + Larger<int64_t>(share.first - passed, 0),
                                       row + Smaller(share.last - passed, end - row)};
                    if (!only_counts && own.first < own.last) {
                        SendRows(entry, own, row);
                    }
                    passed += end - row;
                }
                row = end;
            }
        }
        return passed;
    }

    // Whether an entry's source is on one of the servers of this launch.
    __aicore__ inline bool IsOfPlaces(int64_t entry) const {
        const int64_t source = entry % (args_.num_servers * args_.ranks_per_server);
        const int64_t place = rail_.PlaceOf(source / args_.ranks_per_server);
        return place >= args_.first_place && place < args_.first_place + args_.num_places;
    }

    // Of an entry, which begins at a row. Rows that are neighbours here are neighbours there.
    __aicore__ inline void SendRows(int64_t entry, const Share& own, int64_t first_row) {
        const int64_t ranks = args_.num_servers * args_.ranks_per_server;
        const int64_t source = entry % ranks;
        const uint64_t place = static_cast<uint64_t>(rail_.PlaceOf(source / args_.ranks_per_server));
        const uint64_t expert = static_cast<uint64_t>(rail_.Number() * (args_.num_entries / ranks) + entry / ranks);
        const uint64_t number = static_cast<uint64_t>(own.last - own.first);
        const uint64_t first = static_cast<uint64_t>(own.first - first_row);
        const uint64_t zone = args_.zone;
        if (!args_.slots.Contains(zone, place, expert, first + number - 1)) {
            report_.Add(REPORT_BAD_ROW, own.first, own.last - own.first);
            return;
        }
        const int64_t number_of_relay = source % args_.ranks_per_server;
        const uint64_t relay = static_cast<uint64_t>(rail_.Neighbour(number_of_relay));
        if (peers_.IsMasked(relay)) {
            return;
        }
        if (number_of_relay != rail_.Number()) {
            traffic_.Add(Traffic::PAYLOAD_INSIDE, static_cast<int64_t>(number) * args_.row_bytes);
        }
        rows_.CopyRows(args_.rows + static_cast<uint64_t>(own.first * args_.row_bytes), own.last - own.first,
                       peers_.WindowOf(relay) + args_.slots.At(zone, place, expert, first));
    }

    Rail rail_;
    Peers peers_;
    Table ends_;
    RowCopy rows_;
    TrafficWords traffic_;
};

}  // namespace moe
