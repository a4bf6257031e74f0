// Combine, steps 1 and 2: every result back to its token's slot, its flag right after it; or no flags,
// where the receivers wait for whole ranks and a post_status follows.
#pragma once

#include "row_copy.h"

namespace moe {

// Tokens of the ranks that rows go back to, however many those have.
struct TokenRange {
    static constexpr uint64_t END = UINT64_MAX;

    uint64_t first;
    uint64_t last;

    // Of a part; the last one has all that are left.
    template <typename Args>
    __aicore__ static inline TokenRange OfPart(const Args& args, int64_t part) {
        const uint64_t first = part * args.part_tokens;
        return {first, part + 1 < args.num_parts ? first + args.part_tokens : END};
    }

    // A negative token is a huge number, and in the last part.
    __aicore__ inline bool Contains(uint64_t token) const {
        return token >= first && (token < last || last == END);
    }
};

// How far this block is, in memory from one launch of a combine in parts to the next.
class PartsProgress {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, uint64_t address) {
        address_ = address;
        words_.Init(pipe, PART_PROGRESS_WORDS);
    }

    __aicore__ inline int64_t Read(uint32_t word) const {
        return ReadFresh<int32_t>(address_, FirstWord() + word);
    }

    // Neighbouring words, from one on.
    template <typename... Values>
    __aicore__ inline void Keep(uint32_t first, Values... values) {
        int64_t word = FirstWord() + first;
        words_.Begin(word);
        (words_.Set(word++, static_cast<int32_t>(values)), ...);
        words_.Store(address_, sizeof...(Values));
    }

private:
    __aicore__ static inline int64_t FirstWord() {
        return AscendC::GetBlockIdx() * static_cast<int64_t>(PART_PROGRESS_WORDS);
    }

    uint64_t address_ = 0;
    Table words_;
};

// Whether a kernel can leave results for queued ranks in the out part, by the numbers of their rows.
template <typename Args>
inline constexpr bool HAS_OUT_ROWS = false;
template <>
inline constexpr bool HAS_OUT_ROWS<CombineSendArgs> = true;

// A block's share of the rows, each to its slot.
template <typename Args>
class ResultRows {
public:
    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe, Report* report, bool is_flagged) {
        args_ = args;
        report_ = report;
        is_flagged_ = is_flagged;
        peers_.Init(args->peers, args->num_ranks);
        rows_.Init(pipe, args->row_bytes);
        flag_ = NewTensor<int32_t>(pipe, STATUS_ENTRY_WORDS);
        origins_.Init(pipe, ORIGINS_PER_CHUNK * ORIGIN_WORDS);
        if (args->places != 0) {
            places_.Init(pipe, ORIGINS_PER_CHUNK);
        }
    }

    __aicore__ inline void Begin() {
        if (is_flagged_) {
            AscendC::Duplicate(flag_, RoundNumber(*args_), static_cast<int32_t>(STATUS_ENTRY_WORDS));
            Order<AscendC::HardEvent::V_MTE3>();
        }
        share_ = Blocks::OfLaunch().ShareOf(args_->num_entries > 0 ? NumResults(*args_, *report_) : 0);
    }

    // The rows of these tokens. Returns how long it took.
    __aicore__ inline int64_t Send(const TokenRange& tokens) {
        const int64_t start = AscendC::GetSystemCycle();
        TraceStep(is_flagged_ ? TRACE_WRITE_AND_FLAG : TRACE_WRITE);
        for (int64_t first = share_.first; first < share_.last; first += ORIGINS_PER_CHUNK) {
            const int64_t last = Smaller(first + ORIGINS_PER_CHUNK, share_.last);
            origins_.Fetch(args_->origins, first * ORIGIN_WORDS, (last - first) * ORIGIN_WORDS);
            if (args_->places != 0) {
                places_.Fetch(args_->places, first, last - first);
            }
            for (int64_t row = first; row < last; ++row) {
                const uint64_t token = OriginOf(row, Origin::TOKEN);
                if (tokens.Contains(token)) {
                    SendRow(row, token);
                }
            }
        }
        return (AscendC::GetSystemCycle() - start) / CYCLES_PER_US;
    }

private:
    static constexpr int64_t ORIGINS_PER_CHUNK = 512;

    // A negative word becomes a huge unsigned number, which no extent holds.
    __aicore__ inline uint64_t OriginOf(int64_t row, uint32_t word) const {
        return static_cast<uint64_t>(static_cast<int64_t>(origins_.At(row * ORIGIN_WORDS + word)));
    }

    __aicore__ inline void SendRow(int64_t row, uint64_t token) {
        const uint64_t rank = OriginOf(row, Origin::SOURCE);
        const uint64_t k = OriginOf(row, Origin::K);
        const uint64_t zone = args_->zone;
        const int64_t place = args_->places == 0 ? row : places_.At(row);
        if (rank >= static_cast<uint64_t>(args_->num_ranks) || !NamesPlace(*args_, is_flagged_, token, k) ||
            place < 0 || place >= args_->capacity) {
            report_->Add(REPORT_BAD_ROW, row);
            return;
        }
        if (peers_.IsMasked(rank)) {
            return;
        }
        const uint64_t from = args_->rows + static_cast<uint64_t>(place) * args_->row_bytes;
        if constexpr (HAS_OUT_ROWS<Args>) {
            if (args_->window != 0 && peers_.IsQueued(rank)) {
                const uint64_t out = args_->window + args_->out_rows.At(zone, row);
                rows_.Copy(from, &out, 1);
                return;
            }
        }
        const uint64_t window = peers_.WindowOf(rank);
        const uint64_t slot = window + args_->slots.At(zone, token, k);
        if (static_cast<int64_t>(rank) != args_->kept_rank) {
            rows_.Copy(from, &slot, 1);
        }
        if (is_flagged_) {
            FinishRow();
            RaiseFlags(GlobalAt<int32_t>(window + args_->status.At(zone, token, k)), flag_, STATUS_ENTRY_WORDS, 1);
        }
    }

    // MTE3 starts copies in order and may end them in another: the flag starts when the row has ended.
    __aicore__ inline void FinishRow() {
        AscendC::PipeBarrier<PIPE_MTE3>();
    }

    const Args* args_ = nullptr;
    Report* report_ = nullptr;
    bool is_flagged_ = false;
    Peers peers_;
    RowCopy rows_;
    AscendC::LocalTensor<int32_t> flag_;
    Table origins_;
    Table places_;
    Share share_{0, 0};
};

class CombineSend : Kernel<CombineSendArgs> {
public:
    __aicore__ inline void Init(const CombineSendArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        results_.Init(&args_, pipe, &report_, args.flag_rows != 0);
        progress_.Init(pipe, args.progress);
    }

    __aicore__ inline void Process() {
        if (args_.part == 0) {
            KeepWord(args_.combine_kind, args_.kind);
        }
        // An earlier part may have sent this one while it waited.
        const bool is_sent = args_.part > 0 && progress_.Read(PartProgress::SENT) > args_.part;
        int64_t send_us = 0;
        if (!is_sent) {
            results_.Begin();
            send_us = results_.Send(TokenRange::OfPart(args_, args_.part));
        }
        if (args_.progress != 0) {
            progress_.Keep(PartProgress::SEND_US, send_us);
        }
        report_.Write();
    }

private:
    ResultRows<CombineSendArgs> results_;
    PartsProgress progress_;
};

}  // namespace moe
