// A launch of two blocks: how they meet, begin and end (emulation/meeting.h, block_pool.h), and what they trace.
#include "meeting.h"
#include "post_ring.h"
#include "trace.h"

using moe::BlockPool;
using moe::emulation::Meeting;

namespace {

alignas(64) uint8_t meeting_memory[sizeof(Meeting)];
alignas(64) uint8_t pool_memory[sizeof(BlockPool)];
alignas(64) uint8_t ring_memory[sizeof(moe::PostRing)];
Meeting& meeting = reinterpret_cast<Meeting&>(meeting_memory);
BlockPool& pool = reinterpret_cast<BlockPool&>(pool_memory);
moe::PostRing& ring = reinterpret_cast<moe::PostRing&>(ring_memory);
moe::TraceEvent events[4];
moe::TraceLog log{events, 4, 0, nullptr, 0, 0};

// Which of the works a block does, and on what.
struct Work {
    uint64_t kind;
    volatile uint64_t* to;
};

void push() {
    moe::RingEntry each{};
    each.item.remote = 1;
    ring.Push(std::move(each));
}

struct Body {
    const Work* work;

    void operator()(uint32_t block) const {
        if (block == 0) return;
        if (work->kind == 1) *work->to = 1;
        if (work->kind == 2) push();
        if (work->kind == 3) log.Add({1, 1, 1, 1, 1, 1, 1});
    }
};

alignas(64) uint8_t bodies[2][sizeof(std::function<void(uint32_t)>)];
Work work;

const std::function<void(uint32_t)>& BodyAt(uint64_t which) {
    return reinterpret_cast<const std::function<void(uint32_t)>&>(bodies[which]);
}

}  // namespace

extern "C" {

void set_up() {
    new (meeting_memory) Meeting(2);
    new (pool_memory) BlockPool();
    pool.threads_.emplace_back();  // it is served by the probe
    new (ring_memory) moe::PostRing(2);
    for (auto& each : bodies) new (each) std::function<void(uint32_t)>(Body{&work});
}

void* arrived() { return &meeting.arrived_; }
void* round_of_meeting() { return &meeting.round_; }
void* ended() { return &meeting.ended_; }
void* failed() { return &meeting.failed_; }
void* why() { return reinterpret_cast<uint64_t*>(&meeting.why_) + 1; } // the length of a string
void* round_of_pool() { return &pool.round_; }
void* running() { return &pool.running_; }
void* body() { return &pool.body_; }
void* stopping() { return &pool.stopping_; }
void* blocks() { return &pool.blocks_; }
void* tail() { return &ring.tail_; }
void* event() { return &events[0].begin_ns; }
void* num_events() { return &log.num_events; }

void meet() { meeting.Wait(); }
void end() { meeting.End(); }
void fail(const std::string* why) { meeting.Fail(*why); }
uint64_t has_failed() { return meeting.Failed() ? meeting.Why().size() : 0; }

void does(uint64_t kind, volatile uint64_t* to) { work = {kind, to}; }
void run(uint64_t which) { pool.Run(2, BodyAt(which)); }
void stop() { pool.~BlockPool(); }
void serve(uint64_t seen) { pool.Serve(1, seen); }
void add_event() { log.Add({1, 1, 1, 1, 1, 1, 1}); }

void plain_store(volatile uint64_t* to, uint64_t value) { *to = value; }
uint64_t plain_load(const volatile uint64_t* from) { return *from; }
}
