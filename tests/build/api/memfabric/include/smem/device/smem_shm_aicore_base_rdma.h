// The declaration of the one function of memfabric-hybrid's device API that the kernels use, as release 1.3.0
// documents it. See kernel_operator.h.
#pragma once

#include "kernel_operator.h"

template <typename T>
__aicore__ void smem_shm_roce_write(__gm__ T* source, __gm__ T* destination, uint32_t rank, uint32_t queue_pair,
                                    uint64_t bytes, AscendC::LocalTensor<uint64_t> scratch64,
                                    AscendC::LocalTensor<uint32_t> scratch32);
