// For memory that Python reads and writes while others do: its own loads and stores have no order on some processors.
#include <atomic>
#include <cstdint>

extern "C" {

// What the caller has read or written before this is done, for all who see it, before what follows. On x86-64 no
// instruction: there this is so but for a load behind a store.
void moe_fence() { std::atomic_thread_fence(std::memory_order_acq_rel); }

// Replaces a word, if it is what was expected; returns what was there. In memory of several processes.
uint64_t moe_exchange_word(uint64_t* word, uint64_t expected, uint64_t desired) {
    __atomic_compare_exchange_n(word, &expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

}  // extern "C"
