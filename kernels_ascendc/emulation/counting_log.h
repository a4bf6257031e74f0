// What a block does, as the counting build notes it: `autotune/model/bodies/counted/library.py` reads it.
#ifndef MOE_EMULATION_COUNTING_LOG_H
#define MOE_EMULATION_COUNTING_LOG_H

#include <cstdint>
#include <vector>

namespace moe::emulation {

enum class Did : uint8_t {
    LOAD,     // a copy to UB: `amount` bytes from `address`
    STORE,    // a copy out of UB: to `address`
    VECTOR,   // an instruction on `amount` bytes
    LOCAL,    // `amount` scalar accesses to UB
    GLOBAL,   // a scalar access to global memory at `address`
    DROP,     // a line of the data cache cleaned and invalidated
    SET,      // a flag from `pipe` to `other`, its number in `amount`
    WAIT,     // for a flag from `pipe` to `other`
    BARRIER,  // of `pipe`
    POST,     // `amount` bytes to `address`, by a queue
    MARK,     // a step begins, of kind `amount`
    SYNC,     // all blocks meet
};

// `Record::flags`.
constexpr uint8_t MISSED = 1;   // of a scalar access: its line was not in the core's data cache
constexpr uint8_t REDUCES = 1;  // of a vector instruction: it sums what it reads
constexpr uint8_t WRITES = 2;   // of a scalar access
constexpr uint8_t LOOKS = 4;    // since the first look for what others send
constexpr uint8_t ROWS = 8;     // of a load: of what nobody knows

struct Record {
    Did did;
    uint8_t pipe;
    uint8_t other;
    uint8_t flags;
    uint32_t amount;
    uint64_t address;
};

static_assert(sizeof(Record) == 16, "as Python reads them");

using Log = std::vector<Record>;

}  // namespace moe::emulation

#endif  // MOE_EMULATION_COUNTING_LOG_H
