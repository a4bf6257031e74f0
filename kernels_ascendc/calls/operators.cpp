// The two operators of `RankCalls`.
#include "rank_calls.h"

namespace moe::calls {

namespace {

using RunPlan = int64_t (*)(const void* plan, const uint64_t* holes);
using TakeIds = int64_t (*)(const void* ids, uint32_t id_bytes, int32_t* taken, uint64_t num_tokens, uint64_t topk,
                            int64_t num_experts, int32_t* rule);

constexpr size_t MAX_HOLES = static_cast<size_t>(Value::COUNT);

PyObject *name_dispatch, *name_combine, *name_buffer_id, *name_number, *name_dtype, *name_memory;

PyObject* PythonsWay() { Py_RETURN_NONE; }

// In the order of Python's operators.
enum Operator : uint32_t { DISPATCH, COMBINE };

Rounds& RoundsOf(const RankCalls& self) { return *reinterpret_cast<Rounds*>(self.facts.rounds); }

uint32_t PartsOf(int64_t num_tokens, int64_t each) {
    return num_tokens > each ? static_cast<uint32_t>((num_tokens + each - 1) / each) : 1;
}

int64_t Run(const RankCalls& self, const Prepared& prepared, const Values& values) {
    uint64_t holes[MAX_HOLES] = {};
    uint64_t* next = holes;
    for (const Value value : prepared.holes) *next++ = values[value];
    const auto run = reinterpret_cast<RunPlan>(self.facts.run_plan);
    int64_t result = 0;
    Py_BEGIN_ALLOW_THREADS;
    result = run(reinterpret_cast<const void*>(prepared.plan), holes);
    Py_END_ALLOW_THREADS;
    return result;
}

// Raises what a result stands for, from what the holes held.
PyObject* Fail(const RankCalls& self, PyObject* operator_name, const Prepared& prepared, int64_t result,
               const Hold& memory, const Parts& parts, int64_t num_tokens) {
    const Shape shape = Shape::Of(num_tokens, self.facts.topk);
    const Ref topk_idx = self.torch->Make(memory, parts.topk_idx, Dtype::INT32, shape);
    if (!topk_idx) return nullptr;
    const Ref bindings(Py_BuildValue("{s:O,s:L}", "topk_idx", topk_idx.get(), "num_tokens",
                                     static_cast<long long>(num_tokens)));
    const Ref code(PyLong_FromLongLong(result));
    if (!bindings || !code) return nullptr;
    const Ref nothing(PyObject_CallFunctionObjArgs(self.python.failed.get(), operator_name,
                                                   prepared.executable.get(), code.get(), bindings.get(), nullptr));
    if (nothing) PyErr_SetString(PyExc_RuntimeError, "a run that failed was not reported");
    return nullptr;
}

// The small outputs of a dispatch, in one block.
class SmallOutputs {
public:
    SmallOutputs(const Facts& facts, int64_t num_ids) {
        expand_idx = Add(num_ids, sizeof(int32_t));
        topk_idx = Add(num_ids, sizeof(int32_t));
        recv_offsets = Add(facts.num_offsets, sizeof(int32_t));
        triples = Add(facts.num_triples, sizeof(int32_t));
        tokens_per_expert = Add(facts.num_local_experts, sizeof(int64_t));
        scales = Add(facts.capacity, sizeof(float));
        weights = Add(facts.capacity, sizeof(float));
    }

    size_t num_bytes() const { return num_bytes_; }

    size_t topk_idx, expand_idx, recv_offsets, triples, tokens_per_expert, scales, weights;

private:
    size_t Add(int64_t elements, size_t each) {
        const size_t offset = num_bytes_;
        num_bytes_ += Aligned(static_cast<size_t>(elements) * each);
        return offset;
    }

