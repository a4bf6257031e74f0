// Dispatch by hierarchy, steps 1 and 2: the tokens that earlier launches have made (rail_tokens), to the rank of this
// rank's number on each server that they go to; behind the last one the end flag. What goes to this rank's own server
// is in its window already.
//
// A block posts for its servers alone. A message carries a run of neighbouring tokens, and the end flag is one of its
// own. Where tokens are made in parts, a part posts the messages that are whole by then, and the last part the rest.
// Two zones of the out part are enough: an entry of a dispatch says that its source has begun it, and so ended the one
// before; whoever begins a third has seen entries of every rank in the second (moe_triton/schemes/hierarchy).
#pragma once

#include "rails.h"

namespace moe {

class RailSend : RailKernel<RailSendArgs> {
public:
    __aicore__ inline void Init(const RailSendArgs& args, AscendC::TPipe* pipe) {
        RailKernel::Init(args, pipe);
        begun_.Init(pipe, static_cast<uint32_t>(args.num_servers));
        counts_.Init(pipe, static_cast<uint32_t>(args.num_servers));
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_POST);
        // A part without tokens makes no message whole, and of none there is no table.
        const bool has_any = args_.is_last != 0 || args_.num_tokens > 0;
        if (has_any && rail_.OwnsAny(0, args_.num_servers)) {
            Count();
            ends_.Begin(RoundNumber(args_), args_.call);
            SendAll();
        }
        poster_.WriteTraffic(args_.adds_traffic != 0);
        report_.Write();
    }

private:
    static constexpr int64_t TOKENS_PER_BELL = 16;

    // Tokens for each server: where the first message begins that has not been posted, and how many are there.
    __aicore__ inline void Count() {
        const bool is_last = args_.is_last != 0;
        const int64_t end = args_.first_token + args_.num_tokens;
        const int64_t row = is_last ? 0 : end * args_.num_servers;
        counts_.Fetch(is_last ? args_.outer_counts : args_.outer_rows, row, args_.num_servers);
        counts_.Begin(0);
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            const int64_t earlier = args_.first_token == 0 ? 0 : EarlierAt(server);
            begun_.Set(server, static_cast<int32_t>(earlier / args_.message_tokens * args_.message_tokens));
        }
    }

    __aicore__ inline int64_t EarlierAt(int64_t server) const {
        return ReadFresh<int32_t>(args_.outer_rows, args_.first_token * args_.num_servers + server);
    }

    // A message to each server in turn, as long as there are any.
    __aicore__ inline void SendAll() {
        bool is_left = true;
        for (int64_t step = 0; is_left; step += args_.message_tokens) {
            is_left = false;
            for (int64_t place = 0; place < args_.num_servers; ++place) {
                const int64_t server = rail_.ServerAt(place);
                if (!rail_.IsOwner(server)) {
                    continue;
                }
                const int64_t count = counts_.At(server);
                const int64_t first = begun_.At(server) + step;
                if (!SendFrom(server, first, count, step == 0)) {
                    return;
                }
                is_left = is_left || first + args_.message_tokens < count;
            }
        }
    }

    // The message that begins with a token, if it is there; and behind the last one the end flag. False after the
    // deadline.
    __aicore__ inline bool SendFrom(int64_t server, int64_t first, int64_t count, bool is_first) {
        const int64_t number = Smaller(args_.message_tokens, count - first);
        const bool is_last = args_.is_last != 0;
        const bool is_whole = number >= (is_last ? 1 : args_.message_tokens);
        if (is_whole && server != rail_.Server() && !Post(server, first, number)) {
            return false;
        }
        const bool is_over = is_last && first + args_.message_tokens >= count && (is_first || number > 0);
        return !is_over || ends_.Send(args_, rail_, peers_, poster_, server, count);
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

    Table begun_, counts_;
};

}  // namespace moe
