// Two processes of which each has a window that the other one writes to by
// libfabric. Prints what the test compares.
#include "fabric_queues.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "clock.h"

namespace {

using namespace moe;

constexpr uint64_t IN_BYTES = 1 << 20;
constexpr uint64_t OUT_BYTES = 1 << 20;
constexpr uint64_t WINDOW_BYTES = IN_BYTES + OUT_BYTES;
constexpr uint64_t DEADLINE_NS = 30'000'000'000;
constexpr uint64_t LOST_AFTER_NS = 2'000'000'000;

[[noreturn]] void Fail(const std::string &why) {
  std::printf("failed: %s\n", why.c_str());
  std::exit(1);
}

// What two processes tell each other beside libfabric.
struct Pipe {
  int in, out;

  template <typename Value> Value Exchange(const Value &mine) const {
    Value theirs{};
    if (write(out, &mine, sizeof(mine)) != sizeof(mine))
      Fail("pipe");
    if (read(in, &theirs, sizeof(theirs)) != sizeof(theirs))
      Fail("the other process ended");
    return theirs;
  }
};

struct Rank {
  Rank(const FabricApi &api, const char *provider, uint32_t number,
       const Pipe &pipe, bool loose)
      : me(number), is_loose(loose),
        memory(static_cast<uint8_t *>(mmap(nullptr, WINDOW_BYTES + 4096,
                                           PROT_READ | PROT_WRITE,
                                           MAP_SHARED | MAP_ANONYMOUS, -1, 0))),
        bell(emulation::DoorbellBehind(reinterpret_cast<uint64_t>(memory),
                                       WINDOW_BYTES)),
        key(std::random_device{}() | uint64_t{std::random_device{}()} << 32),
        given{
            provider,     "127.0.0.1", "0", reinterpret_cast<uint64_t>(memory),
            WINDOW_BYTES, IN_BYTES,    key},
        endpoints(api, given, 2), peers(2), queues(endpoints, LOST_AFTER_NS) {
    queues.Begin(peers, bell, is_loose);
    endpoints.Listen(1 - me, given);
    theirs = pipe.Exchange(endpoints.Address(1 - me));
    endpoints.Connect(1 - me, theirs);
    peers[1 - me].ring = std::make_unique<PostRing>(64);
  }

  uint8_t *Out(uint64_t offset) { return memory + IN_BYTES + offset; }

  void Post(uint64_t offset, uint64_t bytes, uint32_t flags) {
    const PostItem item{reinterpret_cast<uint64_t>(Out(offset)),
                        (uint64_t{1 - me} + 1) << NicMemory::TOKEN_SHIFT |
                            offset,
                        bytes, flags << PostItem::FLAG_SHIFT, 1 - me};
    while (!peers[1 - me].ring->Push({item, 0, 0, nullptr}))
      Step();
    queues.Take({item, 0, 0, nullptr});
    // Messages of a loose queue that wait at the same time go together.
    if (!is_loose)
      Step();
  }

  void Step() {
    queues.Deliver(MonotonicNs());
    if (MonotonicNs() > until)
      Fail("deadline");
  }

  template <typename Condition> void Until(Condition &&condition) {
    while (!condition())
      Step();
  }

