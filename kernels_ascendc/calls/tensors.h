// Python's tensors, seen and made without torch's headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dlpack.h"
#include "memory.h"
#include "references.h"

namespace moe::calls {

// DLPack's code and bits.
enum class Dtype : uint16_t {
    INT8 = 0 << 8 | 8,
    INT32 = 0 << 8 | 32,
    INT64 = 0 << 8 | 64,
    FLOAT16 = 2 << 8 | 16,
    FLOAT32 = 2 << 8 | 32,
    BFLOAT16 = 4 << 8 | 16,
    BOOL = 6 << 8 | 8,
};

constexpr size_t BytesOf(Dtype dtype) { return (static_cast<uint16_t>(dtype) & 0xff) / 8; }

struct Shape {
    std::array<int64_t, 4> sizes{};
    int32_t ndim = 0;
};

// A contiguous tensor in the host's memory.
struct Seen {
    uint64_t address = 0;
    Dtype dtype{};
    int32_t ndim = 0;
    const int64_t* shape = nullptr;
};

constexpr int32_t MAX_DIMENSIONS = 4;
constexpr Py_ssize_t MAX_DESCRIBED = 32;

// Bytes that are the same for the same dtypes and sizes of some tensors, and for no others.
class Description {
public:
    void Add(const void* bytes, size_t count) {
        std::memcpy(bytes_.data() + size_, bytes, count);
        size_ += count;
    }
    void AddNone() { bytes_[size_++] = 0; }
    PyObject* Bytes() const { return PyBytes_FromStringAndSize(bytes_.data(), static_cast<Py_ssize_t>(size_)); }

private:
    std::array<char, MAX_DESCRIBED * (4 + MAX_DIMENSIONS * sizeof(int64_t))> bytes_;
    size_t size_ = 0;
};

// What DLPack's table does not tell of a tensor, asked of torch's libraries. Functions by address, from Python
// (moe_triton/backends/cpu/extension.py): three of torch's stable C interface
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

// torch's side of the exchange.
class Torch {
public:
    // False, with a Python error, where this torch offers no table, or one of another version, or lacks a function.
    bool Load(PyObject* tensor_type, PyObject* addresses) {
        if (!functions_.Load(addresses)) return false;
        const Ref capsule(PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__"));
        if (!capsule) return false;
        auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.get(), dlpack::CAPSULE_NAME));
        if (api == nullptr) return false;
        while (api != nullptr && api->version.major != dlpack::MAJOR_VERSION) api = api->older;
        if (api == nullptr || api->tensor_from_object == nullptr) {
            PyErr_SetString(PyExc_RuntimeError, "torch exchanges tensors by another version of DLPack");
            return false;
        }
        type_ = Ref::Of(tensor_type);
        api_ = api;
        return true;
    }

    // Whether an object is a plain, contiguous tensor on the CPU, and what is in it. Raises nothing.
    bool See(PyObject* object, Seen* seen) const {
        dlpack::Tensor tensor;
        if (!Borrow(object, &tensor) || !IsContiguous(tensor)) return false;
        seen->address = reinterpret_cast<uint64_t>(tensor.data) + tensor.byte_offset;
        seen->dtype = static_cast<Dtype>(tensor.dtype.code << 8 | tensor.dtype.bits);
        seen->ndim = tensor.ndim;
        seen->shape = tensor.shape;
        return true;
    }

    // Whether an object is a plain tensor on the CPU, contiguous or not; its dtype, contiguity and sizes are then added
    // to a description. Raises nothing.
    bool Describe(PyObject* object, Description* description) const {
        dlpack::Tensor tensor;
        if (!Borrow(object, &tensor) || tensor.ndim > MAX_DIMENSIONS) return false;
        const uint8_t head[] = {static_cast<uint8_t>(1 + IsContiguous(tensor)), tensor.dtype.code, tensor.dtype.bits,
                                static_cast<uint8_t>(tensor.ndim)};
        description->Add(head, sizeof(head));
        description->Add(tensor.shape, static_cast<size_t>(tensor.ndim) * sizeof(int64_t));
        return true;
    }

    // A contiguous tensor that holds a block. No object, with a Python error, if it fails.
    Ref Make(const Hold& memory, std::byte* data, Dtype dtype, const Shape& shape) const {
        auto* const lent = new Lent{{}, memory, shape.sizes, {}};
        int64_t stride = 1;
        for (int32_t i = shape.ndim - 1; i >= 0; --i) {
            lent->strides[i] = stride;
            stride *= shape.sizes[i] > 1 ? shape.sizes[i] : 1;
        }
        dlpack::ManagedTensor& managed = lent->managed;
        managed.version = {dlpack::MAJOR_VERSION, 0};
        managed.manager = lent;
        managed.deleter = [](dlpack::ManagedTensor* self) { delete static_cast<Lent*>(self->manager); };
        const auto code = static_cast<uint16_t>(dtype);
        const dlpack::DataType type{static_cast<uint8_t>(code >> 8), static_cast<uint8_t>(code & 0xff), 1};
        managed.tensor = {data, {dlpack::DEVICE_CPU, 0}, shape.ndim, type, lent->sizes.data(), lent->strides.data(), 0};
        void* object = nullptr;
        if (api_->object_from_managed(&managed, &object) != 0) return Ref();
        return Ref(static_cast<PyObject*>(object));
    }

private:
    // A tensor of torch's that holds a block of ours.
    struct Lent {
        dlpack::ManagedTensor managed;
        Hold memory;
        std::array<int64_t, 4> sizes;
        std::array<int64_t, 4> strides;
    };

    // A tensor's memory, if that is all there is to it: not a subclass or a wrapper, whose values are elsewhere; no
    // negated view; on the CPU; within its storage; and nobody waits for its gradient.
    bool Borrow(PyObject* object, dlpack::Tensor* tensor) const {
        if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != type_.get()) return false;
        if (api_->tensor_from_object(object, tensor) != 0) {
            PyErr_Clear();
            return false;
        }
        if (tensor->device.type != dlpack::DEVICE_CPU || tensor->dtype.lanes != 1) return false;
        if (functions_.IsNegated(object) || functions_.NeedsGradient(object)) return false;
        const int64_t elements = Extent(*tensor);
        if (elements == 0) return true;
        return tensor->data != nullptr && functions_.Covers(object, elements, (tensor->dtype.bits + 7) / 8);
    }

    // Elements from the first to the last, gaps between them included.
    static int64_t Extent(const dlpack::Tensor& tensor) {
        int64_t last = 0, contiguous = 1;
        for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
            if (tensor.shape[i] == 0) return 0;
            last += (tensor.shape[i] - 1) * (tensor.strides == nullptr ? contiguous : tensor.strides[i]);
            contiguous *= tensor.shape[i];
        }
        return last + 1;
    }

    // As torch has it: the stride of a dimension of one element does not matter, nor any of an empty tensor.
    static bool IsContiguous(const dlpack::Tensor& tensor) {
        if (tensor.strides == nullptr) return true;
        int64_t expected = 1;
        bool is_contiguous = true;
        for (int32_t i = tensor.ndim - 1; i >= 0; --i) {
            if (tensor.shape[i] == 0) return true;
            if (tensor.shape[i] == 1) continue;
            is_contiguous = is_contiguous && tensor.strides[i] == expected;
            expected *= tensor.shape[i];
        }
        return is_contiguous;
    }

    Ref type_;
    const dlpack::ExchangeApi* api_ = nullptr;
    TorchFunctions functions_;
};

}  // namespace moe::calls
