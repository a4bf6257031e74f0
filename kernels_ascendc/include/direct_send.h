// Direct dispatch, step 1: writes every row to its place in its receiver's output, which follows from the counts of all
// ranks in this rank's window. What later steps read of these counts comes after the rows: no peer waits for it.
//
// No flags: the post_status that follows comes when all blocks' copies are complete.
#pragma once

#include "send_rows.h"

namespace moe {

// What later steps read, and no peer waits for: where the result of each row that was sent can be found, and how many
// rows this rank receives from whom.

// For each result of this rank's tokens, how many elements it lies behind this rank's own first one.
class ResultOffsets {
public:
    __aicore__ inline void Init(const DirectSendArgs* args, const DirectStarts* starts) {
        args_ = args;
        starts_ = starts;
        num_shared_ = args->num_shared_ranks > 0 ? args->num_shared_experts : 0;
        peers_.Init(args->peers, args->num_ranks);
        const AscendC::LocalTensor<int32_t>& scratch = starts->Scratch();
        ids_.Use(scratch);
        indices_.Use(scratch[MAX_RESULTS]);
        shared_ranks_.Use(scratch[2 * MAX_RESULTS]);
        shared_slots_.Use(scratch[3 * MAX_RESULTS]);
        words_ = scratch[4 * MAX_RESULTS];
        offsets_ = words_.ReinterpretCast<int64_t>();
    }

    // Each block those of its share of tokens.
    __aicore__ inline void Write() {
        const Share share = SplitEvenly(args_->num_tokens, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        const int64_t per_chunk = MAX_RESULTS / (args_->topk + num_shared_);
        for (int64_t token = share.first; token < share.last; token += per_chunk) {
            WriteTokens(args_->first_token + token, Smaller(per_chunk, share.last - token));
        }
    }

private:
    static constexpr int64_t MAX_RESULTS = 512;
    static constexpr int64_t ELEMENT_BYTES = 2;
    static_assert(6 * MAX_RESULTS <= DirectStarts::SCRATCH_WORDS, "four tables of a word each, one of two");

    __aicore__ inline void WriteTokens(int64_t first, int64_t number) {
        Load(first, number);
        const DirectSendArgs args = args_[0];  // the loops keep it in registers
        const int64_t width = args.topk + num_shared_;
        for (int64_t token = first; token < first + number; ++token) {
            const uint32_t at = static_cast<uint32_t>((token - first) * width);
            for (int64_t k = 0; k < args.topk; ++k) {
                offsets_.SetValue(at + static_cast<uint32_t>(k), OfRouted(args, token * args.topk + k));
            }
            for (int64_t k = args.topk; k < width; ++k) {
                const int64_t rank = shared_ranks_.At(token * num_shared_ + k - args.topk);
                const int64_t offset = Of(args, rank, 0, shared_slots_.At(token), args.num_shared_ranks);
                offsets_.SetValue(at + static_cast<uint32_t>(k), offset);
            }
        }
        Order<AscendC::HardEvent::S_MTE3>();
        constexpr int64_t OFFSET_BYTES = sizeof(int64_t);
        AscendC::DataCopyPad(GlobalAt<int32_t>(args.result_offsets + first * width * OFFSET_BYTES), words_,
                             ExactBytes(number * width * OFFSET_BYTES));
    }

    __aicore__ inline void Load(int64_t first, int64_t number) {
        Order<AscendC::HardEvent::S_MTE2>();
        ids_.Load(args_->topk_idx, first * args_->topk, number * args_->topk);
        indices_.Load(args_->expand_idx, first * args_->topk, number * args_->topk);
        if (num_shared_ > 0) {
            shared_ranks_.Load(args_->shared_ranks, first * num_shared_, number * num_shared_);
            shared_slots_.Load(args_->shared_slots, first, number);
        }
        Order<AscendC::HardEvent::MTE2_S>();
        Order<AscendC::HardEvent::MTE3_S>();
    }

    __aicore__ inline int64_t OfRouted(const DirectSendArgs& args, int64_t result) const {
        const int32_t id = ids_.At(result);
        if (id < 0 || id >= args.num_experts) {
            return 0;
        }
        const uint32_t local_experts = static_cast<uint32_t>(args.num_local_experts);
        const int64_t rank = args.num_shared_ranks + static_cast<uint32_t>(id) / local_experts;
        return Of(args, rank, static_cast<uint32_t>(id) % local_experts, indices_.At(result), args.num_ranks);
    }

    // 0 where nothing was sent. Counts that nobody can keep lead no further than to the last row.
    __aicore__ inline int64_t Of(const DirectSendArgs& args, int64_t rank, uint64_t expert, int64_t index,
                                 int64_t num_ranks) const {
        if (rank < 0 || rank >= num_ranks) {
            return 0;
        }
        const int64_t place = starts_->Of(static_cast<uint64_t>(rank), expert) + index;
        const int64_t last = static_cast<int64_t>(args.slots.index_extent) - 1;
        const int64_t row = Larger<int64_t>(0, Smaller(place, last));
        const int64_t window = static_cast<int64_t>(peers_.WindowOf(static_cast<uint64_t>(rank)) - args.window);
        return (window + row * args.result_bytes) / ELEMENT_BYTES;
    }

    const DirectSendArgs* args_ = nullptr;
    const DirectStarts* starts_ = nullptr;
    Peers peers_;
    Table ids_, indices_, shared_ranks_, shared_slots_;
    AscendC::LocalTensor<int32_t> words_;
    AscendC::LocalTensor<int64_t> offsets_;
    int64_t num_shared_ = 0;
};

// This rank's part of the counts of all ranks, by expert and then by source.
class ReceivedCounts {
public:
    __aicore__ inline void Init(const DirectSendArgs* args, const DirectStarts& starts) {
        const AscendC::LocalTensor<int32_t>& scratch = starts.Scratch();
        args_ = args;
        silent_ = &starts.Silent();
        loaded_ = scratch;
        turned_ = scratch[MAX_COUNTS];
        const bool is_shared = args->rank < args->num_shared_ranks;
        const int64_t routed = (args->rank - args->num_shared_ranks) * args->num_local_experts;
        first_entry_ = is_shared ? args->rank : args->num_shared_ranks + routed;
        num_entries_ = is_shared ? 1 : args->num_local_experts;
    }

