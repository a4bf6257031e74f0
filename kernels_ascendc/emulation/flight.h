// The flight recorder: what each run of a plan was, how long its steps took and whom it waited for longest, in memory
// that outlives the process (moe_triton/core/flight_file.py, where it is described).
//
// It is on by default, so a run adds to it a few dozen words and no lock. Only the thread that runs a plan writes runs;
// blocks note waits at the same time, each with an atomic maximum.
#pragma once

#include <algorithm>
#include <cstdint>

#include "clock.h"

namespace moe {

constexpr uint32_t FLIGHT_STEPS = 32, FLIGHT_BOUNDS = 13, FLIGHT_OPERATORS = 3;
// Results from here on are of runs that stopped before some launch, for ranks were masked.
constexpr int64_t FLIGHT_MASKED = int64_t{1} << 32;
constexpr uint64_t FLIGHT_NO_NUMBER = UINT64_MAX;

// As flight_file.RunStruct has it.
struct FlightRun {
    uint64_t number;  // from 1 on; 0 while it is being written
    uint64_t begin_ns;
    uint64_t end_ns;  // 0: it runs
    uint64_t count;
    int64_t result;
    uint32_t plan;
    uint32_t step;
    int32_t tokens;
    int32_t rows;
    int32_t awaited_rank;
    uint32_t awaited_us;
    float steps_us[FLIGHT_STEPS];
};
static_assert(sizeof(FlightRun) == 192, "as Python has it");

// As flight_file.PeerStruct has it.
struct FlightPeer {
    uint64_t classes[FLIGHT_BOUNDS + 1];
    uint64_t sum_us;
    uint64_t bytes_in;
    uint64_t bytes_out;
};
static_assert(sizeof(FlightPeer) == 136, "as Python has it");

// Sums of an operator's runs: each in its own row of the header.
struct FlightTotals {
    uint64_t runs[FLIGHT_OPERATORS];
    uint64_t tokens[FLIGHT_OPERATORS];
    uint64_t rows[FLIGHT_OPERATORS];
};

// Where a communicator's recorder lies. This is the process's own, as addresses in shared memory would not be.
struct Flight {
    FlightRun* runs;
    uint64_t max_runs;
    uint64_t* num_runs;
    FlightTotals* totals;
    FlightPeer* peers;
    uint32_t* now_us;  // of each rank, in the run that goes on
    uint64_t num_ranks;
    const uint32_t* bounds_us;
    const uint64_t* counts;  // of runs, by operator
    const uint64_t* numbers;  // that runs have in their stead, where they are not FLIGHT_NO_NUMBER

    uint64_t NumberOf(uint32_t operator_id) const {
        const uint64_t given = numbers[operator_id];
        return given == FLIGHT_NO_NUMBER ? counts[operator_id] : given;
    }
    FlightRun& Newest() const { return runs[*num_runs % max_runs]; }
};

// How a kernel numbers the peers that it waits for: others are those of another group.
constexpr uint8_t PEERS_ARE_RANKS = 0, PEERS_ARE_EXPERTS = 1, PEERS_ARE_OTHERS = 2;

// How long a step took, by the cycles of its launch: moe_triton/backends/phases.py, `Span`.
struct FlightSpan {
    int64_t begin;
    int64_t end;
    int64_t of;
};

// A plan whose runs are recorded, and the placeholders with the numbers that are noted; -1 for none.
struct FlownPlan {
    Flight* flight;
    uint32_t number;
    uint32_t operator_id;
    uint32_t num_steps;
    uint32_t ends_run;  // whether a run of the operator is over with it
    uint32_t counts;  // whether its tokens and rows are those of a run
    int32_t tokens_hole;
    int32_t rows_hole;  // sums of rows, by expert and rank
    uint64_t num_entries;  // of these
    uint64_t row_bytes;  // of a row as it travels
    const double* durations_us;  // of launches, each at its first phase
    const int64_t* cycles;  // of launches of several phases
    const FlightSpan* spans;  // of each step
    const int32_t* ranks_of_experts;
    uint64_t num_experts;  // with shared ones
    const uint8_t* kinds;  // of each step, what its kernel's peers are: PEERS_ARE_RANKS and the like

