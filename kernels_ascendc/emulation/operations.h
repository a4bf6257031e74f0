// Copies, flags, barriers, and the few vector operations that flags need.
#pragma once

#include <array>
#include <chrono>
#include <cstring>
#include <tuple>

#include "tensors.h"

namespace AscendC {

namespace detail {

inline moe::emulation::Core& Core() { return moe::emulation::ThisCore(); }

// Whole 32-byte blocks between GM and an aligned place in UB, inside both.
template <typename T>
uint64_t CheckedBytes(const LocalTensor<T>& local, const GlobalTensor<T>& global, uint64_t count) {
    const uint64_t bytes = count * sizeof(T);
    Core().Require(bytes % BLOCK_BYTES == 0, "DataCopy: the bytes are not a multiple of 32");
    Core().Require(bytes > 0, "DataCopy of nothing");
    Core().Require(local.GetPhyAddr().offset % BLOCK_BYTES == 0, "DataCopy: UB address not aligned to 32 bytes");
    Core().Require(count <= local.GetSize(), "DataCopy beyond the end of a LocalTensor");
    Core().Require(count <= global.GetSize(), "DataCopy beyond the end of a GlobalTensor");
    return bytes;
}

// The offsets of block b of a padded copy on either side. UB blocks start on 32-byte boundaries.
struct PadBlock {
    uint64_t global_at;
    uint64_t local_at;
};

inline uint64_t RoundedUp(uint32_t bytes) { return (uint64_t{bytes} + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES; }

inline PadBlock BlockAt(uint32_t b, const DataCopyExtParams& p, uint32_t global_gap, uint32_t local_gap) {
    const uint64_t local_step = RoundedUp(p.blockLen) + uint64_t{local_gap} * BLOCK_BYTES;
    return {b * (uint64_t{p.blockLen} + global_gap), b * local_step};
}

template <typename T>
void CheckPad(const LocalTensor<T>& local, const GlobalTensor<T>& global, const DataCopyExtParams& p, PadBlock last) {
    constexpr uint32_t MAX_BLOCK_COUNT = 4095;
    constexpr uint32_t MAX_BLOCK_LEN = (1U << 21) - 1;
    Core().Require(p.blockCount > 0 && p.blockLen > 0, "DataCopyPad of nothing");
    Core().Require(p.blockCount <= MAX_BLOCK_COUNT, "DataCopyPad: at most 4095 blocks");
    Core().Require(p.blockLen <= MAX_BLOCK_LEN, "DataCopyPad: blocks of at most 2 MB - 1");
    Core().Require(p.blockLen % sizeof(T) == 0, "DataCopyPad: a block of broken elements");
    Core().Require(local.GetPhyAddr().offset % BLOCK_BYTES == 0, "DataCopyPad: UB address not aligned to 32 bytes");
    // A load fills its last 32-byte unit with undefined bytes.
    Core().Require(last.local_at + RoundedUp(p.blockLen) <= uint64_t{local.GetSize()} * sizeof(T),
                   "DataCopyPad beyond the end of a LocalTensor");
    Core().Require(last.global_at + p.blockLen <= global.GetSize() * sizeof(T),
                   "DataCopyPad beyond the end of a GlobalTensor");
}

template <typename T>
moe::emulation::UbAddress After(const LocalTensor<T>& local, PadBlock at) {
    return {local.GetPhyAddr().offset + static_cast<uint32_t>(at.local_at)};
}

template <typename T>
void RequireAligned(const LocalTensor<T>& local) {
    Core().Require(local.GetPhyAddr().offset % BLOCK_BYTES == 0, "a vector operand is not aligned to 32 bytes");
}

template <typename T>
uint8_t* Bytes(const GlobalTensor<T>& global) {
    return reinterpret_cast<uint8_t*>(global.Host());
}

// What the vector instruction that has begun reads and writes: the first `count` elements.
template <typename T>
void Reads(const LocalTensor<T>& local, uint64_t count) {
    Core().AccessUb(PIPE_V, local.GetPhyAddr(), count * sizeof(T), false);
}

template <typename T>
void Writes(const LocalTensor<T>& local, uint64_t count) {
    Core().AccessUb(PIPE_V, local.GetPhyAddr(), count * sizeof(T), true);
}

}  // namespace detail

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
    const uint64_t bytes = detail::CheckedBytes(dst, src, count);
    detail::Core().BeginInstruction(PIPE_MTE2);
    detail::Core().CopyIn(dst.GetPhyAddr(), detail::Bytes(src), bytes);
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
    const uint64_t bytes = detail::CheckedBytes(src, dst, count);
    detail::Core().BeginInstruction(PIPE_MTE3);
    detail::Core().CopyOut(detail::Bytes(dst), src.GetPhyAddr(), bytes);
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad) {
    // The kernels need no padding values; ignoring them silently would be worse than refusing them.
    detail::Core().Require(!pad.isPad, "DataCopyPad: padding values are not emulated");
    detail::CheckPad(dst, src, p, detail::BlockAt(p.blockCount - 1U, p, p.srcStride, p.dstStride));
    detail::Core().BeginInstruction(PIPE_MTE2);
    for (uint32_t b = 0; b < p.blockCount; ++b) {
        const auto at = detail::BlockAt(b, p, p.srcStride, p.dstStride);
        detail::Core().CopyIn(detail::After(dst, at), detail::Bytes(src) + at.global_at, p.blockLen);
        detail::Core().Spoil({detail::After(dst, at).offset + p.blockLen},
                             static_cast<uint32_t>(detail::RoundedUp(p.blockLen) - p.blockLen));
    }
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p) {
    detail::CheckPad(src, dst, p, detail::BlockAt(p.blockCount - 1U, p, p.dstStride, p.srcStride));
    detail::Core().BeginInstruction(PIPE_MTE3);
    for (uint32_t b = 0; b < p.blockCount; ++b) {
        const auto at = detail::BlockAt(b, p, p.dstStride, p.srcStride);
        detail::Core().CopyOut(detail::Bytes(dst) + at.global_at, detail::After(src, at), p.blockLen);
    }
}

namespace detail {

constexpr int32_t REPEAT_BYTES = 256;

template <typename T>
T ElementAt(const uint8_t* from, int64_t index) {
    T value;
    std::memcpy(&value, from + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

// A vector instruction on the first `count` elements: each of `dst` from its index and those of the sources.
template <typename T, typename Function, typename... Sources>
void Transform(const char* beyond, const LocalTensor<T>& dst, int64_t count, Function&& function,
               const LocalTensor<Sources>&... sources) {
    Core().Require(count > 0 && count <= dst.GetSize() && ((count <= sources.GetSize()) && ...), beyond);
    RequireAligned(dst);
    (RequireAligned(sources), ...);
    Core().BeginInstruction(PIPE_V);
    (Reads(sources, static_cast<uint64_t>(count)), ...);
    Writes(dst, static_cast<uint64_t>(count));
    uint8_t* to = dst.Host();
    const std::array<const uint8_t*, sizeof...(Sources)> all{sources.Host()...};
    Core().Issue(PIPE_V, [=] {
        for (int64_t i = 0; i < count; ++i) {
            const T value = std::apply([&](auto*... from) { return function(i, ElementAt<Sources>(from, i)...); }, all);
            std::memcpy(to + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
        }
    });
}

constexpr const char* BEYOND = "a vector instruction beyond the end of a LocalTensor";

// A vector instruction that sums the first `count` elements, or some of them: `sum` says which.
template <typename T, typename Sum>
void Reduce(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer, uint64_t count,
            bool fits, Sum&& sum) {
    Core().Require(count <= src.GetSize(), "ReduceSum beyond the end of its source");
    Core().Require(dst.GetSize() >= 1, "ReduceSum needs room for its result");
    RequireAligned(src);
    Core().Require(fits, "ReduceSum: temporary too small");
    Core().BeginInstruction(PIPE_V, true);
    Reads(src, count);
    Writes(sharedTmpBuffer, sharedTmpBuffer.GetSize());
    Writes(dst, 1);
    uint8_t* to = dst.Host();
    const uint8_t* from = src.Host();
    Core().Issue(PIPE_V, [=] {
        const T value = sum(from);
        std::memcpy(to, &value, sizeof(T));
    });
}

}  // namespace detail

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count) {
    detail::Transform("Duplicate beyond the end of a LocalTensor", dst, count, [value](int64_t) { return value; });
}

// The first `mask` elements of each of `repeatTime` repeats, `dstRepeatStride` 32-byte blocks apart.
template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& value, uint64_t mask, const uint8_t repeatTime,
               const uint16_t dstBlockStride, const uint8_t dstRepeatStride) {
    auto& core = detail::Core();
    const uint64_t step = uint64_t{dstRepeatStride} * BLOCK_BYTES;
    core.Require(mask > 0 && mask * sizeof(T) <= 8ULL * BLOCK_BYTES, "Duplicate: a mask of 1 to 64 elements");
    core.Require(repeatTime > 0, "Duplicate: 1 to 255 repeats");
    core.Require(dstBlockStride == 1, "Duplicate: gaps inside a repeat are not emulated");
    core.Require((repeatTime - uint64_t{1}) * step + mask * sizeof(T) <= uint64_t{dst.GetSize()} * sizeof(T),
                 "Duplicate beyond the end of a LocalTensor");
    detail::RequireAligned(dst);
    core.BeginInstruction(PIPE_V);
    for (uint32_t repeat = 0; repeat < repeatTime; ++repeat) {
        detail::Writes(dst[static_cast<uint32_t>(repeat * step / sizeof(T))], mask);
    }
    uint8_t* to = dst.Host();
    core.Issue(PIPE_V, [=] {
        for (uint64_t repeat = 0; repeat < repeatTime; ++repeat) {
            for (uint64_t i = 0; i < mask; ++i) std::memcpy(to + repeat * step + i * sizeof(T), &value, sizeof(T));
        }
    });
}

// The greater of each of the first `count` elements and a scalar.
template <typename T>
void Maxs(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count) {
    detail::Transform(
        detail::BEYOND, dst, count, [=](int64_t, T value) { return value < scalar ? scalar : value; }, src);
}

// The smaller of each of the first `count` elements and a scalar.
template <typename T>
void Mins(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count) {
    detail::Transform(
        detail::BEYOND, dst, count, [=](int64_t, T value) { return scalar < value ? scalar : value; }, src);
}

// The first `count` elements of two tensors.
template <typename T>
void Add(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, const int32_t& count) {
    constexpr const char* BEYOND = "Add beyond the end of a LocalTensor";
    detail::Transform(BEYOND, dst, count, [](int64_t, T first, T second) { return first + second; }, src0, src1);
}

// The sum of each of the first `count` elements and a scalar.
template <typename T>
void Adds(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count) {
    detail::Transform(
        detail::BEYOND, dst, count, [=](int64_t, T value) { return static_cast<T>(value + scalar); }, src);
}

// The product of each of the first `count` elements and a scalar.
template <typename T>
void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count) {
    detail::Transform(
        detail::BEYOND, dst, count, [=](int64_t, T value) { return static_cast<T>(value * scalar); }, src);
}

// `count` numbers, one greater each, from the first one on.
template <typename T>
void CreateVecIndex(LocalTensor<T> dst, const T& firstValue, uint32_t count) {
    detail::Transform("CreateVecIndex beyond the end of a LocalTensor", dst, count,
                      [first = firstValue](int64_t i) { return static_cast<T>(first + static_cast<T>(i)); });
}

// The first `count` elements in another type.
template <typename T, typename U>
void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, const uint32_t count) {
    static_assert(sizeof(T) == sizeof(U), "only conversions that keep the width are emulated");
    detail::Core().Require(mode == RoundMode::CAST_NONE, "Cast: roundings are not emulated");
    detail::Transform(detail::BEYOND, dst, count, [](int64_t, U value) { return static_cast<T>(value); }, src);
}

