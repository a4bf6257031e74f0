// Two that raise flags and ring, and one that sleeps until both have, as a waiting kernel does.
#include "checked.h"

#include "doorbell.h"

namespace {

constexpr uint64_t RINGERS = 2;

struct Bell : rl::test_suite<Bell, RINGERS + 1> {
    moe::emulation::Doorbell bell;
    checked::Word<uint64_t> flags;
    rl::var<uint64_t> rows[RINGERS];

    void before() {
        bell.count.store(0);
        bell.wake_at.store(moe::emulation::Doorbell::NOBODY);
        bell.wakes.store(0);
        flags.store(0);
    }

    void thread(unsigned index) {
        if (index < RINGERS) {
            rows[index]($) = 1;
            flags.fetch_add(1, rl::mo_release, $);
            bell.Ring(1);
            return;
        }
        for (;;) {
            const uint64_t count = bell.count.load();
            const uint64_t there = flags.load(rl::mo_acquire, $);
            if (there == RINGERS) break;
            bell.SleepUntil(count + (RINGERS - there));
        }
        for (auto& row : rows) RL_ASSERT(row($) == 1);
    }
};

}  // namespace

int main(int, char** argv) { return checked::Check<Bell>(std::strtoul(argv[1], nullptr, 10)); }
