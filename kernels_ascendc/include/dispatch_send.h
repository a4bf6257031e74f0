// Dispatch, steps 1 and 2: rows to their experts' slots, then a status entry to every expert's rank.
#ifndef MOE_DISPATCH_SEND_H
#define MOE_DISPATCH_SEND_H

#include "flags.h"

namespace moe {

class DispatchSend {
public:
    __aicore__ inline void Init(const DispatchSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        pipe_ = pipe;
        peers_ = GlobalAt<uint64_t>(args.peers);
        piece_bytes_ = Smaller(args.row_bytes, MAX_PIECE_BYTES);
        pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_));
        pipe->InitBuffer(stamp_buffer_, static_cast<uint32_t>(2 * MAX_VISIT * STAMP_BYTES));
        stamps_ = stamp_buffer_.Get<int32_t>();
        pipe->InitBuffer(entry_buffer_, static_cast<uint32_t>(ENTRIES_PER_CHUNK * STATUS_ENTRY_BYTES));
        entries_ = entry_buffer_.Get<int32_t>();
        ids_.Init(pipe, TABLE_ENTRIES);
        indices_.Init(pipe, TABLE_ENTRIES);
        weights_.Init(pipe, TABLE_ENTRIES);
        report_.Init(pipe, args.report);
        stamps_free_[0] = pipe->AllocEventID<AscendC::HardEvent::MTE3_S>();
        stamps_free_[1] = pipe->AllocEventID<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline void Process() {
        SendRows();
        if (args_.post_status != 0) {
            FinishRowsOfAllBlocks();
            PostStatus();
        }
        report_.Write();
    }

private:
    static constexpr int64_t MAX_PIECE_BYTES = 64 * 1024;
    static constexpr int64_t TABLE_ENTRIES = 1024;
    static constexpr int64_t ENTRIES_PER_CHUNK = 512;
    static constexpr int64_t STAMP_WORDS = STAMP_BYTES / sizeof(int32_t);
    static constexpr int64_t MAX_VISIT = 32;  // slots that one row in UB is copied to

    // Results (token, k) with k in [first_k, first_k + num_k), token-major, of which a block has a share.
    struct Task {
        int64_t first_k;
        int64_t num_k;
        Share results;
    };

    // Shared experts take every token and are few: blocks of their own, in proportion to the volume, keep
    // the traffic to them steady.
    __aicore__ inline Task TaskOfBlock() const {
        const int64_t block = AscendC::GetBlockIdx();
        const int64_t blocks = AscendC::GetBlockNum();
        const int64_t shared = args_.num_shared_ranks > 0 ? args_.num_shared_experts : 0;
        const int64_t results = args_.topk + shared;
        if (shared == 0 || blocks == 1) {
            return {0, results, SplitEvenly(args_.num_tokens * results, block, blocks)};
        }
        int64_t shared_blocks = (blocks * shared + results / 2) / results;
        shared_blocks = shared_blocks < 1 ? 1 : Smaller(shared_blocks, blocks - 1);
        const int64_t routed_blocks = blocks - shared_blocks;
        if (block < routed_blocks) {
            return {0, args_.topk, SplitEvenly(args_.num_tokens * args_.topk, block, routed_blocks)};
        }
        return {args_.topk, shared,
                SplitEvenly(args_.num_tokens * shared, block - routed_blocks, shared_blocks)};
    }

    __aicore__ inline void SendRows() {
        AscendC::Duplicate(stamps_, 0, static_cast<int32_t>(2 * MAX_VISIT * STAMP_WORDS));
        Order<AscendC::HardEvent::V_S>();
        const Task task = TaskOfBlock();
        const int64_t max_visit = args_.rows_per_token == 1 ? MAX_VISIT : 1;
        int64_t tables_end = 0;
        for (int64_t result = task.results.first; result < task.results.last;) {
            const int64_t token = result / task.num_k;
            if (token >= tables_end) {
                tables_end = Smaller(token + TABLE_ENTRIES / args_.topk, args_.num_tokens);
                LoadTables(args_.first_token + token, args_.first_token + tables_end);
            }
            const int64_t k = result % task.num_k;
            const int64_t count = Smaller(Smaller(task.num_k - k, task.results.last - result), max_visit);
            SendToken(args_.first_token + token, task.first_k + k, count);
            result += count;
        }
        WaitForStamps();
    }

    __aicore__ inline void LoadTables(int64_t first_token, int64_t last_token) {
        const int64_t first = first_token * args_.topk;
        const int64_t count = (last_token - first_token) * args_.topk;
        Order<AscendC::HardEvent::S_MTE2>();
        ids_.Load(args_.topk_idx, first, count);
        indices_.Load(args_.expand_idx, first, count);
        if (args_.topk_weights != 0) {
            weights_.Load(args_.topk_weights, first, count);
        }
        Order<AscendC::HardEvent::MTE2_S>();
    }

