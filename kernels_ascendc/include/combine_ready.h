// Combine in parts, step 3: waits for some of this rank's tokens, whichever are complete first.
//
// A rank that is late must not keep others from sending: a block that has waited as long as it took to send a part
// sends the next one before it waits on.
#pragma once

#include "combine_send.h"
#include "result_flags.h"
#include "waits.h"

namespace moe {

// What some tokens wait for, in memory from one launch to the next: two words for each, the lower one first.
class PendingResults {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t max_tokens) {
        words_.Init(pipe, WORDS * max_tokens);
    }

    // Between Order<S_MTE2> and Order<MTE2_S>, as `Table::Load`.
    __aicore__ inline void Load(uint64_t address, int64_t first, int64_t count) {
        words_.Load(address, WORDS * first, WORDS * count);
    }

    __aicore__ inline void Begin(int64_t first) {
        words_.Begin(WORDS * first);
    }

    __aicore__ inline ResultBits Of(int64_t token) const {
        const uint64_t low = static_cast<uint32_t>(words_.At(WORDS * token));
        const uint64_t high = static_cast<uint32_t>(words_.At(WORDS * token + 1));
        return static_cast<ResultBits>(high << WORD_BITS | low);
    }

    __aicore__ inline void Set(int64_t token, ResultBits bits) const {
        words_.Set(WORDS * token, static_cast<int32_t>(bits));
        words_.Set(WORDS * token + 1, static_cast<int32_t>(bits >> WORD_BITS));
    }

    // So many, from the first one on that is loaded, or set.
    __aicore__ inline void Store(uint64_t address, int64_t count) const {
        words_.Store(address, WORDS * count);
    }

private:
    static constexpr int64_t WORDS = 2;
    static constexpr int64_t WORD_BITS = 32;

    Table words_;
};

// A part of this rank's tokens is those that are complete first, whichever they are. They are listed for the launch
// that sums them.
//
// A part has an even share of the list's places, and each block an even share of those. The tokens with these numbers
// are the block's own: it fills its places with whatever of its tokens in all parts is complete, and no block needs to
// know what another one finds. If every rank has sent as many parts, there are enough of them. What tokens still wait
// for is in memory from one launch to the next.
class ReadyTokens {
public:
    __aicore__ inline void Init(const CombineReadyArgs* args, AscendC::TPipe* pipe, Report* report) {
        args_ = args;
        report_ = report;
        num_results_ = args->topk + args->num_shared_experts;
        tokens_per_chunk_ = TABLE_ENTRIES / num_results_;
        number_ = RoundNumber(*args);
        flags_.Init(pipe, num_results_, tokens_per_chunk_, number_);
        expected_.Init(args, pipe, TABLE_ENTRIES);
        pending_.Init(pipe, tokens_per_chunk_);
        found_.Init(pipe, TABLE_ENTRIES);
        waited_.Init(pipe, args->is_timed != 0 || IsTraced() ? args->waited_us : 0, TABLE_ENTRIES);
    }

    // After launches that have taken all tokens of so many parts, and noted those of so many.
    __aicore__ inline void Begin(int64_t taken, int64_t noted) {
        KeepNumber(*args_, number_);
        taken_ = taken;
        noted_ = noted;
        places_ = OwnIn(args_->part);
        if (AscendC::GetBlockIdx() == 0) {
            const int64_t parts = args_->num_parts;
            found_.Begin(0);
            found_.Set(0, static_cast<int32_t>(SplitEvenly(args_->num_tokens, args_->first_part, parts).first));
            found_.Set(1, static_cast<int32_t>(SplitEvenly(args_->num_tokens, args_->part, parts).last));
            found_.Store(args_->bounds, 2);
        }
    }

    // How far these launches are, for the next one: so many parts are sent.
    __aicore__ inline void Keep(PartsProgress& progress, int64_t sent) const {
        progress.Keep(PartProgress::SENT, sent, taken_, noted_);
    }

    // Until this part's places are filled, for so long at most. Says whether they are.
    __aicore__ inline bool Wait(int64_t timeout_us) {
        TraceStep(TRACE_POLL);
        deadline_.Start(timeout_us);
        const int64_t first = OwnIn(taken_).first;
        for (PollLoop poll(deadline_, args_->window, first, args_->num_tokens - first); poll.Next();) {
            if (Take(poll.WaitedUs())) {
                return true;
            }
            // Each token that is still to be found misses a flag at least.
            poll.Miss(places_.last - places_.first);
        }
        return false;
    }

