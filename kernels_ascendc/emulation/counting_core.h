// A block in the counting build: every operation takes effect at once, on a memory without rows, and is noted.
#pragma once

#include <algorithm>
#include <exception>
#include <unordered_set>

#include "counting_memory.h"
#include "launch_settings.h"
#include "meeting.h"
#include "memory.h"
#include "nic.h"
#include "trace.h"

namespace moe::emulation {

// What a block does, as it is noted: `autotune/model/kernel_costs/counted/library.py` reads it.
enum class Did : uint8_t {
    LOAD,     // a copy to UB: `amount` bytes from `address`
    STORE,    // a copy out of UB: to `address`
    VECTOR,   // an instruction on `amount` bytes
    LOCAL,    // `amount` scalar accesses to UB
    GLOBAL,   // a scalar access to global memory at `address`
    DROP,     // a line of the data cache cleaned and invalidated
    SET,      // a flag from `pipe` to `other`, its number in `amount`
    WAIT,     // for a flag from `pipe` to `other`
    BARRIER,  // of `pipe`
    POST,     // `amount` bytes to `address`, by a queue
    MARK,     // a step begins, of kind `amount`
    SYNC,     // all blocks meet
};

// `Record::flags`.
constexpr uint8_t MISSED = 1;   // of a scalar access: its line was not in the core's data cache
constexpr uint8_t REDUCES = 1;  // of a vector instruction: it sums what it reads
constexpr uint8_t WRITES = 2;   // of a scalar access
constexpr uint8_t LOOKS = 4;    // since the first look for what others send
constexpr uint8_t ROWS = 8;     // of a load: of what nobody knows

struct Record {
    Did did;
    uint8_t pipe;
    uint8_t other;
    uint8_t flags;
    uint32_t amount;
    uint64_t address;
};

static_assert(sizeof(Record) == 16, "as Python reads them");

using Log = std::vector<Record>;

// How a launch is run.
enum class Mode : uint32_t {
    LOGGED,
    SILENT,  // for what it leaves behind, up to where it waits for what nobody sends
    BLIND,   // up to its first look for what others send, which finds nothing; nothing is stored
};

// The ranks of a group, and what the last launch's blocks did.
struct CountedGroup {
    explicit CountedGroup(uint32_t num_ranks) : ranks(num_ranks) {}

    std::vector<RankMemory> ranks;
    uint64_t rank = 0;  // that launches run on
    Mode mode = Mode::LOGGED;
    uint64_t number = 0;  // among the launches of its plan
    std::vector<Log> logs;
    std::vector<uint64_t> awaited;  // writers of what is looked at in the own window
    bool waits = false;             // blind blocks have looked in vain
};

// While it runs.
struct CountedLaunch {
    CountedGroup& group;
    void (*let_run)();  // other blocks go on
    uint64_t changes = 0;  // stores, posts, blocks that ended
    uint32_t syncing = 0;  // blocks that wait for the others
    uint64_t syncs = 0;
    bool is_over = false;  // blocks that have not ended never will
};

// A blind block has looked, or its launch is over.
struct HasEnded : std::exception {};

class Core;
inline thread_local Core* current_core = nullptr;

class Core : public CoreOfBlock {
public:
    Core(uint32_t index, uint32_t count, CountedLaunch& launch, uint8_t* ub)
        : CoreOfBlock{index, count}, launch_(launch), ub_{ub, {}} {}

    uint8_t* Ub(UbAddress address) { return ub_.bytes + address.offset; }

    void BeginInstruction(pipe_t, bool reduces = false) {
        instruction_ = {0, 0, false, reduces};
        copy_ = NONE;
    }

    void AccessUb(pipe_t of, UbAddress at, uint64_t bytes, bool writes) {
        if (of == PIPE_S) {
            AccessScalar(at, bytes, writes);
        } else if (!writes) {
            instruction_.read = std::max(instruction_.read, bytes);
            instruction_.is_unknown = instruction_.is_unknown || ub_.unknown.HasAny(at.offset, bytes);
        } else {
            instruction_.written += bytes;
            ub_.unknown.Set(at.offset, bytes, instruction_.is_unknown);
        }
    }