// Sums the first `count` elements.
template <typename T>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t count) {
    constexpr int32_t LANES = 8;
    detail::Core().Require(count > 0, "ReduceSum beyond the end of its source");
    const bool fits = sharedTmpBuffer.GetSize() * uint64_t{detail::REPEAT_BYTES} >= count * sizeof(T);
    detail::Reduce(dst, src, sharedTmpBuffer, static_cast<uint64_t>(count), fits, [count](const uint8_t* from) {
        T lanes[LANES] = {};
        for (int32_t i = 0; i < count; ++i) lanes[i % LANES] += detail::ElementAt<T>(from, i);
        T sum{};
        for (const T lane : lanes) sum += lane;
        return sum;
    });
}

// Sums the elements that `mask` names of each of `repeatTime` repeats, `srcRepStride` 32-byte blocks apart.
template <typename T>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const uint64_t mask[], const int32_t repeatTime, const int32_t srcRepStride) {
    static_assert(sizeof(T) == 4, "one mask word covers the 64 elements of a repeat");
    constexpr int32_t MAX_REPEATS = 255;
    detail::Core().Require(mask[0] != 0, "ReduceSum: an empty mask");
    detail::Core().Require(repeatTime > 0 && repeatTime <= MAX_REPEATS, "ReduceSum: 1 to 255 repeats");
    const uint64_t repeat_bytes = static_cast<uint64_t>(srcRepStride) * BLOCK_BYTES;
    const uint64_t end = (static_cast<uint64_t>(repeatTime) - 1) * repeat_bytes + detail::REPEAT_BYTES;
    const bool fits = sharedTmpBuffer.GetSize() >= static_cast<uint32_t>(repeatTime);
    detail::Reduce(dst, src, sharedTmpBuffer, end / sizeof(T), fits, [=, bits = mask[0]](const uint8_t* from) {
        T sum{};
        for (int32_t repeat = 0; repeat < repeatTime; ++repeat) {
            for (uint64_t left = bits; left != 0; left &= left - 1) {
                sum += detail::ElementAt<T>(from + static_cast<uint64_t>(repeat) * repeat_bytes, __builtin_ctzll(left));
            }
        }
        return sum;
    });
}