    // One source row to the slots of `count` results of a token.
    __aicore__ inline void SendToken(int64_t token, int64_t first_k, int64_t count) {
        if (args_.rows_per_token != 1 && first_k >= args_.rows_per_token) {
            report_.Add(REPORT_BAD_ROW, ResultIndex(token, first_k), count);
            return;
        }
        const int64_t row = args_.rows_per_token == 1 ? token : token * args_.rows_per_token + first_k;
        const AscendC::LocalTensor<int32_t> stamps = FreeStamps();
        uint64_t slots[MAX_VISIT];
        uint32_t num_slots = 0;
        for (int64_t k = first_k; k < first_k + count; ++k) {
            const uint64_t slot = SlotOf(token, k);
            if (slot != 0) {
                WriteStamp(stamps[static_cast<uint32_t>(num_slots * STAMP_WORDS)], token, k);
                slots[num_slots++] = slot;
            }
        }
        Order<AscendC::HardEvent::S_MTE3>();
        if (num_slots > 0) {
            CopyRow(args_.rows + static_cast<uint64_t>(row * args_.row_stride), slots, num_slots);
        }
        for (uint32_t i = 0; i < num_slots; ++i) {
            AscendC::DataCopy(GlobalAt<int32_t>(slots[i] + static_cast<uint64_t>(args_.stamp_offset)),
                              stamps[static_cast<uint32_t>(i * STAMP_WORDS)], STAMP_WORDS);
        }
        AscendC::SetFlag<AscendC::HardEvent::MTE3_S>(stamps_free_[visits_ % 2]);
        ++visits_;
    }

    // Two halves in turn: scalar code writes one while the copies of the other are still under way.
    __aicore__ inline AscendC::LocalTensor<int32_t> FreeStamps() {
        if (visits_ - waited_ == 2) {
            AscendC::WaitFlag<AscendC::HardEvent::MTE3_S>(stamps_free_[waited_ % 2]);
            ++waited_;
        }
        return stamps_[static_cast<uint32_t>(visits_ % 2 * MAX_VISIT * STAMP_WORDS)];
    }

    __aicore__ inline void WaitForStamps() {
        for (; waited_ < visits_; ++waited_) {
            AscendC::WaitFlag<AscendC::HardEvent::MTE3_S>(stamps_free_[waited_ % 2]);
        }
        pipe_->ReleaseEventID<AscendC::HardEvent::MTE3_S>(stamps_free_[0]);
        pipe_->ReleaseEventID<AscendC::HardEvent::MTE3_S>(stamps_free_[1]);
    }

    __aicore__ inline void WriteStamp(const AscendC::LocalTensor<int32_t>& stamp, int64_t token, int64_t k) const {
        const bool weighted = args_.topk_weights != 0 && k < args_.topk;
        stamp.SetValue(0, static_cast<int32_t>(args_.rank));
        stamp.SetValue(1, static_cast<int32_t>(token));
        stamp.SetValue(2, static_cast<int32_t>(k));
        stamp.SetValue(3, weighted ? weights_.At(token * args_.topk + k) : 0);
    }

    __aicore__ inline void CopyRow(uint64_t source, const uint64_t* slots, uint32_t num_slots) {
        for (int64_t done = 0; done < args_.row_bytes; done += piece_bytes_) {
            const uint64_t at = static_cast<uint64_t>(done);
            const uint32_t bytes = static_cast<uint32_t>(Smaller(piece_bytes_, args_.row_bytes - done));
            AscendC::LocalTensor<uint8_t> in = rows_.AllocTensor<uint8_t>();
            AscendC::DataCopy(in, GlobalAt<uint8_t>(source + at), bytes);
            rows_.EnQue(in);
            AscendC::LocalTensor<uint8_t> out = rows_.DeQue<uint8_t>();
            for (uint32_t i = 0; i < num_slots; ++i) {
                AscendC::DataCopy(GlobalAt<uint8_t>(slots[i] + at), out, bytes);
            }
            rows_.FreeTensor(out);
        }
    }

    __aicore__ inline int64_t ResultIndex(int64_t token, int64_t k) const {
        return token * (args_.topk + args_.num_shared_experts) + k;
    }

    // Address of the slot of result k of a token; 0 when nothing is to be sent.
    __aicore__ inline uint64_t SlotOf(int64_t token, int64_t k) {
        uint64_t rank = 0;
        uint64_t expert = 0;
        uint64_t index = static_cast<uint64_t>(token);
        if (k >= args_.topk) {
            const int64_t replicas = args_.num_shared_ranks / args_.num_shared_experts;
            rank = static_cast<uint64_t>((k - args_.topk) * replicas + args_.rank % replicas);
        } else {
            const int32_t id = ids_.At(token * args_.topk + k);
            if (id == -1) {
                return 0;
            }
            // A negative id or index becomes a huge unsigned one, which no extent holds.
            const uint32_t local_experts = static_cast<uint32_t>(args_.slots.expert_extent);
            rank = static_cast<uint64_t>(args_.num_shared_ranks) + static_cast<uint32_t>(id) / local_experts;
            expert = static_cast<uint32_t>(id) % local_experts;
            index = static_cast<uint64_t>(static_cast<int64_t>(indices_.At(token * args_.topk + k)));
        }
        const uint64_t zone = static_cast<uint64_t>(args_.zone);
        const uint64_t source = static_cast<uint64_t>(args_.rank);
        if (rank >= args_.slots.source_extent || !args_.slots.Contains(zone, source, expert, index)) {
            report_.Add(REPORT_BAD_ROW, ResultIndex(token, k));
            return 0;
        }
        return peers_.GetValue(rank) + args_.slots.At(zone, source, expert, index);
    }

