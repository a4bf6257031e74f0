// The Python module `moe_calls`: see call_program.h.
#include "call_program.h"
#include "output_pool.h"

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "moe_calls", "Whole calls of a rank, natively.", -1};

bool Add(PyObject* module, const char* name, PyTypeObject* type) {
    return PyType_Ready(type) == 0 && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(type)) == 0;
}

// Numbers of the operations, by name.
bool AddOperations(PyObject* module) {
    using moe::calls::Operation;
    const moe::calls::Ref numbers(PyDict_New());
    const auto add = [&numbers](const char* name, Operation operation, int operands) {
        const moe::calls::Ref number(Py_BuildValue("(ii)", static_cast<int>(operation), operands));
        return number && numbers && PyDict_SetItemString(numbers.get(), name, number.get()) == 0;
    };
#define MOE_EACH(name, operands) add(#name, Operation::name, operands) &&
    return MOE_OPERATIONS(MOE_EACH) PyModule_AddObjectRef(module, "OPERATIONS", numbers.get()) == 0;
#undef MOE_EACH
}

}  // namespace

// The rule on zones, for tests/test_rounds.py.
#define MOE_EXPORT extern "C" __attribute__((visibility("default")))
using moe::calls::Rounds;
MOE_EXPORT uint64_t moe_rounds_zone(const Rounds* rounds, uint32_t id) { return rounds->Zone(id); }
MOE_EXPORT bool moe_rounds_needs_wait(const Rounds* rounds, uint32_t id, bool capturing) {
    return rounds->NeedsWait(id, capturing);
}
MOE_EXPORT void moe_rounds_begin(Rounds* rounds, uint32_t id) { rounds->Begin(id); }
MOE_EXPORT void moe_rounds_end(Rounds* rounds, uint32_t id, bool succeeded, bool capturing) {
    rounds->End(id, succeeded, capturing);
}

PyMODINIT_FUNC PyInit_moe_calls() {
    using namespace moe::calls;
    Ref module(PyModule_Create(&definition));
    if (!module || PyType_Ready(&product_type) != 0 || !AddOperations(module.get()) ||
        !Add(module.get(), "CallProgram", &call_program_type) || !Add(module.get(), "OutputPool", &output_pool_type) ||
        PyModule_AddStringConstant(module.get(), "ROUNDS", Rounds::Layout().c_str()) != 0 ||
        PyModule_AddIntConstant(module.get(), "KEPT_PER_SIZE", KEPT_PER_SIZE) != 0 ||
        PyModule_AddIntConstant(module.get(), "MAX_KEPT", MAX_KEPT) != 0 ||
        PyModule_AddIntConstant(module.get(), "NUM_OPERANDS", NUM_OPERANDS) != 0 ||
        PyModule_AddIntConstant(module.get(), "MAX_SIZES", MAX_SIZES) != 0) {
        return nullptr;
    }
    return module.Release();
}
