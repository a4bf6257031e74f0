// Dispatch and combine of one rank in one native call each, where all is as it should be.
//
// Between two layers of a model, megabytes go through the caches, and then each line of Python costs tens of times
// what it costs in a loop. So the usual call is checked, given its outputs and run here. Whatever is not exactly as
// expected, wrong or only rare, makes a call return None before it has changed anything: Python's way
// (moe_triton/buffer.py) then says what is wrong, or does it.
#ifndef MOE_CALLS_RANK_CALLS_H
#define MOE_CALLS_RANK_CALLS_H

#include <cstdint>
#include <memory>

#include "handle_memory.h"
#include "memory.h"
#include "output_pool.h"
#include "prepared.h"
#include "references.h"
#include "rounds.h"
#include "tensors.h"

namespace moe::calls {

// What holds for every call of a rank.
struct Facts {
    int64_t buffer_id;
    int64_t hidden;
    int64_t topk;
    int64_t num_experts;
    int64_t num_smooth;  // rows of the smooth scales
    int64_t max_tokens;
    int64_t capacity;  // A
    int64_t num_local_experts;  // E
    int64_t num_offsets;  // E * EP
    int64_t num_triples;  // 3 A + trailer, in words
    int64_t dispatch_tokens;  // of a part
    int64_t combine_tokens;
    uint64_t window_base;
    uint64_t results_zone_0;  // direct: where results lie that peers can read; 0 for nowhere
    uint64_t results_zone_1;
    uint64_t results_bytes;
    uint64_t run_plan;  // moe_run_plan
    uint64_t take_ids;  // moe_take_ids
    uint64_t rounds;  // address of the `Rounds`
    uint64_t holder;  // address of the number of the thread that holds the lock
};

// Names and types of Python's, looked up once.
struct Python {
    Ref last;  // the executable that each operator ran last: a dict
    Ref acquire, release;  // of the communicator's lock
    Ref output_type, handle_type;
    Ref failed;  // called with operator, executable, result and bindings of a run that failed; raises
    Ref buffer_id;
};

struct RankCalls {
    PyObject_HEAD
    Facts facts;
    Python python;
    std::shared_ptr<const Torch> torch;
    std::shared_ptr<Pool> pool;
    PyObject* dispatches;  // lists of `Prepared`
    PyObject* combines;
};

extern PyTypeObject rank_calls_type;

// dispatch(x, topk_idx, topk_weights, quantize, smooth_scales) and combine(y, topk_weights, handle).
PyObject* Dispatch(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* Combine(PyObject* self, PyObject* const* args, Py_ssize_t count);

// The interned names that calls use. False with a Python error.
bool InternNames();

}  // namespace moe::calls

#endif  // MOE_CALLS_RANK_CALLS_H
