#include "handle_memory.h"

#include <cstring>
#include <new>

#include "types.h"

namespace moe::calls {

namespace {

PyObject* Tensor(PyObject* object, PyObject* name) {
    const auto* const self = reinterpret_cast<HandleMemory*>(object);
    const char* const text = PyUnicode_AsUTF8(name);
    if (text == nullptr) return nullptr;
    const auto is = [text](const char* wanted) { return std::strcmp(text, wanted) == 0; };
    const auto make = [self](std::byte* data, const Shape& shape) {
        return self->torch->Make(self->memory, data, Dtype::INT32, shape).Release();
    };
    if (is("topk_idx")) return make(self->parts.topk_idx, Shape::Of(self->num_tokens, self->topk));
    if (is("expand_idx")) return make(self->parts.expand_idx, Shape::Of(self->num_tokens * self->topk));
    if (is("recv_offsets")) return make(self->parts.recv_offsets, Shape::Of(self->num_offsets));
    if (is("assist_info")) return make(self->parts.triples, Shape::Of(self->num_triples));
    PyErr_SetObject(PyExc_AttributeError, name);
    return nullptr;
}

void Dealloc(PyObject* self) {
    auto* const handle = reinterpret_cast<HandleMemory*>(self);
    handle->memory.~Hold();
    handle->torch.~shared_ptr();
    Py_TYPE(self)->tp_free(self);
}

PyMethodDef methods[] = {
    {"tensor", Tensor, METH_O, "The tensor of a `DispatchHandle`'s attribute. AttributeError where it is another."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyTypeObject handle_memory_type =
    MakeType("moe_calls.HandleMemory", "What a dispatch's handle holds, before anybody asks for its tensors.",
             sizeof(HandleMemory), Dealloc, methods);

Ref NewHandleMemory() {
    Ref made(handle_memory_type.tp_alloc(&handle_memory_type, 0));
    if (!made) return made;
    auto* const handle = reinterpret_cast<HandleMemory*>(made.get());
    new (&handle->memory) Hold();
    new (&handle->torch) std::shared_ptr<const Torch>();
    return made;
}

}  // namespace moe::calls