  const uint32_t me;
  const bool is_loose;
  uint8_t *const memory;
  emulation::Doorbell *const bell;
  const uint64_t key;
  const uint64_t until = MonotonicNs() + DEADLINE_NS;
  const FabricDescription given;
  FabricEndpoints endpoints;
  std::vector<NicPeer> peers;
  FabricQueues queues;
  FabricAddress theirs{};
};

volatile uint32_t &WordAt(uint8_t *at) {
  return *reinterpret_cast<uint32_t *>(at);
}

// Rows and then a flag, each way and again: no row is ever behind the flag that
// follows it.
void RowsAndFlags(Rank &rank) {
  constexpr uint32_t ROUNDS = 200;
  constexpr uint64_t ROWS = 16, ROW_BYTES = 4096, FIRST = 4096;
  uint64_t wrong = 0;
  for (uint32_t round = 1; round <= ROUNDS; ++round) {
    for (uint64_t row = 0; row < ROWS; ++row) {
      std::memset(rank.Out(FIRST + row * ROW_BYTES),
                  static_cast<int>(round + row) & 255, ROW_BYTES);
      rank.Post(FIRST + row * ROW_BYTES, ROW_BYTES, 0);
    }
    WordAt(rank.Out(0)) = round;
    rank.Post(0, 32, 1);
    rank.Until([&] { return WordAt(rank.memory) >= round; });
    for (uint64_t row = 0; row < ROWS; ++row) {
      for (uint64_t i = 0; i < ROW_BYTES; ++i) {
        const int want = static_cast<int>(round + row) & 255;
        const int next = static_cast<int>(round + 1 + row) &
                         255; // of a peer that has gone on
        const int have = rank.memory[FIRST + row * ROW_BYTES + i];
        wrong += have != want && have != next ? 1 : 0;
      }
    }
    // All that was posted is there before its memory is written again.
    rank.Until([&] { return rank.queues.IsIdle(); });
  }
  rank.Until([&] { return rank.bell->count.load() >= ROUNDS; });
  std::printf("wrong %lu, told %lu\n", wrong, rank.bell->count.load());
}

// A wrong key, and writes beyond the end: no byte changes.
void Strangers(Rank &rank, const Pipe &pipe) {
  std::memset(rank.memory, 7, IN_BYTES);
  pipe.Exchange(1);
  FabricAddress other = rank.theirs;
  other.key ^= 1;
  rank.endpoints.Connect(1 - rank.me, other);
  std::memset(rank.Out(0), 9, OUT_BYTES);
  rank.Post(64, 1024, 0);
  rank.Until([&] { return rank.queues.IsIdle(); });
  other.in_bytes -= 64;
  try {
    rank.endpoints.Connect(1 - rank.me, other);
    Fail("a shorter window was taken");
  } catch (const FabricError &) {
  }
  rank.endpoints.Connect(1 - rank.me, rank.theirs);
  rank.Post(IN_BYTES - 64, 128, 0);
  const uint64_t end = MonotonicNs() + 500'000'000;
  rank.Until([&] {
    return MonotonicNs() > end &&
           (rank.queues.IsIdle() || rank.queues.IsLost(1 - rank.me));
  });
  pipe.Exchange(2);
  uint64_t changed = 0;
  for (uint64_t i = 0; i < IN_BYTES; ++i)
    changed += rank.memory[i] != 7 ? 1 : 0;
  std::printf("changed %lu\n", changed);
}

// A peer that is dropped writes on, and nothing of it comes; nor does what is
// posted to it keep anybody.
void Dropped(Rank &rank, const Pipe &pipe) {
  constexpr uint64_t BYTES = 256 << 10;
  std::memset(rank.Out(0), 1, BYTES);
  std::memset(rank.memory, 0, IN_BYTES);
  pipe.Exchange(1);
  if (rank.me == 0) {
    // In the middle of the other one's writes.
    rank.Until([&] { return WordAt(rank.memory) != 0; });
    rank.Post(0, BYTES, 1);
    rank.queues.Drop(1);
    rank.Until([&] { return rank.queues.IsDropped(1); });
    std::memset(rank.memory, 7, IN_BYTES);
    const uint64_t end = MonotonicNs() + 500'000'000;
    rank.Until([&] { return MonotonicNs() > end; });
    uint64_t changed = 0;
    for (uint64_t i = 0; i < IN_BYTES; ++i)
      changed += rank.memory[i] != 7 ? 1 : 0;
    rank.Post(0, BYTES, 1);
    rank.Until([&] { return rank.queues.IsIdle(); });
    std::printf("changed %lu\n", changed);
    pipe.Exchange(4);
    return;
  }
  while (!rank.queues.IsLost(0))
    rank.Post(0, BYTES, 0);
  rank.Until([&] { return rank.queues.IsIdle(); });
  std::printf("lost\n");
  std::fflush(stdout);
  pipe.Exchange(4);
}

// A peer that ends: what is posted to it is dropped in the end, and nothing
// waits for ever.
void Ends(Rank &rank) {
  if (rank.me == 1)
    _exit(0);
  uint64_t posted = 0;
  while (!rank.queues.IsLost(1)) {
    if (posted < 1 << 20) {
      rank.Post(0, 4096, 1);
      ++posted;
    }
    rank.Step();
  }
  rank.Until([&] { return rank.queues.IsIdle(); });
  std::printf("lost\n");
}

} // namespace

int main(int count, char **arguments) {
  if (count != 4)
    Fail("library, provider, case");
  int there[2], back[2];
  if (pipe(there) != 0 || pipe(back) != 0)
    Fail("pipe");
  const bool is_child = fork() == 0;
  close(is_child ? there[1] : there[0]);
  close(is_child ? back[0] : back[1]);
  const Pipe between =
      is_child ? Pipe{there[0], back[1]} : Pipe{back[0], there[1]};
  FabricApi api;
  if (const std::string why = api.Load(arguments[1]); !why.empty())
    Fail(why);
  const std::string name = arguments[3];
  try {
    Rank rank(api, arguments[2], is_child ? 1 : 0, between, name == "loose");
    if (name == "rows" || name == "loose")
      RowsAndFlags(rank);
    if (name == "strangers")
      Strangers(rank, between);
    if (name == "dropped")
      Dropped(rank, between);
    if (name == "ends")
      Ends(rank);
    if (name != "ends")
      between.Exchange(3);
  } catch (const FabricError &error) {
    Fail(error.what());
  }
  std::fflush(stdout);
  if (is_child)
    _exit(0);
  int status = 0;
  wait(&status);
  return status;
}
