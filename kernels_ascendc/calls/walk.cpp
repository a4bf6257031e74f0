// A call: a walk over the steps of its program and of its plan.
#include <algorithm>
#include <cstring>

#include "call_program.h"

namespace moe::calls {

namespace {

using RunPlan = int64_t (*)(uint64_t plan, const uint64_t* placeholders);
using TakeIds = int64_t (*)(int64_t ids, uint32_t id_bytes, int64_t taken, uint64_t num_tokens, uint64_t topk,
                            int64_t num_experts, const uint8_t* mask, uint32_t by_token, int32_t* rule);
using CallsAgree = int64_t (*)(int64_t words, int64_t table, int64_t* needed);
using ZeroGaps = void (*)(int64_t words, int64_t table, int64_t rows, int64_t row_bytes, int64_t stride,
                          int64_t num_rows);
using DigestIds = int64_t (*)(int64_t ids, uint64_t count, const uint8_t* mask, uint64_t per_flag);

bool IsSame(PyObject* one, PyObject* other) {
    return one == other || (PyUnicode_Check(one) && PyUnicode_Check(other) && PyUnicode_Compare(one, other) == 0);
}

// From an address up to another one.
struct Extent {
    uint64_t begin = 0, end = 0;
};

// What one call has found out so far, in registers, and the memory that it holds.
class Frame {
public:
    Frame(const CallProgram& program, PyObject* const* arguments)
        : program_(program), rounds_(*reinterpret_cast<Rounds*>(program.rounds)), arguments_(arguments) {}

    // Whether every check held. The values are of the registers behind those so far.
    bool Walk(Items<int64_t> values, Items<Step> steps) {
        std::memcpy(registers_ + size_, values.data, values.count * sizeof(int64_t));
        size_ += values.count;
        for (size_t i = 0; i < steps.count; ++i) {
            const Step& step = steps[i];
            if (step.operation == Operation::GIVEN) {
                const bool is_given = arguments_[step.operands[0]] != Py_None;
                registers_[step.target] = is_given;
                if (!is_given) i += step.operands[1];
            } else if (!Do(step, registers_ + step.target)) {
                return false;
            }
        }
        return true;
    }

    // The plan for what the key's registers hold. No object where there is none.
    Ref FindPlan() const {
        int64_t key[MAX_REGISTERS];
        size_t count = 0;
        for (const uint16_t each : Items<uint16_t>(program_.key.get())) key[count++] = registers_[each];
        PyObject* const plans = program_.plans.get();
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(plans); ++i) {
            PyObject* const plan = PyList_GET_ITEM(plans, i);
            if (std::memcmp(PyBytes_AS_STRING(PyTuple_GET_ITEM(plan, 0)), key, count * sizeof(int64_t)) == 0) {
                return Ref::Of(plan);
            }
        }
        return Ref();
    }

    Rounds& rounds() const { return rounds_; }
    int64_t operator[](size_t number) const { return registers_[number]; }
    const Hold& hold(size_t number) const { return holds_[number]; }

