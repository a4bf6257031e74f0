// Dispatch, step 3: waits for a status entry from every rank for every local expert, but from those that are masked,
// reads the counts, and clears the entries, unless one has another call word: its rows are not those that this rank
// expects. A source whose rows were lost on their way counts as one that did not come in time. Where counts have an
// end, one that cannot be is reported.
//
// Where ranks have to agree on who is masked before they send, a wait leaves out whom the call has known of, and gives
// up once another rank is masked and not all entries are there; and an entry of a rank that goes by other masks is
// reported.
#pragma once

#include "entry_order.h"
#include "silent_ranks.h"
#include "status_entries.h"
#include "waits.h"

namespace moe {

class DispatchWait : Kernel<DispatchWaitArgs> {
public:
    __aicore__ inline void Init(const DispatchWaitArgs& args, AscendC::TPipe* pipe,
                                const Blocks& blocks = Blocks::OfLaunch()) {
        Kernel::Init(args, pipe, blocks);
        flags_.Init(pipe, static_cast<uint32_t>(ENTRIES_PER_CHUNK * STATUS_ENTRY_WORDS));
        order_.Init(args.num_local_experts, static_cast<int64_t>(args.status.source_extent));
        if (WaitsForAll()) {
            units_ = NewTensor<int32_t>(pipe, ENTRIES_PER_CHUNK * UNIT_WORDS);
        }
        waited_.Init(pipe, args.waited_us, ENTRIES_PER_CHUNK);
        const int64_t sources = static_cast<int64_t>(args.status.source_extent);
        if (args.known != 0) {
            silent_.InitKnown(args.peers, sources, args.known);
        } else {
            silent_.Init(args.peers, sources, args.changes, args.is_relayed != 0 ? Senders::RELAYED : Senders::RANKS);
        }
    }

    __aicore__ inline void Process() {
        const int64_t total = args_.num_local_experts * static_cast<int64_t>(args_.status.source_extent);
        const Share share = blocks_.ShareOf(total);
        // What this launch itself keeps, another block may not have kept yet.
        agreed_ = args_.agreed == 0 ? 0 : ReadFresh<int32_t>(args_.agreed);
        call_ = args_.dispatch_word != 0 ? ReadFresh<int32_t>(args_.dispatch_word) : WordOfDispatch(args_);
        KeepWord(args_.kept_zone, args_.zone, blocks_);
        KeepWord(args_.turned, 1 - args_.zone, blocks_);
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        const Share awaited = WaitsForAll() ? Share{0, total} : share;
        for (int64_t first = awaited.first; first < awaited.last; first += ENTRIES_PER_CHUNK) {
            const Share chunk = {first, Smaller(first + ENTRIES_PER_CHUNK, awaited.last)};
            const Share own = {Larger(first, share.first), Smaller(chunk.last, share.last)};
            Receive(chunk, {own.first, Larger(own.first, own.last)});
        }
        // A block that gave up for another one's entries has to know it as well when it comes back.
        if (missing_place_ >= 0 && !report_.IsWanted()) {
            report_.Add(CodeOfMissing(), order_.NumberAt(missing_place_));
        }
        report_.Write();
    }

    // Whether something is missing or wrong, of this block's entries or of those that it waited for.
    __aicore__ inline bool HasFailed() const {
        return has_failed_;
    }

private:
    static constexpr int64_t ENTRIES_PER_CHUNK = 1024;

    // Shares and chunks are contiguous in the window.
    __aicore__ inline uint64_t AddressOf(int64_t place) const {
        const uint64_t expert = order_.ExpertAt(place);
        const uint64_t source = order_.SourceAt(place);
        return args_.window + args_.status.At(args_.zone, expert, source);
    }

    __aicore__ inline AscendC::GlobalTensor<float> EntriesFrom(int64_t first) const {
        return GlobalAt<float>(AddressOf(first));
    }

    // The prefix sums of a block need the counts of all entries: it waits for all of them and leaves them to a later
    // launch to clear, since other blocks may not have seen them yet. Otherwise each waits for its own.
    __aicore__ inline bool WaitsForAll() const {
        return args_.all_counts != 0;
    }

    __aicore__ inline void Receive(const Share& chunk, const Share& own) {
        const bool complete = WaitForEntries(chunk, own);
        if (!complete && missing_place_ < 0) {
            missing_place_ = FirstMissing(chunk);
        }
        if (complete && WaitsForAll()) {
            CopyCounts(chunk);
        }
        const bool same_call = StoreCounts(chunk, own);
        has_failed_ = has_failed_ || !complete || !same_call;
        StoreTimes(chunk, own);
        if (complete && same_call && !WaitsForAll()) {
            ClearEntries(chunk.first, chunk.last - chunk.first);
        }
    }

