// How a kernel is declared and started: all that differs between a host and the compilers of CANN.
//
// SyncAll asks three things of a launch (Ascend C API, SyncAll): that the kernel's type is mixed although it
// runs on vector cores alone, that no more blocks than cores are started, and, where several streams run, that
// its blocks start together. One that started with some of its blocks would wait in SyncAll for cores that
// another launch holds, which waits for these.
//
// MOE_KERNEL(name, Args)        a kernel's head; its one parameter is `args`
// MOE_KERNEL_BEGIN              the first statement of its body
// MOE_LAUNCH(name, ...)         the statements of its launcher
// MOE_SCHEDULE_MODE             1: blocks start together; 0: the compiler cannot say so
#ifndef MOE_LAUNCH_H
#define MOE_LAUNCH_H

#include "moe_layout.h"

#if defined(MOE_EMULATION)

#define MOE_SCHEDULE_MODE 1
#define MOE_KERNEL(name, Args) static void name##_kernel(Args args)
#define MOE_KERNEL_BEGIN
#define MOE_LAUNCH(name, blocks, stream, args) \
    return moe::emulation::RunBlocks((blocks), [&] { name##_kernel(args); }, (stream))

#else

namespace moe {

// The host side knows the SoC's own limit (moe_triton/soc.py); no SoC has more cores than this.
inline bool HasCoreForEach(uint32_t blocks) {
    return blocks > 0 && blocks <= MAX_BLOCKS;
}

constexpr int TOO_MANY_BLOCKS = 1;

}  // namespace moe

#if !defined(MOE_KERNEL_TYPE_BY_MACRO)

// CANN 9: "SIMD BuiltIn keywords", __mix__(cube, vec) and __schedmode__(mode).
#define MOE_SCHEDULE_MODE 1
#define MOE_KERNEL(name, Args) __global__ __aicore__ __mix__(0, 1) __schedmode__(1) void name##_kernel(Args args)
#define MOE_KERNEL_BEGIN
#define MOE_LAUNCH(name, blocks, stream, args)        \
    if (!moe::HasCoreForEach(blocks)) {               \
        return moe::TOO_MANY_BLOCKS;                  \
    }                                                 \
    name##_kernel<<<(blocks), nullptr, (stream)>>>(args); \
    return 0

#elif !defined(MOE_SYNC_ADDRESS)

// CANN 8.3 and 8.5: "Setting the Kernel Type". No schedule mode in the language yet.
#define MOE_SCHEDULE_MODE 0
#define MOE_KERNEL(name, Args) __global__ __aicore__ void name##_kernel(Args args)
#define MOE_KERNEL_BEGIN KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
#define MOE_LAUNCH(name, blocks, stream, args)        \
    if (!moe::HasCoreForEach(blocks)) {               \
        return moe::TOO_MANY_BLOCKS;                  \
    }                                                 \
    name##_kernel<<<(blocks), nullptr, (stream)>>>(args); \
    return 0

#else

// CANN 8.0 to 8.2, `-xcce`: nothing sets the address that cores meet at, so that it comes as an argument. No page
// says so of a plain kernel; kernels that are built this way in public do it (catlass).
extern "C" int32_t rtGetC2cCtrlAddr(uint64_t* address, uint32_t* bytes);

#define MOE_SCHEDULE_MODE 0
#define MOE_KERNEL(name, Args) __global__ __aicore__ void name##_kernel(uint64_t sync_address, Args args)
#define MOE_KERNEL_BEGIN                               \
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0); \
    AscendC::SetSyncBaseAddr(sync_address);
#define MOE_LAUNCH(name, blocks, stream, args)                      \
    if (!moe::HasCoreForEach(blocks)) {                             \
        return moe::TOO_MANY_BLOCKS;                                \
    }                                                               \
    uint64_t sync_address = 0;                                      \
    uint32_t sync_bytes = 0;                                        \
    const int32_t failed = rtGetC2cCtrlAddr(&sync_address, &sync_bytes); \
    if (failed != 0) {                                              \
        return failed;                                              \
    }                                                               \
    name##_kernel<<<(blocks), nullptr, (stream)>>>(sync_address, args); \
    return 0

#endif
#endif

#endif  // MOE_LAUNCH_H
