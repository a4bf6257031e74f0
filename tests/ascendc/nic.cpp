// A NIC between two windows: what arrives, in which order, and what is refused. Prints what the test compares.
#include "nic.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using moe::Nic;
using moe::NicDescription;
using moe::PostItem;

namespace {

constexpr uint64_t IN_BYTES = 1 << 20;
constexpr uint64_t OUT_BYTES = 1 << 20;
constexpr uint64_t WINDOW_BYTES = IN_BYTES + OUT_BYTES;
constexpr uint64_t PEER = 1;
constexpr uint64_t TOKEN = (PEER + 1) << moe::NicMemory::TOKEN_SHIFT;
constexpr uint64_t STEP = 32;
constexpr uint64_t DEADLINE_NS = 20'000'000'000;

struct Memory {
    Memory() : all(WINDOW_BYTES + 2 * moe::emulation::Doorbell::BYTES) {}

    uint8_t* Begin() {
        const auto at = reinterpret_cast<uint64_t>(all.data());
        return all.data() + (512 - at % 512) % 512;
    }

    moe::emulation::Doorbell& Bell() {
        return *moe::emulation::DoorbellBehind(reinterpret_cast<uint64_t>(Begin()), WINDOW_BYTES);
    }

    std::vector<uint8_t> all;
};

struct World {
    Memory own;
    Memory peer;
    uint64_t windows[2] = {0, reinterpret_cast<uint64_t>(peer.Begin())};
    uint64_t inside[2] = {1, 0};
    NicDescription description{
        2,       0, windows, inside, reinterpret_cast<uint64_t>(own.Begin()), IN_BYTES, WINDOW_BYTES, 1, 8, 0,
        nullptr, 0, 1,       -1, nullptr, nullptr, nullptr, 0};

    uint8_t* Out(uint64_t offset) { return own.Begin() + IN_BYTES + offset; }

    // From the out part to the same offset of the peer's window.
    PostItem Item(uint64_t offset, uint64_t bytes, uint32_t flags = 0) {
        return {reinterpret_cast<uint64_t>(Out(offset)), TOKEN + offset, bytes, flags << PostItem::FLAG_SHIFT, PEER};
    }
};

void PostAll(Nic& nic, const PostItem& item, bool reads_at_once = false) {
    for (const uint64_t end = moe::MonotonicNs() + DEADLINE_NS; !nic.Post(item, reads_at_once);) {
        if (moe::MonotonicNs() > end) std::abort();
        std::this_thread::yield();
    }
}

uint64_t WordAt(const uint8_t* at) { return __atomic_load_n(reinterpret_cast<const uint64_t*>(at), __ATOMIC_ACQUIRE); }

// Whether a whole message of words `number` is at an offset of the peer's window.
bool IsThere(World& world, uint64_t offset, uint64_t bytes, uint64_t number) {
    for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        if (WordAt(world.peer.Begin() + offset + at) != number) return false;
    }
    return true;
}

uint64_t Await(World& world, uint64_t offset, uint64_t number) {
    const uint64_t end = moe::MonotonicNs() + DEADLINE_NS;
    while (WordAt(world.peer.Begin() + offset) != number) {
        if (moe::MonotonicNs() > end) std::abort();
    }
    return 0;
}

// Messages of so many bytes each, and how often a reader found the promises broken: all of a message is there when the
// first piece of the next one is; and, where a queue keeps order inside, when its own last word is.
int Order(uint64_t seed, bool keeps_order, uint64_t messages, uint64_t bytes) {
    World world;
    world.description.seed = seed;
    world.description.keeps_order = keeps_order ? 1 : 0;
    uint64_t late_behind_next = 0;
    uint64_t late_behind_end = 0;
    {
        Nic nic(world.description);
        std::thread reader([&] {
            for (uint64_t number = 1; number <= messages; ++number) {
                const uint64_t offset = (number - 1) * bytes;
                Await(world, offset + bytes - sizeof(uint64_t), number);
                if (!IsThere(world, offset, bytes, number)) ++late_behind_end;
                if (number == messages) break;
                Await(world, offset + bytes, number + 1);
                if (!IsThere(world, offset, bytes, number)) ++late_behind_next;
            }
        });
        for (uint64_t number = 1; number <= messages; ++number) {
            const uint64_t offset = (number - 1) * bytes;
            for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
                std::memcpy(world.Out(offset + at), &number, sizeof(number));
            }
            PostAll(nic, world.Item(offset, bytes, 1));
        }
        reader.join();
    }
    uint64_t there = 0;
    for (uint64_t number = 1; number <= messages; ++number) {
        there += IsThere(world, (number - 1) * bytes, bytes, number) ? 1 : 0;
    }
    std::printf("%lu %lu %lu %lu\n", there, world.peer.Bell().count.load(), late_behind_next, late_behind_end);
    return 0;
}

