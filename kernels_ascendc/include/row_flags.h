// Flags in the stamps of a dispatch's rows: where they are, who is waited for, and zeros in their places.
#pragma once

#include "entry_order.h"
#include "silent_ranks.h"
#include "waits.h"

namespace moe {

// Entries are named by their places in the window, and blocks share them as dispatch_wait does: what a block reads
// here it has written there.
template <typename Args>
class RowFlags {
public:
    static constexpr int64_t PLACES_PER_CHUNK = 1024;
    static constexpr int64_t MAX_STAMPS = 1024;  // in UB

    __aicore__ inline void Init(const Args* args, AscendC::TPipe* pipe, Report* report) {
        args_ = args;
        report_ = report;
        order_.Init(args->num_local_experts, args->num_ranks);
        stamps_.Init(pipe, static_cast<uint32_t>(MAX_STAMPS * STAMP_WORDS));
        words_ = stamps_.Entries().template ReinterpretCast<int32_t>();
        zeros_ = NewTensor<int32_t>(pipe, MAX_CLEARED * UNIT_WORDS);
        counts_ = NewTensor<int32_t>(pipe, PLACES_PER_CHUNK * UNIT_WORDS);
        waited_.Init(pipe, args->waited_us, PLACES_PER_CHUNK);
        silent_.Init(args->peers, args->num_ranks, args->changes);
        if (args->waited_us != 0) {
            pipe->InitBuffer(time_buffer_, static_cast<uint32_t>(PLACES_PER_CHUNK * UB_ALIGN));
        }
    }

    // Returns the places of one of these blocks.
    __aicore__ inline Share Begin(const Blocks& blocks = Blocks::OfLaunch()) {
        AscendC::Duplicate(zeros_, 0, static_cast<int32_t>(MAX_CLEARED * UNIT_WORDS));
        const int64_t total = args_->num_local_experts * args_->num_ranks;
        return blocks.ShareOf(total);
    }

    // So many places at most, whose counts and times the other functions know from then on.
    __aicore__ inline void Load(const Share& places) {
        places_ = places;
        is_missing_ = false;
        Order<AscendC::HardEvent::S_MTE2>();
        order_.Load(args_->recv_counts, counts_, places);
        Order<AscendC::HardEvent::MTE2_S>();
        LoadTimes();
    }

    // What has changed.
    __aicore__ inline void Store() {
        StoreTimes();
        if (is_missing_) {
            StoreUnits(args_->recv_counts, counts_);
        }
    }

    __aicore__ inline int64_t SourceAt(int64_t place) const {
        return order_.SourceAt(place);
    }

    // Before each look: whether there are sources that nothing is awaited from any more. Rows of theirs may have been
    // announced; what has come of them is taken out by who finds that ranks were masked meanwhile.
    __aicore__ inline bool LookForSilent() {
        return silent_.Look();
    }

    // As of the last look.
    __aicore__ inline bool HasSilent() const {
        return silent_.HasAny();
    }

    __aicore__ inline bool IsSilent(int64_t place) const {
        return silent_.Has(SourceAt(place));
    }

    // Peers wrote the counts: they cannot make us look behind the slots. Of an entry that did not come there are none.
    __aicore__ inline int64_t RowsOf(int64_t place) const {
        return Larger<int64_t>(0, Smaller(CountOf(place), Most()));
    }

    // The same, and an error if there are more.
    __aicore__ inline int64_t CheckedRowsOf(int64_t place) {
        const int64_t count = CountOf(place);
        if (count > Most()) {
            report_->Add(REPORT_BAD_ROW, order_.NumberAt(place), count - Most());
        }
        return Larger<int64_t>(0, Smaller(count, Most()));
    }

    __aicore__ inline uint64_t SlotOf(int64_t place, int64_t row) const {
        return args_->window + args_->slots.At(args_->zone, SourceAt(place), order_.ExpertAt(place), row);
    }

    __aicore__ inline uint64_t StampOf(int64_t place, int64_t row) const {
        return SlotOf(place, row) + static_cast<uint64_t>(args_->stamp_offset);
    }

