// Walks a plan on the CPU: one call from Python runs every launch of an operator.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "../calls/rounds.h"
#include "block_pool.h"
#include "flight.h"
#include "launch_settings.h"
#include "row_copies.h"
#include "trace.h"

namespace {

// Packed entry of a compiled Triton kernel: argument words, number of programs, this program.
using TritonEntry = void (*)(const uint64_t* words, int32_t num_programs, int32_t program);
using AscendCEntry = int (*)(uint32_t blocks, const void* stream, const uint64_t* words);

using moe::calls::MASKS_CHANGED;
static_assert(moe::FLIGHT_MASKED == MASKS_CHANGED && moe::FLIGHT_OPERATORS == moe::calls::NUM_OPERATORS);

enum Kind : uint32_t { TRITON = 0, ASCEND_C = 1 };

// A second thread for work that runs in parallel to its owner's.
class Companion {
public:
    ~Companion() {
        if (!thread_.joinable()) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    // `work` must live until `Wait` has returned.
    void Start(const std::function<void()>& work) {
        if (!thread_.joinable()) thread_ = std::thread([this] { Serve(); });
        {
            std::lock_guard<std::mutex> lock(mutex_);
            work_ = &work;
        }
        changed_.notify_all();
    }

    void Wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return work_ == nullptr; });
    }

private:
    void Serve() {
        // Where both share a core, who communicates sleeps in between and must be let in at once: the scheduler lets
        // what wakes preempt a thread of this class. A batch thread would end its time slice first, and the wire wait.
        const sched_param none{};
        sched_setscheduler(0, SCHED_IDLE, &none);
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return work_ != nullptr || stopping_; });
            if (work_ == nullptr) return;
            lock.unlock();
            (*work_)();
            lock.lock();
            work_ = nullptr;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::thread thread_;
    const std::function<void()>* work_ = nullptr;
    bool stopping_ = false;
};

}  // namespace

extern "C" {

struct MoeLaunch {
    uint64_t entry;
    uint32_t kind;
    uint32_t blocks;
    uint64_t* words;
    uint32_t alongside;  // needs nothing of the launch before it
    uint32_t first;      // number of its first phase among the plan's
};

// Sets `*word` to placeholder `placeholder` plus `offset` before the walk; or, for a number, to the begin or the size
// of one of its `parts` parts.
struct MoePatch {
    uint64_t* word;
    uint64_t placeholder;
    uint64_t offset;
    uint32_t part;
    uint32_t parts;
    uint64_t is_count;
};

struct MoePlan {
    const MoeLaunch* launches;
    uint64_t num_launches;
    const MoePatch* patches;
    uint64_t num_patches;
    int32_t* report;
    uint64_t report_words;
    uint64_t phase_words;  // of these, those of each phase of a launch
    double* durations_us;  // of each launch, at the number of its first phase
    const moe::LaunchSettings* settings;
    uint64_t overlap;  // whether launches may run beside each other
    const moe::TracedPlan* trace;  // null for none
    const char* name;              // for torch's profiler
    const char* const* steps;      // likewise, of each phase
    uint64_t reads_peers;  // whether it reads in peers' windows what they write over once they mask this rank
    const moe::FlownPlan* flight;  // null for none
};

// A run among several: of which operator, and whether a run of that begins with it, or ends.
struct MoeTurn {
    const MoePlan* plan;
    const uint64_t* placeholders;
    uint32_t operator_id;
    uint32_t begins;
    uint32_t ends;
};

}  // extern "C"