// A loose queue: rows, each with a flag behind it. How often a flag was there before a row that was posted before it, and
// whether a row has ever come before a flag that was posted before it.
int Loose(uint64_t seed, bool keeps_order, uint64_t rows, uint64_t bytes) {
    World world;
    world.description.seed = seed;
    world.description.keeps_order = keeps_order ? 1 : 0;
    world.description.is_loose = 1;
    const uint64_t flags = rows * bytes;
    uint64_t late = 0;
    uint64_t overtaken = 0;
    {
        Nic nic(world.description);
        for (uint64_t number = 1; number <= rows; ++number) {
            const uint64_t row = (number - 1) * bytes;
            const uint64_t flag = flags + (number - 1) * sizeof(uint64_t);
            for (uint64_t at = 0; at < bytes; at += sizeof(uint64_t)) {
                std::memcpy(world.Out(row + at), &number, sizeof(number));
            }
            std::memcpy(world.Out(flag), &number, sizeof(number));
            PostAll(nic, world.Item(row, bytes));
            PostAll(nic, world.Item(flag, sizeof(uint64_t), 1));
        }
        for (uint64_t left = rows; left > 0;) {
            left = 0;
            for (uint64_t number = rows; number > 0; --number) {
                const uint64_t row = (number - 1) * bytes;
                const bool has_row = IsThere(world, row, bytes, number);
                const bool has_flag = WordAt(world.peer.Begin() + flags + (number - 1) * sizeof(uint64_t)) == number;
                left += has_flag ? 0 : 1;
                const uint64_t before_it = number > 1 ? WordAt(world.peer.Begin() + flags + (number - 2) * sizeof(uint64_t)) : 1;
                overtaken += has_row && before_it == 0 ? 1 : 0;
                if (!has_flag) continue;
                for (uint64_t before = 1; before <= number; ++before) {
                    late += IsThere(world, (before - 1) * bytes, bytes, before) ? 0 : 1;
                }
            }
        }
    }
    std::printf("%lu %lu %d\n", late, world.peer.Bell().count.load(), overtaken > 0 ? 1 : 0);
    return 0;
}

// Which word arrives that is written once the message is posted: the old one, or the new one. A NIC that takes its time
// is busy with a message before it, and has not read this one by then.
int Early(uint64_t seed, bool reads_at_once) {
    constexpr uint64_t BYTES = 1 << 19;
    World world;
    moe::PacedLink link{1 << 22, 0, 0, {0}, {0}};
    world.description.seed = seed;
    world.description.link = seed == 0 ? &link : nullptr;
    const uint64_t before = 1;
    const uint64_t after = 2;
    std::memcpy(world.Out(BYTES), &before, sizeof(before));
    {
        Nic nic(world.description);
        if (seed == 0) PostAll(nic, world.Item(0, BYTES));
        PostAll(nic, world.Item(BYTES, STEP), reads_at_once);
        std::memcpy(world.Out(BYTES), &after, sizeof(after));
    }
    std::printf("%lu\n", WordAt(world.peer.Begin() + BYTES));
    return 0;
}

// How long messages take, and whether the link was given their bytes.
int Pace(uint64_t post_ns, uint64_t rate, uint64_t latency_ns, bool is_inside, uint64_t messages, uint64_t bytes) {
    World world;
    moe::PacedLink link{rate, latency_ns, 1 << 16, {0}, {0}};
    world.description.post_ns = post_ns;
    world.description.link = rate == 0 ? nullptr : &link;
    world.inside[PEER] = is_inside ? 1 : 0;
    const uint64_t start = moe::MonotonicNs();
    {
        Nic nic(world.description);
        for (uint64_t number = 0; number < messages; ++number) PostAll(nic, world.Item(number * bytes, bytes, 1));
    }
    std::printf("%lu %lu %lu\n", moe::MonotonicNs() - start, link.taken_bytes.load(), world.peer.Bell().count.load());
    return 0;
}

int Refusals() {
    World world;
    Nic nic(world.description);
    PostItem other = world.Item(0, STEP);
    other.rank = 0;
    PostItem unknown = world.Item(0, STEP);
    unknown.rank = 2;
    PostItem mapped = world.Item(0, STEP);
    mapped.remote = reinterpret_cast<uint64_t>(world.peer.Begin());
    PostItem inner = world.Item(0, STEP);
    inner.local = reinterpret_cast<uint64_t>(world.own.Begin());
    PostItem huge = world.Item(0, UINT64_MAX);
    PostItem beyond = world.Item(0, STEP);
    beyond.remote = TOKEN + IN_BYTES - STEP + 1;
    const PostItem bad[] = {other, unknown, mapped, inner, huge, beyond, world.Item(0, 0), world.Item(OUT_BYTES, STEP)};
    for (const PostItem& item : bad) std::printf("%d", nic.Holds(item) ? 1 : 0);
    const PostItem good[] = {world.Item(0, STEP), world.Item(OUT_BYTES - STEP, STEP), world.Item(0, OUT_BYTES)};
    std::printf(" ");
    for (const PostItem& item : good) std::printf("%d", nic.Holds(item) ? 1 : 0);
    // Of one launch only one block; of the next one any.
    std::printf(" ");
    for (const auto& [launch, block] : {std::pair{7, 3}, {7, 3}, {7, 4}, {8, 4}}) {
        std::printf("%d", nic.Claim(PEER, static_cast<uint64_t>(launch), static_cast<uint32_t>(block)) ? 1 : 0);
    }
    std::printf("\n");
    return 0;
}

// A ring of 8: nobody takes anything while the first message waits for the link.
int Full() {
    World world;
    moe::PacedLink link{1 << 20, 0, 0, {0}, {0}};
    world.description.link = &link;
    uint64_t posted = 0;
    Nic nic(world.description);
    PostAll(nic, world.Item(0, 1 << 19));  // half a second
    for (; posted < 100 && nic.Post(world.Item(0, STEP)); ++posted) {
    }
    std::printf("%lu\n", posted);
    return 0;
}

}  // namespace

int main(int count, char** words) {
    const std::string what = words[1];
    std::vector<uint64_t> given;
    for (int i = 2; i < count; ++i) given.push_back(std::strtoull(words[i], nullptr, 10));
    if (what == "order") return Order(given[0], given[1] != 0, given[2], given[3]);
    if (what == "loose") return Loose(given[0], given[1] != 0, given[2], given[3]);
    if (what == "pace") return Pace(given[0], given[1], given[2], given[3] != 0, given[4], given[5]);
    if (what == "early") return Early(given[0], given[1] != 0);
    if (what == "full") return Full();
    return Refusals();
}