template <HardEvent event>
void SetFlag(int32_t id) {
    detail::Core().Require(id >= 0 && static_cast<uint32_t>(id) < NUM_EVENT_IDS, "event ids are 0 to 7");
    detail::Core().SetFlag(event, static_cast<uint64_t>(id));
}

template <HardEvent event>
void WaitFlag(int32_t id) {
    detail::Core().Require(id >= 0 && static_cast<uint32_t>(id) < NUM_EVENT_IDS, "event ids are 0 to 7");
    detail::Core().WaitFlag(event, static_cast<uint64_t>(id));
}

template <pipe_t pipe>
void PipeBarrier() {
    detail::Core().Barrier(pipe);
}

template <bool isAIVOnly = true>
void SyncAll() {
    static_assert(isAIVOnly, "there are only vector cores here");
    detail::Core().SyncAll();
}

inline int64_t GetBlockIdx() { return detail::Core().block; }
inline int64_t GetBlockNum() { return detail::Core().blocks; }

// 50 ticks a microsecond, as on A2 and A3.
inline int64_t GetSystemCycle() {
#ifdef MOE_EMULATION_COUNTING
    return 0;  // no deadline passes
#endif
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() / static_cast<int64_t>(moe::NS_PER_CYCLE);
}

template <typename T, CacheLine line, DcciDst destination>
void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst) {
    static_assert(destination == DcciDst::CACHELINE_OUT || destination == DcciDst::CACHELINE_ALL,
                  "the cache is to agree with GM");
    if constexpr (line == CacheLine::ENTIRE_DATA_CACHE) {
        detail::Core().CleanAndInvalidateAll();
    } else {
        detail::Core().CleanAndInvalidate(dst.Host());
    }
}

}  // namespace AscendC

