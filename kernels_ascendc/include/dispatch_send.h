// Dispatch, steps 1 and 2: rows into the slots of their experts' ranks, then a status entry to each.
//
// The entry of an expert must not be visible before any row that it counts, whichever core sent that
// row: hence PipeBarrier<PIPE_ALL> (this core's rows have landed) and SyncAll (every core's have) before
// the first entry is written.
#ifndef MOE_DISPATCH_SEND_H
#define MOE_DISPATCH_SEND_H

#include "platform.h"

namespace moe {

class DispatchSend {
public:
    __aicore__ inline explicit DispatchSend(const DispatchSendArgs& args)
        : args_(args),
          block_(static_cast<uint64_t>(AscendC::GetBlockIdx())),
          blocks_(static_cast<uint64_t>(AscendC::GetBlockNum())),
          width_(static_cast<uint64_t>(args.topk)),
          rows_(Global<uint8_t>(args.rows)),
          peers_(Global<uint64_t>(args.peers)),
          counts_(Global<int32_t>(args.counts)),
          report_(args.report) {
        const auto results = static_cast<uint32_t>(args.topk + args.num_shared_experts);
        pipe_.InitBuffer(row_queue_, 2, static_cast<uint32_t>(args.row_bytes) + results * STAMP_BYTES);
        pipe_.InitBuffer(entries_, ENTRIES_AT_ONCE * STATUS_ENTRY_BYTES);
        const auto ids_bytes = static_cast<uint32_t>(args.num_tokens * args.topk * sizeof(int32_t));
        pipe_.InitBuffer(ids_, ids_bytes);
        pipe_.InitBuffer(index_, ids_bytes);
        pipe_.InitBuffer(weights_, ids_bytes);
    }

    __aicore__ inline void Process() {
        SendRows();
        if (args_.post_status != 0) {
            AscendC::PipeBarrier<PIPE_ALL>();
            AscendC::SyncAll<true>();
            PostStatus();
        }
    }

private:
    static constexpr uint32_t ENTRIES_AT_ONCE = 64;

    // Where one copy of a row goes.
    struct Destination {
        uint64_t rank;
        uint64_t expert;
        uint64_t index;
    };

    // Cores are set aside for shared experts in proportion to their share of the rows, since those rows
    // all go to few ranks; with one core there is nothing to set aside.
    __aicore__ inline void SendRows() {
        const auto shared = static_cast<uint64_t>(args_.num_shared_experts);
        const auto tokens = static_cast<uint64_t>(args_.num_tokens);
        uint64_t aside = 0;
        if (shared > 0 && blocks_ > 1) {
            aside = (blocks_ * shared + (width_ + shared) / 2) / (width_ + shared);
            aside = aside < 1 ? 1 : (aside > blocks_ - 1 ? blocks_ - 1 : aside);
        }
        if (aside == 0 || block_ >= aside) {
            SendRouted(Share(tokens * width_, block_ - aside, blocks_ - aside));
        }
        if (shared > 0 && (aside == 0 || block_ < aside)) {
            SendShared(Share(tokens * shared, block_, aside == 0 ? blocks_ : aside));
        }
    }

    __aicore__ inline void SendRouted(Range range) {
        if (range.begin == range.end) {
            return;
        }
        LoadRouting(range);
        for (uint64_t token = range.begin / width_; token * width_ < range.end; ++token) {
            const uint64_t first = token * width_ < range.begin ? range.begin : token * width_;
            const uint64_t last = (token + 1) * width_ > range.end ? range.end : (token + 1) * width_;
            if (args_.rows_per_token == 1) {
                SendCopies(token, 0, {first, last}, range.begin);
                continue;
            }
            for (uint64_t n = first; n < last; ++n) {
                SendCopies(token, n - token * width_, {n, n + 1}, range.begin);
            }
        }
    }

    // This core's part of ids, indices and weights. Read from UB: a scalar access to GM takes 30 times
    // as long.
    __aicore__ inline void LoadRouting(Range range) {
        const uint64_t first = static_cast<uint64_t>(args_.first_token) * width_ + range.begin;
        const auto bytes = static_cast<uint32_t>((range.end - range.begin) * sizeof(int32_t));
        Load(ids_.Get<int32_t>(), args_.topk_idx, first, bytes);
        Load(index_.Get<int32_t>(), args_.expand_idx, first, bytes);
        if (args_.topk_weights != 0) {
            Load(weights_.Get<int32_t>(), args_.topk_weights, first, bytes);
        }
        Synchronize<HardEvent::MTE2_S>();
    }