    // A status entry announces rows that several blocks wrote: every block's copies have to be complete,
    // and every block has to have said so, before the first entry leaves.
    __aicore__ inline void FinishRowsOfAllBlocks() {
        AscendC::PipeBarrier<PIPE_ALL>();
        AscendC::SyncAll<true>();
    }

    // One entry per shared rank, then one per routed expert; empty ones too, since every rank waits for
    // an entry from every rank.
    __aicore__ inline void PostStatus() {
        const int64_t routed = (static_cast<int64_t>(args_.slots.source_extent) - args_.num_shared_ranks) *
                               static_cast<int64_t>(args_.slots.expert_extent);
        const Share share =
            SplitEvenly(args_.num_shared_ranks + routed, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        AscendC::Duplicate(entries_, 0, static_cast<int32_t>(ENTRIES_PER_CHUNK * STATUS_ENTRY_WORDS));
        Order<AscendC::HardEvent::V_S>();
        for (int64_t first = share.first; first < share.last; first += ENTRIES_PER_CHUNK) {
            PostEntries(first, Smaller(first + ENTRIES_PER_CHUNK, share.last));
        }
    }

    __aicore__ inline void PostEntries(int64_t first, int64_t last) {
        const int64_t shared_ranks = args_.num_shared_ranks;
        const int64_t first_routed = first < shared_ranks ? shared_ranks : first;
        if (first_routed < last) {
            Order<AscendC::HardEvent::S_MTE2>();
            ids_.Load(args_.counts, first_routed - shared_ranks, last - first_routed);
            Order<AscendC::HardEvent::MTE2_S>();
        }
        Order<AscendC::HardEvent::MTE3_S>();
        for (int64_t entry = first; entry < last; ++entry) {
            const uint32_t word = static_cast<uint32_t>((entry - first) * STATUS_ENTRY_WORDS);
            entries_.SetValue(word, FLAG_BITS);
            entries_.SetValue(word + 1,
                              entry < shared_ranks ? TokensForSharedRank(entry) : ids_.At(entry - shared_ranks));
        }
        Order<AscendC::HardEvent::S_MTE3>();
        for (int64_t entry = first; entry < last; ++entry) {
            const uint32_t word = static_cast<uint32_t>((entry - first) * STATUS_ENTRY_WORDS);
            AscendC::DataCopy(GlobalAt<int32_t>(EntryAddress(entry)), entries_[word], STATUS_ENTRY_WORDS);
        }
    }

    __aicore__ inline int32_t TokensForSharedRank(int64_t shared_rank) const {
        const int64_t replicas = args_.num_shared_ranks / args_.num_shared_experts;
        const bool is_ours = shared_rank % replicas == args_.rank % replicas;
        return is_ours ? static_cast<int32_t>(args_.total_tokens) : 0;
    }

    __aicore__ inline uint64_t EntryAddress(int64_t entry) const {
        const int64_t local_experts = static_cast<int64_t>(args_.slots.expert_extent);
        const int64_t routed = entry - args_.num_shared_ranks;
        const int64_t rank = routed < 0 ? entry : args_.num_shared_ranks + routed / local_experts;
        const int64_t expert = routed < 0 ? 0 : routed % local_experts;
        return peers_.GetValue(static_cast<uint64_t>(rank)) +
               args_.status.At(static_cast<uint64_t>(args_.zone), static_cast<uint64_t>(expert),
                               static_cast<uint64_t>(args_.rank));
    }

    DispatchSendArgs args_;
    AscendC::TPipe* pipe_ = nullptr;
    AscendC::GlobalTensor<uint64_t> peers_;
    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> rows_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> stamp_buffer_;
    AscendC::LocalTensor<int32_t> stamps_;
    AscendC::TBuf<AscendC::TPosition::VECCALC> entry_buffer_;
    AscendC::LocalTensor<int32_t> entries_;
    Table ids_;
    Table indices_;
    Table weights_;
    Report report_;
    AscendC::TEventID stamps_free_[2];
    int64_t piece_bytes_ = 0;
    uint32_t visits_ = 0;
    uint32_t waited_ = 0;
};

}  // namespace moe

#endif  // MOE_DISPATCH_SEND_H