namespace moe::emulation {

inline void PollPause(uint32_t attempt, uint64_t window, int64_t missing, int64_t first = 0, int64_t count = 0) {
    ThisCore().has_polled = true;
    ThisCore().Poll(attempt, reinterpret_cast<const void*>(window), missing > 1 ? static_cast<uint64_t>(missing) : 1,
                    {first, count});
}

inline void BeginLook() { ThisCore().BeginLook(); }

inline void LetOthersRun() { sched_yield(); }

inline int64_t PieceBytes(int64_t bytes, uint32_t places) {
    return static_cast<int64_t>(ThisCore().PieceBytes(static_cast<uint64_t>(bytes), places));
}

inline bool WaitsAreStopped() { return ThisCore().IsStopped(); }

template <typename T>
void NotifyFlags(const AscendC::GlobalTensor<T>& to, uint64_t number) {
    ThisCore().Notify(AscendC::detail::Bytes(to), number);
}

inline bool Post(const PostItem& item) { return ThisCore().Post(item); }

// Its block, where a trace records what that does.
inline TracedBlock* LoggedBlock() {
    TracedBlock* const traced = ThisCore().traced;
    return traced != nullptr && traced->IsLogged() ? traced : nullptr;
}

inline bool IsTraced() { return LoggedBlock() != nullptr; }

// Whether the flight recorder asks for whom waits last.
inline bool IsWatched() { return ThisCore().flown != nullptr; }

// For the flight recorder.
inline void NoteWaited(int64_t peer, uint64_t us) {
    const auto& core = ThisCore();
    if (core.flown != nullptr) core.flown->NoteWait(core.step, peer, static_cast<uint32_t>(us));
}

// The host and its traces number phases like launches.
inline void BeginPhase(uint32_t number) {
    ThisCore().BeginPhase(number);
    if (number == 0) return;
    ++ThisCore().step;
    ThisCore().has_polled = false;
    if (WaitControl* const control = ControlOfThread()) control->BeginPhase(number);
    if (TracedBlock* const traced = ThisCore().traced) traced->NextPhase();
}

inline void TraceStep(uint32_t kind) {
    if (TracedBlock* const traced = LoggedBlock()) traced->Step(kind);
    ThisCore().Mark(kind);
}

inline void TraceWait(int64_t peer, int64_t start, int32_t us) {
    if (us <= 0) return;
    NoteWaited(peer, static_cast<uint64_t>(us));
    if (TracedBlock* const traced = LoggedBlock()) {
        traced->WaitedFor(static_cast<uint32_t>(peer), static_cast<uint64_t>(start) * NS_PER_CYCLE,
                          static_cast<uint64_t>(us) * 1000U);
    }
}

inline void TraceWaitEnds(int64_t peer, int64_t start) {
    if (ThisCore().flown != nullptr && ThisCore().has_polled) {
        NoteWaited(peer, (MonotonicNs() - static_cast<uint64_t>(start) * NS_PER_CYCLE) / 1000U);
    }
    if (TracedBlock* const traced = LoggedBlock()) {
        traced->WaitEnds(static_cast<uint32_t>(peer), static_cast<uint64_t>(start) * NS_PER_CYCLE);
    }
}

// One copy of aligned blocks, each of which arrives with its last bytes, those after `data_bytes`, last.
inline void CopyBlocksInOrder(const AscendC::GlobalTensor<uint8_t>& dst, const AscendC::LocalTensor<uint8_t>& src,
                              uint32_t blocks, uint32_t block_bytes, uint32_t data_bytes) {
    ThisCore().Require(reinterpret_cast<uint64_t>(dst.Host()) % block_bytes == 0, "blocks must lie aligned in GM");
    AscendC::detail::CheckedBytes(src, dst, uint64_t{blocks} * block_bytes);
    ThisCore().BeginInstruction(PIPE_MTE3);
    ThisCore().CopyBlocksOut(dst.Host(), src.GetPhyAddr(), blocks, {block_bytes, data_bytes});
}

}  // namespace moe::emulation
