// Names, constants and parameter structs of the API.
#ifndef MOE_EMULATION_TYPES_H
#define MOE_EMULATION_TYPES_H

#include <cstdint>

#define MOE_ASCENDC_EMULATION
#define MOE_EMULATION 1

#define __aicore__
#define __global__ static
#define __mix__(cube, vector)
#define __schedmode__(mode)
// A qualifier is all that a macro can put on a pointee in standard C++. `volatile` makes a GM address
// another type than a host or UB address: passing one where plain memory is expected does not compile.
#ifdef MOE_EMULATION_STRICT
#define __gm__ volatile
#else
#define __gm__
#endif
#define GM_ADDR __gm__ uint8_t*

enum pipe_t { PIPE_S = 0, PIPE_V = 1, PIPE_MTE2 = 2, PIPE_MTE3 = 3, PIPE_ALL = 4 };

namespace AscendC {

class TPipe;
using TEventID = int8_t;

// 192 KB, of which the top 8 KB are reserved by default.
constexpr uint32_t UB_BYTES = 184 * 1024;
constexpr uint32_t BLOCK_BYTES = 32;
constexpr uint32_t MAX_VECTOR_CORES = 48;
constexpr uint32_t NUM_PIPES = 4;
constexpr uint32_t NUM_EVENTS = 12;
constexpr uint32_t NUM_EVENT_IDS = 8;  // of each event

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };

// "A_B": set when what pipe A was given before has completed; holds up what pipe B is given after.
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
    MTE3_MTE2,
};

constexpr pipe_t SourcePipe(HardEvent event) {
    if (event <= HardEvent::S_MTE3) return PIPE_S;
    if (event <= HardEvent::V_MTE3) return PIPE_V;
    if (event <= HardEvent::MTE2_MTE3) return PIPE_MTE2;
    return PIPE_MTE3;
}

constexpr pipe_t TargetPipe(HardEvent event) {
    switch (event) {
        case HardEvent::V_S:
        case HardEvent::MTE2_S:
        case HardEvent::MTE3_S: return PIPE_S;
        case HardEvent::S_V:
        case HardEvent::MTE2_V:
        case HardEvent::MTE3_V: return PIPE_V;
        case HardEvent::S_MTE2:
        case HardEvent::V_MTE2:
        case HardEvent::MTE3_MTE2: return PIPE_MTE2;
        default: return PIPE_MTE3;
    }
}

struct DataCopyExtParams {
    uint16_t blockCount = 1;
    uint32_t blockLen = 0;   // bytes
    uint32_t srcStride = 0;  // gap: bytes in GM, 32-byte blocks in UB
    uint32_t dstStride = 0;
    uint32_t rsv = 0;
};

template <typename T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0;
    uint8_t rightPadding = 0;
    T paddingValue{};
};

enum class CacheLine : uint8_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint8_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

}  // namespace AscendC

namespace moe::emulation {

// An address inside UB: no pointer, so that it cannot be mixed with one.
struct UbAddress {
    uint32_t offset;
};

}  // namespace moe::emulation

#endif  // MOE_EMULATION_TYPES_H
