// Dispatch, step 3 where each row has a flag: waits for the rows that the status entries have counted, and clears
// their flags. What is in the rows stays for a later launch.
//
// Two zones are enough for the reasons that inband_receive.h gives: entries go out before rows here, too, and a
// dispatch ends only when every row that was sent to it has come.
#pragma once

#include "row_flags.h"

namespace moe {

class DispatchRows : Kernel<DispatchRowsArgs> {
public:
    __aicore__ inline void Init(const DispatchRowsArgs& args, AscendC::TPipe* pipe) {
        Kernel::Init(args, pipe);
        flags_.Init(&args_, pipe, &report_);
    }

    __aicore__ inline void Process() {
        const Share share = flags_.Begin();
        deadline_.Start(report_.IsOld() ? 0 : args_.timeout_us);
        for (int64_t first = share.first; first < share.last; first += Flags::PLACES_PER_CHUNK) {
            const Share places = {first, Smaller(first + Flags::PLACES_PER_CHUNK, share.last)};
            flags_.Load(places);
            for (int64_t place = places.first; place < places.last; ++place) {
                AddRows(place);
            }
            FinishPieces();
            flags_.Store();
        }
        report_.Write();
    }

private:
    using Flags = RowFlags<DispatchRowsArgs>;

    static constexpr int64_t MAX_PIECES = 64;

    // Neighbouring slots of one entry, whose stamps are polled together with those of other pieces: a poll costs a
    // round trip, whatever it reads.
    struct Piece {
        uint64_t stamp;  // the first
        int64_t place;
        int64_t first;  // of its stamps in UB
        int64_t count;
        bool is_noted;
    };

    __aicore__ inline void AddRows(int64_t place) {
        const int64_t count = flags_.CheckedRowsOf(place);
        for (int64_t done = 0; done < count;) {
            if (num_pieces_ == MAX_PIECES || num_stamps_ == Flags::MAX_STAMPS) {
                FinishPieces();
            }
            const int64_t more = Smaller(count - done, Flags::MAX_STAMPS - num_stamps_);
            pieces_[num_pieces_++] = {flags_.StampOf(place, done), place, num_stamps_, more, false};
            num_stamps_ += more;
            done += more;
        }
    }

    __aicore__ inline void FinishPieces() {
        const bool is_complete = num_pieces_ == 0 || WaitForPieces();
        for (int64_t i = 0; i < num_pieces_; ++i) {
            const Piece& piece = pieces_[i];
            if (is_complete || IsComplete(piece)) {
                flags_.Clear(piece.stamp, piece.count);
            } else {
                flags_.GiveUp(piece.place, deadline_);
            }
        }
        num_pieces_ = 0;
        num_stamps_ = 0;
    }

    __aicore__ inline bool WaitForPieces() {
        flags_.Prepare(num_stamps_);
        const int64_t first = pieces_[0].place;
        int64_t noted = -1;
        for (PollLoop poll(deadline_, args_.window, first, pieces_[num_pieces_ - 1].place + 1 - first); poll.Next();) {
            Order<AscendC::HardEvent::S_MTE2>();
            for (int64_t i = 0; i < num_pieces_; ++i) {
                flags_.LoadStamps(pieces_[i].stamp, pieces_[i].first, pieces_[i].count);
            }
            for (int64_t i = 0; flags_.LookForSilent() && i < num_pieces_; ++i) {
                if (flags_.IsSilent(pieces_[i].place)) {
                    flags_.StandIn(pieces_[i].first, pieces_[i].count);
                }
            }
            const int64_t seen = flags_.CountSet(num_stamps_);
            if (flags_.IsTimed() && seen != noted) {
                NoteArrivals(poll.WaitedUs(), seen);
                noted = seen;
            }
            if (seen == num_stamps_) {
                return true;
            }
            poll.Miss(num_stamps_ - seen);
        }
        return false;
    }

    __aicore__ inline bool IsComplete(const Piece& piece) const {
        for (int64_t i = piece.first; i < piece.first + piece.count; ++i) {
            if (!flags_.IsSet(i)) {
                return false;
            }
        }
        return true;
    }

    __aicore__ inline void NoteArrivals(int32_t us, int64_t seen) {
        // All were there at once, as most often.
        if (us == 0 && seen == num_stamps_) {
            return;
        }
        for (int64_t i = 0; i < num_pieces_; ++i) {
            Piece& piece = pieces_[i];
            if (!piece.is_noted && (seen == num_stamps_ || IsComplete(piece))) {
                piece.is_noted = true;
                flags_.NoteWait(piece.place, deadline_, us);
            }
        }
    }

    Flags flags_;
    Deadline deadline_;
    Piece pieces_[MAX_PIECES];
    int64_t num_pieces_ = 0;
    int64_t num_stamps_ = 0;
};

}  // namespace moe
