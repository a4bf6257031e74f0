// Our own emulation of the part of the Ascend C API that the kernels use, for the CPU.
//
// Three builds: *fast* (the default) does every operation at once, near memcpy's speed. *strict*
// (MOE_EMULATION_STRICT) does each operation late and out of order as far as the hardware may, lets scalar
// code see GM through a cache that nothing keeps coherent, refuses accesses to the same bytes that nothing
// orders, and checks everything else that it can, so that a kernel that is wrong on an NPU is wrong here too.
// *counting* (MOE_EMULATION_COUNTING) notes what each block does and moves no rows: a model prices it.
#pragma once

#include "types.h"
#ifdef MOE_EMULATION_STRICT
#include "strict_core.h"
#elif defined(MOE_EMULATION_COUNTING)
#include "counting_core.h"
#else
#include "fast_core.h"
#endif
#include "operations.h"
#include "queues.h"
#ifdef MOE_EMULATION_COUNTING
#include "counting_blocks.h"
#else
#include "run_blocks.h"
#endif
