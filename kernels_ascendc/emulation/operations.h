// Copies, flags, barriers, and the few vector operations that flags need.
#ifndef MOE_EMULATION_OPERATIONS_H
#define MOE_EMULATION_OPERATIONS_H

#include <chrono>
#include <limits>

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

// Block b of a padded copy: where it lies on either side. UB blocks start on 32-byte boundaries.
struct PadBlock {
    uint64_t global_at;
    uint64_t local_at;
};

inline PadBlock BlockAt(uint32_t b, const DataCopyExtParams& p, uint32_t global_gap, uint32_t local_gap) {
    const uint64_t local_bytes = (p.blockLen + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
    return {b * (uint64_t{p.blockLen} + global_gap), b * (local_bytes + uint64_t{local_gap} * BLOCK_BYTES)};
}

template <typename T>
void CheckPad(const LocalTensor<T>& local, const GlobalTensor<T>& global, const DataCopyExtParams& p, PadBlock last) {
    Core().Require(p.blockCount > 0 && p.blockLen > 0, "DataCopyPad of nothing");
    Core().Require(local.GetPhyAddr().offset % BLOCK_BYTES == 0, "DataCopyPad: UB address not aligned to 32 bytes");
    Core().Require(last.local_at + p.blockLen <= uint64_t{local.GetSize()} * sizeof(T),
                   "DataCopyPad beyond the end of a LocalTensor");
    Core().Require(last.global_at + p.blockLen <= global.GetSize() * sizeof(T),
                   "DataCopyPad beyond the end of a GlobalTensor");
}

template <typename T>
uint8_t* Bytes(const GlobalTensor<T>& global) {
    return reinterpret_cast<uint8_t*>(global.Host());
}

}  // namespace detail

template <typename T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
    const uint64_t bytes = detail::CheckedBytes(dst, src, count);
    detail::Core().Copy(PIPE_MTE2, dst.Host(), detail::Bytes(src), bytes);
}

template <typename T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
    const uint64_t bytes = detail::CheckedBytes(src, dst, count);
    detail::Core().Copy(PIPE_MTE3, detail::Bytes(dst), src.Host(), bytes);
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& p,
                 const DataCopyPadExtParams<T>& pad) {
    // The kernels need no padding values; leaving them out silently would be worse than refusing them.
    detail::Core().Require(!pad.isPad, "DataCopyPad: padding values are not emulated");
    detail::CheckPad(dst, src, p, detail::BlockAt(p.blockCount - 1U, p, p.srcStride, p.dstStride));
    for (uint32_t b = 0; b < p.blockCount; ++b) {
        const auto at = detail::BlockAt(b, p, p.srcStride, p.dstStride);
        detail::Core().Copy(PIPE_MTE2, dst.Host() + at.local_at, detail::Bytes(src) + at.global_at, p.blockLen);
    }
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& p) {
    detail::CheckPad(src, dst, p, detail::BlockAt(p.blockCount - 1U, p, p.dstStride, p.srcStride));
    for (uint32_t b = 0; b < p.blockCount; ++b) {
        const auto at = detail::BlockAt(b, p, p.dstStride, p.srcStride);
        detail::Core().Copy(PIPE_MTE3, detail::Bytes(dst) + at.global_at, src.Host() + at.local_at, p.blockLen);
    }
}

template <typename T>
void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count) {
    detail::Core().Require(count > 0 && static_cast<uint32_t>(count) <= dst.GetSize(),
                           "Duplicate beyond the end of a LocalTensor");
    uint8_t* to = dst.Host();
    detail::Core().Issue(PIPE_V, [to, value, n = count] {
        for (int32_t i = 0; i < n; ++i) std::memcpy(to + i * sizeof(T), &value, sizeof(T));
    });
}

// Sums the first `mask` elements of each of `repeatTime` repeats, `srcRepStride` 32-byte blocks apart.
template <typename T>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& sharedTmpBuffer,
               const int32_t mask, const int32_t repeatTime, const int32_t srcRepStride) {
    constexpr int32_t MAX_REPEATS = 255;
    auto& core = detail::Core();
    core.Require(mask > 0 && mask * sizeof(T) <= 256, "ReduceSum: mask covers 1 element to 256 bytes");
    core.Require(repeatTime > 0 && repeatTime <= MAX_REPEATS, "ReduceSum: 1 to 255 repeats");
    const uint64_t last = uint64_t(repeatTime - 1) * uint64_t(srcRepStride) * BLOCK_BYTES + mask * sizeof(T);
    core.Require(last <= uint64_t{src.GetSize()} * sizeof(T), "ReduceSum beyond the end of its source");
    core.Require(dst.GetSize() >= 1, "ReduceSum needs room for its result");
    core.Require(sharedTmpBuffer.GetSize() >= static_cast<uint32_t>(repeatTime), "ReduceSum: temporary too small");
    uint8_t* to = dst.Host();
    const uint8_t* from = src.Host();
    core.Issue(PIPE_V, [=] {
        T sum{};
        for (int32_t r = 0; r < repeatTime; ++r) {
            for (int32_t i = 0; i < mask; ++i) {
                T value;
                std::memcpy(&value, from + r * srcRepStride * static_cast<int64_t>(BLOCK_BYTES) + i * sizeof(T), sizeof(T));
                sum += value;
            }
        }
        std::memcpy(to, &sum, sizeof(T));
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
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count() / 20;
}

template <typename T, CacheLine line, DcciDst destination>
void DataCacheCleanAndInvalid(const GlobalTensor<T>&) {
    detail::Core().Barrier(PIPE_S);
}

}  // namespace AscendC

#endif  // MOE_EMULATION_OPERATIONS_H
