// What differs between an AI core and a host that emulates one.
#ifndef MOE_PLATFORM_H
#define MOE_PLATFORM_H

#include "kernel_operator.h"

namespace moe {

// Called between two looks at a flag. An AI core has nothing better to do than look again; on a host
// the rank that will raise the flag may need this very core.
__aicore__ inline void PollPause(uint32_t attempt) {
#ifdef MOE_EMULATION
    emulation::PollPause(attempt);
#else
    (void)attempt;
#endif
}

}  // namespace moe

#endif  // MOE_PLATFORM_H
