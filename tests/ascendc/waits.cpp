// Waits that look up late, as on a loaded machine: how often each begins anew,
// and when waits look at all.
#include <cstdio>
#include <initializer_list>

#include "block_pool.h"
#include "wait_control.h"

namespace {

constexpr uint64_t PAUSE_NS = 1'000'000'000;

// Looks up, after a pause or not; returns whether the wait has begun then.
bool Begins(moe::WaitControl& control, bool after_pause) {
    if (after_pause) control.looked_ns -= 2 * PAUSE_NS;
    const uint64_t before = control.began_ns;
    moe::LookUpFromWait(control);
    return control.began_ns != before;
}

} // namespace

int main() {
    moe::WaitControl control{};
    control.pause_ns = PAUSE_NS;
    for (const bool after_pause : {false, false, true, false, true, true})
        std::printf("%d ", Begins(control, after_pause));
    control.BeginPhase(1);
    for (const bool after_pause : {true, true, true}) std::printf("%d ", Begins(control, after_pause));
    // Once attempts let others run, each may take long.
    uint32_t first = 0;
    while (!moe::IsTimeToLook(first)) ++first;
    std::printf("%d %d\n", first > 200 && first < 300, moe::IsTimeToLook(first + 1) && moe::IsTimeToLook(first + 2));
}
