// Whole rows from this rank's memory to slots of any rank, through UB, and what goes with them from there.
#pragma once

#include "flags.h"

namespace moe {

// Two halves of a buffer in UB: scalar code fills one half of a buffer while copies out of the other are under way.
class DoubleBuffer {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe) {
        pipe_ = pipe;
        free_[0] = pipe->AllocEventID<AscendC::HardEvent::MTE3_S>();
        free_[1] = pipe->AllocEventID<AscendC::HardEvent::MTE3_S>();
    }

    // Index of a half that no copy reads any more.
    __aicore__ inline uint32_t Take() {
        if (given_ - waited_ == 2) {
            AscendC::WaitFlag<AscendC::HardEvent::MTE3_S>(free_[waited_ % 2]);
            ++waited_;
        }
        return given_ % 2;
    }

    // After the last copy out of the half that was taken.
    __aicore__ inline void Give() {
        AscendC::SetFlag<AscendC::HardEvent::MTE3_S>(free_[given_ % 2]);
        ++given_;
    }

    __aicore__ inline void Finish() {
        for (; waited_ < given_; ++waited_) {
            AscendC::WaitFlag<AscendC::HardEvent::MTE3_S>(free_[waited_ % 2]);
        }
        pipe_->ReleaseEventID<AscendC::HardEvent::MTE3_S>(free_[0]);
        pipe_->ReleaseEventID<AscendC::HardEvent::MTE3_S>(free_[1]);
    }

private:
    AscendC::TPipe* pipe_ = nullptr;
    AscendC::TEventID free_[2];
    uint32_t given_ = 0;
    uint32_t waited_ = 0;
};

// How many results there are to send back. The prefix sums came from memory that peers, or callers, write: they cannot
// make us read past our own rows.
template <typename Args>
__aicore__ inline int64_t NumResults(const Args& args, Report& report) {
    const int64_t rows = ReadFresh<int32_t>(args.recv_offsets, args.num_entries - 1);
    if (rows >= 0 && rows <= args.capacity) {
        return rows;
    }
    if (AscendC::GetBlockIdx() == 0) {
        report.Add(REPORT_BAD_ROW, rows < 0 ? 0 : args.capacity, rows < 0 ? 1 : rows - args.capacity);
    }
    return rows < 0 ? 0 : args.capacity;
}

// Whether there is a place for this result of a token.
template <typename Args>
__aicore__ inline bool NamesPlace(const Args& args, bool is_flagged, uint64_t token, uint64_t k) {
    const uint64_t zone = args.zone;
    return args.slots.Contains(zone, token, k) && (!is_flagged || args.status.Contains(zone, token, k));
}

class RowCopy {
public:
    __aicore__ inline void Init(AscendC::TPipe* pipe, int64_t row_bytes) {
        row_bytes_ = row_bytes;
        piece_bytes_ = Smaller(row_bytes, MAX_PIECE_BYTES);
        pipe->InitBuffer(rows_, 2, static_cast<uint32_t>(piece_bytes_));
    }

    // One row to several slots: it is loaded once.
    __aicore__ inline void Copy(uint64_t source, const uint64_t* slots, uint32_t num_slots) {
        CopyBytes(source, row_bytes_, slots, num_slots);
    }

    // Neighbouring rows to neighbouring places.
    __aicore__ inline void CopyRows(uint64_t source, int64_t number, uint64_t to) {
        CopyBytes(source, number * row_bytes_, &to, 1);
    }

private:
    static constexpr int64_t MAX_PIECE_BYTES = 64 * 1024;

    __aicore__ inline void CopyBytes(uint64_t source, int64_t num_bytes, const uint64_t* slots, uint32_t num_slots) {
        const int64_t piece_bytes = PieceBytes(piece_bytes_, num_slots);
        for (int64_t done = 0; done < num_bytes; done += piece_bytes) {
            const uint64_t at = done;
            const uint32_t bytes = static_cast<uint32_t>(Smaller(piece_bytes, num_bytes - done));
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

    AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 2> rows_;
    int64_t row_bytes_ = 0;
    int64_t piece_bytes_ = 0;
};

}  // namespace moe
