// Combine by hierarchy, where a rank of this server is missing: who waits for partial rows from here hears without whom
// there are none, lest it takes this rank for the missing one. All blocks have ended their waits (PhaseRunner).
#ifndef MOE_RETURNS_LOST_H
#define MOE_RETURNS_LOST_H

#include "rails.h"

namespace moe {

// The number in its server of the first rank whose results did not come; -1 if all did.
template <typename Args>
__aicore__ inline int64_t FirstLost(const Args& args) {
    for (int64_t number = 0; number < args.ranks_per_server; ++number) {
        if (ReadFresh<int32_t>(args.returned, number) < 0) {
            return number;
        }
    }
    return -1;
}

class ReturnsLost {
public:
    __aicore__ inline void Init(const ReturnsLostArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        FindZone(args_);
        rail_.Init(args);
        report_.Init(pipe, args.report, args_.zone);
        peers_.Init(args.peers, args.num_servers * args.ranks_per_server);
        poster_.Init(pipe, &peers_, &report_, args.traffic, args.timeout_us);
        ends_.Init(pipe);
    }

    __aicore__ inline void Process() {
        const int64_t lost = FirstLost(args_);
        if (lost >= 0) {
            ends_.Begin(RoundNumber(args_), args_.call);
            Send(static_cast<int32_t>(rail_.Neighbour(lost)) + 1);
        }
        poster_.WriteTraffic(true);
        report_.Write();
    }

private:
    __aicore__ inline void Send(int32_t lost) {
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            const bool is_posted = server != rail_.Server() && rail_.IsOwner(server);
            if (is_posted && !ends_.Send(args_, rail_, peers_, poster_, server, 0, lost)) {
                return;
            }
        }
    }

    ReturnsLostArgs args_;
    Rail rail_;
    Peers peers_;
    Poster poster_;
    EndFlags ends_;
    Report report_;
};

}  // namespace moe

#endif  // MOE_RETURNS_LOST_H
