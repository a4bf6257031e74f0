// Blocks that meet twice, and end: what each wrote before is there for all others, and may be written over behind the
// second meeting.
#include "checked.h"

#include "meeting.h"

namespace {

constexpr unsigned BLOCKS = 3;

struct Blocks : rl::test_suite<Blocks, BLOCKS> {
    moe::emulation::Meeting meeting{BLOCKS};
    rl::var<unsigned> words[BLOCKS];

    void thread(unsigned index) {
        words[index]($) = 1;
        meeting.Wait();
        for (auto& word : words) RL_ASSERT(word($) == 1);
        meeting.Wait();
        words[index]($) = 2;
        meeting.End();
    }
};

}  // namespace

int main(int, char** argv) { return checked::Check<Blocks>(std::strtoul(argv[1], nullptr, 10)); }
