// Traces: when each block ran which launch, the steps in it, and the peers that it waited for.
//
// Where torch's profiler looks at the calling thread, the same launches are ranges in it. Without either,
// a block only checks a null pointer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "clock.h"
#include "flight.h"
#include "types.h"

#include "moe_layout.h"

namespace moe {

// Ranges in torch's profiler say by name what a thread does while a profiler looks at it. Functions of torch's
// libraries by address, from Python (moe_triton/backends/cpu/native.py); null where this torch lacks one. Nothing of
// Python's runs in them, so that ranges need no lock and swallow no signal.
struct TorchProfiler {
    bool (*is_on)();  // whether a profiler, or another observer, looks at this thread
    int32_t (*start)(const char* name, void* arguments, const void* inputs, uint64_t num_inputs, void** range);
    int32_t (*end)(void* range);

    bool IsOn() const { return is_on != nullptr && is_on(); }
};

inline TorchProfiler& ProfilerOfProcess() {
    static TorchProfiler profiler{};
    return profiler;
}

// A range from here to the end of its scope. Without a name there is none.
class ProfiledRange {
public:
    explicit ProfiledRange(const char* name) { Start(name); }
    ProfiledRange(const ProfiledRange&) = delete;
    ProfiledRange& operator=(const ProfiledRange&) = delete;
    ~ProfiledRange() { End(); }

    // One ends, and the next begins.
    void Next(const char* name) {
        End();
        Start(name);
    }

private:
    void Start(const char* name) {
        if (name == nullptr) return;
        if (ProfilerOfProcess().start(name, nullptr, nullptr, 0, &range_) != 0) range_ = nullptr;
    }

    void End() {
        if (range_ != nullptr) ProfilerOfProcess().end(range_);
        range_ = nullptr;
    }

    void* range_ = nullptr;
};

struct TraceEvent {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t call;
    uint32_t launch;
    uint32_t block;
    uint32_t kind;
    int32_t peer;
};

constexpr uint32_t NUM_COUNTERS = Traffic::FRAMING_INSIDE + 1;

// One run of a plan.
struct TraceCall {
    uint64_t begin_ns;
    uint64_t end_ns;
    uint64_t number;
    uint32_t plan;
    int32_t tokens;
    int32_t rows;
    int32_t result;  // as of moe_run_plan
    int64_t traffic[NUM_COUNTERS];  // sums of all blocks' counters; -1: it posts nothing
};

// Two rings, which keep the newest entries.
struct TraceLog {
    TraceEvent* events;
    uint64_t max_events;
    uint64_t num_events;
    TraceCall* calls;
    uint64_t max_calls;
    uint64_t num_calls;  // the number of the call that runs

    // Blocks add at the same time.
    void Add(const TraceEvent& event) {
        events[__atomic_fetch_add(&num_events, 1, __ATOMIC_RELAXED) % max_events] = event;
    }
};

// A plan whose runs are traced, and the placeholders with the numbers that a trace shows; -1 for none.
struct TracedPlan {
    TraceLog* log;
    uint32_t number;
    int32_t tokens_hole;
    int32_t rows_hole;    // sums of rows
    uint32_t last_entry;  // which of the sums counts all of them
    const int64_t* traffic;  // what blocks have posted, as Traffic; null: nothing
    uint64_t traffic_blocks;
};

// A call of a plan; if that is not traced, the plan is null and nothing is recorded.
class CallTrace {
public:
    CallTrace(const TracedPlan* plan, const uint64_t* placeholders) : plan_(plan), placeholders_(placeholders) {
        if (plan_ == nullptr) return;
        ++plan_->log->num_calls;
        begin_ns_ = MonotonicNs();
    }

    int64_t End(int64_t result) const {
        if (plan_ == nullptr) return result;
        TraceLog& log = *plan_->log;
        const uint64_t number = log.num_calls;
        const int32_t tokens = plan_->tokens_hole < 0 ? -1 : static_cast<int32_t>(placeholders_[plan_->tokens_hole]);
        const int32_t rows = plan_->rows_hole < 0 || result != 0 ? -1 : Rows();
        TraceCall& call = log.calls[number % log.max_calls];
        call = {begin_ns_, MonotonicNs(), number, plan_->number, tokens, rows, static_cast<int32_t>(result), {}};
        SumTraffic(call.traffic);
        return result;
    }

private:
    int32_t Rows() const {
        return reinterpret_cast<const int32_t*>(placeholders_[plan_->rows_hole])[plan_->last_entry];
    }

    void SumTraffic(int64_t* counters) const {
        for (uint32_t i = 0; i < NUM_COUNTERS; ++i) {
            counters[i] = plan_->traffic == nullptr ? -1 : 0;
            for (uint64_t block = 0; block < plan_->traffic_blocks; ++block) {
                counters[i] += plan_->traffic[block * TRAFFIC_WORDS + i];
            }
        }
    }

