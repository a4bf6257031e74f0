// The queue of one peer: a ring of items that one core at a time fills and the NIC empties.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace moe {

// A write, as AICPU's `BatchWrite` has them.
struct PostItem {
    static constexpr uint32_t FLAG_SHIFT = 16;

    uint64_t local;   // address
    uint64_t remote;  // address that the table of peers has, and an offset
    uint64_t bytes;
    uint32_t dtype;  // of 8 bits; in its upper half, how many flags come with the message
    uint32_t rank;

    uint32_t Flags() const { return dtype >> FLAG_SHIFT; }
    const uint8_t* Bytes() const { return reinterpret_cast<const uint8_t*>(local); }
    // Whether both write some byte.
    bool Meets(const PostItem& other) const {
        return remote < other.remote + other.bytes && other.remote < remote + bytes;
    }
};

static_assert(sizeof(PostItem) == 32, "the size of the hardware's");

// An item in a queue: when it was posted and, where the link is traced, by which call; and its bytes where they were
// read then.
struct RingEntry {
    PostItem item;
    uint64_t posted_ns;
    uint64_t call;
    std::shared_ptr<const std::vector<uint8_t>> read;
};

class PostRing {
public:
    explicit PostRing(uint64_t capacity) : entries_(capacity) {}

    // False while it is full.
    bool Push(RingEntry entry) {
        const uint64_t tail = tail_.load(std::memory_order_relaxed);
        if (tail - head_.load(std::memory_order_acquire) == entries_.size()) return false;
        entries_[tail % entries_.size()] = std::move(entry);
        tail_.store(tail + 1, std::memory_order_release);
        return true;
    }

    // How many there have been.
    uint64_t Posted() const { return tail_.load(std::memory_order_acquire); }
    const RingEntry& At(uint64_t number) const { return entries_[number % entries_.size()]; }

    // How many of them are delivered.
    uint64_t Delivered() const { return head_.load(std::memory_order_acquire); }

    // The oldest one is delivered, and its place free.
    void Pop() { head_.store(head_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }

    // Whether this block of this launch may post: a queue belongs to one core at a time, and a launch's cores do not
    // know when another has posted.
    bool Claim(uint64_t launch, uint32_t block) {
        const uint64_t mine = launch << BLOCK_BITS | block;
        const uint64_t before = owner_.exchange(mine);
        return before == mine || before >> BLOCK_BITS != launch;
    }

private:
    static constexpr uint32_t BLOCK_BITS = 8;

    std::vector<RingEntry> entries_;
    alignas(64) std::atomic<uint64_t> tail_{0};
    std::atomic<uint64_t> owner_{0};
    alignas(64) std::atomic<uint64_t> head_{0};
};

// How deep a NIC sleeps: a post wakes it from some depth on.
enum class Sleep : uint32_t {
    NONE,
    UNTIL_DUE,  // until something is due
    GATHERING,  // until enough is due at once, unless a message comes that somebody is told of
    UNTIL_POSTED,
};

// Sleeping until something is posted, in one process.
//
// Who wakes the sleeper takes the depth away, and that is the word that it sleeps on: were it another one, a wake-up
// that comes before the sleep would leave a sleeper that seems to be awake, and nobody would wake it again.
class PostBell {
public:
    // After posting: wakes whoever sleeps as deep as this, or deeper.
    void Ring(Sleep least) {
        rings_.fetch_add(1);
        const Sleep depth = depth_.load();
        if (depth == Sleep::NONE || depth < least) return;
        // One call wakes it, and not those of all posts until it runs.
        if (depth_.exchange(Sleep::NONE) == Sleep::NONE) return;
        if (woken_by_ >= 0) {
            eventfd_write(woken_by_, 1);
            return;
        }
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&depth_), FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }

    // From now on the sleeper sleeps on an event's descriptor, and so beside others. Before anybody posts.
    void WakeBy(int event) { woken_by_ = event; }

    uint32_t Rings() const { return rings_.load(); }

    // Unless it has rung since; until it rings, or as long as this.
    void SleepSince(uint32_t rings, Sleep depth, const timespec* longest) {
        SleepUnless(rings, depth, [=] {
            syscall(SYS_futex, reinterpret_cast<uint32_t*>(&depth_), FUTEX_WAIT_PRIVATE, depth, longest, nullptr, 0);
        });
    }

    // The same; or until another descriptor is readable.
    void SleepSince(uint32_t rings, Sleep depth, const timespec* longest, int other) {
        SleepUnless(rings, depth, [=] {
            pollfd both[] = {{woken_by_, POLLIN, 0}, {other, POLLIN, 0}};
            ppoll(both, 2, longest, nullptr);
        });
        // Whoever has taken the depth away writes it, maybe only now: then the next sleep is a short one.
        eventfd_t number = 0;
        eventfd_read(woken_by_, &number);
    }

private:
    template <typename Wait>
    void SleepUnless(uint32_t rings, Sleep depth, Wait&& wait) {
        // An exchange: qemu lets a store pass the load behind it, whatever order they have (docs/aarch64.md).
        depth_.exchange(depth);
        if (rings_.load() == rings) wait();
        depth_.store(Sleep::NONE);
    }

    std::atomic<uint32_t> rings_{0};
    std::atomic<Sleep> depth_{Sleep::NONE};
    int woken_by_ = -1;
};

static_assert(sizeof(std::atomic<Sleep>) == sizeof(uint32_t), "a futex is a plain word");

}  // namespace moe
