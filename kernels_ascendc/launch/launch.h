// How a kernel is declared and started: all that differs between a host and the compilers of CANN.
//
// SyncAll asks three things of a launch (Ascend C API, SyncAll): that the kernel's type is mixed although it
// runs on vector cores alone, that no more blocks than cores are started, and, where several streams run, that
// its blocks start together. One that started with some of its blocks would wait in SyncAll for cores that
// another launch holds, which waits for these.
//
// MOE_KERNEL(name, Args)        a kernel's head; its arguments are `args`
// MOE_KERNEL_BEGIN              the first statement of its body
// MOE_LAUNCH(name, ...)         the statements of its launcher
// moe::SCHEDULE_MODE            1: blocks start together; 0: the compiler cannot say so
#pragma once

#include "moe_layout.h"

#ifdef MOE_EMULATION

namespace moe {
constexpr uint32_t SCHEDULE_MODE = 1;
}

#define MOE_KERNEL(name, Args) static void name##_kernel(Args args)
#define MOE_KERNEL_BEGIN
#define MOE_LAUNCH(name, blocks, stream, args) \
    return moe::emulation::RunBlocks((blocks), [&] { name##_kernel(args); }, (stream))

#else

namespace moe {

constexpr int32_t TOO_MANY_BLOCKS = 1;

// The host side knows the SoC's own limit (moe_triton/core/soc.py); no SoC has more cores than this.
inline bool HasCoreForEach(uint32_t blocks) {
    return blocks > 0 && blocks <= MAX_BLOCKS;
}

// CANN 9: "SIMD BuiltIn keywords", __mix__(cube, vec) and __schedmode__(mode). Before: "Setting the Kernel Type",
// and no word for the schedule mode.
#ifndef MOE_KERNEL_TYPE_BY_MACRO
constexpr uint32_t SCHEDULE_MODE = 1;
#define MOE_KERNEL_ATTRIBUTES __mix__(0, 1) __schedmode__(1)
#define MOE_KERNEL_BEGIN
#else
constexpr uint32_t SCHEDULE_MODE = 0;
#define MOE_KERNEL_ATTRIBUTES
#define MOE_KERNEL_BEGIN KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
#endif

}  // namespace moe

#define MOE_KERNEL(name, Args) __global__ __aicore__ MOE_KERNEL_ATTRIBUTES void name##_kernel(Args args)
#define MOE_LAUNCH(name, blocks, stream, args)            \
    if (!moe::HasCoreForEach(blocks)) {                   \
        return moe::TOO_MANY_BLOCKS;                      \
    }                                                     \
    name##_kernel<<<(blocks), nullptr, (stream)>>>(args); \
    return 0

#endif
