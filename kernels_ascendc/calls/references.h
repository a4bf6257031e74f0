// Owners of Python objects and of a lock in Python, and Python objects around ours.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>

#include <cstdint>
#include <new>
#include <utility>

namespace moe::calls {

// One reference to a Python object, or none.
class Ref {
public:
    Ref() = default;
    // Takes a reference over.
    explicit Ref(PyObject* object) : object_(object) {}
    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref& operator=(Ref&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    static Ref Of(PyObject* object) {
        Py_XINCREF(object);
        return Ref(object);
    }

    PyObject* get() const { return object_; }
    PyObject* Release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

private:
    PyObject* object_ = nullptr;
};

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

// Holds a `threading.Lock` if it was free, and says which thread does.
class HeldLock {
public:
    HeldLock(PyObject* acquire, PyObject* release, uint64_t holder) : release_(release), holder_(holder) {
        const Ref taken(PyObject_CallOneArg(acquire, Py_False));
        if (!taken) PyErr_Clear();
        is_held_ = taken.get() == Py_True;
        if (is_held_) Say(static_cast<uint64_t>(pthread_self()));
    }
    HeldLock(const HeldLock&) = delete;
    HeldLock& operator=(const HeldLock&) = delete;
    ~HeldLock() {
        if (!is_held_) return;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);  // what is being raised goes on being raised
        Say(0);
        const Ref released(PyObject_CallNoArgs(release_));
        if (!released) PyErr_WriteUnraisable(release_);
        PyErr_Restore(type, value, trace);
    }

    bool is_held() const { return is_held_; }

private:
    void Say(uint64_t thread) { *reinterpret_cast<uint64_t*>(holder_) = thread; }

    PyObject* release_;
    uint64_t holder_;  // where the number of the thread goes
    bool is_held_ = false;
};

}  // namespace moe::calls