namespace {

uint64_t ValueOf(const MoePatch& patch, uint64_t placeholder) {
    if (patch.parts == 0) return placeholder + patch.offset;
    const uint64_t first = placeholder * patch.part / patch.parts;
    return patch.is_count == 0 ? first : placeholder * (patch.part + 1) / patch.parts - first;
}

// What the profiler calls the phases; null where none looks.
using Steps = const char* const*;

bool RunLaunch(const MoePlan* plan, Steps steps, uint64_t i, uint32_t first_core = 0) {
    const MoeLaunch& launch = plan->launches[i];
    const moe::TracedLaunch traced{plan->trace != nullptr ? plan->trace->log : nullptr, launch.first, first_core,
                                   steps};
    const moe::TracedLaunch* const stream = traced.log != nullptr || steps != nullptr ? &traced : nullptr;
    if (moe::WaitControl* const control = moe::ControlOfThread()) {
        control->Begin(reinterpret_cast<uint64_t>(plan), launch.first);
    }
    const auto start = std::chrono::steady_clock::now();
    bool is_good = true;
    if (launch.kind == TRITON) {
        const auto entry = reinterpret_cast<TritonEntry>(launch.entry);
        const auto programs = static_cast<int32_t>(launch.blocks);
        moe::ParallelFor(launch.blocks, [&](uint32_t program) {
            const moe::TracedBlock block(stream, program);
            entry(launch.words, programs, static_cast<int32_t>(program));
            moe::emulation::OrderStreamed();
        });
    } else {
        const auto entry = reinterpret_cast<AscendCEntry>(launch.entry);
        is_good = entry(launch.blocks, stream, launch.words) == 0;
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    plan->durations_us[launch.first] = took.count();
    return is_good;
}

std::unique_ptr<Companion>& ThreadCompanion() {
    thread_local std::unique_ptr<Companion> companion;
    return companion;
}

// The computing launch goes to the companion: it cannot fail, and the error of the other one is the caller's.
bool RunBoth(const MoePlan* plan, Steps steps, uint64_t communication, uint64_t compute) {
    std::unique_ptr<Companion>& companion = ThreadCompanion();
    if (!companion) companion = std::make_unique<Companion>();
    const std::function<void()> work = [=] { RunLaunch(plan, steps, compute, plan->launches[communication].blocks); };
    companion->Start(work);
    const bool is_good = RunLaunch(plan, steps, communication);
    companion->Wait();
    return is_good;
}

// The first phase of a launch that reported something, as the plan numbers phases; -1 if none did.
int64_t FirstReported(const MoePlan* plan, const MoeLaunch& launch) {
    for (uint64_t i = 0; i < plan->report_words; ++i) {
        if (plan->report[i] != 0) return launch.first + static_cast<int64_t>(i / plan->phase_words);
    }
    return -1;
}

bool IsStopped(const MoePlan* plan) {
    return plan->settings != nullptr && plan->settings->control != nullptr && plan->settings->control->IsStopped();
}

// See `moe_run_plan`.
int64_t Walk(const MoePlan* plan, Steps steps, uint64_t first) {
    for (uint64_t i = first; i < plan->num_launches; ++i) {
        if (IsStopped(plan)) return 1 + static_cast<int64_t>(plan->launches[i].first);
        if (moe::AreMasksChanged(plan->settings)) return MASKS_CHANGED + static_cast<int64_t>(i);
        uint64_t communication = i;
        bool is_good = true;
        // In parallel only where each has a core of its own: taking turns on one core gains nothing.
        if (plan->overlap != 0 && i + 1 < plan->num_launches && plan->launches[i + 1].alongside != 0) {
            communication = plan->launches[i].kind == ASCEND_C ? i : i + 1;
            is_good = RunBoth(plan, steps, communication, communication == i ? i + 1 : i);
            ++i;
        } else {
            is_good = RunLaunch(plan, steps, i);
        }
        const MoeLaunch& launch = plan->launches[communication];
        if (!is_good) return -1 - static_cast<int64_t>(launch.first);
        const int64_t reported = launch.kind == ASCEND_C ? FirstReported(plan, launch) : -1;
        if (reported >= 0) return 1 + reported;
    }
    // A stop is reported even if the last launch has succeeded.
    if (IsStopped(plan)) return 1 + static_cast<int64_t>(plan->launches[plan->num_launches - 1].first);
    const bool is_masked = plan->reads_peers != 0 && moe::IsMaskedByPeers(*plan->settings);
    const bool is_changed = is_masked || moe::AreMasksChanged(plan->settings);
    return is_changed ? MASKS_CHANGED + static_cast<int64_t>(plan->num_launches) : 0;
}

int64_t RunFrom(const MoePlan* plan, const uint64_t* placeholders, uint64_t first) {
    for (uint64_t i = 0; i < plan->num_patches; ++i) {
        const MoePatch& patch = plan->patches[i];
        *patch.word = ValueOf(patch, placeholders[patch.placeholder]);
    }
    std::fill_n(plan->report, plan->report_words, 0);
    moe::ThreadSettings() = plan->settings;
    const bool is_profiled = moe::ProfilerOfProcess().IsOn();
    const moe::ProfiledRange range(is_profiled ? plan->name : nullptr);
    const moe::CallTrace trace(plan->trace, placeholders);
    const moe::FlightOfRun flight(plan->flight, placeholders);
    flight.Begin();
    moe::WaitControl* const control = plan->flight != nullptr ? moe::ControlOfThread() : nullptr;
    if (control != nullptr) control->flown = plan->flight;
    const int64_t result = flight.End(trace.End(Walk(plan, is_profiled ? plan->steps : nullptr, first)));
    if (control != nullptr) control->flown = nullptr;
    moe::ThreadSettings() = nullptr;
    return result;
}

}  // namespace

extern "C" {

// For the flight recorder, around a run whose launches Python makes.
void moe_flight_begin(const moe::FlownPlan* plan, const uint64_t* placeholders) {
    moe::FlightOfRun(plan, placeholders).Begin();
}

void moe_flight_end(const moe::FlownPlan* plan, const uint64_t* placeholders, int64_t result) {
    moe::FlightOfRun(plan, placeholders).End(result);
}

// See `moe::IsMaskedByPeers`.
int moe_is_masked_by_peers(const moe::LaunchSettings* settings) { return moe::IsMaskedByPeers(*settings) ? 1 : 0; }

// In a process that has just been forked: the calling thread's helper threads do not exist here.
void moe_forget_threads() {
    moe::ForgetThreadPool();
    (void)ThreadCompanion().release();
}

// From now on runs are ranges of this profiler, see `moe::TorchProfiler`.
void moe_use_profiler(bool (*is_on)(), decltype(moe::TorchProfiler::start) start,
                      decltype(moe::TorchProfiler::end) end) {
    moe::ProfilerOfProcess() = {is_on, start, end};
}

// Returns 0; 1 + i if phase i reported something (in plan->report), or did not begin or end because the plan's control
// was stopped; -1 - i if the launch that begins with phase i failed (moe_last_error says why); MASKS_CHANGED + n if
// ranks have been masked meanwhile, before the n-th launch, or this one by peers whose windows it has read. Phases are
// counted over the whole plan. Later launches have not run.
int64_t moe_run_plan(const MoePlan* plan, const uint64_t* placeholders) { return RunFrom(plan, placeholders, 0); }

// The same from a launch on.
int64_t moe_resume_plan(const MoePlan* plan, const uint64_t* placeholders, uint64_t first) {
    return RunFrom(plan, placeholders, first);
}

// Runs plans one behind the other, up to the first that is not good. Returns what `moe_run_plan` does of the last one
// that ran, whose number `last` is then.
int64_t moe_run_turns(const MoeTurn* turns, uint64_t count, moe::calls::Rounds* rounds, uint64_t* last) {
    int64_t result = 0;
    moe::SinceLook since_look;
    for (uint64_t i = 0; i < count && result == 0; ++i) {
        const MoeTurn& turn = turns[i];
        const moe::LaunchSettings* const settings = turn.plan->settings;
        if (settings != nullptr && settings->control != nullptr) since_look.LookUp(*settings->control);
        *last = i;
        if (turn.begins != 0) rounds->Begin(turn.operator_id);
        result = moe_run_plan(turn.plan, turn.placeholders);
        // Where ranks were masked meanwhile, Python brings it to its end.
        if (turn.ends != 0) rounds->End(turn.operator_id, result == 0 || result >= MASKS_CHANGED, false);
    }
    return result;
}

}  // extern "C"
