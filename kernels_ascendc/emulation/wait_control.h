// What a host does while its launches wait for peers: it ends waits early, and lets Python handle signals, report long
// waits, and say whom one is for when a rank is lost, or somebody asks. Signals are handled between runs too, where
// several follow one another.
//
// Only the thread that launched does this, and in a wait only after some time without flags. Python's functions are
// passed as addresses, since programs without Python load this library too.
#pragma once

#include <pthread.h>

#include <cstdint>

#include "clock.h"
#include "flight.h"

namespace moe {

// Tokens, entries or rows that a block waits for.
struct Awaited {
    int64_t first;
    int64_t count;
};

// What a block last waited for, in which launch, and when it last polled.
struct BlockWait {
    uint64_t looked_ns;
    uint64_t launch;
    Awaited awaited;
};

// Functions of Python's C interface.
struct PythonCalls {
    int (*ensure_gil)();
    void (*release_gil)(int state);
    int (*check_signals)();
    void* (*call)(void* callable);
    void (*drop)(void* object);
    void (*fetch_error)(void** type, void** value, void** trace);
};

// One per communicator. All fields but `stop` and `alarm` belong to the thread that is in a call.
struct WaitControl {
    static constexpr uint32_t MAX_BLOCKS = 48;

    uint64_t stop;    // set by any thread and never cleared: waits end as if at their deadline
    uint64_t alarm;   // set and cleared by any thread: while it is set, `answer` is called at every look
    uint64_t holder;  // the thread that is in a call
    // The running launch and its plan: that of `moe_run_plan`, or a number that Python gave.
    uint64_t plan;
    uint64_t first;   // its first phase, as the plan numbers phases
    uint64_t launch;  // the phase that the launching thread is in
    uint64_t began_ns;  // when this launch's wait was first noticed; 0: not yet
    uint64_t look_ns;   // when to look for signals next
    uint64_t tell_ns;   // when to report the wait next
    uint64_t patience_ns;  // of a wait before its first report; 0: never
    uint64_t pause_ns;     // between two looks that makes a wait begin anew: the process has not run; 0: none does
    uint64_t looked_ns;    // last
    uint64_t was_paused;   // whether this wait has begun anew: once, for a loaded machine makes many such pauses
    uint64_t main_thread;  // the one that handles signals
    PythonCalls python;
    void* tell;      // a callable
    void* answer;    // a callable
    void* say;       // a callable
    const FlownPlan* flown;  // the plan that runs, where its runs are recorded
    const uint64_t* asked;   // how often somebody, in any process, has asked what the running wait is for; or null
    uint64_t* answered;      // the last of these that `say` has answered
    void* error[3];  // raised by a signal handler: type, value and traceback; the launch's caller raises it again
    BlockWait blocks[MAX_BLOCKS];

    void Begin(uint64_t of_plan, uint64_t number) {
        plan = of_plan;
        first = launch = number;
        began_ns = 0;
        BeginStep();
    }

    void BeginPhase(uint64_t number) {
        launch = first + number;
        began_ns = 0;
        BeginStep();
    }

    // For the flight recorder.
    void BeginStep() const {
        if (flown != nullptr) flown->flight->Newest().step = static_cast<uint32_t>(launch);
    }

    bool IsAsked() const {
        return asked != nullptr &&
               __atomic_load_n(asked, __ATOMIC_RELAXED) != __atomic_load_n(answered, __ATOMIC_RELAXED);
    }

    bool IsStopped() const { return __atomic_load_n(&stop, __ATOMIC_RELAXED) != 0; }
    bool IsAlarmed() const { return __atomic_load_n(&alarm, __ATOMIC_RELAXED) != 0; }

    // On the block's own thread.
    void Note(uint32_t block, uint32_t phase, Awaited awaited) {
        if (block < MAX_BLOCKS) blocks[block] = {MonotonicNs(), first + phase, awaited};
    }

    // What it waited for has come, and may have been cleared.
    void Forget(uint32_t block) {
        if (block < MAX_BLOCKS) blocks[block].looked_ns = 0;
    }
};

// What Python is called for.
struct Errand {
    bool handles_signals;
    bool tells;
    bool answers;
    bool says;
};

// Calls Python: has it handle signals, report a wait, and answer an alarm. What it raises is kept, and ends this wait
// and all others.
inline void CallPython(WaitControl& control, Errand errand) {
    const PythonCalls& python = control.python;
    const auto returns = [&python](void* callable) {
        void* const made = python.call(callable);
        if (made != nullptr) python.drop(made);
        return made != nullptr;
    };
    const int state = python.ensure_gil();
    bool is_good = !errand.handles_signals || python.check_signals() == 0;
    if (is_good && errand.tells) is_good = returns(control.tell);
    if (is_good && errand.answers) is_good = returns(control.answer);
    if (is_good && errand.says) is_good = returns(control.say);
    if (!is_good) {
        python.fetch_error(&control.error[0], &control.error[1], &control.error[2]);
        __atomic_store_n(&control.stop, 1, __ATOMIC_RELAXED);
    }
    python.release_gil(state);
}

constexpr uint64_t NS_BETWEEN_LOOKS = 50'000'000;

// Called repeatedly by the launching thread while it waits, without the GIL.
inline void LookUpFromWait(WaitControl& control) {
    const uint64_t now = MonotonicNs();
    const bool begins = control.began_ns == 0;
    if (begins) control.was_paused = 0;
    const bool has_paused = control.pause_ns != 0 && now - control.looked_ns > control.pause_ns;
    const bool begins_anew = !begins && has_paused && control.was_paused == 0;
    if (begins_anew) control.was_paused = 1;
    control.looked_ns = now;
    if (begins || begins_anew) {
        control.began_ns = now;
        control.look_ns = now + NS_BETWEEN_LOOKS;
        control.tell_ns = control.patience_ns == 0 ? UINT64_MAX : now + control.patience_ns;
    }
    if (now < control.look_ns || control.IsStopped()) return;
    control.look_ns = now + NS_BETWEEN_LOOKS;
    const bool handles_signals = static_cast<uint64_t>(pthread_self()) == control.main_thread;
    const bool tells = now >= control.tell_ns, answers = control.IsAlarmed();
    const bool says = control.IsAsked();
    if (!handles_signals && !tells && !answers && !says) return;
    if (tells) control.tell_ns = now + (now - control.began_ns);
    CallPython(control, {handles_signals, tells, answers, says});
}

// When the thread was in Python last, by what it looks between runs.
class SinceLook {
public:
    // Called by the launching thread between runs that follow one another, without the GIL: none of them may wait.
    void LookUp(WaitControl& control) {
        const uint64_t now = MonotonicNs();
        if (now < next_ns_ || control.IsStopped()) return;
        next_ns_ = now + NS_BETWEEN_LOOKS;
        if (static_cast<uint64_t>(pthread_self()) == control.main_thread)
            CallPython(control, {true, false, false, false});
    }

private:
    uint64_t next_ns_ = MonotonicNs() + NS_BETWEEN_LOOKS;
};

}  // namespace moe
