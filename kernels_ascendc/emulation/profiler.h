// Ranges in torch's profiler: what a thread does, by name, while a profiler looks at it.
#ifndef MOE_EMULATION_PROFILER_H
#define MOE_EMULATION_PROFILER_H

#include <cstdint>

namespace moe {

// Functions of torch's libraries by address, from Python (moe_triton/backends/cpu/native.py); null where this torch
// lacks one. Nothing of Python's runs in them, so that ranges need no lock and swallow no signal.
struct TorchProfiler {
    bool (*is_on)();  // whether a profiler, or another observer, looks at this thread
    int32_t (*start)(const char* name, void* arguments, const void* inputs, uint64_t num_inputs, void** range);
    int32_t (*end)(void* range);
};

inline TorchProfiler& ProfilerOfProcess() {
    static TorchProfiler profiler{};
    return profiler;
}

inline bool IsProfiled() {
    const TorchProfiler& profiler = ProfilerOfProcess();
    return profiler.is_on != nullptr && profiler.is_on();
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

}  // namespace moe

#endif  // MOE_EMULATION_PROFILER_H
