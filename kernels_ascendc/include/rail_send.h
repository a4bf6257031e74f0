// Dispatch by hierarchy, steps 1 and 2: each token once to every server that it has experts on, to the rank of this
// rank's number there; behind the last one the end flag. What goes to this rank's own server lies in its own window.
//
// A block posts for its servers alone. A token is one message, or all of a server's are; the end flag is one of its
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
        ids_.Init(pipe, static_cast<uint32_t>(TOKENS_PER_CHUNK * args.num_servers));
        slot_ = NewTensor<uint8_t>(pipe, args.slot_bytes);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_POST);
        Begin();
        if (PostTokens()) {
            PostEnds();
        }
        poster_.WriteTraffic(args_.adds_traffic != 0);
        report_.Write();
    }

private:
    static constexpr int64_t TOKENS_PER_CHUNK = 128;
    static constexpr int64_t TOKENS_PER_BELL = 16;

    __aicore__ inline void Begin() {
        const int32_t number = RoundNumber(args_);
        ends_.Begin(number, args_.call);
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            counts_.Set(server, 0);
            owns_any_ = owns_any_ || rail_.IsOwner(server);
        }
        // A row without scales has zeros in its place, and the head's last words are none.
        AscendC::Duplicate(slot_.template ReinterpretCast<int32_t>(), 0,
                           static_cast<int32_t>(args_.slot_bytes / static_cast<int64_t>(sizeof(int32_t))));
        Order<AscendC::HardEvent::V_S>();
        Order<AscendC::HardEvent::V_MTE2>();
        SetHead(RailHead::NUMBER, number);
        SetHead(RailHead::CALL, static_cast<int32_t>(args_.call));
    }

    __aicore__ inline void SetHead(uint32_t word, int32_t value) {
        slot_.template ReinterpretCast<int32_t>().SetValue(word, value);
    }

    // False after the deadline.
    __aicore__ inline bool PostTokens() {
        for (int64_t first = 0; owns_any_ && first < args_.num_tokens; first += TOKENS_PER_CHUNK) {
            const int64_t last = Smaller(first + TOKENS_PER_CHUNK, args_.num_tokens);
            ids_.Fetch(args_.outer_ids, first * args_.num_servers, (last - first) * args_.num_servers);
            for (int64_t token = first; token < last; ++token) {
                if (HasServer(token) && !PostToken(token)) {
                    return false;
                }
            }
        }
        return true;
    }

    // Whether a token goes to a server of this block's.
    __aicore__ inline bool GoesTo(int64_t token, int64_t server) const {
        return rail_.IsOwner(server) && ids_.At(token * args_.num_servers + server) >= 0;
    }

    __aicore__ inline bool HasServer(int64_t token) const {
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            if (GoesTo(token, server)) {
                return true;
            }
        }
        return false;
    }

    __aicore__ inline bool PostToken(int64_t token) {
        LoadSlot(token);
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            if (GoesTo(token, server)) {
                WriteTo(server);
            }
        }
        FinishToken();
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            if (!GoesTo(token, server)) {
                continue;
            }
            const int64_t index = counts_.At(server);
            counts_.Set(server, static_cast<int32_t>(index + 1));
            if (args_.by_token != 0 && server != rail_.Server() && !Post(server, index, 1)) {
                return false;
            }
        }
        return true;
    }

    // Nothing is posted, and no other token written, before it is there.
    __aicore__ inline void FinishToken() {
        Order<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline void LoadSlot(int64_t token) {
        constexpr int64_t WORD = sizeof(int32_t);
        const int64_t word_bytes = args_.weights_offset - args_.words_offset;
        const uint64_t row = args_.rows + static_cast<uint64_t>(token * args_.row_stride);
        SetHead(RailHead::TOKEN, static_cast<int32_t>(token));
        AscendC::DataCopy(slot_[RAIL_HEAD_BYTES], GlobalAt<uint8_t>(row), static_cast<uint32_t>(args_.row_bytes));
        AscendC::DataCopyPad(slot_[args_.words_offset],
                             GlobalAt<uint8_t>(args_.route_words + static_cast<uint64_t>(token * word_bytes)),
                             ExactBytes(word_bytes), NoPadding<uint8_t>());
        AscendC::DataCopyPad(slot_[args_.weights_offset],
                             GlobalAt<uint8_t>(args_.topk_weights + static_cast<uint64_t>(token * args_.topk * WORD)),
                             ExactWords(args_.topk), NoPadding<uint8_t>());
        if (args_.row_scale != 0) {
            AscendC::DataCopy(slot_[args_.scale_offset],
                              GlobalAt<uint8_t>(row + static_cast<uint64_t>(args_.row_scale)),
                              static_cast<uint32_t>(args_.slot_bytes - args_.scale_offset));
        }
        Order<AscendC::HardEvent::S_MTE3>();
        Order<AscendC::HardEvent::MTE2_MTE3>();
    }

    // Where nobody looks for it; or in this rank's own in part, where other blocks do. There, too, the next token's
    // head says that all of it is there.
    __aicore__ inline void WriteTo(int64_t server) {
        const uint32_t bytes = static_cast<uint32_t>(args_.slot_bytes);
        const int64_t index = counts_.At(server);
        if (server == rail_.Server()) {
            const uint64_t to = args_.window + args_.slots.At(args_.zone, server, index);
            RaiseFlags(GlobalAt<uint8_t>(to), slot_, bytes, 1);
        } else {
            AscendC::DataCopy(GlobalAt<uint8_t>(OutSlot(server, index)), slot_, bytes);
        }
    }

    __aicore__ inline uint64_t OutSlot(int64_t server, int64_t index) const {
        return args_.window + static_cast<uint64_t>(args_.out_offset) + args_.slots.At(args_.zone, server, index);
    }

    // Whether a message is told of: a token is passed on when the next one's is there, and few at a time wake the relay
    // less often. The end flag, which says of all, always is.
    __aicore__ inline uint32_t BellOf(int64_t first) const {
        return args_.by_token != 0 && first > 0 && first % TOKENS_PER_BELL == 0 ? 1 : 0;
    }

    // Neighbouring slots.
    __aicore__ inline bool Post(int64_t server, int64_t first, int64_t number) {
        const int64_t rank = rail_.RankOn(server);
        const uint64_t remote = peers_.WindowOf(rank) + args_.slots.At(args_.zone, rail_.Server(), first);
        const int64_t bytes = (number - 1) * static_cast<int64_t>(args_.slots.index_stride) + args_.slot_bytes;
        const int64_t payload = number * args_.row_bytes;
        return poster_.Put(rank, {OutSlot(server, first), remote, payload, bytes - payload, BellOf(first)});
    }

    __aicore__ inline void PostEnds() {
        for (int64_t place = 0; place < args_.num_servers; ++place) {
            const int64_t server = rail_.ServerAt(place);
            if (!rail_.IsOwner(server)) {
                continue;
            }
            const int64_t count = counts_.At(server);
            const bool is_left = args_.by_token == 0 && server != rail_.Server() && count > 0;
            if (is_left && !Post(server, 0, count)) {
                return;
            }
            if (!ends_.Send(args_, rail_, peers_, poster_, server, count)) {
                return;
            }
        }
    }

    Table counts_, ids_;
    AscendC::LocalTensor<uint8_t> slot_;
    bool owns_any_ = false;
};

}  // namespace moe
