// When a rank's link to other servers carried which message, for traces.
#ifndef MOE_EMULATION_LINK_LOG_H
#define MOE_EMULATION_LINK_LOG_H

#include <cstdint>

namespace moe {

struct LinkSpan {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t call;  // in which the message was posted
    uint64_t peer;
};

// A ring, which keeps the newest. The NIC adds at any time; a reader takes what is older than `num_spans`, and leaves
// out what that says has been overwritten meanwhile.
struct LinkLog {
    LinkSpan* spans;
    uint64_t max_spans;
    uint64_t num_spans;      // that were ever added
    const uint64_t* call;    // the number of the call that runs

    void Add(const LinkSpan& span) {
        spans[num_spans % max_spans] = span;
        __atomic_store_n(&num_spans, num_spans + 1, __ATOMIC_RELEASE);
    }
};

}  // namespace moe

#endif  // MOE_EMULATION_LINK_LOG_H
