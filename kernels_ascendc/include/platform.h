// What differs between an AI core and a host that emulates one.
#pragma once

#include "kernel_operator.h"
#include "moe_layout.h"

#if defined(MOE_MEMFABRIC) && !defined(MOE_EMULATION)
#include "smem_shm_aicore_base_rdma.h"
#endif

namespace moe {

// Later scalar reads through this tensor read memory, not the core's data cache: for the bytes from its first one to
// the end of their line of 64. The empty statements keep the compiler from moving reads across.
template <typename T>
__aicore__ inline void DropCachedLine(const AscendC::GlobalTensor<T>& tensor) {
    __asm__ __volatile__("");
    AscendC::DataCacheCleanAndInvalid<T, AscendC::CacheLine::SINGLE_CACHE_LINE, AscendC::DcciDst::CACHELINE_OUT>(
        tensor);
    __asm__ __volatile__("");
}

#ifdef MOE_EMULATION
using emulation::BeginLook, emulation::BeginPhase, emulation::IsTraced, emulation::IsWatched;
using emulation::LetOthersRun;
using emulation::NotifyFlags, emulation::PieceBytes, emulation::PollPause, emulation::TraceStep;
using emulation::TraceWait, emulation::TraceWaitEnds, emulation::WaitsAreStopped;

// Whether waits run in a process, which may be stopped while the clock goes on.
constexpr bool CAN_BE_PAUSED = true;
#else
constexpr bool CAN_BE_PAUSED = false;

// Called between two polls of flags in the window at an address, of which so many were not there yet: those of so many
// tokens or entries from a first one on. An AI core simply polls again; on a host the rank that will set them may need
// this core, and long waits are reported.
__aicore__ inline void PollPause(uint32_t /*attempt*/, uint64_t /*window*/, int64_t /*missing*/, int64_t /*first*/,
                                 int64_t /*count*/) {}

// Before the first of some polls, or before a look that is no wait: for what others may have done until then.
__aicore__ inline void BeginLook() {}

// Between two things that are done for others, ahead of time: on a host somebody may need this core for what all wait
// for.
__aicore__ inline void LetOthersRun() {}

// In what pieces so many bytes go to so many places, a piece to each of them before the next one. A host that streams
// takes short ones.
__aicore__ inline int64_t PieceBytes(int64_t bytes, uint32_t /*places*/) {
    return bytes;
}

// Whether waits are to end as if at their deadline: on a host, because of Ctrl-C or `close`.
__aicore__ inline bool WaitsAreStopped() {
    return false;
}

// So many flags were set by a copy. On a host, a rank that waits for them may be asleep.
template <typename T>
__aicore__ inline void NotifyFlags(const AscendC::GlobalTensor<T>& /*to*/, uint64_t /*number*/) {}

// Whether this block is traced, which only a host does; an AI core has a profiler.
__aicore__ inline bool IsTraced() {
    return false;
}

// Whether the host asks for whom waits last, which only one that runs the kernels itself does.
__aicore__ inline bool IsWatched() {
    return false;
}

// The block begins a phase, by its number from 0 of those that run in its launch.
__aicore__ inline void BeginPhase(uint32_t /*number*/) {}

// The block begins a step: TRACE_WRITE, TRACE_SYNC, ...
__aicore__ inline void TraceStep(uint32_t /*kind*/) {}

// A wait that started at this cycle took so long for one flag of a peer; 0: the flag was already set.
__aicore__ inline void TraceWait(int64_t /*peer*/, int64_t /*start*/, int32_t /*us*/) {}

// A wait for a peer that started at this cycle ends now; the block goes on with its step.
__aicore__ inline void TraceWaitEnds(int64_t /*peer*/, int64_t /*start*/) {}
#endif

// Of flags in one copy. A host takes longer copies for rows, and orders nothing inside them.
constexpr int64_t MAX_POLLED_BYTES = 2048;
#ifdef MOE_EMULATION
static_assert(MAX_POLLED_BYTES <= emulation::LONGEST_POLLED_BYTES, "a flag is not seen before the count beside it");
#endif

// A copy that sets `number` flags.
template <typename T>
__aicore__ inline void RaiseFlags(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from,
                                  uint32_t count, uint32_t number) {
    AscendC::DataCopy(to, from, count);
    NotifyFlags(to, number);
}

// Whether kernels of this build post. An AI core does by memfabric-hybrid's RoCE write, where the build was given that.
#if defined(MOE_EMULATION) || defined(MOE_MEMFABRIC)
constexpr bool HAS_POSTS = true;
#else
constexpr bool HAS_POSTS = false;
#endif

// UB that a post writes to, of a unit each: an AI core rings the doorbell and moves the queue's head from there.
struct PostScratch {
    AscendC::LocalTensor<uint64_t> doorbell;
    AscendC::LocalTensor<uint32_t> head;
};

// Starts a write of `bytes` bytes at `local`, in this rank's out part, to `remote` in the window of `rank`, behind all
// that was posted to it before: its first piece comes when that is there. What is posted must be complete: copies that
// this core or others have under way are not. False while the queue is full. `flags` come with it that a host may be
// asleep for. A queue belongs to one core at a time.
//
// On an AI core it is never false: memfabric's function itself waits there until a full queue has room. All that goes
// to a rank goes by one queue pair, as no order holds between two.
__aicore__ inline bool Post([[maybe_unused]] uint32_t rank, [[maybe_unused]] uint64_t local,
                            [[maybe_unused]] uint64_t remote, [[maybe_unused]] uint64_t bytes,
                            [[maybe_unused]] uint32_t flags, [[maybe_unused]] const PostScratch& scratch) {
#if defined(MOE_EMULATION)
    // As the other one leaves it, and no access of this kernel's own.
    std::memset(scratch.doorbell.Host(), 0xFF, sizeof(uint64_t));
    std::memset(scratch.head.Host(), 0xFF, sizeof(uint32_t));
    return emulation::Post({local, remote, bytes, flags << PostItem::FLAG_SHIFT, rank});
#elif defined(MOE_MEMFABRIC)
    constexpr uint32_t QUEUE_PAIR = 0;
    smem_shm_roce_write(reinterpret_cast<__gm__ uint8_t*>(local), reinterpret_cast<__gm__ uint8_t*>(remote), rank,
                        QUEUE_PAIR, bytes, scratch.doorbell, scratch.head);
    return true;
#else
    return false;  // the host starts no kernel that needs queues
#endif
}

// Whole blocks of data with a flag at each one's end, of which no peer sees the flag before the data. What
// one copy writes to an aligned 512-byte block arrives in the order of its addresses: the AI core's memory
// system sees to it, and fullmesh_v2 is built on it. A host's memcpy promises no order.
__aicore__ inline void CopyBlocksInOrder(const AscendC::GlobalTensor<uint8_t>& to,
                                         const AscendC::LocalTensor<uint8_t>& from, uint32_t blocks) {
#ifdef MOE_EMULATION
    emulation::CopyBlocksInOrder(to, from, blocks, BLOCK_BYTES, BLOCK_DATA_BYTES);
    NotifyFlags(to, blocks);
#else
    AscendC::DataCopy(to, from, blocks * BLOCK_BYTES);
#endif
}

}  // namespace moe