    // Each block those of its share of entries.
    __aicore__ inline void Write() {
        const Share share = SplitEvenly(num_entries_, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        const int64_t sources = Smaller(args_->num_ranks, MAX_SOURCES);
        // In UB a source's counts fill whole units.
        const int64_t entries = sources < args_->num_ranks ? 1 : MAX_COUNTS / (sources * UNIT) * UNIT;
        for (int64_t entry = share.first; entry < share.last; entry += entries) {
            for (int64_t source = 0; source < args_->num_ranks; source += sources) {
                Turn(entry, Smaller(entries, share.last - entry), source, Smaller(sources, args_->num_ranks - source));
            }
        }
    }

private:
    static constexpr int64_t UNIT = UB_ALIGN / sizeof(int32_t);
    static constexpr int64_t MAX_COUNTS = 2048;
    static constexpr int64_t MAX_SOURCES = MAX_COUNTS / UNIT;
    static_assert(2 * MAX_COUNTS <= DirectStarts::SCRATCH_WORDS, "as they are loaded, and as they are stored");

    __aicore__ inline void Turn(int64_t entry, int64_t entries, int64_t source, int64_t sources) {
        constexpr int64_t WORD_BYTES = sizeof(int32_t);
        const uint64_t at = args_->window + args_->counts.At(args_->zone, source, first_entry_ + entry);
        const uint32_t bytes = static_cast<uint32_t>(entries * WORD_BYTES);
        const uint32_t gap = static_cast<uint32_t>(args_->counts.source_stride) - bytes;
        const int64_t row = (entries + UNIT - 1) / UNIT * UNIT;
        Order<AscendC::HardEvent::S_MTE2>();
        AscendC::DataCopyPad(loaded_, GlobalAt<int32_t>(at), {static_cast<uint16_t>(sources), bytes, gap, 0, 0},
                             NoPadding<int32_t>());
        Order<AscendC::HardEvent::MTE2_S>();
        Order<AscendC::HardEvent::MTE3_S>();
        for (int64_t i = 0; i < entries; ++i) {
            for (int64_t s = 0; s < sources; ++s) {
                const int32_t count = loaded_.GetValue(static_cast<uint32_t>(s * row + i));
                turned_.SetValue(static_cast<uint32_t>(i * sources + s), silent_->Has(source + s) ? 0 : count);
            }
        }
        Order<AscendC::HardEvent::S_MTE3>();
        AscendC::DataCopyPad(GlobalAt<int32_t>(args_->recv_counts)[entry * args_->num_ranks + source], turned_,
                             ExactBytes(entries * sources * WORD_BYTES));
    }

    const DirectSendArgs* args_ = nullptr;
    const SilentRanks* silent_ = nullptr;
    AscendC::LocalTensor<int32_t> loaded_, turned_;
    int64_t first_entry_ = 0;
    int64_t num_entries_ = 0;
};

class DirectSend {
public:
    __aicore__ inline void Init(const DirectSendArgs& args, AscendC::TPipe* pipe) {
        args_ = args;
        report_.Init(pipe, args.report, args_.zone);
        starts_.Init(&args_, pipe);
        rows_.Init(&args_, pipe, &report_, Blocks::OfLaunch(), {{}, &starts_});
        result_offsets_.Init(&args_, &starts_);
        received_counts_.Init(&args_, starts_);
    }

    __aicore__ inline void Process() {
        starts_.Sum();
        rows_.Process();
        result_offsets_.Write();
        received_counts_.Write();
        report_.Write();
    }

private:
    DirectSendArgs args_;
    DirectStarts starts_;
    SendRows<DirectSendArgs> rows_;
    ResultOffsets result_offsets_;
    ReceivedCounts received_counts_;
    Report report_;
};

}  // namespace moe