    const TracedPlan* plan_;
    const uint64_t* placeholders_;
    uint64_t begin_ns_ = 0;
};

// A launch that a trace or a profiler sees: passed as the launch's stream; null where there is neither.
struct TracedLaunch {
    TraceLog* log;  // null without a trace
    uint32_t number;
    uint32_t first_core;       // the cores before it belong to the launch that runs in parallel
    const char* const* steps;  // what the profiler calls each phase of the plan; null where none looks
};

// Adds the spans of one block of a launch, on the thread that runs the block.
class TracedBlock {
public:
    TracedBlock(const TracedLaunch* launch, uint32_t block)
        : launch_(launch), number_(launch == nullptr ? 0 : launch->number), range_(NameOfPhase()) {
        if (!IsLogged()) return;
        block_ = launch->first_core + block;
        begin_ns_ = MonotonicNs();
    }
    ~TracedBlock() {
        if (IsLogged()) End(MonotonicNs());
    }

    // From here on the block runs the next phase of its launch.
    void NextPhase() {
        if (IsLogged()) {
            const uint64_t now = MonotonicNs();
            End(now);
            waits_ns_.clear();
            step_ = TRACE_BLOCK;
            has_polled_ = false;
            begin_ns_ = now;
        }
        ++number_;
        range_.Next(NameOfPhase());
    }

    // From here on the block does this, or goes on with it.
    void Step(uint32_t kind) {
        if (kind == step_) return;
        const uint64_t now = MonotonicNs();
        EndStep(now);
        has_polled_ = has_polled_ || kind == TRACE_POLL;
        step_ = kind;
        step_ns_ = now;
    }

    // A wait that began at `begin_ns` waited `ns` for one flag of a peer. The longest one is kept.
    void WaitedFor(uint32_t peer, uint64_t begin_ns, uint64_t ns) {
        if (peer >= waits_ns_.size()) waits_ns_.resize(peer + 1);
        if (waits_ns_[peer] < ns) waits_ns_[peer] = ns;
        wait_begin_ns_ = begin_ns > begin_ns_ ? begin_ns : begin_ns_;
    }

    // A wait that began at `begin_ns` ends, if there was one: if the block has polled. What it does goes on as another
    // span, so that spans nest.
    void WaitEnds(uint32_t peer, uint64_t begin_ns) {
        if (!has_polled_) return;
        const uint64_t now = MonotonicNs();
        EndStep(now);
        step_ns_ = now;
        WaitedFor(peer, begin_ns, now - std::max(begin_ns, begin_ns_));
    }

    // Whether its phases are seen, by a trace or a profiler.
    bool IsOn() const { return launch_ != nullptr; }

    // Whether what it does in them is, by a trace.
    bool IsLogged() const { return launch_ != nullptr && launch_->log != nullptr; }

private:
    const char* NameOfPhase() const {
        return launch_ == nullptr || launch_->steps == nullptr ? nullptr : launch_->steps[number_];
    }

    void End(uint64_t now) {
        EndStep(now);
        for (uint32_t peer = 0; peer < waits_ns_.size(); ++peer) {
            if (waits_ns_[peer] == 0) continue;
            const uint64_t end = wait_begin_ns_ + waits_ns_[peer];
            Add(wait_begin_ns_, end < now ? end : now, TRACE_WAIT, static_cast<int32_t>(peer));
        }
        Add(begin_ns_, now, TRACE_BLOCK);
    }

    void EndStep(uint64_t now) {
        if (step_ != TRACE_BLOCK) Add(step_ns_, now, step_);
    }

    void Add(uint64_t begin_ns, uint64_t end_ns, uint32_t kind, int32_t peer = -1) {
        launch_->log->Add({begin_ns, end_ns, launch_->log->num_calls, number_, block_, kind, peer});
    }

    const TracedLaunch* launch_;
    uint32_t number_;
    ProfiledRange range_;
    uint32_t block_ = 0;
    uint64_t begin_ns_ = 0;
    uint32_t step_ = TRACE_BLOCK;  // none yet
    uint64_t step_ns_ = 0;
    bool has_polled_ = false;
    uint64_t wait_begin_ns_ = 0;
    std::vector<uint64_t> waits_ns_;  // by peer; 0 for none
};

namespace emulation {

// What a core of any build has: its block of the launch, and what the kernel and the host have there.
struct CoreOfBlock {
    const uint32_t block;
    const uint32_t blocks;
    AscendC::TPipe* pipe = nullptr;
    TracedBlock* traced = nullptr;  // null where nothing is traced or profiled
    const FlownPlan* flown = nullptr;  // null where the flight recorder does not note waits
    uint32_t step = 0;                 // the phase that runs, as the plan numbers them
    bool has_polled = false;           // in it
};

}  // namespace emulation

}  // namespace moe
