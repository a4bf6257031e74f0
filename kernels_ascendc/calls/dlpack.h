// What of DLPack 1.x we use: its tensors, and the table through which C exchanges them with an array library's
// Python objects (dmlc.github.io/dlpack, "C API"; Python finds it as `__dlpack_c_exchange_api__` of a type).
#pragma once

#include <cstdint>

namespace dlpack {

constexpr uint32_t MAJOR_VERSION = 1;
constexpr const char* CAPSULE_NAME = "dlpack_exchange_api";
constexpr int32_t DEVICE_CPU = 1;

struct Version {
    uint32_t major, minor;
};

struct Device {
    int32_t type, id;
};

struct DataType {
    uint8_t code, bits;
    uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t* shape;
    int64_t* strides;  // in elements; null for a contiguous tensor
    uint64_t byte_offset;
};

struct ManagedTensor {
    Version version;
    void* manager;
    void (*deleter)(ManagedTensor* self);
    uint64_t flags;
    Tensor tensor;
};

struct ExchangeApi {
    Version version;
    const ExchangeApi* older;
    int (*allocate)(Tensor* prototype, ManagedTensor** out, void* context,
                    void (*set_error)(void* context, const char* kind, const char* message));
    int (*managed_from_object)(void* object, ManagedTensor** out);
    int (*object_from_managed)(ManagedTensor* tensor, void** out_object);  // takes the tensor over
    int (*tensor_from_object)(void* object, Tensor* out);  // borrows; may be missing
    int (*current_stream)(int32_t device_type, int32_t device_id, void** out_stream);
};

}  // namespace dlpack