    size_t num_bytes_ = 0;
};

uint64_t Address(const std::byte* data) { return reinterpret_cast<uint64_t>(data); }

// A `DispatchHandle` without going through its constructor, or its ban on assignments.
Ref MakeHandle(const RankCalls& self, const Prepared& prepared, int64_t number, PyObject* memory) {
    auto* const type = reinterpret_cast<PyTypeObject*>(self.python.handle_type.get());
    Ref handle(type->tp_alloc(type, 0));
    const Ref count(PyLong_FromLongLong(number));
    if (!handle || !count) return Ref();
    const auto set = [&handle](PyObject* name, PyObject* value) {
        return PyObject_GenericSetAttr(handle.get(), name, value) == 0;
    };
    if (!set(name_buffer_id, self.python.buffer_id.get()) || !set(name_number, count.get()) ||
        !set(name_dtype, prepared.dtype.get()) || !set(name_memory, memory)) {
        return Ref();
    }
    return handle;
}

// A named tuple of one's own making. The items are taken over.
Ref MakeOutput(const RankCalls& self, Ref (&items)[5]) {
    auto* const type = reinterpret_cast<PyTypeObject*>(self.python.output_type.get());
    Ref output(type->tp_alloc(type, 5));
    if (!output) return output;
    for (Py_ssize_t i = 0; i < 5; ++i) PyTuple_SET_ITEM(output.get(), i, items[i].Release());
    return output;
}

// Whether an object is a tensor of (rows, columns) fp32.
bool SeeFloats(const RankCalls& self, PyObject* object, int64_t rows, int64_t columns, Seen* seen) {
    return self.torch->See(object, seen) && seen->dtype == Dtype::FLOAT32 && seen->Has({rows, columns});
}

bool IsInt8(PyObject* quantize) {
    return PyUnicode_Check(quantize) && PyUnicode_CompareWithASCIIString(quantize, "int8") == 0;
}

// What a handle holds, if it is of this buffer's latest dispatch; or null.
const HandleMemory* MemoryOf(const RankCalls& self, PyObject* handle, int64_t num_dispatches, Ref* keep) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(handle)) != self.python.handle_type.get()) return nullptr;
    *keep = Ref(PyObject_GenericGetAttr(handle, name_memory));
    if (!*keep) {
        PyErr_Clear();
        return nullptr;
    }
    if (Py_TYPE(keep->get()) != &handle_memory_type) return nullptr;
    const auto* const memory = reinterpret_cast<const HandleMemory*>(keep->get());
    const bool is_latest = memory->buffer_id == self.facts.buffer_id && memory->number == num_dispatches - 1;
    return is_latest ? memory : nullptr;
}

}  // namespace

bool InternNames() {
    struct {
        PyObject** name;
        const char* text;
    } const names[] = {{&name_dispatch, "dispatch"},   {&name_combine, "combine"},
                       {&name_buffer_id, "buffer_id"}, {&name_number, "number"},
                       {&name_dtype, "dtype"},         {&name_memory, "_memory"}};
    for (const auto& each : names) {
        *each.name = PyUnicode_InternFromString(each.text);
        if (*each.name == nullptr) return false;
    }
    return true;
}

