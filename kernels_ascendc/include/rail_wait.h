// Combine by hierarchy, step 3: until the end flag of each server's rank of this rail is there. It has the number of
// partial rows, which this rank knows, or the rank without which there are none, and its call word if that is why; and
// whose results the rows are without.
//
// Words come from a peer: another count, or a rank that is not of the peer's server, names nothing.
#pragma once

#include "rails.h"
#include "silent_ranks.h"

namespace moe {

class RailWait : Kernel<RailWaitArgs> {
public:
    __aicore__ inline void Init(const RailWaitArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        rail_.Init(args);
        end_.Init(pipe, RAIL_END_WORDS);
        seen_.Init(pipe, UB_ALIGN / sizeof(int32_t));
        left_out_.Init(pipe, UB_ALIGN / sizeof(int32_t));
        silent_.Init(args.peers, args.num_servers * args.ranks_per_server, args.changes, Senders::RELAYS);
    }

    __aicore__ inline void Process() {
        number_ = RoundNumber(args_);
        KeepWord(args_.kept_zone, args_.zone);
        KeepNumber(args_, number_);
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        const Share servers = blocks_.ShareOf(args_.num_servers);
        for (int64_t server = servers.first; server < servers.last; ++server) {
            const bool is_there = IsEndThere(server, servers.last - server);
            deadline_.TraceWait(rail_.RankOn(server), deadline_.WaitedUs());
            seen_.Begin(server);
            // Without the one that passes a server's sums on there are none.
            seen_.Set(server, is_there ? CountOf(server) : silent_.Has(rail_.RankOn(server)) ? 0 : -1);
            seen_.Store(args_.rail_seen, 1);
            left_out_.Begin(server);
            left_out_.Set(server, is_there ? end_.At(RailEnd::LEFT_OUT) : 0);
            left_out_.Store(args_.rail_left_out, 1);
        }
        report_.Write();
    }

private:
    // `left` servers are waited for, from this one on. False at once where nothing is awaited.
    __aicore__ inline bool IsEndThere(int64_t server, int64_t left) {
        const uint64_t at = args_.window + args_.ends.At(args_.zone, server);
        for (PollLoop poll(deadline_, args_.window, server, left); poll.Next();) {
            if (silent_.Look() && silent_.Has(rail_.RankOn(server))) {
                return false;
            }
            end_.Fetch(at, 0, RAIL_END_WORDS);
            if (end_.At(RailEnd::NUMBER) == number_) {
                return true;
            }
            poll.Miss(1);
        }
        report_.Add(REPORT_TIMEOUT, rail_.RankOn(server));
        return false;
    }

    // Or, below 0, why there are none; 0 of an end flag that is refused.
    __aicore__ inline int32_t CountOf(int64_t server) {
        const int32_t call = static_cast<int32_t>(args_.call);
        const int32_t lost = end_.At(RailEnd::LOST);
        const int32_t count = end_.At(RailEnd::COUNT);
        if (end_.At(RailEnd::CALL) != call) {
            report_.AddMismatch(rail_.RankOn(server), call, end_.At(RailEnd::CALL));
            return 0;
        }
        const int32_t lost_call = end_.At(RailEnd::LOST_CALL);
        if (lost != 0 && lost_call != call && rail_.IsOn(server, static_cast<int64_t>(lost) - 1)) {
            if (lost_call != 0) {
                report_.AddMismatch(static_cast<int64_t>(lost) - 1, call, lost_call);
                return 0;
            }
            report_.Add(REPORT_TIMEOUT, rail_.RankOn(server));
            return -1 - lost;
        }
        if (lost != 0 || count != ReadFresh<int32_t>(args_.outer_counts, server)) {
            report_.Add(REPORT_BAD_ROW, rail_.RankOn(server));
            return 0;
        }
        return count;
    }

    Rail rail_;
    SilentRanks silent_;
    Table end_, seen_, left_out_;
    Deadline deadline_;
    int32_t number_ = 0;
};

}  // namespace moe
