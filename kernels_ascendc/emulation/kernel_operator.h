// Our own emulation of the part of the Ascend C API that the kernels use, for the CPU.
//
// Two builds: *fast* (the default) does every operation at once, near memcpy's speed. *strict*
// (MOE_EMULATION_STRICT) does each operation late and out of order as far as the hardware may, lets scalar
// code see GM through a cache that nothing keeps coherent, refuses accesses to the same bytes that nothing
// orders, and checks everything else that it can, so that a kernel that is wrong on an NPU is wrong here too.
#ifndef MOE_EMULATION_KERNEL_OPERATOR_H
#define MOE_EMULATION_KERNEL_OPERATOR_H

#include "types.h"
#ifdef MOE_EMULATION_STRICT
#include "strict_core.h"
#else
#include "fast_core.h"
#endif
#include "operations.h"
#include "queues.h"
#include "run_blocks.h"
#include "tensors.h"

#endif  // MOE_EMULATION_KERNEL_OPERATOR_H
