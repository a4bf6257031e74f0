#include "rank_calls.h"

#include <structmember.h>

#include <cstddef>
#include <iterator>
#include <new>

#include "types.h"

namespace moe::calls {

namespace {

struct Number {
    const char* name;
    size_t offset;  // in Facts, whose members have 64 bits each
};

constexpr Number NUMBERS[] = {
    {"buffer_id", offsetof(Facts, buffer_id)},
    {"hidden", offsetof(Facts, hidden)},
    {"topk", offsetof(Facts, topk)},
    {"num_experts", offsetof(Facts, num_experts)},
    {"num_smooth", offsetof(Facts, num_smooth)},
    {"max_tokens", offsetof(Facts, max_tokens)},
    {"capacity", offsetof(Facts, capacity)},
    {"num_local_experts", offsetof(Facts, num_local_experts)},
    {"num_offsets", offsetof(Facts, num_offsets)},
    {"num_triples", offsetof(Facts, num_triples)},
    {"dispatch_tokens", offsetof(Facts, dispatch_tokens)},
    {"combine_tokens", offsetof(Facts, combine_tokens)},
    {"window_base", offsetof(Facts, window_base)},
    {"results_zone_0", offsetof(Facts, results_zone_0)},
    {"results_zone_1", offsetof(Facts, results_zone_1)},
    {"results_bytes", offsetof(Facts, results_bytes)},
    {"run_plan", offsetof(Facts, run_plan)},
    {"take_ids", offsetof(Facts, take_ids)},
    {"rounds", offsetof(Facts, rounds)},
    {"holder", offsetof(Facts, holder)},
};
static_assert(std::size(NUMBERS) * sizeof(uint64_t) == sizeof(Facts));

// Every number has to be there, and nothing else.
bool ReadFacts(PyObject* numbers, Facts* facts) {
    if (PyDict_Size(numbers) != static_cast<Py_ssize_t>(std::size(NUMBERS))) {
        PyErr_SetString(PyExc_TypeError, "facts: too many, or too few");
        return false;
    }
    for (const Number& number : NUMBERS) {
        PyObject* const value = PyDict_GetItemString(numbers, number.name);
        if (value == nullptr) {
            PyErr_Format(PyExc_TypeError, "facts: %s is missing", number.name);
            return false;
        }
        const uint64_t word = PyLong_AsUnsignedLongLongMask(value);
        if (PyErr_Occurred() != nullptr) return false;
        *reinterpret_cast<uint64_t*>(reinterpret_cast<std::byte*>(facts) + number.offset) = word;
    }
    return true;
}

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    static const char* const names[] = {"facts",       "pool",        "last",   "lock",
                                        "output_type", "handle_type", "failed", nullptr};
    PyObject *numbers, *pool, *last, *lock, *output_type, *handle_type, *failed;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$O!O!O!OO!O!O", const_cast<char**>(names), &PyDict_Type,
                                     &numbers, &output_pool_type, &pool, &PyDict_Type,
                                     &last, &lock, &PyType_Type, &output_type, &PyType_Type, &handle_type, &failed)) {
        return nullptr;
    }
    Facts facts;
    if (!ReadFacts(numbers, &facts)) return nullptr;
    const auto& outputs = *reinterpret_cast<OutputPool*>(pool);
    Ref acquire(PyObject_GetAttrString(lock, "acquire")), release(PyObject_GetAttrString(lock, "release"));
    Ref buffer_id(PyLong_FromLongLong(facts.buffer_id)), dispatches(PyList_New(0)), combines(PyList_New(0));
    Ref self(type->tp_alloc(type, 0));
    if (!acquire || !release || !buffer_id || !dispatches || !combines || !self) return nullptr;
    auto* const made = reinterpret_cast<RankCalls*>(self.get());
    made->facts = facts;
    new (&made->python) Python{Ref::Of(last),
                               std::move(acquire),   std::move(release),   Ref::Of(output_type),
                               Ref::Of(handle_type), Ref::Of(failed),      std::move(buffer_id)};
    new (&made->torch) std::shared_ptr<const Torch>(outputs.torch);
    new (&made->pool) std::shared_ptr<Pool>(outputs.pool);
    made->dispatches = dispatches.Release();
    made->combines = combines.Release();
    return self.Release();
}

void Dealloc(PyObject* object) {
    auto* const self = reinterpret_cast<RankCalls*>(object);
    Py_XDECREF(self->dispatches);
    Py_XDECREF(self->combines);
    self->python.~Python();
    self->torch.~shared_ptr();
    self->pool.~shared_ptr();
    Py_TYPE(object)->tp_free(object);
}

PyMethodDef methods[] = {
    {"dispatch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Dispatch)), METH_FASTCALL,
     "dispatch(x, topk_idx, topk_weights, quantize, smooth_scales): a `DispatchOutput`, or None for Python's way."},
    {"combine", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Combine)), METH_FASTCALL,
     "combine(y, topk_weights, handle): a tensor, or None for Python's way."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef members[] = {
    {"dispatches", T_OBJECT_EX, offsetof(RankCalls, dispatches), 0, "list of `Prepared` dispatches"},
    {"combines", T_OBJECT_EX, offsetof(RankCalls, combines), 0, "list of `Prepared` combines"},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

PyTypeObject rank_calls_type =
    MakeType("moe_calls.RankCalls", "Dispatch and combine of one rank in one native call each.", sizeof(RankCalls),
             Dealloc, New, methods, members);

}  // namespace moe::calls