    __aicore__ inline void Load(const LocalTensor<int32_t>& to, uint64_t address, uint64_t first, uint32_t bytes) {
        AscendC::DataCopyPad(to, Global<int32_t>(address)[first], {1, bytes, 0, 0, 0}, {false, 0, 0, 0});
    }

    // One row of `rows` to each chosen expert among the token's entries [n.begin, n.end) of this launch.
    __aicore__ inline void SendCopies(uint64_t token, uint64_t row_of_token, Range n, uint64_t loaded_from) {
        const LocalTensor<int32_t> ids = ids_.Get<int32_t>();
        bool any = false;
        for (uint64_t i = n.begin; i < n.end; ++i) {
            any = any || ids.GetValue(static_cast<uint32_t>(i - loaded_from)) >= 0;
        }
        if (!any) {
            return;
        }
        LocalTensor<uint8_t> buffer = LoadRow(token, row_of_token);
        LocalTensor<int32_t> stamps = buffer[static_cast<uint32_t>(args_.row_bytes)].ReinterpretCast<int32_t>();
        for (uint64_t i = n.begin; i < n.end; ++i) {
            const int32_t weight =
                args_.topk_weights == 0 ? 0 : weights_.Get<int32_t>().GetValue(static_cast<uint32_t>(i - loaded_from));
            Stamp(stamps, i - n.begin, token, i - token * width_, weight);
        }
        buffer = ReadyToSend(buffer);
        for (uint64_t i = n.begin; i < n.end; ++i) {
            const auto at = static_cast<uint32_t>(i - loaded_from);
            const int32_t id = ids.GetValue(at);
            if (id < 0) {
                continue;
            }
            const auto expert = static_cast<uint64_t>(id);
            const uint64_t local_experts = args_.slots.expert_extent;
            // A negative index becomes a huge one, which no slot has.
            const auto index = static_cast<uint64_t>(static_cast<int64_t>(index_.Get<int32_t>().GetValue(at)));
            SendOne(buffer, i - n.begin, token,
                    {static_cast<uint64_t>(args_.num_shared_ranks) + expert / local_experts, expert % local_experts,
                     index});
        }
        row_queue_.FreeTensor(buffer);
    }

    // Every token to this rank's replica of each shared expert.
    __aicore__ inline void SendShared(Range range) {
        const auto shared = static_cast<uint64_t>(args_.num_shared_experts);
        for (uint64_t n = range.begin; n < range.end; ++n) {
            const uint64_t token = n / shared;
            const uint64_t s = n % shared;
            LocalTensor<uint8_t> buffer = LoadRow(token, args_.rows_per_token == 1 ? 0 : width_ + s);
            Stamp(buffer[static_cast<uint32_t>(args_.row_bytes)].ReinterpretCast<int32_t>(), 0, token, width_ + s, 0);
            buffer = ReadyToSend(buffer);
            SendOne(buffer, 0, token, {Replica(s), 0, static_cast<uint64_t>(args_.first_token) + token});
            row_queue_.FreeTensor(buffer);
        }
    }

    // The rank that holds the shared expert for this one.
    __aicore__ inline uint64_t Replica(uint64_t shared_expert) const {
        const auto replicas = static_cast<uint64_t>(args_.num_shared_ranks / args_.num_shared_experts);
        return shared_expert * replicas + static_cast<uint64_t>(args_.rank) % replicas;
    }

    __aicore__ inline LocalTensor<uint8_t> LoadRow(uint64_t token, uint64_t row_of_token) {
        const auto row_bytes = static_cast<uint32_t>(args_.row_bytes);
        const uint64_t row =
            (static_cast<uint64_t>(args_.first_token) + token) * static_cast<uint64_t>(args_.rows_per_token) +
            row_of_token;
        LocalTensor<uint8_t> buffer = row_queue_.AllocTensor<uint8_t>();
        AscendC::DataCopy(buffer, rows_[row * static_cast<uint64_t>(args_.row_stride)], row_bytes);
        // MTE2 may write to the buffer once MTE3 has sent what it held before: so, after MTE2, may we.
        Synchronize<HardEvent::MTE2_S>();
        return buffer;
    }

    __aicore__ inline void Stamp(const LocalTensor<int32_t>& stamps, uint64_t i, uint64_t token, uint64_t k,
                                 int32_t weight) {
        const auto at = static_cast<uint32_t>(i * WORDS_PER_ENTRY);
        stamps.SetValue(at, static_cast<int32_t>(args_.rank));
        stamps.SetValue(at + 1, static_cast<int32_t>(args_.first_token + static_cast<int64_t>(token)));
        stamps.SetValue(at + 2, static_cast<int32_t>(k));
        stamps.SetValue(at + 3, weight);
    }