    // A tensor of a spec, or an argument; any other object as it is.
    Ref Make(PyObject* item) const {
        if (!PyBytes_Check(item)) return Ref::Of(item);
        if (PyBytes_GET_SIZE(item) == sizeof(ArgumentSpec)) {
            return Ref::Of(arguments_[Items<ArgumentSpec>(item).data->number]);
        }
        const auto memory = [this](uint16_t number) -> const Hold& { return holds_[number]; };
        return MakeTensor(*program_.torch, item, registers_, memory);
    }

private:
    bool Do(const Step& step, int64_t* target) {
        const uint16_t* const number = step.operands;
        const auto in = [this, number](size_t operand) { return registers_[number[operand]]; };
        switch (step.operation) {
            case Operation::TENSOR: return See(number[0], number[1], target);
            case Operation::NUMBER: return Count(arguments_[number[0]], target);
            case Operation::CHOICE: return Choose(arguments_[number[0]], number[1], number[2], target);
            case Operation::KEPT: return TakeKept(arguments_[number[0]], number[1], number[2], number[3] != 0, target);
            case Operation::ZONE:
                *target = static_cast<int64_t>(rounds_.Zone(program_.id));
                return !rounds_.NeedsWait(program_.id, false);
            case Operation::EQUAL: return in(0) == in(1);
            case Operation::EITHER: return in(0) == in(1) || in(0) == in(2);
            case Operation::AT_MOST: return in(0) <= in(1);
            case Operation::MULTIPLY_ADD: *target = in(0) * in(1) + in(2); return true;
            case Operation::DIVIDE: *target = in(0) / in(1); return true;
            case Operation::MINIMUM: *target = in(0) < in(1) ? in(0) : in(1); return true;
            case Operation::PARTS: *target = in(0) > in(1) ? (in(0) + in(1) - 1) / in(1) : 1; return true;
            case Operation::PICK: *target = registers_[number[0] + in(1)]; return true;
            case Operation::STARTS: *target = in(0) == in(1); return in(0) <= in(1) || in(0) - in(1) >= in(2);
            case Operation::LOAD: *target = *reinterpret_cast<const int32_t*>(in(0)); return true;
            case Operation::RESERVE:
                *target = static_cast<int64_t>(reserved_);
                reserved_ += Aligned(static_cast<size_t>(in(0) * in(1)));
                return true;
            case Operation::ALLOCATE: {
                Hold& hold = holds_[number[0]] = Hold(program_.pool->Take(std::exchange(reserved_, 0)));
                if (hold) *target = reinterpret_cast<int64_t>(hold.data());
                return static_cast<bool>(hold);
            }
            case Operation::TAKE_IDS: {
                int32_t rule = 0;
                const auto id_bytes = static_cast<uint32_t>(BytesOf(static_cast<Dtype>(in(1))));
                const auto take_ids = reinterpret_cast<TakeIds>(program_.take_ids);
                const auto* const mask = reinterpret_cast<const uint8_t*>(in(6));
                return take_ids(in(0), id_bytes, in(2), in(3), in(4), in(5), mask, in(7) != 0, &rule) < 0;
            }
            case Operation::DIGEST:
                *target = reinterpret_cast<DigestIds>(program_.digest_ids)(
                    in(0), in(1), reinterpret_cast<const uint8_t*>(in(2)), in(3));
                return true;
            case Operation::COPY:
                std::memcpy(reinterpret_cast<void*>(in(1)), reinterpret_cast<const void*>(in(0)), in(2));
                return true;
            case Operation::READ:
                extents_[number[0]] = {static_cast<uint64_t>(in(1)), static_cast<uint64_t>(in(1) + in(2))};
                return true;
            case Operation::APART: return IsApart(number[0]);
            case Operation::AGREE: return reinterpret_cast<CallsAgree>(program_.calls_agree)(in(0), in(1), target) != 0;
            case Operation::ZERO_GAPS:
                reinterpret_cast<ZeroGaps>(program_.zero_gaps)(in(0), in(1), in(2), in(3), in(4), in(5));
                return true;
            case Operation::MARKED: return HasMark(arguments_[number[0]], in(1));
            default: return false;
        }
    }

    bool See(size_t number, int32_t ndim, int64_t* target) {
        Seen seen;
        if (!program_.torch->See(arguments_[number], &seen) || seen.ndim != ndim) return false;
        target[0] = static_cast<int64_t>(seen.address);
        target[1] = static_cast<int64_t>(seen.dtype);
        uint64_t num_bytes = BytesOf(seen.dtype);
        for (int32_t i = 0; i < ndim; ++i) num_bytes *= static_cast<uint64_t>(target[2 + i] = seen.shape[i]);
        extents_[number] = {seen.address, seen.address + num_bytes};
        return true;
    }

    // Of what steps so far have seen.
    bool IsApart(size_t number) const {
        const Extent& own = extents_[number];
        for (size_t other = 0; other < MAX_ARGUMENTS; ++other) {
            const uint64_t begin = std::max(own.begin, extents_[other].begin);
            if (other != number && begin < std::min(own.end, extents_[other].end)) return false;
        }
        return true;
    }

    static bool Count(PyObject* argument, int64_t* target) {
        int overflow = 0;
        if (!PyLong_Check(argument)) return false;
        *target = PyLong_AsLongLongAndOverflow(argument, &overflow);
        return overflow == 0;
    }

    bool HasMark(PyObject* argument, int64_t mark) const {
        const Ref found(PyObject_GetAttr(argument, program_.mark_name.get()));
        if (!found) PyErr_Clear();
        if (!found) return true;
        int64_t number = 0;
        return Count(found.get(), &number) && number == mark;
    }

    bool Choose(PyObject* argument, size_t first, size_t count, int64_t* target) const {
        for (size_t i = 0; i < count; ++i) {
            if (!IsSame(argument, PyTuple_GET_ITEM(program_.objects.get(), first + i))) continue;
            *target = static_cast<int64_t>(i);
            return true;
        }
        return false;
    }