    // After the deadline. Flags tell the host who is missing. The places that are left get some token of this rank:
    // later launches must not read what stood there before.
    __aicore__ inline void GiveUp() {
        int64_t first_missing = 0;
        int64_t missing = 0;
        for (int64_t part = taken_; part < args_->num_parts; ++part) {
            const Share own = OwnIn(part);
            for (int64_t first = own.first; first < own.last; first += tokens_per_chunk_) {
                const int64_t last = Smaller(first + tokens_per_chunk_, own.last);
                Load(first, last, false, true);
                for (int64_t token = first; token < last; ++token) {
                    if (pending_.Of(token) > 0) {
                        first_missing = missing == 0 ? token : first_missing;
                        ++missing;
                        NoteMissing(token, first);
                    }
                }
                StoreTimes(first, last);
            }
        }
        report_->Add(REPORT_TIMEOUT, first_missing, missing);
        while (places_.first < places_.last) {
            const int64_t count = Smaller(places_.last - places_.first, TABLE_ENTRIES);
            found_.Begin(places_.first);
            for (int64_t i = 0; i < count; ++i) {
                found_.Set(places_.first + i, static_cast<int32_t>(first_missing));
            }
            found_.Store(args_->ready_tokens, count);
            places_.first += count;
        }
    }

private:
    static constexpr int64_t TABLE_ENTRIES = 512;
    static constexpr ResultBits TAKEN = -1;

    // This block's share of a part: places of the list, and tokens.
    __aicore__ inline Share OwnIn(int64_t part) const {
        const Share all = SplitEvenly(args_->num_tokens, part, args_->num_parts);
        const Share own = SplitEvenly(all.last - all.first, AscendC::GetBlockIdx(), AscendC::GetBlockNum());
        return {all.first + own.first, all.first + own.last};
    }

    // Complete tokens, in their order, until this part's places are filled. Says whether they are.
    __aicore__ inline bool Take(int32_t waited_us) {
        for (int64_t part = taken_; part < args_->num_parts && places_.first < places_.last; ++part) {
            const Share own = OwnIn(part);
            const bool is_new = part >= noted_;
            bool is_over = true;
            for (int64_t first = own.first; first < own.last; first += tokens_per_chunk_) {
                const int64_t last = Smaller(first + tokens_per_chunk_, own.last);
                Load(first, last, is_new, waited_us > 0);
                is_over = TakeComplete(first, last, is_new, waited_us) && is_over;
            }
            noted_ = Larger(noted_, part + 1);
            taken_ += part == taken_ && is_over ? 1 : 0;
        }
        return places_.first == places_.last;
    }

    __aicore__ inline void Load(int64_t first, int64_t last, bool is_new, bool is_late) {
        Order<AscendC::HardEvent::S_MTE2>();
        // All tokens' flags at once: most of a look at one is the way to memory.
        const uint32_t bytes = static_cast<uint32_t>(num_results_ * STATUS_ENTRY_BYTES);
        const uint32_t gap = static_cast<uint32_t>(args_->status.token_stride) - bytes;
        const uint64_t status = args_->window + args_->status.At(args_->zone, first, 0);
        AscendC::DataCopyPad(flags_.Entries(), GlobalAt<int32_t>(status),
                             {static_cast<uint16_t>(last - first), bytes, gap, 0, 0}, NoPadding<int32_t>());
        if (is_new || IsTraced() || (is_late && IsWatched()) || expected_.LookForSilent()) {
            expected_.Load(first, last);
            has_ids_ = true;
        } else {
            has_ids_ = false;
        }
        if (!is_new) {
            pending_.Load(args_->pending, first, last - first);
        }
        Order<AscendC::HardEvent::MTE2_S>();
        if (is_new) {
            NotePending(first, last);
        } else {
            waited_.Load(first * num_results_, (last - first) * num_results_);
        }
    }

    // The results that come back for each token.
    __aicore__ inline void NotePending(int64_t first, int64_t last) {
        pending_.Begin(first);
        for (int64_t token = first; token < last; ++token) {
            const ResultBits expected = expected_.Of(token);
            for (int64_t k = 0; waited_.IsWanted() && k < num_results_; ++k) {
                waited_.Expect((token - first) * num_results_ + k, HasBit(expected, k));
            }
            pending_.Set(token, expected);
        }
    }

    // Says whether none of the tokens is left.
    __aicore__ inline bool TakeComplete(int64_t first, int64_t last, bool is_new, int32_t waited_us) {
        const int64_t before = places_.first;
        int64_t left = last - first;
        found_.Begin(before);
        for (int64_t token = first; token < last && places_.first < places_.last; ++token) {
            const ResultBits expected = pending_.Of(token);
            if (expected == TAKEN) {
                --left;
            } else if (IsComplete(token, first, expected, waited_us)) {
                --left;
                found_.Set(places_.first, static_cast<int32_t>(token));
                pending_.Set(token, TAKEN);
                ++places_.first;
            }
        }
        if (places_.first > before) {
            found_.Store(args_->ready_tokens, places_.first - before);
        }
        if (is_new || places_.first > before) {
            pending_.Store(args_->pending, last - first);
        }
        StoreTimes(first, last);
        return left == 0;
    }

