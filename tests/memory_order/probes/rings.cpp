// A queue of posts, and what wakes its NIC.
#include "post_ring.h"

using moe::PostBell;
using moe::PostRing;

namespace {

alignas(64) uint8_t ring_memory[sizeof(PostRing)];
alignas(64) uint8_t bell_memory[sizeof(PostBell)];
PostRing& ring = reinterpret_cast<PostRing&>(ring_memory);
PostBell& bell = reinterpret_cast<PostBell&>(bell_memory);

}  // namespace

extern "C" {

void set_up() {
    new (ring_memory) PostRing(1);
    new (bell_memory) PostBell();
}

void* tail() { return &ring.tail_; }
void* head() { return &ring.head_; }
void* entry() { return &ring.entries_[0].item.remote; }
void* rings() { return &bell.rings_; }
void* depth() { return &bell.depth_; }

void push(uint64_t remote) {
    moe::RingEntry each{};
    each.item.remote = remote;
    ring.Push(std::move(each));
}

uint64_t posted() { return ring.Posted(); }
uint64_t delivered() { return ring.Delivered(); }
uint64_t at() { return ring.At(0).item.remote; }
void pop() { ring.Pop(); }
void ring_bell() { bell.Ring(moe::Sleep::UNTIL_DUE); }
uint32_t count_rings() { return bell.Rings(); }
void sleep_since(uint32_t seen) { bell.SleepSince(seen, moe::Sleep::UNTIL_POSTED, nullptr); }

void plain_store(volatile uint64_t* to, uint64_t value) { *to = value; }
uint64_t plain_load(const volatile uint64_t* from) { return *from; }
}
