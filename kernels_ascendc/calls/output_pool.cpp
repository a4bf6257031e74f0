#include "output_pool.h"

namespace moe::calls {

namespace {

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    static const char* const names[] = {"tensor_type", "functions", "codes", "limit", nullptr};
    PyObject *tensor_type, *functions, *codes;
    Py_ssize_t limit;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "$O!O!O!n", const_cast<char**>(names), &PyType_Type, &tensor_type,
                                     &PyDict_Type, &functions, &PyDict_Type, &codes, &limit)) {
        return nullptr;
    }
    auto torch = std::make_shared<Torch>();
    if (!torch->Load(tensor_type, functions)) return nullptr;
    return Box(type, OutputPool{std::make_shared<Pool>(static_cast<size_t>(limit)), std::move(torch), Ref::Of(codes)})
        .Release();
}

// One tensor from (shape, dtype). No object, with a Python error, where it cannot be.
Ref Empty(const OutputPool& self, PyObject* spec) {
    if (!PyTuple_Check(spec) || PyTuple_GET_SIZE(spec) != 2 || !PyTuple_Check(PyTuple_GET_ITEM(spec, 0))) {
        PyErr_Format(PyExc_TypeError, "an output is asked for by shape, a tuple, and dtype, not by %R", spec);
        return Ref();
    }
    PyObject *const sizes = PyTuple_GET_ITEM(spec, 0), *const dtype = PyTuple_GET_ITEM(spec, 1);
    PyObject* const code = PyDict_GetItemWithError(self.codes.get(), dtype);
    Shape shape;
    shape.ndim = static_cast<int32_t>(PyTuple_GET_SIZE(sizes));
    if (code == nullptr || PyTuple_GET_SIZE(sizes) > static_cast<Py_ssize_t>(shape.sizes.size())) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no output is of shape and dtype %R", spec);
        return Ref();
    }
    const auto of_code = static_cast<Dtype>(PyLong_AsLong(code));
    size_t num_bytes = BytesOf(of_code);
    for (int32_t i = 0; i < shape.ndim; ++i) {
        const Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, i));
        if (size < 0) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "a size is negative: %R", sizes);
            return Ref();
        }
        shape.sizes[i] = size;
        num_bytes *= static_cast<size_t>(size);
    }
    const Hold memory(self.pool->Take(num_bytes));
    if (!memory) return Ref(PyErr_NoMemory());
    return self.torch->Make(memory, memory.data(), of_code, shape);
}

PyObject* EmptyAll(PyObject* self, PyObject* specs) {
    const Ref items(PySequence_Fast(specs, "specs must be a sequence"));
    if (!items) return nullptr;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.get());
    Ref made(PyList_New(count));
    if (!made) return nullptr;
    for (Py_ssize_t i = 0; i < count; ++i) {
        Ref tensor = Empty(BodyOf<OutputPool>(self), PySequence_Fast_GET_ITEM(items.get(), i));
        if (!tensor) return nullptr;
        PyList_SET_ITEM(made.get(), i, tensor.Release());
    }
    return made.Release();
}

PyObject* KeptBytes(PyObject* self, PyObject*) { return PyLong_FromSize_t(BodyOf<OutputPool>(self).pool->KeptBytes()); }

PyObject* Allocations(PyObject* self, PyObject*) {
    return PyLong_FromSize_t(BodyOf<OutputPool>(self).pool->Allocations());
}

PyObject* Close(PyObject* self, PyObject*) {
    BodyOf<OutputPool>(self).pool->Close();
    Py_RETURN_NONE;
}

// What tells plans apart of the tensors that a call is given: None where one is not plain, or there are too many.
PyObject* Describe(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    const Torch& torch = *BodyOf<OutputPool>(self).torch;
    if (count > MAX_DESCRIBED) Py_RETURN_NONE;
    Description description;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (args[i] == Py_None) {
            description.AddNone();
        } else if (!torch.Describe(args[i], &description)) {
            Py_RETURN_NONE;
        }
    }
    return description.Bytes();
}

PyMethodDef methods[] = {
    {"empty_all", EmptyAll, METH_O,
     "empty_all(specs): a contiguous tensor, of undefined contents, for each (shape, dtype)."},
    {"describe", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Describe)), METH_FASTCALL,
     "describe(*objects): bytes for the dtype, sizes and contiguity of each; None where one is neither None nor a "
     "plain tensor on the CPU (moe_triton/core/plain_tensors.py)."},
    {"close", Close, METH_NOARGS, "close(): gives back what waits to be used again, and keeps nothing from now on."},
    {"kept_bytes", KeptBytes, METH_NOARGS, "kept_bytes(): bytes that wait to be used again."},
    {"allocations", Allocations, METH_NOARGS, "allocations(): how often memory came from the system so far."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyTypeObject output_pool_type =
    BoxType<OutputPool>("moe_calls.OutputPool", "Tensors from recycled memory.", New, methods);

}  // namespace moe::calls