PyObject* Dispatch(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    auto& self = *reinterpret_cast<RankCalls*>(object);
    const Facts& facts = self.facts;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "dispatch takes 5 arguments");
        return nullptr;
    }
    PyObject* const smooth_scales = args[4];
    Seen x, ids, weights, smooth;
    Key key;
    key.quantize = args[3] != Py_None;
    key.weights = args[2] != Py_None;
    key.smooth = smooth_scales != Py_None;
    if (key.quantize && !IsInt8(args[3])) return PythonsWay();
    if (!self.torch->See(args[0], &x) || x.ndim != 2) return PythonsWay();
    const int64_t num_tokens = x.shape[0], num_ids = num_tokens * facts.topk;
    if (x.shape[1] != facts.hidden || num_tokens > facts.max_tokens) return PythonsWay();
    if (!self.torch->See(args[1], &ids) || !ids.Has({num_tokens, facts.topk})) return PythonsWay();
    if (ids.dtype != Dtype::INT32 && ids.dtype != Dtype::INT64) return PythonsWay();
    if (key.weights && !SeeFloats(self, args[2], num_tokens, facts.topk, &weights)) return PythonsWay();
    if (key.smooth && !(key.quantize && SeeFloats(self, smooth_scales, facts.num_smooth, facts.hidden, &smooth))) {
        return PythonsWay();
    }

    const HeldLock lock(self.python.acquire.get(), self.python.release.get(), facts.holder);
    if (!lock.is_held()) return PythonsWay();
    Rounds& rounds = RoundsOf(self);
    const auto number = static_cast<int64_t>(rounds.counts[DISPATCH]);
    key.dtype = x.dtype;
    key.zone = static_cast<uint8_t>(rounds.Zone(DISPATCH));
    key.parts = PartsOf(num_tokens, facts.dispatch_tokens);
    const Prepared* const prepared = Find(self.dispatches, key);
    if (prepared == nullptr) return PythonsWay();
    const Ref keep = Ref::Of(reinterpret_cast<PyObject*>(const_cast<Prepared*>(prepared)));

    const SmallOutputs small(facts, num_ids);
    const Hold memory(self.pool->Take(small.num_bytes()));
    const bool is_direct = static_cast<bool>(prepared->tokens);
    const Dtype row_dtype = key.quantize ? Dtype::INT8 : key.dtype;
    const auto rows_bytes = static_cast<size_t>(facts.capacity * facts.hidden) * BytesOf(row_dtype);
    const Hold rows(is_direct ? nullptr : self.pool->Take(rows_bytes));
    if (!memory || (!rows && !is_direct)) return PythonsWay();
    const Parts parts{memory.data() + small.topk_idx, memory.data() + small.expand_idx,
                      memory.data() + small.recv_offsets, memory.data() + small.triples};
    int32_t rule = 0;
    const auto take_ids = reinterpret_cast<TakeIds>(facts.take_ids);
    if (take_ids(reinterpret_cast<const void*>(ids.address), static_cast<uint32_t>(BytesOf(ids.dtype)),
                 reinterpret_cast<int32_t*>(parts.topk_idx), static_cast<uint64_t>(num_tokens),
                 static_cast<uint64_t>(facts.topk), facts.num_experts, &rule) >= 0) {
        return PythonsWay();
    }

    Values values;
    values[Value::X] = x.address;
    values[Value::TOPK_IDX] = Address(parts.topk_idx);
    values[Value::TOPK_WEIGHTS] = weights.address;
    values[Value::SMOOTH_SCALES] = smooth.address;
    values[Value::NUM_TOKENS] = static_cast<uint64_t>(num_tokens);
    values[Value::NUM_IDS] = static_cast<uint64_t>(num_ids);
    values[Value::EXPAND_IDX] = Address(parts.expand_idx);
    values[Value::TOKENS_PER_EXPERT] = Address(memory.data() + small.tokens_per_expert);
    values[Value::RECV_OFFSETS] = Address(parts.recv_offsets);
    values[Value::TRIPLES] = Address(parts.triples);
    values[Value::SCALES] = Address(memory.data() + small.scales);
    values[Value::WEIGHTS] = Address(memory.data() + small.weights);
    values[Value::TOKENS] = is_direct ? prepared->tokens_address : Address(rows.data());
    rounds.Begin(DISPATCH);
    const int64_t result = Run(self, *prepared, values);
    rounds.End(DISPATCH, result == 0, false);
    if (result != 0) return Fail(self, name_dispatch, *prepared, result, memory, parts, num_tokens);
    if (PyDict_SetItem(self.python.last.get(), name_dispatch, prepared->executable.get()) != 0) return nullptr;

    const Ref handle_memory = NewHandleMemory();
    if (!handle_memory) return nullptr;
    auto& held = *reinterpret_cast<HandleMemory*>(handle_memory.get());
    held.memory = memory;
    held.torch = self.torch;
    held.parts = parts;
    held.dtype = key.dtype;
    held.buffer_id = facts.buffer_id;
    held.number = number;
    held.num_tokens = num_tokens;
    held.topk = facts.topk;
    held.num_offsets = facts.num_offsets;
    held.num_triples = facts.num_triples;
    const auto make = [&](size_t offset, Dtype dtype, int64_t elements) {
        return self.torch->Make(memory, memory.data() + offset, dtype, Shape::Of(elements));
    };
    Ref items[5] = {
        is_direct ? Ref::Of(prepared->tokens.get())
                  : self.torch->Make(rows, rows.data(), row_dtype, Shape::Of(facts.capacity, facts.hidden)),
        key.quantize ? make(small.scales, Dtype::FLOAT32, facts.capacity) : Ref::Of(Py_None),
        make(small.tokens_per_expert, Dtype::INT64, facts.num_local_experts),
        key.weights ? make(small.weights, Dtype::FLOAT32, facts.capacity) : Ref::Of(Py_None),
        MakeHandle(self, *prepared, number, handle_memory.get()),
    };
    for (const Ref& item : items) {
        if (!item) return nullptr;
    }
    return MakeOutput(self, items).Release();
}

