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
#ifndef MOE_LAUNCH_H
#define MOE_LAUNCH_H

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

// The host side knows the SoC's own limit (moe_triton/soc.py); no SoC has more cores than this.
inline bool HasCoreForEach(uint32_t blocks) {
    return blocks > 0 && blocks <= MAX_BLOCKS;
}

// CANN 9: "SIMD BuiltIn keywords", __mix__(cube, vec) and __schedmode__(mode). Before: "Setting the Kernel Type",
// and no word for the schedule mode.
#ifndef MOE_KERNEL_TYPE_BY_MACRO
constexpr uint32_t SCHEDULE_MODE = 1;
#define MOE_KERNEL_ATTRIBUTES __mix__(0, 1) __schedmode__(1)
#define MOE_KERNEL_TYPE
#else
constexpr uint32_t SCHEDULE_MODE = 0;
#define MOE_KERNEL_ATTRIBUTES
#define MOE_KERNEL_TYPE KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
#endif

}  // namespace moe

#ifndef MOE_SYNC_ADDRESS

#define MOE_KERNEL(name, Args) __global__ __aicore__ MOE_KERNEL_ATTRIBUTES void name##_kernel(Args args)
#define MOE_KERNEL_BEGIN MOE_KERNEL_TYPE
#define MOE_LAUNCH(name, blocks, stream, args)            \
    if (!moe::HasCoreForEach(blocks)) {                   \
        return moe::TOO_MANY_BLOCKS;                      \
    }                                                     \
    name##_kernel<<<(blocks), nullptr, (stream)>>>(args); \
    return 0

#else

// `-xcce`: nothing sets the address that cores meet at, so that it comes as an argument. No page was found that
// says so; public kernels that are built this way do it (catlass).
extern "C" int32_t rtGetC2cCtrlAddr(uint64_t* address, uint32_t* bytes);

#define MOE_KERNEL(name, Args) \
    __global__ __aicore__ MOE_KERNEL_ATTRIBUTES void name##_kernel(uint64_t sync_address, Args args)
#define MOE_KERNEL_BEGIN \
    MOE_KERNEL_TYPE      \
    AscendC::SetSyncBaseAddr(sync_address);
#define MOE_LAUNCH(name, blocks, stream, args)                           \
    if (!moe::HasCoreForEach(blocks)) {                                  \
        return moe::TOO_MANY_BLOCKS;                                     \
    }                                                                    \
    uint64_t sync_address = 0;                                           \
    uint32_t sync_bytes = 0;                                             \
    const int32_t failed = rtGetC2cCtrlAddr(&sync_address, &sync_bytes); \
    if (failed != 0) {                                                   \
        return failed;                                                   \
    }                                                                    \
    name##_kernel<<<(blocks), nullptr, (stream)>>>(sync_address, args);  \
    return 0

#endif
#endif

#endif  // MOE_LAUNCH_H
