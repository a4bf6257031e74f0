// The native path: calls of a rank's operators that run without Python.
//
// Between two layers of a model, megabytes go through the caches, and then each line of Python costs tens of times
// what it costs in a loop. So common calls are checked, given outputs and run here, by programs that Python writes
// (moe_triton/core/call_program.py): what an operator's arguments must be, which plan they select, its outputs and
// the contents of its placeholders. Any other call, wrong or only rare, returns None before it has changed anything;
// Python then raises the error, or runs it.
#pragma once

#include <cstdint>
#include <memory>

#include "memory.h"
#include "references.h"
#include "rounds.h"
#include "tensors.h"

namespace moe::calls {

constexpr size_t MAX_REGISTERS = 320, MAX_KEPT = 32, MAX_HOLDS = 4, MAX_ARGUMENTS = 32, NUM_OPERANDS = 8;

// The operations, by their names in Python, and how many operands they have. a to h are a step's operands: registers,
// or numbers where it says so. A check that fails ends the walk.
// clang-format off
#define MOE_OPERATIONS(each)                                                                                     \
    each(TENSOR, 2)       /* target...: address, dtype and sizes of argument number a, which has b dimensions */     \
    each(GIVEN, 2)        /* target: whether argument number a is not None; if not, the next b steps are left out */ \
    each(NUMBER, 1)       /* target: the integer that argument number a is */                                       \
    each(CHOICE, 3)       /* target: which of the c objects from number b on argument number a is */                \
    each(KEPT, 4)         /* target...: what a run of operator b left in its handle a, its latest one unless d is   \
                          1; to hold number c */                                                                 \
    each(ZONE, 0)         /* target: of this run; checks that no full wait has to come first */                     \
    each(EQUAL, 2)        /* checks a == b */                                                                       \
    each(EITHER, 3)       /* checks a == b or a == c */                                                             \
    each(AT_MOST, 2)      /* checks a <= b */                                                                       \
    each(MULTIPLY_ADD, 3) /* target: a * b + c */                                                                   \
    each(DIVIDE, 2)       /* target: a / b */                                                                       \
    each(MINIMUM, 2)      /* target: the smaller of a and b */                                                      \
    each(PARTS, 2)        /* target: parts of at most b that a is cut into, at least one */                         \
    each(PICK, 2)         /* target: the register that stands as many behind a as b says */                         \
    each(STARTS, 3)       /* target: whether address a is b; checks that it is not in the c bytes from there on */  \
    each(LOAD, 1)         /* target: the int32 at address a */                                                      \
    each(RESERVE, 2)      /* target: where a elements of b bytes begin in the next block */                         \
    each(ALLOCATE, 1)     /* target: address of a block for what is reserved, from now on hold number a */          \
    each(TAKE_IDS, 8)     /* copies ids at a of dtype b to c, d rows of e; checks that they name f experts where the    \
                          mask at g says so, if that is not 0: of whole rows, if h is not 0 */                       \
    each(DIGEST, 4)       /* target: what stands for the b int32 at address a that the mask at c, if that is not 0, \
                          says count: a flag of it is for d of them */                                           \
    each(COPY, 3)         /* copies c bytes at address a to address b */                                            \
    each(READ, 3)         /* c bytes from address b on are read too: as if they were argument number a */           \
    each(APART, 1)        /* checks that argument number a shares no memory with another one, or what is read */    \
    each(AGREE, 2)     /* target, and behind it: rows that a call needs, by what ranks have said at a and what the    \
                          table at b tells of that; checks that all agree, and have room */                         \
    each(ZERO_GAPS, 6) /* zeroes gaps by that: of f rows of d bytes at address c, experts' e rows apart or aligned */ \
    each(MARKED, 2)       /* checks that argument number a has mark b, if it has any */
// clang-format on

enum class Operation : uint16_t {
#define MOE_EACH(name, operands) name,
    MOE_OPERATIONS(MOE_EACH)
#undef MOE_EACH
        COUNT
};

struct Step {
    Operation operation;
    uint16_t target;
    uint16_t operands[NUM_OPERANDS];
};
static_assert(sizeof(Step) == 20);

// A tensor in a hold's memory, by the registers of its address and sizes.
struct TensorSpec {
    uint16_t hold;
    Dtype dtype;
    uint16_t address;
    uint16_t ndim;
    uint16_t sizes[4];
};
static_assert(sizeof(TensorSpec) == 16);

// One of the call's arguments.
struct ArgumentSpec {
    uint16_t number;
};

// Items of a Python bytes object.
template <typename Item>
struct Items {
    explicit Items(PyObject* bytes)
        : data(reinterpret_cast<const Item*>(PyBytes_AS_STRING(bytes))),
          count(static_cast<size_t>(PyBytes_GET_SIZE(bytes)) / sizeof(Item)) {}
    const Item* begin() const { return data; }
    const Item* end() const { return data + count; }
    const Item& operator[](size_t i) const { return data[i]; }

