// Dispatch by hierarchy, ahead of step 1: each token as it travels by rail, with what its relay has to know of it. It
// is loaded once, and written to the out part once for each other server that it has experts on, behind the tokens that
// go there before it; so that neighbours there are one message. What stays on this rank's server lies in its window.
//
// All blocks make tokens. They are posted, and relayed, by the launch that follows.
#pragma once

#include "rails.h"
#include "row_copy.h"

namespace moe {

class RailTokens : Kernel<RailTokensArgs> {
public:
    __aicore__ inline void Init(const RailTokensArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        rail_.Init(args);
        ids_.Init(pipe, static_cast<uint32_t>(TOKENS_PER_CHUNK * args.num_servers));
        places_.Init(pipe, static_cast<uint32_t>(TOKENS_PER_CHUNK * args.num_servers));
        slots_ = NewTensor<uint8_t>(pipe, 2 * args.slot_bytes);
        double_buffer_.Init(pipe);
    }

    __aicore__ inline void Process() {
        TraceStep(TRACE_WRITE);
        const Share share = blocks_.ShareOf(args_.num_tokens);
        const int64_t end = args_.first_token + share.last;
        if (share.first < share.last) {
            Begin();
        }
        for (int64_t first = args_.first_token + share.first; first < end; first += TOKENS_PER_CHUNK) {
            const int64_t number = Smaller(TOKENS_PER_CHUNK, end - first);
            ids_.Fetch(args_.outer_ids, first * args_.num_servers, number * args_.num_servers);
            places_.Fetch(args_.outer_rows, first * args_.num_servers, number * args_.num_servers);
            for (int64_t token = first; token < first + number; ++token) {
                Make(token);
            }
        }
        double_buffer_.Finish();
        report_.Write();
    }

private:
    static constexpr int64_t TOKENS_PER_CHUNK = 128;

    // Of both halves what is the same of all tokens. A row without scales has zeros in their place.
    __aicore__ inline void Begin() {
        AscendC::Duplicate(slots_.template ReinterpretCast<int32_t>(), 0,
                           static_cast<int32_t>(2 * args_.slot_bytes / static_cast<int64_t>(sizeof(int32_t))));
        Order<AscendC::HardEvent::V_S>();
        Order<AscendC::HardEvent::V_MTE2>();
        const int32_t number = RoundNumber(args_);
        for (uint32_t half = 0; half < 2; ++half) {
            SetHead(half, RailHead::NUMBER, number);
            SetHead(half, RailHead::CALL, static_cast<int32_t>(args_.call));
            SetHead(half, RailHead::TOKENS, static_cast<int32_t>(args_.message_tokens));
        }
    }

    __aicore__ inline uint32_t HalfAt(uint32_t half) const {
        return half * static_cast<uint32_t>(args_.slot_bytes);
    }

    __aicore__ inline void SetHead(uint32_t half, uint32_t word, int32_t value) {
        slots_[HalfAt(half)].template ReinterpretCast<int32_t>().SetValue(word, value);
    }

    __aicore__ inline void Make(int64_t token) {
        const uint32_t half = double_buffer_.Take();
        SetHead(half, RailHead::TOKEN, static_cast<int32_t>(token));
        Load(token, slots_[HalfAt(half)]);
        for (int64_t server = 0; server < args_.num_servers; ++server) {
            const int64_t entry = token * args_.num_servers + server;
            if (ids_.At(entry) >= 0) {
                const uint64_t part = server == rail_.Server() ? 0 : static_cast<uint64_t>(args_.out_offset);
                const uint64_t to = args_.window + part + SlotOf(server, places_.At(entry));
                AscendC::DataCopy(GlobalAt<uint8_t>(to), slots_[HalfAt(half)], static_cast<uint32_t>(args_.slot_bytes));
            }
        }
        double_buffer_.Give();
    }

    __aicore__ inline uint64_t SlotOf(int64_t server, int32_t index) const {
        return args_.slots.At(args_.zone, static_cast<uint64_t>(rail_.PlaceOf(server)), static_cast<uint64_t>(index));
    }

    __aicore__ inline void Load(int64_t token, const AscendC::LocalTensor<uint8_t>& slot) const {
        constexpr int64_t WORD = sizeof(int32_t);
        const int64_t word_bytes = args_.weights_offset - args_.words_offset;
        const uint64_t row = args_.rows + static_cast<uint64_t>(token * args_.row_stride);
        Order<AscendC::HardEvent::S_MTE2>();
        AscendC::DataCopy(slot[RAIL_HEAD_BYTES], GlobalAt<uint8_t>(row), static_cast<uint32_t>(args_.row_bytes));
        AscendC::DataCopyPad(slot[args_.words_offset],
                             GlobalAt<uint8_t>(args_.route_words + static_cast<uint64_t>(token * word_bytes)),
                             ExactBytes(word_bytes), NoPadding<uint8_t>());
        AscendC::DataCopyPad(slot[args_.weights_offset],
                             GlobalAt<uint8_t>(args_.topk_weights + static_cast<uint64_t>(token * args_.topk * WORD)),
                             ExactWords(args_.topk), NoPadding<uint8_t>());
        if (args_.row_scale != 0) {
            AscendC::DataCopy(slot[args_.scale_offset], GlobalAt<uint8_t>(row + static_cast<uint64_t>(args_.row_scale)),
                              static_cast<uint32_t>(args_.slot_bytes - args_.scale_offset));
        }
        Order<AscendC::HardEvent::S_MTE3>();
        Order<AscendC::HardEvent::MTE2_MTE3>();
    }

    Rail rail_;
    Table ids_, places_;
    AscendC::LocalTensor<uint8_t> slots_;
    DoubleBuffer double_buffer_;
};

}  // namespace moe
