// Two halves of a buffer in UB.
#ifndef MOE_DOUBLE_BUFFER_H
#define MOE_DOUBLE_BUFFER_H

#include "flags.h"

namespace moe {

// Scalar code fills one half of a buffer while copies out of the other are under way.
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

}  // namespace moe

#endif  // MOE_DOUBLE_BUFFER_H
