// A slot with flags in band: 512-byte blocks, each 480 bytes of the slot and then a flag of eight 1.0f.
//
// Offsets in a slot are multiples of 32 and so is 480: no 32-byte unit of it lies in two blocks, and the
// stamp, which comes last, is whole in the last block.
#pragma once

#include "flags.h"

namespace moe {

static_assert(BLOCK_BYTES == BLOCK_DATA_BYTES + UB_ALIGN, "a block is its data and one flag");
constexpr uint32_t FLAG_WORDS = UB_ALIGN / sizeof(float);
constexpr uint32_t BLOCK_UNITS = BLOCK_BYTES / UB_ALIGN;

__aicore__ inline int64_t NumBlocks(int64_t bytes) {
    return (bytes + BLOCK_DATA_BYTES - 1) / BLOCK_DATA_BYTES;
}

__aicore__ inline int64_t NumBlocksOfSlot(int64_t stamp_offset) {
    return NumBlocks(stamp_offset + STAMP_BYTES);
}

// Where the slot's byte `offset` lies.
__aicore__ inline uint64_t PlaceInBlocks(int64_t offset) {
    return static_cast<uint64_t>(offset / BLOCK_DATA_BYTES * BLOCK_BYTES + offset % BLOCK_DATA_BYTES);
}

}  // namespace moe