    bool TakeKept(PyObject* handle, size_t operator_id, size_t hold, bool of_any, int64_t* target) {
        if (reinterpret_cast<PyObject*>(Py_TYPE(handle)) != program_.handle_type.get()) return false;
        const Ref found(PyObject_GenericGetAttr(handle, program_.product_name.get()));
        if (!found) PyErr_Clear();
        if (!found || Py_TYPE(found.get()) != &product_type) return false;
        const auto& product = BodyOf<Product>(found.get());
        if (product.owner != program_.owner || product.operator_id != operator_id) return false;
        if (!of_any && product.number + 1 != rounds_.counts[operator_id]) return false;  // another has run since
        holds_[hold] = product.memory;
        std::memcpy(target, product.values, sizeof(product.values));
        return true;
    }

    const CallProgram& program_;
    Rounds& rounds_;
    PyObject* const* arguments_;
    size_t size_ = 0, reserved_ = 0;
    Hold holds_[MAX_HOLDS];
    Extent extents_[MAX_ARGUMENTS];
    int64_t registers_[MAX_REGISTERS];
};

// What placeholders stand for in a run, in their order.
struct Words {
    uint64_t words[MAX_REGISTERS];
    size_t count = 0;
};

// Runs a plan, with which the operator's run is over, or not.
int64_t Run(const CallProgram& program, const PreparedPlan& plan, const Frame& frame, bool is_over, Words* given) {
    for (const uint16_t placeholder : plan.placeholders) {
        given->words[given->count++] = static_cast<uint64_t>(frame[placeholder]);
    }
    const auto run = reinterpret_cast<RunPlan>(program.run_plan);
    int64_t result = 0;
    Py_BEGIN_ALLOW_THREADS;
    result = run(plan.plan[0], given->words);
    Py_END_ALLOW_THREADS;
    // Where ranks were masked meanwhile, Python brings it to its end.
    const bool is_masked = result >= MASKS_CHANGED;
    if (is_over || (result != 0 && !is_masked)) frame.rounds().End(program.id, result == 0 || is_masked, false);
    return result;
}

// Has Python deal with what a result stands for. False, with a Python error, where it raises.
bool IsMended(const CallProgram& program, const PreparedPlan& plan, const Frame& frame, int64_t result,
              const Words& given) {
    const auto* const bytes = reinterpret_cast<const char*>(given.words);
    const auto num_bytes = static_cast<Py_ssize_t>(given.count * sizeof(uint64_t));
    const Ref bindings(PyDict_New()), code(PyLong_FromLongLong(result));
    const Ref words(PyBytes_FromStringAndSize(bytes, num_bytes));
    if (!bindings || !code || !words) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan.bindings); ++i) {
        PyObject* const pair = PyTuple_GET_ITEM(plan.bindings, i);
        PyObject *const name = PyTuple_GET_ITEM(pair, 0), *const item = PyTuple_GET_ITEM(pair, 1);
        const bool is_number = PyLong_Check(item);
        const Ref value = is_number ? Ref(PyLong_FromLongLong(frame[PyLong_AsSize_t(item)])) : frame.Make(item);
        if (!value || PyDict_SetItem(bindings.get(), name, value.get()) != 0) return false;
    }
    const Ref answer(PyObject_CallFunctionObjArgs(program.failed.get(), program.name.get(), plan.executable, code.get(),
                                                  bindings.get(), words.get(), nullptr));
    if (answer.get() == Py_True) return true;
    if (answer) PyErr_SetString(PyExc_RuntimeError, "a run that failed was not reported");
    return false;
}

// A handle without going through its constructor, or its ban on assignments.
Ref MakeHandle(const CallProgram& program, const PreparedPlan& plan, const Frame& frame, uint64_t number) {
    Product kept{frame.hold(0), program.torch, Ref::Of(plan.kept_tensors), program.owner, program.id, number, {}};
    for (size_t i = 0; i < plan.kept.count; ++i) kept.values[i] = frame[plan.kept[i]];
    const Ref product = Box(&product_type, std::move(kept)), count(PyLong_FromUnsignedLongLong(number));
    auto* const type = reinterpret_cast<PyTypeObject*>(program.handle_type.get());
    Ref handle(type->tp_alloc(type, 0));
    if (!product || !count || !handle) return Ref();
    const auto set = [&handle](PyObject* name, PyObject* value) {
        return PyObject_GenericSetAttr(handle.get(), name, value) == 0;
    };
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plan.handle_fields); ++i) {
        PyObject* const pair = PyTuple_GET_ITEM(plan.handle_fields, i);
        const Ref value = frame.Make(PyTuple_GET_ITEM(pair, 1));
        if (!value || !set(PyTuple_GET_ITEM(pair, 0), value.get())) return Ref();
    }
    if (!set(program.number_name.get(), count.get()) || !set(program.product_name.get(), product.get())) return Ref();
    return handle;
}

