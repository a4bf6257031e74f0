// Types of Python's: what all of ours have in common.
#ifndef MOE_CALLS_TYPES_H
#define MOE_CALLS_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <new>
#include <utility>

#include "references.h"

namespace moe::calls {

// One that only we make objects of.
inline PyTypeObject MakeType(const char* name, const char* doc, size_t num_bytes, destructor dealloc,
                             PyMethodDef* methods = nullptr) {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = name;
    type.tp_doc = doc;
    type.tp_basicsize = static_cast<Py_ssize_t>(num_bytes);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    type.tp_dealloc = dealloc;
    type.tp_methods = methods;
    return type;
}

// One that Python can make objects of.
inline PyTypeObject MakeType(const char* name, const char* doc, size_t num_bytes, destructor dealloc, newfunc make,
                             PyMethodDef* methods = nullptr, PyMemberDef* members = nullptr) {
    PyTypeObject type = MakeType(name, doc, num_bytes, dealloc, methods);
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_new = make;
    type.tp_members = members;
    return type;
}

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

template <typename Body>
void Dealloc(PyObject* object) {
    BodyOf<Body>(object).~Body();
    Py_TYPE(object)->tp_free(object);
}

}  // namespace moe::calls

#endif  // MOE_CALLS_TYPES_H