    template <typename Effect>
    void Issue(pipe_t of, Effect&& effect) {
        if (of == PIPE_V) {
            const uint64_t bytes = instruction_.read != 0 ? instruction_.read : instruction_.written;
            Note(
                {Did::VECTOR, PIPE_V, 0, instruction_.reduces ? REDUCES : uint8_t{0}, static_cast<uint32_t>(bytes), 0});
        }
        effect();
    }

    void CopyIn(UbAddress to, const uint8_t* from, uint64_t bytes) {
        const auto address = reinterpret_cast<uint64_t>(from);
        const bool is_own = SegmentOf(address) == group_.rank + 1;
        has_looked_ = has_looked_ || (is_own && is_looking_);
        NoteCopy(Did::LOAD, PIPE_MTE2, address, bytes);
        if (IsReal(address)) {
            std::memcpy(ub_.bytes + to.offset, from, bytes);
            ub_.unknown.Set(to.offset, bytes, false);
            return;
        }
        if (is_own && has_looked_ && group_.mode == Mode::BLIND) {
            std::memset(ub_.bytes + to.offset, 0, bytes);
            ub_.unknown.Set(to.offset, bytes, false);
            return;
        }
        MemoryAt(address).Load(ub_, to.offset, address, bytes);
        if (group_.mode != Mode::SILENT && ub_.unknown.HasAny(to.offset, bytes)) log_[copy_].flags |= ROWS;
        if (is_own && has_looked_ && group_.mode == Mode::LOGGED) {
            MemoryAt(address).AddWriters(address, bytes, group_.awaited);
        }
    }

    void CopyOut(uint8_t* to, UbAddress from, uint64_t bytes) {
        const auto address = reinterpret_cast<uint64_t>(to);
        NoteCopy(Did::STORE, PIPE_MTE3, address, bytes);
        ++launch_.changes;
        if (group_.mode == Mode::BLIND) return;
        if (IsReal(address)) {
            std::memcpy(to, ub_.bytes + from.offset, bytes);
        } else if (Takes(address)) {
            MemoryAt(address).Store(ub_, address, from.offset, bytes, WriterOf(copy_));
            if (IsRank(address) && SegmentOf(address) - 1 != group_.rank) RankAt(address).written += bytes;
        }
    }

    void CopyBlocksOut(uint8_t* to, UbAddress from, uint32_t number, FlaggedBlock of) {
        CopyOut(to, from, uint64_t{number} * of.bytes);
    }

    uint64_t PieceBytes(uint64_t bytes, uint32_t) const { return bytes; }

    // What lies behind a load's last byte, in its unit, is as unknown as the rest of it.
    void Spoil(UbAddress, uint32_t) {}
    void Discard(UbAddress, uint32_t) {}

    template <typename T>
    T ScalarLoad(const T* from) {
        NoteScalar(from, 0);
        const auto address = reinterpret_cast<uint64_t>(from);
        return IsReal(address) ? *from : MemoryAt(address).template Value<T>(address);
    }

    template <typename T>
    void ScalarStore(T* to, T value) {
        NoteScalar(to, WRITES);
        ++launch_.changes;
        const auto address = reinterpret_cast<uint64_t>(to);
        if (group_.mode == Mode::BLIND) return;
        if (IsReal(address)) {
            *to = value;
        } else if (Takes(address)) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(&value);
            MemoryAt(address).StoreBytes(address, bytes, sizeof(T), WriterOf(log_.size()));
        }
    }

    void CleanAndInvalidate(const void* address) {
        Note({Did::DROP, PIPE_S, 0, 0, 1, reinterpret_cast<uint64_t>(address)});
        cached_.erase(reinterpret_cast<uint64_t>(address) / LINE_BYTES);
    }

