// Dispatch's status entries have numbers by expert, then by source: n = expert * ranks + source, the order of all
// tables. In a window they lie by source, then by expert, without gaps: what one rank posts is contiguous.
#pragma once

#include "flags.h"

namespace moe {

class EntryOrder {
public:
    __aicore__ inline void Init(int64_t num_experts, int64_t num_ranks) {
        num_experts_ = num_experts;
        num_ranks_ = num_ranks;
    }

    __aicore__ inline int64_t ExpertAt(int64_t place) const {
        return place % num_experts_;
    }

    __aicore__ inline int64_t SourceAt(int64_t place) const {
        return place / num_experts_;
    }

    __aicore__ inline int64_t NumberAt(int64_t place) const {
        return ExpertAt(place) * num_ranks_ + SourceAt(place);
    }

    // To a table by numbers: a word for each of some places, each at the beginning of a unit of UB.
    __aicore__ inline void Store(uint64_t table, const AscendC::LocalTensor<int32_t>& units,
                                 const Share& places) const {
        Move<false>(table, units, places);
    }

    // The other way round.
    __aicore__ inline void Load(uint64_t table, const AscendC::LocalTensor<int32_t>& units, const Share& places) const {
        Move<true>(table, units, places);
    }

    // Of the i-th of those places.
    __aicore__ static inline uint32_t UnitAt(int64_t i) {
        return static_cast<uint32_t>(i * static_cast<int64_t>(UB_ALIGN) / WORD_BYTES);
    }

private:
    static constexpr int64_t WORD_BYTES = sizeof(int32_t);
    static constexpr uint32_t LENGTH = sizeof(int32_t);

    template <bool IS_LOAD>
    __aicore__ inline void Move(uint64_t table, const AscendC::LocalTensor<int32_t>& units, const Share& places) const {
        if (places.last - places.first > num_experts_) {
            MoveByExpert<IS_LOAD>(table, units, places);
            return;
        }
        const uint32_t gap = static_cast<uint32_t>((num_ranks_ - 1) * WORD_BYTES);  // in the table
        for (int64_t place = places.first; place < places.last;) {
            const int64_t end = Smaller((SourceAt(place) + 1) * num_experts_, places.last);
            Copy<IS_LOAD>(GlobalAt<int32_t>(table)[NumberAt(place)], units[UnitAt(place - places.first)], end - place,
                          gap, 0);
            place = end;
        }
    }

    // Of more places than there are experts: some of every expert.
    template <bool IS_LOAD>
    __aicore__ inline void MoveByExpert(uint64_t table, const AscendC::LocalTensor<int32_t>& units,
                                        const Share& places) const {
        const Share sources = {SourceAt(places.first), SourceAt(places.last)};
        const int64_t skipped = ExpertAt(places.first);
        const int64_t rest = ExpertAt(places.last);
        const uint32_t gap = static_cast<uint32_t>(num_experts_ - 1);  // of units
        for (int64_t expert = 0; expert < num_experts_; ++expert) {
            const int64_t begin = sources.first + (expert < skipped ? 1 : 0);
            const int64_t end = sources.last + (expert < rest ? 1 : 0);
            const int64_t place = begin * num_experts_ + expert;
            Copy<IS_LOAD>(GlobalAt<int32_t>(table)[expert * num_ranks_ + begin], units[UnitAt(place - places.first)],
                          end - begin, 0, gap);
        }
    }

    template <bool IS_LOAD>
    __aicore__ static inline void Copy(const AscendC::GlobalTensor<int32_t>& table,
                                       const AscendC::LocalTensor<int32_t>& units, int64_t count, uint32_t table_gap,
                                       uint32_t unit_gap) {
        const uint16_t number = static_cast<uint16_t>(count);
        if constexpr (IS_LOAD) {
            AscendC::DataCopyPad(units, table, {number, LENGTH, table_gap, unit_gap, 0}, NoPadding<int32_t>());
        } else {
            AscendC::DataCopyPad(table, units, {number, LENGTH, unit_gap, table_gap, 0});
        }
    }

    int64_t num_experts_ = 1;
    int64_t num_ranks_ = 1;
};

}  // namespace moe
