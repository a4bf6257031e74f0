// What differs between an NPU and the emulation, and the small things that all kernels share.
#ifndef MOE_PLATFORM_H
#define MOE_PLATFORM_H

#include "kernel_operator.h"
#include "moe_layout.h"

namespace moe {

using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;

// Bytes of eight fp32, the smallest copy; a status entry is one.
constexpr uint32_t WORDS_PER_ENTRY = STATUS_ENTRY_BYTES / sizeof(int32_t);
constexpr int64_t TICKS_PER_US = 50;

// Between two looks at flags that are not there yet. An AI core has nothing better to do; on a CPU the
// rank that is waited for may need this very core.
__aicore__ inline void PollPause(uint32_t attempt) {
#ifdef MOE_ASCENDC_EMULATION
    moe::emulation::ThisCore().Poll(attempt);
#else
    (void)attempt;
#endif
}

template <typename T>
__aicore__ inline GlobalTensor<T> Global(uint64_t address) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
    return tensor;
}

struct Range {
    uint64_t begin;
    uint64_t end;
};

// Part `part` of `total` things split evenly into `parts` contiguous ranges.
__aicore__ inline Range Share(uint64_t total, uint64_t part, uint64_t parts) {
    const uint64_t each = total / parts;
    const uint64_t rest = total % parts;
    const uint64_t begin = part * each + (part < rest ? part : rest);
    return {begin, begin + each + (part < rest ? 1 : 0)};
}

// Waits on the scalar side for everything given to the event's source pipe so far.
template <HardEvent event>
__aicore__ inline void Synchronize() {
    constexpr int32_t ID = 0;
    AscendC::SetFlag<event>(ID);
    AscendC::WaitFlag<event>(ID);
}

class Deadline {
public:
    __aicore__ inline explicit Deadline(int64_t timeout_us)
        : end_(AscendC::GetSystemCycle() + timeout_us * TICKS_PER_US) {}
    __aicore__ inline bool Passed() const { return AscendC::GetSystemCycle() > end_; }

private:
    int64_t end_;
};

// This block's line of the report: the first thing that went wrong stays.
class Report {
public:
    __aicore__ inline explicit Report(uint64_t address)
        : line_(Global<int32_t>(address)[AscendC::GetBlockIdx() * REPORT_WORDS]) {}

    __aicore__ inline void Write(uint32_t code, uint64_t index, uint64_t count) {
        if (written_) {
            return;
        }
        written_ = true;
        line_.SetValue(1, static_cast<int32_t>(index));
        line_.SetValue(2, static_cast<int32_t>(count));
        line_.SetValue(0, static_cast<int32_t>(code));
        AscendC::DataCacheCleanAndInvalid<int32_t, AscendC::CacheLine::SINGLE_CACHE_LINE,
                                          AscendC::DcciDst::CACHELINE_OUT>(line_);
    }

private:
    GlobalTensor<int32_t> line_;
    bool written_ = false;
};

}  // namespace moe

#endif  // MOE_PLATFORM_H
