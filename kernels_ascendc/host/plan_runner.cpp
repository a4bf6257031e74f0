// Walks a plan on the CPU: one call from Python runs every launch of an operator.
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "block_pool.h"
#include "trace.h"

namespace {

// Packed entry of a compiled Triton kernel: argument words, number of programs, this program.
using TritonEntry = void (*)(const uint64_t* words, int32_t num_programs, int32_t program);
using AscendCEntry = int (*)(uint32_t blocks, const void* stream, const uint64_t* words);

enum Kind : uint32_t { TRITON = 0, ASCEND_C = 1 };

double MicrosecondsSince(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

bool AnyReported(const int32_t* report, uint32_t words) {
    int32_t seen = 0;
    for (uint32_t i = 0; i < words; ++i) {
        seen |= report[i];
    }
    return seen != 0;
}

}  // namespace

extern "C" {

struct MoeLaunch {
    uint64_t entry;
    uint32_t kind;
    uint32_t blocks;
    uint64_t* words;
};

// Puts hole `hole` plus `offset` into `*word` before the walk.
struct MoePatch {
    uint64_t* word;
    uint64_t hole;
    uint64_t offset;
};

struct MoePlan {
    const MoeLaunch* launches;
    uint64_t num_launches;
    const MoePatch* patches;
    uint64_t num_patches;
    int32_t* report;
    uint64_t report_words;
    double* durations_us;  // one per launch
    moe::TraceLog* trace;  // null for none
};

// Returns 0; 1 + i when launch i reported something (its report stands in plan->report); -1 - i when
// launch i failed in itself (moe_last_error says why). Launches after it have not run.
int64_t moe_run_plan(const MoePlan* plan, const uint64_t* holes) {
    for (uint64_t i = 0; i < plan->num_patches; ++i) {
        const MoePatch& patch = plan->patches[i];
        *patch.word = holes[patch.hole] + patch.offset;
    }
    for (uint64_t i = 0; i < plan->report_words; ++i) {
        plan->report[i] = 0;
    }
    const moe::TracedCall traced_call(plan->trace);
    for (uint64_t i = 0; i < plan->num_launches; ++i) {
        const MoeLaunch& launch = plan->launches[i];
        const moe::TracedLaunch traced{plan->trace, static_cast<uint32_t>(i)};
        const moe::TracedLaunch* const stream = plan->trace != nullptr ? &traced : nullptr;
        const auto start = std::chrono::steady_clock::now();
        if (launch.kind == TRITON) {
            const auto entry = reinterpret_cast<TritonEntry>(launch.entry);
            const auto programs = static_cast<int32_t>(launch.blocks);
            moe::ParallelFor(launch.blocks, [&](uint32_t program) {
                const moe::TracedBlock block(stream, program);
                entry(launch.words, programs, static_cast<int32_t>(program));
            });
        } else {
            const auto entry = reinterpret_cast<AscendCEntry>(launch.entry);
            if (entry(launch.blocks, stream, launch.words) != 0) {
                return -1 - static_cast<int64_t>(i);
            }
            if (AnyReported(plan->report, static_cast<uint32_t>(plan->report_words))) {
                return 1 + static_cast<int64_t>(i);
            }
        }
        plan->durations_us[i] = MicrosecondsSince(start);
    }
    return 0;
}

// Position of the first id outside [-1, num_experts) (`*rule` = 1) or equal to an earlier one of its
// token (`*rule` = 2); -1 when every id is good.
int64_t moe_first_bad_id(const int32_t* ids, uint64_t num_tokens, uint64_t topk, int64_t num_experts, int32_t* rule) {
    for (uint64_t token = 0; token < num_tokens; ++token) {
        const int32_t* row = ids + token * topk;
        for (uint64_t k = 0; k < topk; ++k) {
            const int64_t id = row[k];
            if (id < -1 || id >= num_experts) {
                *rule = 1;
                return static_cast<int64_t>(token * topk + k);
            }
            for (uint64_t earlier = 0; id >= 0 && earlier < k; ++earlier) {
                if (row[earlier] == id) {
                    *rule = 2;
                    return static_cast<int64_t>(token * topk + k);
                }
            }
        }
    }
    return -1;
}

}  // extern "C"
