// Copies of emulation/memory.h, of one entry.
#include "memory.h"

extern "C" {

void copy_in_order(uint8_t* to, const uint8_t* from) { moe::emulation::CopyInOrder(to, from, 32); }
}
