#include "prepared.h"

#include <array>
#include <cstring>
#include <new>

#include "types.h"

namespace moe::calls {

namespace {

// In the order of `Value`.
constexpr std::array<const char*, static_cast<size_t>(Value::COUNT)> NAMES = {
    "x",          "topk_idx",          "topk_weights", "smooth_scales", "num_tokens", "num_ids",
    "expand_idx", "tokens_per_expert", "recv_offsets", "triples",       "scales",     "weights",
    "tokens",     "y",                 "num_rows",     "out",           "own_results"};

bool AddHole(std::vector<Value>& holes, PyObject* name) {
    const char* const text = PyUnicode_AsUTF8(name);
    if (text == nullptr) return false;
    for (size_t i = 0; i < NAMES.size(); ++i) {
        if (std::strcmp(text, NAMES[i]) == 0) {
            holes.push_back(static_cast<Value>(i));
            return true;
        }
    }
    PyErr_Format(PyExc_ValueError, "no call has a value for the hole %s", text);
    return false;
}

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    static const char* const names[] = {"executable", "plan",           "holes",   "dtype",    "dtype_code",
                                        "quantize",   "smooth",         "weights", "in_place", "zone",
                                        "parts",      "tokens",         "tokens_address",      nullptr};
    PyObject *executable, *holes, *dtype, *tokens;
    unsigned long long plan, tokens_address;
    unsigned short code;
    int quantize, smooth, weights, in_place;
    unsigned char zone;
    unsigned int parts;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$OKO!OHppppbIOK", const_cast<char**>(names), &executable, &plan,
                                     &PyTuple_Type, &holes, &dtype, &code, &quantize, &smooth, &weights, &in_place,
                                     &zone, &parts, &tokens, &tokens_address)) {
        return nullptr;
    }
    std::vector<Value> filled;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(holes); ++i) {
        if (!AddHole(filled, PyTuple_GET_ITEM(holes, i))) return nullptr;
    }
    if (filled.size() > NAMES.size()) {
        PyErr_SetString(PyExc_ValueError, "a hole is named twice");
        return nullptr;
    }
    Ref self(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto* const made = reinterpret_cast<Prepared*>(self.get());
    made->key = {static_cast<Dtype>(code), quantize != 0, smooth != 0, weights != 0, in_place != 0, zone, parts};
    new (&made->executable) Ref(Ref::Of(executable));
    new (&made->dtype) Ref(Ref::Of(dtype));
    new (&made->tokens) Ref(tokens == Py_None ? Ref() : Ref::Of(tokens));
    made->tokens_address = tokens_address;
    made->plan = plan;
    new (&made->holes) std::vector<Value>(std::move(filled));
    return self.Release();
}

void Dealloc(PyObject* self) {
    auto* const prepared = reinterpret_cast<Prepared*>(self);
    prepared->executable.~Ref();
    prepared->dtype.~Ref();
    prepared->tokens.~Ref();
    prepared->holes.~vector();
    Py_TYPE(self)->tp_free(self);
}

}  // namespace

PyTypeObject prepared_type = MakeType(
    "moe_calls.Prepared", "A plan that `RankCalls` can run, and for which calls.", sizeof(Prepared), Dealloc, New);

Prepared* Find(PyObject* list, const Key& key) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
        auto* const prepared = reinterpret_cast<Prepared*>(PyList_GET_ITEM(list, i));
        if (prepared->key == key) return prepared;
    }
    return nullptr;
}

}  // namespace moe::calls
