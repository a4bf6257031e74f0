// Dispatch by hierarchy, steps 1 and 2: the tokens that an earlier launch has made (rail_tokens), to the rank of this
// rank's number on each server that they go to; behind the last one the end flag. What goes to this rank's own server
// is in its window already.
//
// A block posts for its servers alone. A message carries a run of neighbouring tokens, and the end flag is one of its
// own. Two zones of the out part are enough: an entry of a dispatch says that its source has begun it, and so ended the
// one before; whoever begins a third has seen entries of every rank in the second (moe_triton/schemes/hierarchy).
#pragma once

#include "rails.h"

namespace moe {

class RailSend : RailKernel<RailSendArgs> {
public:
    __aicore__ inline void Init(const RailSendArgs& args, AscendC::TPipe* pipe) {
        RailKernel::Init(args, pipe);
        counts_.Init(pipe, static_cast<uint32_t>(args.num_servers));
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_POST);
        if (OwnsAny()) {
            counts_.Fetch(args_.outer_counts, 0, args_.num_servers);
            ends_.Begin(RoundNumber(args_), args_.call);
            SendAll();
        }
        poster_.WriteTraffic(args_.adds_traffic != 0);
        report_.Write();
    }

private:
    static constexpr int64_t TOKENS_PER_BELL = 16;

    __aicore__ inline bool OwnsAny() const {
        bool owns_any = false;
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            owns_any = owns_any || rail_.IsOwner(server);
        }
        return owns_any;
    }

    // A message to each server in turn, as long as there are any.
    __aicore__ inline void SendAll() {
        bool is_left = true;
        for (int64_t first = 0; is_left; first += args_.message_tokens) {
            is_left = false;
            for (int64_t place = 0; place < args_.num_servers; ++place) {
                const int64_t server = rail_.ServerAt(place);
                if (!rail_.IsOwner(server)) {
                    continue;
                }
                const int64_t count = counts_.At(server);
                if (!SendFrom(server, first, count)) {
                    return;
                }
                is_left = is_left || first + args_.message_tokens < count;
            }
        }
    }

    // The message that begins with a token, if there is one; and behind the last one the end flag. False after the
    // deadline.
    __aicore__ inline bool SendFrom(int64_t server, int64_t first, int64_t count) {
        if (first > 0 && first >= count) {
            return true;  // all of it has been sent
        }
        const int64_t number = Smaller(args_.message_tokens, count - first);
        if (server != rail_.Server() && number > 0 && !Post(server, first, number)) {
            return false;
        }
        return first + number < count || ends_.Send(args_, rail_, peers_, poster_, server, count);
    }

    // Whether a message is told of: its tokens are passed on when the next one's first head is there, and few at a time
    // wake the relay less often. The end flag, which says of all, always is.
    __aicore__ inline uint32_t BellOf(int64_t first) const {
        return first > 0 && first % TOKENS_PER_BELL < args_.message_tokens ? 1 : 0;
    }

    // Neighbouring slots.
    __aicore__ inline bool Post(int64_t server, int64_t first, int64_t number) {
        const int64_t rank = rail_.RankOn(server);
        const uint64_t slot = args_.slots.At(args_.zone, rail_.PlaceOf(server), first);
        const uint64_t local = args_.window + static_cast<uint64_t>(args_.out_offset) + slot;
        const uint64_t remote = peers_.WindowOf(rank) + args_.slots.At(args_.zone, rail_.PlaceFrom(server), first);
        const int64_t bytes = (number - 1) * static_cast<int64_t>(args_.slots.index_stride) + args_.slot_bytes;
        const int64_t payload = number * args_.row_bytes;
        return poster_.Put(rank, {local, remote, payload, bytes - payload, BellOf(first)});
    }

    Table counts_;
};

}  // namespace moe