    __aicore__ inline bool WaitForEntries(const Share& chunk, const Share& own) {
        const int64_t count = chunk.last - chunk.first;
        const int64_t repeats = (count + FlagCounter::ENTRIES_PER_REPEAT - 1) / FlagCounter::ENTRIES_PER_REPEAT;
        ZeroEntries(repeats * FlagCounter::ENTRIES_PER_REPEAT);
        Order<AscendC::HardEvent::V_MTE2>();
        waited_.BeginWait();
        if (waited_.IsWanted()) {
            ExpectAll(own.last - own.first);
        }
        int64_t noted = 0;
        for (PollLoop poll(deadline_, args_.window, chunk.first, count); poll.Next();) {
            Order<AscendC::HardEvent::S_MTE2>();
            AscendC::DataCopy(flags_.Entries(), EntriesFrom(chunk.first),
                              static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
            if (silent_.Look()) {
                StandIn(chunk);
            }
            const int64_t seen = flags_.SumWordOfEach(StatusEntry::FLAG, repeats);
            if (waited_.AreRecorded() && seen != noted) {
                waited_.NoteArrivals(WordsOf(chunk, own), FLAG_BITS, 0, own.last - own.first, poll.WaitedUs());
                noted = seen;
            }
            if (seen == count) {
                return true;
            }
            if (HaveMasksChanged()) {
                gave_up_ = true;
                return false;
            }
            if (waited_.BeginLate()) {
                ExpectAll(own.last - own.first);
                waited_.NoteArrivals(WordsOf(chunk, own), FLAG_BITS, 0, own.last - own.first, 0);
                noted = seen;
            }
            poll.Miss(count - seen);
        }
        return false;
    }

    // Since the call began. For waits that must not go on without a rank that is masked meanwhile.
    __aicore__ inline bool HaveMasksChanged() const {
        return args_.known != 0 && ReadFresh<uint64_t>(args_.changes) != ReadFresh<uint64_t>(args_.known);
    }

    __aicore__ inline uint32_t CodeOfMissing() const {
        return gave_up_ ? REPORT_MASKED : REPORT_TIMEOUT;
    }

    // In UB: an entry of this call, without rows, for each rank that nothing is awaited from. What one of them has
    // written, or will write, counts for nothing.
    __aicore__ inline void StandIn(const Share& chunk) {
        const AscendC::LocalTensor<int32_t> words = WordsOf(chunk, chunk);
        Order<AscendC::HardEvent::MTE2_S>();
        for (int64_t place = chunk.first; place < chunk.last; ++place) {
            if (silent_.Has(order_.SourceAt(place))) {
                const uint32_t entry = static_cast<uint32_t>((place - chunk.first) * STATUS_ENTRY_WORDS);
                words.SetValue(entry + StatusEntry::FLAG, FLAG_BITS);
                words.SetValue(entry + StatusEntry::COUNT, agreed_);
                words.SetValue(entry + StatusEntry::CALL, call_);
            }
        }
    }

    __aicore__ inline int64_t FirstMissing(const Share& chunk) const {
        const AscendC::LocalTensor<int32_t> words = WordsOf(chunk, chunk);
        int64_t i = 0;
        while (words.GetValue(static_cast<uint32_t>(i * STATUS_ENTRY_WORDS) + StatusEntry::FLAG) == FLAG_BITS) {
            ++i;
        }
        return chunk.first + i;
    }

    // In UB.
    __aicore__ inline AscendC::LocalTensor<int32_t> WordsOf(const Share& chunk, const Share& own) const {
        const uint32_t first = static_cast<uint32_t>((own.first - chunk.first) * STATUS_ENTRY_WORDS);
        return flags_.Entries()[first].template ReinterpretCast<int32_t>();
    }

    // Out of the entries: each word fills a unit of UB on its way.
    __aicore__ inline void CopyCounts(const Share& chunk) {
        constexpr int64_t COUNT_BYTES = StatusEntry::COUNT * sizeof(int32_t);
        const uint16_t count = static_cast<uint16_t>(chunk.last - chunk.first);
        const AscendC::DataCopyExtParams gather{count, sizeof(int32_t), STATUS_ENTRY_BYTES - sizeof(int32_t), 0, 0};
        Order<AscendC::HardEvent::MTE3_MTE2>();
        AscendC::DataCopyPad(units_, GlobalAt<int32_t>(AddressOf(chunk.first) + COUNT_BYTES), gather,
                             NoPadding<int32_t>());
        if (silent_.HasAny()) {
            Order<AscendC::HardEvent::MTE2_S>();
            for (int64_t place = chunk.first; place < chunk.last; ++place) {
                if (silent_.Has(order_.SourceAt(place))) {
                    units_.SetValue(EntryOrder::UnitAt(place - chunk.first), 0);
                }
            }
            Order<AscendC::HardEvent::S_MTE3>();
        }
        Order<AscendC::HardEvent::MTE2_MTE3>();
        order_.Store(args_.all_counts, units_, chunk);
    }

    __aicore__ inline void ExpectAll(int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
            waited_.Expect(i);
        }
    }

