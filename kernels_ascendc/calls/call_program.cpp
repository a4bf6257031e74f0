// The Python objects of call_program.h: how they are made of what Python writes.
#include "call_program.h"

#include "output_pool.h"

namespace moe::calls {

namespace {

bool Refuse(const char* why) {
    PyErr_SetString(PyExc_ValueError, why);
    return false;
}

bool AreIn(Items<uint16_t> registers, size_t count) {
    for (const uint16_t each : registers) {
        if (each >= count) return Refuse("a program has no register of that number");
    }
    return true;
}

// Every number of a step is below the registers' but for how many are left out, and the highest leaves room for the
// most that a step writes.
bool AreSteps(Items<Step> steps, size_t num_registers) {
    for (const Step& step : steps) {
        if (step.operation >= Operation::COUNT) return Refuse("a program has no step of that kind");
        for (const uint16_t number : step.operands) {
            if (number >= num_registers) return Refuse("a program has no register of that number");
        }
        if (step.target >= num_registers) return Refuse("a program has no register of that number");
    }
    return num_registers + MAX_KEPT <= MAX_REGISTERS || Refuse("a program has too many registers");
}

PyObject* New(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    static const char* const names[] = {
        "operator_id", "name",   "num_arguments", "steps",       "values",       "key",         "objects",   "pool",
        "owner",       "rounds", "run_plan",      "take_ids",    "digest_ids",   "calls_agree", "zero_gaps", "holder",
        "last",        "lock",   "handle_type",   "number_name", "product_name", "mark_name",   "failed",    nullptr};
    CallProgram made;
    PyObject *name, *steps, *values, *key, *objects, *pool, *last, *lock, *handle_type, *number, *product, *mark,
        *failed;
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "$IUHSSSO!O!KKKKKKKKO!OO!UUUO", const_cast<char**>(names), &made.id, &name,
            &made.num_arguments, &steps, &values, &key, &PyTuple_Type, &objects, &output_pool_type, &pool, &made.owner,
            &made.rounds, &made.run_plan, &made.take_ids, &made.digest_ids, &made.calls_agree, &made.zero_gaps,
            &made.holder, &PyDict_Type, &last, &lock, &PyType_Type, &handle_type, &number, &product, &mark, &failed)) {
        return nullptr;
    }
    const size_t num_registers = Items<int64_t>(values).count;
    if (made.num_arguments > MAX_ARGUMENTS) {
        Refuse("a program has too many arguments");
        return nullptr;
    }
    if (!AreSteps(Items<Step>(steps), num_registers) || !AreIn(Items<uint16_t>(key), num_registers)) return nullptr;
    const std::pair<Ref*, PyObject*> held[] = {{&made.name, name},          {&made.values, values},
                                               {&made.steps, steps},        {&made.key, key},
                                               {&made.objects, objects},    {&made.last, last},
                                               {&made.failed, failed},      {&made.handle_type, handle_type},
                                               {&made.number_name, number}, {&made.product_name, product},
                                               {&made.mark_name, mark}};
    for (const auto& [member, object] : held) *member = Ref::Of(object);
    made.acquire = Ref(PyObject_GetAttrString(lock, "acquire"));
    made.release = Ref(PyObject_GetAttrString(lock, "release"));
    made.plans = Ref(PyList_New(0));
    if (!made.acquire || !made.release || !made.plans) return nullptr;
    made.torch = BodyOf<OutputPool>(pool).torch;
    made.pool = BodyOf<OutputPool>(pool).pool;
    return Box(type, std::move(made)).Release();
}

// What can be checked of a plan before it is added. Registers behind so many are its own.
bool IsPlan(PyObject* tuple, size_t registers, size_t keys) {
    PyObject *key, *values, *steps, *placeholders, *plan, *executable, *outputs, *output_type, *bindings, *kept,
        *tensors, *fields, *mark, *next;
    if (!PyArg_ParseTuple(tuple, "SSSSSOO!OO!SOO!SO", &key, &values, &steps, &placeholders, &plan, &executable,
                          &PyTuple_Type, &outputs, &output_type, &PyTuple_Type, &bindings, &kept, &tensors,
                          &PyTuple_Type, &fields, &mark, &next)) {
        return false;
    }
    const PreparedPlan read(tuple);
    const size_t count = registers + read.values.count;
    if (!AreSteps(read.steps, count) || !AreIn(read.placeholders, count) || !AreIn(read.kept, count)) return false;
    if (read.mark.count != 0 &&
        (read.mark.count != 2 || read.mark[0] >= PyTuple_GET_SIZE(outputs) || read.mark[1] >= count)) {
        return Refuse("one of the outputs is marked, with a register");
    }
    if (read.key.count != keys || read.kept.count > MAX_KEPT) {
        return Refuse("a plan's key is of another size, or its handle keeps too much");
    }
    return true;
}

PyObject* AddPlan(PyObject* object, PyObject* tuple) {
    const auto& program = BodyOf<CallProgram>(object);
    const size_t count = Items<int64_t>(program.values.get()).count;
    if (!IsPlan(tuple, count, Items<uint16_t>(program.key.get()).count)) return nullptr;
    const PreparedPlan plan(tuple);
    if (plan.next != Py_None) {
        if (!PyTuple_Check(plan.next))
            return PyErr_Format(PyExc_TypeError, "a plan goes on with a tuple, or with None");
        if (!IsPlan(plan.next, count + plan.values.count, 0)) return nullptr;
        if (PreparedPlan(plan.next).next != Py_None)
            return PyErr_Format(PyExc_ValueError, "a run has two plans at most");
    }
    if (PyList_Append(program.plans.get(), tuple) != 0) return nullptr;
    Py_RETURN_NONE;
}

// Replaces the plans, and returns the previous ones.
PyObject* Swap(PyObject* object, PyObject* plans) {
    if (!PyList_Check(plans)) return PyErr_Format(PyExc_TypeError, "plans come as a list");
    return std::exchange(BodyOf<CallProgram>(object).plans, Ref::Of(plans)).Release();
}

PyObject* Get(PyObject* object, PyObject* name) {
    const auto& product = BodyOf<Product>(object);
    PyObject* const spec = PyDict_GetItemWithError(product.tensors.get(), name);
    if (spec == nullptr) {
        if (!PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name);
        return nullptr;
    }
    if (PyLong_Check(spec)) {
        return PyLong_FromLongLong(product.values[PyLong_AsSize_t(spec) % MAX_KEPT]);
    }
    const auto memory = [&product](uint16_t) -> const Hold& { return product.memory; };
    return MakeTensor(*product.torch, spec, product.values, memory).Release();
}

PyMethodDef methods[] = {{"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(Call)), METH_FASTCALL,
                          "call(*arguments): what the operator returns, or None where Python has to run the call."},
                         {"add", AddPlan, METH_O, "add(plan): one more plan that it can run."},
                         {"swap", Swap, METH_O, "swap(plans): replaces the plans, and returns the previous ones."},
                         {nullptr, nullptr, 0, nullptr}};

PyMethodDef product_methods[] = {
    {"get", Get, METH_O, "The tensor or number of a handle's attribute. AttributeError where it is another."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyTypeObject call_program_type =
    BoxType<CallProgram>("moe_calls.CallProgram", "An operator of one rank in one native call.", New, methods);
PyTypeObject product_type = BoxType<Product>(
    "moe_calls.Product", "What a run's handle holds, before anybody asks for its tensors.", nullptr, product_methods);

}  // namespace moe::calls