    __aicore__ inline bool IsComplete(int64_t token, int64_t first, ResultBits expected, int32_t waited_us) {
        if (expected == 0) {
            return true;
        }
        const ResultBits awaited = has_ids_ ? expected_.Awaited(token, expected) : expected;
        const int64_t missing = flags_.NumMissing(token - first, awaited);
        if (waited_.IsWanted()) {
            NoteArrivals(token, first, waited_us);
        }
        if (missing > 0) {
            NoteLate(token, first, awaited, waited_us);
            return false;
        }
        flags_.ReportStray(token - first, expected | (has_ids_ ? expected_.Lost(token) : 0), token, *report_);
        return true;
    }

    // What has been missing until now.
    __aicore__ inline void NoteLate(int64_t token, int64_t first, ResultBits awaited, int32_t us) {
        if (us == 0 || !IsWatched()) {
            return;
        }
        const ResultBits late = flags_.Missing(token - first, awaited);
        for (int64_t k = 0; k < num_results_; ++k) {
            if (HasBit(late, k)) {
                deadline_.TraceWait(expected_.ExpertOf(token, k), us);
            }
        }
    }

    __aicore__ inline void NoteArrivals(int64_t token, int64_t first, int32_t waited_us) {
        const int64_t time = (token - first) * num_results_;
        for (int64_t k = 0; IsTraced() && k < num_results_; ++k) {
            if (flags_.IsThere(token - first, k) && waited_.IsMissing(time + k)) {
                deadline_.TraceWait(expected_.ExpertOf(token, k), waited_us);
            }
        }
        const uint32_t entries = static_cast<uint32_t>((token - first) * num_results_ * STATUS_ENTRY_WORDS);
        waited_.NoteArrivals(flags_.Entries()[entries], number_, time, num_results_, waited_us);
    }

    __aicore__ inline void NoteMissing(int64_t token, int64_t first) {
        const int64_t time = (token - first) * num_results_;
        for (int64_t k = 0; IsTraced() && k < num_results_; ++k) {
            if (waited_.IsMissing(time + k)) {
                deadline_.TraceWait(expected_.ExpertOf(token, k), deadline_.WaitedUs());
            }
        }
        waited_.NoteMissing(time, num_results_, deadline_.WaitedUs());
    }

    __aicore__ inline void StoreTimes(int64_t first, int64_t last) {
        waited_.Store(first * num_results_, (last - first) * num_results_);
    }

    const CombineReadyArgs* args_ = nullptr;
    Report* report_ = nullptr;
    int32_t number_ = 0;  // of the round
    ResultFlags flags_;
    ExpectedResults<CombineReadyArgs> expected_;
    PendingResults pending_;
    Table found_;
    WaitedTimes waited_;
    Deadline deadline_;
    int64_t num_results_ = 0;
    int64_t tokens_per_chunk_ = 0;
    int64_t taken_ = 0;  // parts of whose tokens all are taken
    int64_t noted_ = 0;  // parts of whose tokens it is known what they wait for
    bool has_ids_ = false;  // of the tokens that are looked at
    Share places_{0, 0};  // that are still to be filled in this part
};

class CombineReady : Kernel<CombineReadyArgs> {
public:
    __aicore__ inline void Init(const CombineReadyArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        pipe_ = pipe;
        ready_.Init(&args_, pipe, &report_);
        progress_.Init(pipe, args.progress);
    }

    __aicore__ inline void Process() {
        KeepWord(args_.kept_zone, args_.zone);
        sent_ = args_.part + 1;
        if (args_.part == 0) {
            ready_.Begin(0, 0);
        } else {
            sent_ = Larger(sent_, progress_.Read(PartProgress::SENT));
            ready_.Begin(progress_.Read(PartProgress::TAKEN), progress_.Read(PartProgress::NOTED));
        }
        timeout_us_ = report_.IsOld() ? 0 : args_.timeout_us;
        bool is_done = Wait(HasMore() ? progress_.Read(PartProgress::SEND_US) : 0);
        while (!is_done && HasMore()) {
            is_done = Wait(SendNext());
        }
        if (!is_done) {
            ready_.GiveUp();
        }
        ready_.Keep(progress_, sent_);
        report_.Write();
    }

private:
    __aicore__ inline bool HasMore() const {
        return args_.num_entries > 0 && sent_ < args_.num_parts;
    }

    __aicore__ inline bool Wait(int64_t patience_us) {
        return ready_.Wait(HasMore() ? Smaller(patience_us, timeout_us_) : timeout_us_);
    }

    // Returns how long it took.
    __aicore__ inline int64_t SendNext() {
        if (!is_sending_) {
            results_.Init(&args_, pipe_, &report_, true);
            results_.Begin();
            is_sending_ = true;
        }
        return results_.Send(TokenRange::OfPart(args_, sent_++));
    }

    AscendC::TPipe* pipe_ = nullptr;
    ResultRows<CombineReadyArgs> results_;
    ReadyTokens ready_;
    PartsProgress progress_;
    int64_t timeout_us_ = 0;
    int64_t sent_ = 0;  // parts
    bool is_sending_ = false;
};

}  // namespace moe