    // Behind Order<S_MTE2>: stamps of neighbouring slots, to UB from the at-th place for one on.
    __aicore__ inline void LoadStamps(uint64_t stamp, int64_t at, int64_t count) {
        const DataGap gap = static_cast<DataGap>(args_->slots.index_stride) - STAMP_BYTES;
        AscendC::DataCopyPad(words_[static_cast<uint32_t>(at * STAMP_WORDS)], GlobalAt<int32_t>(stamp),
                             {static_cast<uint16_t>(count), STAMP_BYTES, gap, 0, 0}, NoPadding<int32_t>());
    }

    // Behind the loads: stamps in UB that are not waited for are as if they were there.
    __aicore__ inline void StandIn(int64_t at, int64_t count) {
        Order<AscendC::HardEvent::MTE2_S>();
        for (int64_t i = at; i < at + count; ++i) {
            words_.SetValue(static_cast<uint32_t>(i * STAMP_WORDS + Stamp::FLAG), FLAG_BITS);
        }
    }

    // Of so many stamps in UB, from the first on. Before they are loaded, what is behind them is made zero: stamps of
    // the look before, which has read them.
    __aicore__ inline void Prepare(int64_t count) {
        const int64_t padding = RepeatsOf(count) * FlagCounter::ENTRIES_PER_REPEAT - count;
        if (padding > 0) {
            Order<AscendC::HardEvent::S_V>();
            AscendC::Duplicate(words_[static_cast<uint32_t>(count * STAMP_WORDS)], 0,
                               static_cast<int32_t>(padding * STAMP_WORDS));
            Order<AscendC::HardEvent::V_MTE2>();
        }
    }

    __aicore__ inline int64_t CountSet(int64_t count) {
        return stamps_.SumWordOfEach(Stamp::FLAG, RepeatsOf(count));
    }

    // Whose loads a sum has waited for.
    __aicore__ inline bool IsSet(int64_t at) const {
        return words_.GetValue(static_cast<uint32_t>(at * STAMP_WORDS + Stamp::FLAG)) == FLAG_BITS;
    }

    // So many stamps fit into UB.
    __aicore__ inline int64_t MaxRows() const {
        return MAX_STAMPS;
    }

    // Of an entry's rows from the first of these on, the next ones to look at. One copy loads the stamps of all.
    __aicore__ inline Share MissingOf(int64_t /*place*/, const Share& rows) const {
        return rows;
    }

    __aicore__ inline void NoteTaken(int64_t /*place*/, int64_t /*row*/) {}

    // Of a row so long, its bytes in UB.
    __aicore__ inline uint32_t LoadedBytes(int64_t row_bytes) const {
        return static_cast<uint32_t>(WholeUnits(row_bytes));
    }

    // The row that this stamp is behind.
    __aicore__ inline void LoadRow(const AscendC::LocalTensor<uint8_t>& to, uint64_t stamp, uint32_t bytes) const {
        AscendC::DataCopy(to, GlobalAt<uint8_t>(stamp - static_cast<uint64_t>(args_->stamp_offset)), bytes);
    }

    // In UB, of a row that is there: behind it, or at its stamp's place.
    __aicore__ inline AscendC::LocalTensor<uint8_t> OriginOf(const AscendC::LocalTensor<uint8_t>& /*row*/,
                                                             int64_t at) const {
        return words_[static_cast<uint32_t>(at * STAMP_WORDS)].template ReinterpretCast<uint8_t>();
    }

    // The flags alone: where rows come from stands beside them. A sum of them came before, and with it the vector
    // unit's zeros.
    __aicore__ inline void Clear(uint64_t stamp, int64_t count) {
        const DataGap gap = static_cast<DataGap>(args_->slots.index_stride) - FLAG_BYTES;
        for (int64_t first = 0; first < count; first += MAX_CLEARED) {
            const uint16_t number = static_cast<uint16_t>(Smaller(MAX_CLEARED, count - first));
            const uint64_t at = stamp + static_cast<uint64_t>(first) * args_->slots.index_stride + FLAG_AT;
            AscendC::DataCopyPad(GlobalAt<int32_t>(at), zeros_, {number, FLAG_BYTES, 0, gap, 0});
        }
    }