PyObject* MakeOutput(const CallProgram& program, const PreparedPlan& plan, const Frame& frame, uint64_t number) {
    if (plan.output_type == Py_None) return frame.Make(PyTuple_GET_ITEM(plan.outputs, 0)).Release();
    const Py_ssize_t count = PyTuple_GET_SIZE(plan.outputs), handles = plan.kept_tensors != Py_None;
    auto* const type = reinterpret_cast<PyTypeObject*>(plan.output_type);
    Ref made(type->tp_alloc(type, count + handles));
    for (Py_ssize_t i = 0; made && i < count + handles; ++i) {
        Ref item = i < count ? frame.Make(PyTuple_GET_ITEM(plan.outputs, i)) : MakeHandle(program, plan, frame, number);
        if (!item) return nullptr;
        PyTuple_SET_ITEM(made.get(), i, item.Release());
    }
    return made.Release();
}

// Marks the output that is to be marked. False, with a Python error, where that fails.
bool Mark(const CallProgram& program, const PreparedPlan& plan, const Frame& frame, PyObject* made) {
    if (plan.mark.count == 0) return true;
    PyObject* const output = plan.output_type == Py_None ? made : PyTuple_GET_ITEM(made, plan.mark[0]);
    const Ref mark(PyLong_FromLongLong(frame[plan.mark[1]]));
    return mark && PyObject_SetAttr(output, program.mark_name.get(), mark.get()) == 0;
}

// The second plan of a run, once it is known that it can be run; or what the first one has made, with which Python goes
// on, as it does where ranks were masked. Nobody asks for the times of a run in two plans.
PyObject* GoOn(const CallProgram& program, const PreparedPlan& first, Frame* frame, uint64_t number, bool is_masked) {
    const PreparedPlan plan(first.next);
    PyObject *const last = program.last.get(), *const name = program.name.get();
    if (PyDict_Contains(last, name) == 1 && PyDict_DelItem(last, name) != 0) return nullptr;
    if (is_masked || !frame->Walk(plan.values, plan.steps)) return MakeOutput(program, first, *frame, number);
    Words given;
    const int64_t result = Run(program, plan, *frame, true, &given);
    if (result != 0 && !IsMended(program, plan, *frame, result, given)) return nullptr;
    return MakeOutput(program, plan, *frame, number);
}

}  // namespace

PyObject* Call(PyObject* object, PyObject* const* arguments, Py_ssize_t count) {
    const auto& program = BodyOf<CallProgram>(object);
    if (count != program.num_arguments) {
        return PyErr_Format(PyExc_TypeError, "%U takes %d arguments", program.name.get(), int{program.num_arguments});
    }
    const HeldLock lock(program.acquire.get(), program.release.get(), program.holder);
    if (!lock.is_held()) Py_RETURN_NONE;
    Frame frame(program, arguments);
    if (!frame.Walk(Items<int64_t>(program.values.get()), Items<Step>(program.steps.get()))) Py_RETURN_NONE;
    const Ref found = frame.FindPlan();
    if (!found) Py_RETURN_NONE;
    const PreparedPlan plan(found.get());
    if (!frame.Walk(plan.values, plan.steps)) Py_RETURN_NONE;
    const uint64_t number = frame.rounds().counts[program.id];
    frame.rounds().Begin(program.id);
    const bool is_over = plan.next == Py_None;
    Words given;
    const int64_t result = Run(program, plan, frame, is_over, &given);
    if (result != 0 && !IsMended(program, plan, frame, result, given)) return nullptr;
    if (!is_over) return GoOn(program, plan, &frame, number, result != 0);
    if (PyDict_SetItem(program.last.get(), program.name.get(), plan.executable) != 0) return nullptr;
    Ref made(MakeOutput(program, plan, frame, number));
    return made && Mark(program, plan, frame, made.get()) ? made.Release() : nullptr;
}

}  // namespace moe::calls