    // The entries give up their first words to the times.
    __aicore__ inline void StoreTimes(const Share& chunk, const Share& own) {
        const int64_t count = own.last - own.first;
        if (count == 0 || !waited_.AreRecorded()) {
            return;
        }
        waited_.NoteMissing(0, count, deadline_.WaitedUs());
        for (int64_t i = 0; i < count; ++i) {
            deadline_.TraceWait(order_.SourceAt(own.first + i), waited_.At(i));
        }
        if (args_.waited_us != 0) {
            const AscendC::LocalTensor<int32_t> words = WordsOf(chunk, own);
            Order<AscendC::HardEvent::MTE3_S>();
            for (int64_t i = 0; i < count; ++i) {
                words.SetValue(static_cast<uint32_t>(i * STATUS_ENTRY_WORDS), waited_.At(i));
            }
            Order<AscendC::HardEvent::S_MTE3>();
            order_.Store(args_.waited_us, words, own);
        }
    }

    // Whether all entries that arrived are of the same call. They give up their first words to the counts.
    __aicore__ inline bool StoreCounts(const Share& chunk, const Share& own) {
        bool same_call = true;
        if (own.first == own.last) {
            return same_call;
        }
        const AscendC::LocalTensor<int32_t> words = WordsOf(chunk, own);
        for (int64_t place = own.first; place < own.last; ++place) {
            const uint32_t entry = static_cast<uint32_t>((place - own.first) * STATUS_ENTRY_WORDS);
            const bool arrived = words.GetValue(entry + StatusEntry::FLAG) == FLAG_BITS;
            const int32_t count = arrived ? words.GetValue(entry + StatusEntry::COUNT) : -1;
            words.SetValue(entry, count);
            if (arrived && words.GetValue(entry + StatusEntry::CALL) != call_) {
                report_.AddMismatch(order_.NumberAt(place), call_, words.GetValue(entry + StatusEntry::CALL));
                same_call = false;
            } else if (!arrived || count == LOST_COUNT) {
                report_.Add(CodeOfMissing(), order_.NumberAt(place));
            } else if (args_.agreed != 0 && count != agreed_) {
                report_.Add(REPORT_MASKED, order_.NumberAt(place));
            } else if (args_.count_end != 0 && (count < 0 || count >= args_.count_end)) {
                report_.Add(REPORT_BAD_ROW, order_.NumberAt(place));
            }
        }
        Order<AscendC::HardEvent::S_MTE3>();
        order_.Store(args_.recv_counts, words, own);
        return same_call;
    }

    __aicore__ inline void ClearEntries(int64_t first, int64_t count) {
        ZeroEntries(count);
        Order<AscendC::HardEvent::V_MTE3>();
        AscendC::DataCopy(EntriesFrom(first), flags_.Entries(), static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
    }

    // Words of theirs may be on their way to tables.
    __aicore__ inline void ZeroEntries(int64_t count) {
        Order<AscendC::HardEvent::S_V>();
        Order<AscendC::HardEvent::MTE3_V>();
        AscendC::Duplicate(flags_.Entries(), 0.0f, static_cast<int32_t>(count * STATUS_ENTRY_WORDS));
    }

    FlagCounter flags_;
    EntryOrder order_;
    SilentRanks silent_;
    AscendC::LocalTensor<int32_t> units_;
    WaitedTimes waited_;
    Deadline deadline_;
    int32_t call_ = 0;
    int32_t agreed_ = 0;
    bool has_failed_ = false;
    bool gave_up_ = false;
    int64_t missing_place_ = -1;
};

}  // namespace moe
