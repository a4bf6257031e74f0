// Owners of Python objects, and of a lock in Python.
#ifndef MOE_CALLS_REFERENCES_H
#define MOE_CALLS_REFERENCES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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
    Ref(const Ref&) = delete;
    Ref& operator=(const Ref&) = delete;
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

// Holds a `threading.Lock` if it was free.
class HeldLock {
public:
    HeldLock(PyObject* acquire, PyObject* release) : release_(release) {
        const Ref taken(PyObject_CallOneArg(acquire, Py_False));
        if (!taken) PyErr_Clear();
        is_held_ = taken.get() == Py_True;
    }
    HeldLock(const HeldLock&) = delete;
    HeldLock& operator=(const HeldLock&) = delete;
    ~HeldLock() {
        if (!is_held_) return;
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);  // what is being raised goes on being raised
        const Ref released(PyObject_CallNoArgs(release_));
        if (!released) PyErr_WriteUnraisable(release_);
        PyErr_Restore(type, value, trace);
    }

    bool is_held() const { return is_held_; }

private:
    PyObject* release_;
    bool is_held_ = false;
};

}  // namespace moe::calls

#endif  // MOE_CALLS_REFERENCES_H