    void CleanAndInvalidateAll() {
        Note({Did::DROP, PIPE_S, 0, 0, 1, 0});
        cached_.clear();
    }

    void SetFlag(AscendC::HardEvent event, uint64_t id) { NoteFlag(Did::SET, event, id); }
    void WaitFlag(AscendC::HardEvent event, uint64_t id) { NoteFlag(Did::WAIT, event, id); }
    void Barrier(pipe_t of) { Note({Did::BARRIER, static_cast<uint8_t>(of), 0, 0, 0, 0}); }
    void DrainScalar() {}

    void SyncAll() {
        Note({Did::SYNC, 0, 0, 0, 0, 0});
        ++launch_.changes;
        if (++launch_.syncing == blocks) {
            launch_.syncing = 0;
            ++launch_.syncs;
            return;
        }
        for (const uint64_t round = launch_.syncs; launch_.syncs == round;) LetRun();
    }

    void Mark(uint32_t kind) {
        step_ = kind;
        Note({Did::MARK, 0, 0, 0, kind, 0});
    }

    void BeginPhase(uint32_t) {}

    // It looks for what others send, or have done. Other blocks go on before, so that it is done.
    void BeginLook() {
        // Whoever goes on to another look has found what it looked for.
        if (has_found_) ++launch_.changes;
        has_found_ = true;
        if (++looks_ > MOST_LOOKS) launch_.is_over = true;
        LetRun();
        BeginNextLook();
    }

    // It has looked in vain. A look that has left nothing behind is no part of what a launch does that finds all there.
    void Poll(uint32_t, const void*, uint64_t, Awaited) {
        const bool is_alone = group_.mode == Mode::SILENT && blocks == 1;
        const bool waits = group_.mode == Mode::BLIND && has_looked_;
        group_.waits = group_.waits || waits;
        if (is_alone || waits) throw HasEnded();
        has_found_ = false;
        if (++polls_ > MOST_POLLS) launch_.is_over = true;
        if (own_changes_ == changes_before_look_) log_.resize(look_);
        LetRun();
        BeginNextLook();
    }

    bool IsStopped() const { return false; }
    void Notify(const void*, uint64_t) {}

    bool Post(const PostItem& item) {
        Note({Did::POST, PIPE_S, 0, 0, static_cast<uint32_t>(item.bytes), item.remote});
        ++launch_.changes;
        ++own_changes_;
        // Of ranks with memory of their own.
        if (Nic* const nic = SettingsOfThread().nic) return nic->Post(item);
        if (group_.mode != Mode::BLIND && Takes(item.remote)) {
            const uint64_t writer = WriterOf(log_.size()) | uint64_t{1} << Writer::POSTED;
            MemoryAt(item.remote).Receive(MemoryAt(item.local), item.remote, item.local, item.bytes, writer);
            RankAt(item.remote).posted += item.bytes;
            ++RankAt(item.remote).messages;
        }
        return true;
    }

    void Finish() {}

    void Require(bool holds, const char* rule) {
        if (!holds) throw CheckFailed(rule);
    }

private:
    static constexpr size_t NONE = ~size_t{0};
    static constexpr uint32_t MOST_POLLS = 4096;  // of a block, that found nothing
    static constexpr uint32_t MOST_LOOKS = 1U << 24;

    // A vector instruction.
    struct Instruction {
        uint64_t read;
        uint64_t written;
        bool is_unknown;
        bool reduces;
    };

    void LetRun() {
        launch_.let_run();
        current_core = this;
        if (launch_.is_over) throw HasEnded();
    }

    void BeginNextLook() {
        is_looking_ = true;
        look_ = log_.size();
        changes_before_look_ = own_changes_;
        may_merge_ = false;
    }

    // This process's own memory is for launches outside of any group.
    bool IsReal(uint64_t address) {
        const bool is_real = SegmentOf(address) == 0;
        Require(!is_real || group_.ranks.empty(), "it follows an address that no argument points to");
        return is_real;
    }

