// Combine by hierarchy, where a rank of this server is missing or made another call: who waits for partial rows from
// here hears without whom there are none, lest it takes this rank for the missing one. All blocks have ended their
// waits (PhaseRunner).
#pragma once

#include "rails.h"

namespace moe {

// Whose results there are none of.
struct LostRank {
    int64_t number;  // in its server; -1: all results came
    int32_t call;    // its call word if it made another call; 0: nothing came
};

// The first rank that made another call, which may be why others did not come; else the first that did not come. The
// wait before leaves an entry of another call where it is.
template <typename Args>
__aicore__ inline LostRank FirstLost(const Args& args) {
    LostRank lost{-1, 0};
    for (int64_t number = 0; number < args.ranks_per_server; ++number) {
        const uint64_t entry = args.window + args.returns.At(args.zone, 0, static_cast<uint64_t>(number));
        const int32_t call = ReadFresh<int32_t>(entry, StatusEntry::CALL);
        if (ReadFresh<int32_t>(entry, StatusEntry::FLAG) == FLAG_BITS && call != static_cast<int32_t>(args.call)) {
            return {number, call};
        }
        if (lost.number < 0 && ReadFresh<int32_t>(args.returned, number) < 0) {
            lost.number = number;
        }
    }
    return lost;
}

// Says so to the rails of the servers of this launch.
template <typename Args>
__aicore__ inline void SendLost(const Args& args, const Rail& rail, const Peers& peers, Poster& poster, EndFlags& ends,
                                const LostRank& lost) {
    const int32_t rank = static_cast<int32_t>(rail.Neighbour(lost.number));
    for (int64_t i = 0; i < args.num_places; ++i) {
        const int64_t server = rail.ServerAt(args.first_place + i);
        const bool is_posted = server != rail.Server() && rail.IsOwner(server);
        if (is_posted && !ends.Send(args, rail, peers, poster, server, 0, rank + 1, lost.call)) {
            return;
        }
    }
}

class ReturnsLost : RailKernel<ReturnsLostArgs> {
public:
    __aicore__ inline void Init(const ReturnsLostArgs& args, AscendC::TPipe* pipe) {
        RailKernel::Init(args, pipe);
    }

    __aicore__ inline void Process() {
        const LostRank lost = FirstLost(args_);
        // A rank whose waits were stopped is leaving: it is the one that others miss.
        if (lost.number >= 0 && !WaitsAreStopped()) {
            ends_.Begin(RoundNumber(args_), args_.call);
            SendLost(args_, rail_, peers_, poster_, ends_, lost);
        }
        poster_.WriteTraffic(true);
        report_.Write();
    }
};

}  // namespace moe
