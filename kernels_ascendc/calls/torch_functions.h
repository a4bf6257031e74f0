// What DLPack's table does not tell of a tensor, asked of torch's libraries.
#ifndef MOE_CALLS_TORCH_FUNCTIONS_H
#define MOE_CALLS_TORCH_FUNCTIONS_H

#include <cstddef>
#include <cstdint>

#include "references.h"

namespace moe::calls {

// Functions by address, from Python (moe_triton/backends/cpu/extension.py): three of torch's stable C interface
// (torch/csrc/inductor/aoti_torch/c/shim.h), whose handle is the address of an at::Tensor, and two of C++, whose
// mangled names hold their parameters. A Python tensor has its at::Tensor, which is one pointer to a c10::TensorImpl,
// right behind its head: Python compares that with the tensor's own `_cdata` before it loads this module.
class TorchFunctions {
public:
    // False, with a Python error, where one is missing.
    bool Load(PyObject* addresses) {
        return Read(addresses, "aoti_torch_get_storage_size", &storage_size_) &&
               Read(addresses, "aoti_torch_get_storage_offset", &storage_offset_) &&
               Read(addresses, "aoti_torch_grad_mode_is_enabled", &grad_mode_is_enabled_) &&
               Read(addresses, "is_neg", &is_neg_) && Read(addresses, "requires_grad", &requires_grad_);
    }

    // Whether a tensor's values are its memory's, negated.
    bool IsNegated(PyObject* tensor) const { return is_neg_(Handle(tensor)); }

    // Whether what is computed from a tensor now has to lead back to it.
    bool NeedsGradient(PyObject* tensor) const {
        return requires_grad_(*static_cast<void* const*>(Handle(tensor))) && grad_mode_is_enabled_();
    }

    // Whether a tensor's storage holds this many elements, from the tensor's first one on.
    bool Covers(PyObject* tensor, int64_t elements, int64_t element_bytes) const {
        int64_t num_bytes = 0, offset = 0;
        return storage_size_(Handle(tensor), &num_bytes) == 0 && storage_offset_(Handle(tensor), &offset) == 0 &&
               (offset + elements) * element_bytes <= num_bytes;
    }

private:
    static const void* Handle(PyObject* tensor) {
        return reinterpret_cast<const std::byte*>(tensor) + sizeof(PyObject);
    }

    template <typename Function>
    static bool Read(PyObject* addresses, const char* name, Function* function) {
        PyObject* const address = PyDict_GetItemString(addresses, name);
        if (address == nullptr) {
            PyErr_Format(PyExc_TypeError, "functions: %s is missing", name);
            return false;
        }
        *function = reinterpret_cast<Function>(PyLong_AsVoidPtr(address));
        return PyErr_Occurred() == nullptr;
    }

    int32_t (*storage_size_)(const void* tensor, int64_t* num_bytes) = nullptr;
    int32_t (*storage_offset_)(const void* tensor, int64_t* elements) = nullptr;
    bool (*grad_mode_is_enabled_)() = nullptr;
    bool (*is_neg_)(const void* tensor) = nullptr;
    bool (*requires_grad_)(const void* impl) = nullptr;
};

}  // namespace moe::calls

#endif  // MOE_CALLS_TORCH_FUNCTIONS_H
