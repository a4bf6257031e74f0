// The Python module `moe_calls`: see rank_calls.h.
#include "rank_calls.h"

namespace {

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "moe_calls", "Whole calls of a rank, natively.", -1, nullptr,
                          nullptr,               nullptr,     nullptr,                            nullptr};

bool Add(PyObject* module, const char* name, PyTypeObject* type) {
    return PyType_Ready(type) == 0 && PyModule_AddObjectRef(module, name, reinterpret_cast<PyObject*>(type)) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit_moe_calls() {
    using namespace moe::calls;
    Ref module(PyModule_Create(&definition));
    if (!module || !InternNames() || PyType_Ready(&handle_memory_type) != 0 ||
        !Add(module.get(), "OutputPool", &output_pool_type) || !Add(module.get(), "RankCalls", &rank_calls_type) ||
        !Add(module.get(), "Prepared", &prepared_type) ||
        PyModule_AddIntConstant(module.get(), "KEPT_PER_SIZE", KEPT_PER_SIZE) != 0 ||
        PyModule_AddIntConstant(module.get(), "MAX_SIZES", MAX_SIZES) != 0) {
        return nullptr;
    }
    return module.Release();
}
