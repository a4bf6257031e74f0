// What combine needs of a dispatch, as memory: its tensors are made when somebody asks for them.
#ifndef MOE_CALLS_HANDLE_MEMORY_H
#define MOE_CALLS_HANDLE_MEMORY_H

#include <cstdint>
#include <memory>

#include "memory.h"
#include "references.h"
#include "tensors.h"

namespace moe::calls {

// Where the parts of a dispatch's small outputs stand in their one block.
struct Parts {
    std::byte* topk_idx;  // (T, K) int32
    std::byte* expand_idx;  // (T * K,) int32
    std::byte* recv_offsets;  // (E * EP,) int32
    std::byte* triples;  // (3 A + trailer,) int32
};

struct HandleMemory {
    PyObject_HEAD
    Hold memory;
    std::shared_ptr<const Torch> torch;
    Parts parts;
    Dtype dtype;
    int64_t buffer_id;
    int64_t number;
    int64_t num_tokens;
    int64_t topk;
    int64_t num_offsets;
    int64_t num_triples;

    // How many rows arrived.
    int32_t Received() const { return reinterpret_cast<const int32_t*>(parts.recv_offsets)[num_offsets - 1]; }
};

extern PyTypeObject handle_memory_type;

// A new one with nothing in it yet. No object, with a Python error, if there is no memory.
Ref NewHandleMemory();

}  // namespace moe::calls

#endif  // MOE_CALLS_HANDLE_MEMORY_H
