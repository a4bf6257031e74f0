// A NIC's way to a peer's window, a paced link, and the log of what it carried.
#include "transport.h"

#include "fence.cpp"
#include "paced_link.h"
#include "post_ring.h"

namespace {

alignas(64) uint8_t memory[sizeof(moe::SharedMemory)];
moe::SharedMemory& transport = reinterpret_cast<moe::SharedMemory&>(memory);
moe::PacedLink paced;
uint64_t call = 1;
moe::LinkSpan spans[2];
moe::LinkLog log{spans, 2, 0, &call};

}  // namespace

extern "C" {

void set_up(uint64_t window, moe::emulation::Doorbell* bell) {
    new (memory) moe::SharedMemory(1);
    transport.Register(0, window, bell);
    paced.bytes_per_second = moe::PacedLink::NS_PER_S;
    paced.bucket_bytes = 1;
}

void put(uint64_t offset, const uint8_t* from, uint64_t bytes) { transport.Put(0, offset, from, bytes); }
void flag() { transport.Flag(0, 1); }
void copy_in_order(uint8_t* to, const uint8_t* from) { moe::emulation::CopyInOrder(to, from, 32); }

void* idle_at() { return &paced.idle_at_ns; }
void* taken() { return &paced.taken_bytes; }
void take() { paced.Take(5, 1); }

void* num_spans() { return &log.num_spans; }
void* span(uint64_t number) { return &spans[number].begin_ns; }
void add_span(uint64_t begin_ns) { log.Add({begin_ns, 1, 1, 1}); }

void plain_store(volatile uint64_t* to, uint64_t value) { *to = value; }
uint64_t plain_load(const volatile uint64_t* from) { return *from; }
}
