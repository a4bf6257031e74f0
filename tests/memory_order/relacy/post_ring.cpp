// A core posts to a queue of one place, and wakes its NIC; the NIC sleeps whenever there is nothing to do. What a post
// names is read before its place is free again.
#include "checked.h"

#include "post_ring.h"

namespace {

constexpr uint64_t POSTS = 3;

struct Queue : rl::test_suite<Queue, 2> {
    moe::PostRing ring{1};
    moe::PostBell bell;
    rl::var<uint64_t> bytes;

    void before() { bytes($) = 0; }

    void thread(unsigned index) {
        if (index == 0) {
            Post();
        } else {
            Serve();
        }
    }

    void Post() {
        for (uint64_t post = 1; post <= POSTS; ++post) {
            while (ring.Delivered() != post - 1) rl::yield(1, $);
            bytes($) = post;
            moe::RingEntry entry{};
            entry.item.remote = post;
            RL_ASSERT(ring.Push(std::move(entry)));
            bell.Ring(moe::Sleep::UNTIL_DUE);
        }
    }

    void Serve() {
        for (uint64_t taken = 0; taken < POSTS;) {
            const uint32_t rings = bell.Rings();
            if (ring.Posted() == taken) {
                bell.SleepSince(rings, moe::Sleep::UNTIL_POSTED, nullptr);
                continue;
            }
            ++taken;
            RL_ASSERT(ring.At(taken - 1).item.remote == taken);
            RL_ASSERT(bytes($) == taken);
            ring.Pop();
        }
    }
};

}  // namespace

int main(int, char** argv) { return checked::Check<Queue>(std::strtoul(argv[1], nullptr, 10)); }
