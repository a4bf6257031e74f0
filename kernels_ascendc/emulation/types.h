// Names, constants and parameter structs of the API.
#pragma once

#include <cstdint>

#define MOE_EMULATION 1

#define __aicore__
// In standard C++ a macro can only add a qualifier to a pointee. `volatile` makes a GM address a different type from a
// host or UB address: passing one where plain memory is expected does not compile.
#ifdef MOE_EMULATION_STRICT
#define __gm__ volatile
#else
#define __gm__
#endif

enum pipe_t { PIPE_S = 0, PIPE_V = 1, PIPE_MTE2 = 2, PIPE_MTE3 = 3, PIPE_ALL = 4 };

namespace AscendC {

class TPipe;
using TEventID = int8_t;

// 192 KB, of which the top 8 KB are reserved by default.
constexpr uint32_t UB_BYTES = 184 * 1024;
constexpr uint32_t BLOCK_BYTES = 32;
constexpr uint32_t MAX_VECTOR_CORES = 48;
constexpr uint32_t NUM_PIPES = 4;
constexpr uint32_t NUM_EVENTS = NUM_PIPES * NUM_PIPES;
constexpr uint32_t NUM_EVENT_IDS = 8;  // of each event

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };

// "A_B": set when earlier work of pipe A has completed; holds up later work of pipe B. Its number is 4 A + B.
enum class HardEvent : uint8_t {
    S_V = NUM_PIPES * PIPE_S + PIPE_V,
    S_MTE2 = NUM_PIPES * PIPE_S + PIPE_MTE2,
    S_MTE3 = NUM_PIPES * PIPE_S + PIPE_MTE3,
    V_S = NUM_PIPES * PIPE_V + PIPE_S,
    V_MTE2 = NUM_PIPES * PIPE_V + PIPE_MTE2,
    V_MTE3 = NUM_PIPES * PIPE_V + PIPE_MTE3,
    MTE2_S = NUM_PIPES * PIPE_MTE2 + PIPE_S,
    MTE2_V = NUM_PIPES * PIPE_MTE2 + PIPE_V,
    MTE2_MTE3 = NUM_PIPES * PIPE_MTE2 + PIPE_MTE3,
    MTE3_S = NUM_PIPES * PIPE_MTE3 + PIPE_S,
    MTE3_V = NUM_PIPES * PIPE_MTE3 + PIPE_V,
    MTE3_MTE2 = NUM_PIPES * PIPE_MTE3 + PIPE_MTE2,
};

constexpr pipe_t SourcePipe(HardEvent event) { return static_cast<pipe_t>(static_cast<uint32_t>(event) / NUM_PIPES); }
constexpr pipe_t TargetPipe(HardEvent event) { return static_cast<pipe_t>(static_cast<uint32_t>(event) % NUM_PIPES); }

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

// How a conversion rounds; CAST_NONE where nothing is lost, and to the nearest even where something is.
enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };

enum class CacheLine : uint8_t { SINGLE_CACHE_LINE, ENTIRE_DATA_CACHE };
enum class DcciDst : uint8_t { CACHELINE_ALL, CACHELINE_UB, CACHELINE_OUT, CACHELINE_ATOMIC };

}  // namespace AscendC

namespace moe::emulation {

// An address inside UB: no pointer, so that it cannot be mixed with one.
struct UbAddress {
    uint32_t offset;
};

}  // namespace moe::emulation