PyObject* Combine(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    auto& self = *reinterpret_cast<RankCalls*>(object);
    const Facts& facts = self.facts;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "combine takes 3 arguments");
        return nullptr;
    }
    const HeldLock lock(self.python.acquire.get(), self.python.release.get(), facts.holder);
    if (!lock.is_held()) return PythonsWay();
    Rounds& rounds = RoundsOf(self);
    const auto num_dispatches = static_cast<int64_t>(rounds.counts[DISPATCH]);
    Ref keep_memory;
    const HandleMemory* const memory = MemoryOf(self, args[2], num_dispatches, &keep_memory);
    if (memory == nullptr) return PythonsWay();
    const int64_t num_tokens = memory->num_tokens;
    Seen y, weights;
    if (!self.torch->See(args[0], &y) || y.ndim != 2 || y.shape[1] != facts.hidden) return PythonsWay();
    const int64_t num_rows = y.shape[0];
    if (y.dtype != memory->dtype || (num_rows < facts.capacity && num_rows < memory->Received())) return PythonsWay();
    Key key;
    key.dtype = y.dtype;
    key.weights = args[1] != Py_None;
    if (key.weights && !SeeFloats(self, args[1], num_tokens, facts.topk, &weights)) return PythonsWay();
    if (rounds.NeedsWait(COMBINE, false)) return PythonsWay();
    key.zone = static_cast<uint8_t>(rounds.Zone(COMBINE));
    key.parts = PartsOf(num_tokens, facts.combine_tokens);
    if (facts.results_bytes != 0) {
        const uint64_t results = key.zone == 0 ? facts.results_zone_0 : facts.results_zone_1;
        const uint64_t ahead = y.address - results;
        if (ahead > 0 && ahead < facts.results_bytes) return PythonsWay();
        key.in_place = ahead == 0;
    }
    const Prepared* const prepared = Find(self.combines, key);
    if (prepared == nullptr) return PythonsWay();
    const Ref keep = Ref::Of(reinterpret_cast<PyObject*>(const_cast<Prepared*>(prepared)));
    const Hold out(self.pool->Take(static_cast<size_t>(num_tokens * facts.hidden) * BytesOf(key.dtype)));
    if (!out) return PythonsWay();

    Values values;
    values[Value::Y] = y.address;
    values[Value::NUM_ROWS] = static_cast<uint64_t>(num_rows);
    values[Value::TRIPLES] = Address(memory->parts.triples);
    values[Value::RECV_OFFSETS] = Address(memory->parts.recv_offsets);
    values[Value::TOPK_IDX] = Address(memory->parts.topk_idx);
    values[Value::EXPAND_IDX] = Address(memory->parts.expand_idx);
    values[Value::TOPK_WEIGHTS] = weights.address;
    values[Value::NUM_TOKENS] = static_cast<uint64_t>(num_tokens);
    values[Value::OUT] = Address(out.data());
    // In elements, as the sum finds them beside those that came; the difference is a whole number of them.
    const auto from_window = static_cast<int64_t>(y.address - facts.window_base);
    values[Value::OWN_RESULTS] = static_cast<uint64_t>(from_window / static_cast<int64_t>(BytesOf(key.dtype)));
    rounds.Begin(COMBINE);
    const int64_t result = Run(self, *prepared, values);
    rounds.End(COMBINE, result == 0, false);
    if (result != 0) return Fail(self, name_combine, *prepared, result, memory->memory, memory->parts, num_tokens);
    if (PyDict_SetItem(self.python.last.get(), name_combine, prepared->executable.get()) != 0) return nullptr;
    return self.torch->Make(out, out.data(), key.dtype, Shape::Of(num_tokens, facts.hidden)).Release();
}

}  // namespace moe::calls