    // Of all sources, from an address on.
    __aicore__ inline void ClearEntries(uint64_t entries) const {
        const int64_t total = args_->num_local_experts * args_->num_ranks;
        Order<AscendC::HardEvent::V_MTE3>();
        for (int64_t first = 0; first < total; first += MAX_CLEARED) {
            const uint64_t at = entries + static_cast<uint64_t>(first) * STATUS_ENTRY_BYTES;
            const int64_t count = Smaller(MAX_CLEARED, total - first);
            AscendC::DataCopy(GlobalAt<int32_t>(at), zeros_, static_cast<uint32_t>(count * STATUS_ENTRY_WORDS));
        }
    }

    __aicore__ inline bool IsTimed() const {
        return waited_.IsWanted();
    }

    __aicore__ inline void NoteWait(int64_t place, const Deadline& deadline, int32_t us) {
        is_late_ = true;
        waited_.Raise(place - places_.first, us);
        deadline.TraceWait(SourceAt(place), us);
    }

    // After the deadline.
    __aicore__ inline void GiveUp(int64_t place, const Deadline& deadline) {
        report_->Add(REPORT_TIMEOUT, order_.NumberAt(place));
        counts_.SetValue(EntryOrder::UnitAt(place - places_.first), -1);
        is_missing_ = true;
        NoteWait(place, deadline, deadline.WaitedUs());
    }

protected:
    const Args* args_ = nullptr;
    FlagCounter stamps_;
    AscendC::LocalTensor<int32_t> zeros_;

private:
    using DataGap = uint32_t;

    static constexpr int64_t MAX_CLEARED = 256;
    static constexpr uint32_t FLAG_BYTES = sizeof(int32_t);
    static constexpr uint64_t FLAG_AT = uint64_t{FLAG_BYTES} * Stamp::FLAG;  // in a stamp

    __aicore__ static inline int64_t RepeatsOf(int64_t count) {
        return (count + FlagCounter::ENTRIES_PER_REPEAT - 1) / FlagCounter::ENTRIES_PER_REPEAT;
    }

    __aicore__ inline int64_t CountOf(int64_t place) const {
        const bool is_kept = SourceAt(place) == args_->kept_rank;
        return is_kept ? 0 : counts_.GetValue(EntryOrder::UnitAt(place - places_.first));
    }

    __aicore__ inline int64_t Most() const {
        return static_cast<int64_t>(args_->slots.index_extent);
    }

    __aicore__ inline void LoadTimes() {
        const int64_t count = places_.last - places_.first;
        if (args_->waited_us == 0) {
            waited_.Load(0, count);
            return;
        }
        const AscendC::LocalTensor<int32_t> units = time_buffer_.Get<int32_t>();
        order_.Load(args_->waited_us, units, places_);
        Order<AscendC::HardEvent::MTE2_S>();
        for (int64_t i = 0; i < count; ++i) {
            waited_.Set(i, units.GetValue(EntryOrder::UnitAt(i)));
        }
    }

    __aicore__ inline void StoreTimes() {
        if (args_->waited_us == 0 || !is_late_) {
            return;
        }
        const AscendC::LocalTensor<int32_t> units = time_buffer_.Get<int32_t>();
        for (int64_t i = 0; i < places_.last - places_.first; ++i) {
            units.SetValue(EntryOrder::UnitAt(i), waited_.At(i));
        }
        StoreUnits(args_->waited_us, units);
    }

    __aicore__ inline void StoreUnits(uint64_t table, const AscendC::LocalTensor<int32_t>& units) {
        Order<AscendC::HardEvent::S_MTE3>();
        order_.Store(table, units, places_);
        Order<AscendC::HardEvent::MTE3_S>();
        Order<AscendC::HardEvent::MTE3_MTE2>();
    }

    Report* report_ = nullptr;
    SilentRanks silent_;
    EntryOrder order_;
    AscendC::LocalTensor<int32_t> words_;  // of the stamps
    AscendC::LocalTensor<int32_t> counts_;  // in units
    AscendC::TBuf<AscendC::TPosition::VECCALC> time_buffer_;
    WaitedTimes waited_;
    Share places_{0, 0};
    bool is_missing_ = false;
    bool is_late_ = false;  // some row
};

}  // namespace moe