    __aicore__ inline LocalTensor<uint8_t> ReadyToSend(const LocalTensor<uint8_t>& filled) {
        row_queue_.EnQue(filled);
        LocalTensor<uint8_t> buffer = row_queue_.DeQue<uint8_t>();
        Synchronize<HardEvent::S_MTE3>();
        return buffer;
    }

    __aicore__ inline void SendOne(const LocalTensor<uint8_t>& buffer, uint64_t stamp, uint64_t token, Destination to) {
        const auto zone = static_cast<uint64_t>(args_.zone);
        const auto source = static_cast<uint64_t>(args_.rank);
        const bool inside = args_.slots.Contains(zone, source, to.expert, to.index) && to.rank < args_.slots.source_extent;
        if (!inside) {
            report_.Write(REPORT_BAD_ROW, token, 1);
            return;
        }
        const auto row_bytes = static_cast<uint32_t>(args_.row_bytes);
        const GlobalTensor<uint8_t> slot =
            Global<uint8_t>(peers_.GetValue(to.rank) + args_.slots.At(zone, source, to.expert, to.index));
        AscendC::DataCopy(slot, buffer, row_bytes);
        AscendC::DataCopy(slot[static_cast<uint64_t>(args_.stamp_offset)],
                          buffer[row_bytes + static_cast<uint32_t>(stamp) * STAMP_BYTES], STAMP_BYTES);
    }

    // An entry for every expert of every rank, those that get no token included: the receiver waits for all.
    __aicore__ inline void PostStatus() {
        const auto shared_ranks = static_cast<uint64_t>(args_.num_shared_ranks);
        const uint64_t moe_ranks = args_.slots.source_extent - shared_ranks;
        const Range range = Share(shared_ranks + moe_ranks * args_.slots.expert_extent, block_, blocks_);
        const LocalTensor<int32_t> entries = entries_.Get<int32_t>();
        for (uint64_t first = range.begin; first < range.end; first += ENTRIES_AT_ONCE) {
            const uint64_t last = first + ENTRIES_AT_ONCE < range.end ? first + ENTRIES_AT_ONCE : range.end;
            // The copies of the batch before have left UB.
            Synchronize<HardEvent::MTE3_S>();
            for (uint64_t n = first; n < last; ++n) {
                FillEntry(entries[static_cast<uint32_t>((n - first) * WORDS_PER_ENTRY)], CountOf(n));
            }
            Synchronize<HardEvent::S_MTE3>();
            for (uint64_t n = first; n < last; ++n) {
                const bool is_shared = n < shared_ranks;
                const uint64_t expert = is_shared ? 0 : (n - shared_ranks) % args_.slots.expert_extent;
                const uint64_t rank = is_shared ? n : shared_ranks + (n - shared_ranks) / args_.slots.expert_extent;
                const uint64_t at =
                    args_.status.At(static_cast<uint64_t>(args_.zone), expert, static_cast<uint64_t>(args_.rank));
                AscendC::DataCopy(Global<int32_t>(peers_.GetValue(rank) + at),
                                  entries[static_cast<uint32_t>((n - first) * WORDS_PER_ENTRY)], WORDS_PER_ENTRY);
            }
        }
    }

    __aicore__ inline int32_t CountOf(uint64_t n) const {
        const auto shared_ranks = static_cast<uint64_t>(args_.num_shared_ranks);
        if (n >= shared_ranks) {
            return counts_.GetValue(n - shared_ranks);
        }
        const auto replicas = static_cast<uint64_t>(args_.num_shared_ranks / args_.num_shared_experts);
        return Replica(n / replicas) == n ? static_cast<int32_t>(args_.total_tokens) : 0;
    }

    __aicore__ inline void FillEntry(const LocalTensor<int32_t>& entry, int32_t count) {
        entry.ReinterpretCast<float>().SetValue(0, 1.0f);
        entry.SetValue(1, count);
        for (uint32_t i = 2; i < WORDS_PER_ENTRY; ++i) {
            entry.SetValue(i, 0);
        }
    }

    const DispatchSendArgs args_;
    const uint64_t block_;
    const uint64_t blocks_;
    const uint64_t width_;
    GlobalTensor<uint8_t> rows_;
    GlobalTensor<uint64_t> peers_;
    GlobalTensor<int32_t> counts_;
    Report report_;
    AscendC::TPipe pipe_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> row_queue_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> entries_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> ids_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> index_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> weights_;
};

}  // namespace moe

#endif  // MOE_DISPATCH_SEND_H
