// Python objects around ours, and their types.
#ifndef MOE_CALLS_TYPES_H
#define MOE_CALLS_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <new>
#include <utility>

#include "references.h"

namespace moe::calls {

// A Python object around one of ours.
template <typename Body>
struct Boxed {
    PyObject_HEAD
    Body body;
};

template <typename Body>
Body& BodyOf(PyObject* object) {
    return reinterpret_cast<Boxed<Body>*>(object)->body;
}

// Takes a body over. No object, with a Python error, if there is no memory.
template <typename Body>
Ref Box(PyTypeObject* type, Body body) {
    Ref made(type->tp_alloc(type, 0));
    if (made) new (&BodyOf<Body>(made.get())) Body(std::move(body));
    return made;
}

// Its type; where `make` is null, only we make objects of it.
template <typename Body>
PyTypeObject BoxType(const char* name, const char* doc, newfunc make, PyMethodDef* methods) noexcept {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = name;
    type.tp_doc = doc;
    type.tp_basicsize = sizeof(Boxed<Body>);
    type.tp_flags = Py_TPFLAGS_DEFAULT | (make == nullptr ? Py_TPFLAGS_DISALLOW_INSTANTIATION : 0);
    type.tp_new = make;
    type.tp_dealloc = [](PyObject* object) {
        BodyOf<Body>(object).~Body();
        Py_TYPE(object)->tp_free(object);
    };
    type.tp_methods = methods;
    return type;
}

}  // namespace moe::calls

#endif  // MOE_CALLS_TYPES_H