    // What a block has waited for a peer, in a step. Blocks may note the same one.
    void NoteWait(uint32_t step, int64_t peer, uint32_t us) const {
        if (step >= num_steps || kinds[step] == PEERS_ARE_OTHERS || peer < 0) return;
        if (kinds[step] == PEERS_ARE_EXPERTS) {
            if (static_cast<uint64_t>(peer) >= num_experts) return;
            peer = ranks_of_experts[peer];
        }
        if (static_cast<uint64_t>(peer) >= flight->num_ranks) return;
        uint32_t& most = flight->now_us[peer];
        for (uint32_t seen = __atomic_load_n(&most, __ATOMIC_RELAXED); seen < us;) {
            if (__atomic_compare_exchange_n(&most, &seen, us, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
        }
    }
};

// A run of a plan; if that is not recorded, the plan is null and nothing is.
class FlightOfRun {
public:
    FlightOfRun(const FlownPlan* plan, const uint64_t* placeholders) : plan_(plan), placeholders_(placeholders) {}

    void Begin() const {
        if (plan_ == nullptr) return;
        const Flight& flight = *plan_->flight;
        const uint64_t number = *flight.num_runs + 1;
        FlightRun& run = flight.runs[number % flight.max_runs];
        __atomic_store_n(&run.number, 0, __ATOMIC_RELEASE);
        const int32_t tokens = plan_->tokens_hole < 0 ? -1 : static_cast<int32_t>(placeholders_[plan_->tokens_hole]);
        run.begin_ns = MonotonicNs();
        run.end_ns = 0;
        run.count = flight.NumberOf(plan_->operator_id);
        run.result = 0;
        run.plan = plan_->number;
        run.step = 0;
        run.tokens = tokens;
        run.rows = run.awaited_rank = -1;
        run.awaited_us = 0;
        std::fill_n(flight.now_us, flight.num_ranks, 0);
        __atomic_store_n(&run.number, number, __ATOMIC_RELEASE);
        __atomic_store_n(flight.num_runs, number, __ATOMIC_RELEASE);
    }

    int64_t End(int64_t result) const {
        if (plan_ == nullptr) return result;
        FlightRun& run = plan_->flight->Newest();
        const bool is_good = result == 0;
        NoteSteps(run);
        run.result = result;
        if (result < 0) run.step = static_cast<uint32_t>(-1 - result);
        if (result > 0 && result < FLIGHT_MASKED) run.step = static_cast<uint32_t>(result - 1);
        if (is_good && plan_->rows_hole >= 0) run.rows = SumRows();
        SumWaits(run);
        if (is_good) SumRun(run);
        // Who finds an end finds all else.
        __atomic_store_n(&run.end_ns, MonotonicNs(), __ATOMIC_RELEASE);
        return result;
    }

private:
    void NoteSteps(FlightRun& run) const {
        constexpr float US_PER_CYCLE = static_cast<float>(NS_PER_CYCLE) / 1000.0F;
        for (uint32_t i = 0; i < std::min(plan_->num_steps, FLIGHT_STEPS); ++i) {
            const FlightSpan& span = plan_->spans[i];
            if (span.begin < 0) {
                run.steps_us[i] = static_cast<float>(plan_->durations_us[i]);
                continue;
            }
            const int64_t cycles = plan_->cycles[span.end] - plan_->cycles[span.begin];
            run.steps_us[i] = static_cast<float>(std::max<int64_t>(0, cycles)) * US_PER_CYCLE;
            if (span.of >= 0) run.steps_us[span.of] = std::max(0.0F, run.steps_us[span.of] - run.steps_us[i]);
        }
    }

    // What came from each rank, or goes back to it.
    int32_t SumRows() const {
        const Flight& flight = *plan_->flight;
        const auto* const ends = reinterpret_cast<const int32_t*>(placeholders_[plan_->rows_hole]);
        int32_t before = 0;
        for (uint64_t entry = 0, rank = 0; entry < plan_->num_entries; ++entry) {
            const int64_t rows = ends[entry] - before;
            FlightPeer& peer = flight.peers[rank];
            uint64_t& bytes = plan_->operator_id == 0 ? peer.bytes_in : peer.bytes_out;
            if (rows > 0 && plan_->counts != 0) bytes += static_cast<uint64_t>(rows) * plan_->row_bytes;
            before = ends[entry];
            if (++rank == flight.num_ranks) rank = 0;
        }
        return before;
    }

    void SumWaits(FlightRun& run) const {
        const Flight& flight = *plan_->flight;
        for (uint64_t rank = 0; rank < flight.num_ranks; ++rank) {
            const uint32_t us = flight.now_us[rank];
            if (us == 0) continue;
            if (us > run.awaited_us) {
                run.awaited_us = us;
                run.awaited_rank = static_cast<int32_t>(rank);
            }
            FlightPeer& peer = flight.peers[rank];
            peer.sum_us += us;
            ++peer.classes[std::lower_bound(flight.bounds_us, flight.bounds_us + FLIGHT_BOUNDS, us) - flight.bounds_us];
        }
    }

    void SumRun(const FlightRun& run) const {
        FlightTotals& totals = *plan_->flight->totals;
        const uint32_t id = plan_->operator_id;
        totals.runs[id] += plan_->ends_run;
        if (plan_->counts == 0) return;
        if (run.tokens > 0) totals.tokens[id] += static_cast<uint64_t>(run.tokens);
        if (run.rows > 0) totals.rows[id] += static_cast<uint64_t>(run.rows);
    }

    const FlownPlan* plan_;
    const uint64_t* placeholders_;
};

}  // namespace moe
