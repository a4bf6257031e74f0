// Declarations, and nothing else, of the part of the Ascend C API that the kernels use: signatures of its public
// documentation, and the keywords in terms that clang knows from CUDA. For tests that parse the kernels as an
// NPU's compiler sees them, with MOE_EMULATION undefined; nothing here can run.
//
// __aicore__ is CUDA's `device`: a kernel that calls a function without it does not pass. __gm__ is an address
// space: a GM address does not turn into a pointer of UB or of the host.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__ __attribute__((global))
#define __aicore__ __attribute__((device))
#define __gm__ __attribute__((address_space(1)))
#define __mix__(cube, vector) __attribute__((annotate("mix " #cube " " #vector)))
#define __schedmode__(mode) __attribute__((annotate("schedmode " #mode)))
#define GM_ADDR __gm__ uint8_t*

// What a kernel<<<blocks, l2ctrl, stream>>>(...) hands over.
extern "C" uint32_t __cudaPushCallConfiguration(uint32_t blocks, const void* l2ctrl, void* stream);

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

enum KernelMetaType { KERNEL_TYPE_AIV_ONLY, KERNEL_TYPE_AIC_ONLY, KERNEL_TYPE_MIX_AIV_1_0 };
#define KERNEL_TASK_TYPE_DEFAULT(type) [[maybe_unused]] constexpr KernelMetaType kernel_task_type = type

namespace AscendC {

using TEventID = int8_t;

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent : uint8_t {
    S_V,
    S_MTE2,
    S_MTE3,
    V_S,
    V_MTE2,
    V_MTE3,
    MTE2_S,
    MTE2_V,
    MTE2_MTE3,
    MTE3_S,
    MTE3_V,
    MTE3_MTE2
};

enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class CacheLine : uint64_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint64_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

struct DataCopyExtParams {
    __aicore__ DataCopyExtParams();
    __aicore__ DataCopyExtParams(uint16_t count, uint32_t len, uint32_t src_stride, uint32_t dst_stride, uint32_t rsv);
    uint16_t blockCount;
    uint32_t blockLen;
    uint32_t srcStride;
    uint32_t dstStride;
    uint32_t rsv;
};

template <typename T>
struct DataCopyPadExtParams {
    __aicore__ DataCopyPadExtParams();
    __aicore__ DataCopyPadExtParams(bool is_pad, uint8_t left, uint8_t right, T value);
    bool isPad;
    uint8_t leftPadding;
    uint8_t rightPadding;
    T paddingValue;
};

template <typename T>
class GlobalTensor {
public:
    __aicore__ GlobalTensor();
    __aicore__ void SetGlobalBuffer(__gm__ T* buffer, uint64_t size);
    __aicore__ void SetGlobalBuffer(__gm__ T* buffer);
    __aicore__ T GetValue(uint64_t offset) const;
    __aicore__ void SetValue(uint64_t offset, T value);
    __aicore__ GlobalTensor operator[](uint64_t offset) const;
};

template <typename T>
class LocalTensor {
public:
    __aicore__ LocalTensor();
    __aicore__ T GetValue(uint32_t index) const;
    __aicore__ void SetValue(uint32_t index, T value) const;
    __aicore__ LocalTensor operator[](uint32_t offset) const;
    template <typename U>
    __aicore__ LocalTensor<U> ReinterpretCast() const;
};

template <TPosition source, TPosition target, int32_t depth>
class TQueBind {
public:
    __aicore__ TQueBind();
    template <typename T>
    __aicore__ LocalTensor<T> AllocTensor();
    template <typename T>
    __aicore__ bool EnQue(const LocalTensor<T>& tensor);
    template <typename T>
    __aicore__ LocalTensor<T> DeQue();
    template <typename T>
    __aicore__ void FreeTensor(LocalTensor<T>& tensor);
};

template <TPosition position>
class TBuf {
public:
    __aicore__ TBuf();
    template <typename T>
    __aicore__ LocalTensor<T> Get();
};

class TPipe {
public:
    __aicore__ TPipe();
    __aicore__ void Reset();
    template <TPosition source, TPosition target, int32_t depth>
    __aicore__ bool InitBuffer(TQueBind<source, target, depth>& queue, uint8_t num, uint32_t bytes);
    template <TPosition position>
    __aicore__ bool InitBuffer(TBuf<position>& buffer, uint32_t bytes);
    __aicore__ TEventID FetchEventID(HardEvent event);
    template <HardEvent event>
    __aicore__ TEventID AllocEventID();
    template <HardEvent event>
    __aicore__ void ReleaseEventID(TEventID id);
};

template <HardEvent event>
__aicore__ void SetFlag(int32_t id);
template <HardEvent event>
__aicore__ void WaitFlag(int32_t id);
template <pipe_t pipe>
__aicore__ void PipeBarrier();
template <typename T, CacheLine line, DcciDst destination>
__aicore__ void DataCacheCleanAndInvalid(const GlobalTensor<T>& dst);
template <bool is_aiv_only = true>
__aicore__ void SyncAll();

__aicore__ int64_t GetBlockIdx();
__aicore__ int64_t GetBlockNum();
__aicore__ int64_t GetSystemCycle();

template <typename T>
__aicore__ void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count);
template <typename T>
__aicore__ void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count);
template <typename T>
__aicore__ void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                            const DataCopyPadExtParams<T>& padding);
template <typename T>
__aicore__ void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params);

template <typename T, bool sets_mask = true>
__aicore__ void Duplicate(const LocalTensor<T>& dst, const T& value, const int32_t& count);
template <typename T, bool sets_mask = true>
__aicore__ void Duplicate(const LocalTensor<T>& dst, const T& value, uint64_t mask, uint8_t repeat_times,
                          uint16_t block_stride, uint8_t repeat_stride);
template <typename T, bool sets_mask = true>
__aicore__ void Maxs(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count);
template <typename T, bool sets_mask = true>
__aicore__ void Mins(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count);
template <typename T>
__aicore__ void Add(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
                    const int32_t& count);
template <typename T, bool sets_mask = true>
__aicore__ void Adds(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count);
template <typename T, bool sets_mask = true>
__aicore__ void Muls(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count);
template <typename T>
__aicore__ void CreateVecIndex(LocalTensor<T> dst, const T& first, uint32_t count);
template <typename T, typename U>
__aicore__ void Cast(const LocalTensor<T>& dst, const LocalTensor<U>& src, const RoundMode& mode, uint32_t count);
template <typename T, bool sets_mask = true>
__aicore__ void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
                          int32_t count);
template <typename T, bool sets_mask = true>
__aicore__ void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
                          const uint64_t mask[], int32_t repeat_times, int32_t repeat_stride);

}  // namespace AscendC

__aicore__ AscendC::TPipe* GetTPipePtr();