    const Item* data;
    size_t count;
};

// One plan that a program can run: the Python tuple of these, borrowed. A spec is a `TensorSpec` as bytes.
struct PreparedPlan {
    explicit PreparedPlan(PyObject* plan_tuple) : tuple(plan_tuple) {}

    PyObject* At(Py_ssize_t i) const { return PyTuple_GET_ITEM(tuple, i); }

    PyObject* tuple;
    Items<int64_t> key{At(0)};     // what the program's key registers hold then
    Items<int64_t> values{At(1)};  // of the registers behind the program's, at first
    Items<Step> steps{At(2)};
    Items<uint16_t> placeholders{At(3)};  // registers
    Items<uint64_t> plan{At(4)};          // address
    PyObject* executable = At(5);         // owns the plan
    PyObject* outputs = At(6);  // tuple of specs, `ArgumentSpec`s and objects as they are; the handle follows where
                                // there is one
    PyObject* output_type = At(7);  // of a tuple; None for the only output itself
    PyObject* bindings = At(8);     // tuple of (name, spec or register): what tells why a run failed
    Items<uint16_t> kept{At(9)};    // registers that the handle keeps
    PyObject* kept_tensors = At(10);  // dict of what the handle makes: specs over what is kept, and numbers of its
                                      // registers; or None for no handle
    PyObject* handle_fields = At(11);  // tuple of (name, object), or of (name, `ArgumentSpec`)
    Items<uint16_t> mark{At(12)};      // which output is marked, and the register of its mark; or nothing
    PyObject* next = At(13);  // a plan with which the run goes on, the same of these; or None. Where a check of its
                              // steps fails, what this one has made is returned, and the run is not over
};

// What a run keeps for later ones, as memory: tensors are made from it on first access.
struct Product {
    Hold memory;
    std::shared_ptr<const Torch> torch;
    Ref tensors;  // as `PreparedPlan::kept_tensors`
    uint64_t owner;
    uint64_t operator_id;
    uint64_t number;  // of the run
    int64_t values[MAX_KEPT];
};

struct CallProgram {
    unsigned int id;  // of the operator
    unsigned short num_arguments;
    unsigned long long owner;  // which buffer it is
    // Addresses; holder: of the number of who holds the lock.
    unsigned long long rounds, run_plan, take_ids, digest_ids, calls_agree, zero_gaps, holder;
    Ref name;
    Ref values, steps, key;  // as a plan's; the key is of registers that tell plans apart
    Ref objects;  // tuple that choices are from
    Ref last;  // the executable that each operator ran last: a dict
    Ref acquire, release;  // of the communicator's lock
    Ref handle_type, number_name, product_name;  // of handles, and where they have their run's number and product
    Ref mark_name;  // of the attribute by which a tensor is marked
    Ref failed;  // called with operator, executable, result and bindings of a run that failed; raises
    Ref plans;  // list of `PreparedPlan`
    std::shared_ptr<const Torch> torch;
    std::shared_ptr<Pool> pool;
};

extern PyTypeObject call_program_type, product_type;

// call(*arguments): what the operator returns, or None where Python has to run the call.
PyObject* Call(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

// The tensor of a spec, whose memory `memory(hold)` holds.
template <typename Memory>
Ref MakeTensor(const Torch& torch, PyObject* spec, const int64_t* registers, const Memory& memory) {
    const TensorSpec& read = *Items<TensorSpec>(spec).data;
    Shape shape;
    shape.ndim = read.ndim;
    for (int32_t i = 0; i < shape.ndim; ++i) shape.sizes[i] = registers[read.sizes[i]];
    return torch.Make(memory(read.hold), reinterpret_cast<std::byte*>(registers[read.address]), read.dtype, shape);
}

}  // namespace moe::calls
