// For memory that Python reads and writes while others do: its own loads and stores have no order on some processors.
#include <atomic>

extern "C" {

// What the caller has read or written before this is done, for all who see it, before what follows. On x86-64 no
// instruction: there this is so but for a load behind a store.
void moe_fence() { std::atomic_thread_fence(std::memory_order_acq_rel); }

}  // extern "C"