    bool IsRank(uint64_t address) const { return SegmentOf(address) <= group_.ranks.size(); }

    // Other ranks' windows are in their memory, all else in this one's.
    RankMemory& RankAt(uint64_t address) const {
        return group_.ranks[IsRank(address) ? SegmentOf(address) - 1 : group_.rank];
    }

    Memory& MemoryAt(uint64_t address) const { return RankAt(address).memory; }

    // Of what is stored now, with the number of its record.
    uint64_t WriterOf(size_t record) const {
        const uint64_t number = group_.mode == Mode::SILENT ? 0 : record;
        return number << Writer::RECORD | uint64_t{block} << Writer::BLOCK | uint64_t{step_} << Writer::STEP |
               group_.rank << Writer::RANK | (group_.number + 1) << Writer::LAUNCH;
    }

    bool Takes(uint64_t address) const {
        const uint64_t rank = SegmentOf(address) - 1;
        return !IsRank(address) || rank == group_.rank || group_.ranks[rank].takes;
    }

    void Note(const Record& record) {
        may_merge_ = false;
        if (group_.mode == Mode::SILENT) return;
        log_.push_back(record);
        if (has_looked_) log_.back().flags |= LOOKS;
    }

    // Pieces of one instruction are one copy.
    void NoteCopy(Did did, pipe_t of, uint64_t address, uint64_t bytes) {
        if (did == Did::STORE) ++own_changes_;
        if (group_.mode == Mode::SILENT) return;
        if (copy_ != NONE) {
            log_[copy_].amount += static_cast<uint32_t>(bytes);
            return;
        }
        copy_ = log_.size();
        Note({did, static_cast<uint8_t>(of), 0, 0, static_cast<uint32_t>(bytes), address});
    }

    void NoteScalar(const void* address, uint8_t flags) {
        const bool is_new = cached_.insert(reinterpret_cast<uint64_t>(address) / LINE_BYTES).second;
        if ((flags & WRITES) != 0) ++own_changes_;
        Note({Did::GLOBAL, PIPE_S, 0, static_cast<uint8_t>(flags | (is_new ? MISSED : 0)), 1,
              reinterpret_cast<uint64_t>(address)});
    }

    void NoteFlag(Did did, AscendC::HardEvent event, uint64_t id) {
        Note({did, static_cast<uint8_t>(AscendC::SourcePipe(event)), static_cast<uint8_t>(AscendC::TargetPipe(event)),
              0, static_cast<uint32_t>(id), 0});
    }

    void AccessScalar(UbAddress at, uint64_t bytes, bool writes) {
        if (writes) {
            ub_.unknown.Set(at.offset, bytes, false);
        } else {
            Require(!ub_.unknown.HasAny(at.offset, bytes), "what it does depends on memory that nobody knows");
        }
        if (group_.mode == Mode::SILENT) return;
        if (may_merge_) {
            ++log_.back().amount;
            return;
        }
        Note({Did::LOCAL, PIPE_S, 0, 0, 1, 0});
        may_merge_ = true;
    }

    CountedLaunch& launch_;
    CountedGroup& group_ = launch_.group;
    Log& log_ = group_.logs[block];
    UnifiedBuffer ub_;
    Instruction instruction_{};
    size_t copy_ = NONE;
    bool may_merge_ = false;
    bool is_looking_ = false;  // since the first look
    bool has_looked_ = false;  // at the own window
    size_t look_ = 0;
    uint32_t polls_ = 0;
    uint32_t looks_ = 0;
    bool has_found_ = true;
    uint32_t step_ = 0;
    uint64_t own_changes_ = 0;
    uint64_t changes_before_look_ = 0;
    std::unordered_set<uint64_t> cached_;
};

inline Core& ThisCore() { return *current_core; }

}  // namespace moe::emulation
