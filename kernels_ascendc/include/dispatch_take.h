// Dispatch in parts, step 3: takes the rows that have come, whosever they are, and notes which for the launch that
// arranges them. Only the last part waits.
//
// Rows of an entry are sent in their order, so those that have come are the first ones, or some of them: a part takes
// as far as there is none missing.
#pragma once

#include "row_flags.h"

namespace moe {

class DispatchTake : Kernel<DispatchTakeArgs> {
public:
    __aicore__ inline void Init(const DispatchTakeArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        flags_.Init(&args_, pipe, &report_);
        taken_.Init(pipe, Flags::PLACES_PER_CHUNK);
    }

    __aicore__ inline void Process() {
        const Share share = flags_.Begin();
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        for (int64_t first = share.first; first < share.last; first += Flags::PLACES_PER_CHUNK) {
            const Share places = {first, Smaller(first + Flags::PLACES_PER_CHUNK, share.last)};
            flags_.Load(places);
            LoadTaken(places);
            if (args_.part + 1 == args_.num_parts) {
                WaitForAll(places);
            } else {
                TakeWhatIsThere(places, 0);
            }
            taken_.Store(args_.rows_taken, places.last - places.first);
            flags_.Store();
        }
        report_.Write();
    }

private:
    using Flags = RowFlags<DispatchTakeArgs>;

    // Of each place, the rows that the parts before have taken.
    __aicore__ inline void LoadTaken(const Share& places) {
        if (args_.part > 0) {
            taken_.Fetch(args_.rows_before, places.first, places.last - places.first);
            return;
        }
        taken_.Begin(places.first);
        for (int64_t place = places.first; place < places.last; ++place) {
            flags_.CheckedRowsOf(place);
            taken_.Set(place, 0);
        }
        taken_.Store(args_.rows_before, places.last - places.first);
    }

    __aicore__ inline void WaitForAll(const Share& places) {
        for (PollLoop poll(deadline_, args_.window, places.first, places.last - places.first); poll.Next();) {
            const int64_t missing = TakeWhatIsThere(places, poll.WaitedUs());
            if (missing == 0) {
                return;
            }
            // For whoever looks whom this waits for.
            taken_.Store(args_.rows_taken, places.last - places.first);
            poll.Miss(missing);
        }
        for (int64_t place = places.first; place < places.last; ++place) {
            if (taken_.At(place) < flags_.RowsOf(place)) {
                flags_.GiveUp(place, deadline_);
            }
        }
    }

    // Returns how many flags are missing, at least.
    __aicore__ inline int64_t TakeWhatIsThere(const Share& places, int32_t us) {
        int64_t missing = 0;
        const bool has_silent = flags_.LookForSilent();
        for (int64_t place = places.first; place < places.last; ++place) {
            const int64_t rows = flags_.RowsOf(place);
            if (taken_.At(place) < rows && !(has_silent && flags_.IsSilent(place))) {
                missing += TakeRows(place, rows, us);
            }
        }
        return missing;
    }

    __aicore__ inline int64_t TakeRows(int64_t place, int64_t rows, int32_t us) {
        int64_t missing = 0;
        int64_t row = taken_.At(place);
        while (missing == 0 && row < rows) {
            const int64_t count = Smaller(rows - row, Flags::MAX_STAMPS);
            const uint64_t stamp = flags_.StampOf(place, row);
            flags_.Prepare(count);
            Order<AscendC::HardEvent::S_MTE2>();
            flags_.LoadStamps(stamp, 0, count);
            missing = count - flags_.CountSet(count);
            const int64_t there = missing == 0 ? count : CountFirst();
            if (there > 0) {
                flags_.Clear(stamp, there);
            }
            row += there;
        }
        taken_.Set(place, static_cast<int32_t>(row));
        if (row == rows && us > 0 && flags_.IsTimed()) {
            flags_.NoteWait(place, deadline_, us);
        }
        return missing;
    }

    // Of the stamps in UB, those before the first one without a flag.
    __aicore__ inline int64_t CountFirst() const {
        int64_t there = 0;
        while (flags_.IsSet(there)) {
            ++there;
        }
        return there;
    }

    Flags flags_;
    Table taken_;
    Deadline deadline_;
};

}  // namespace moe
