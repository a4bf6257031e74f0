// Memory in the counting build: what decides what kernels do, and no rows.
//
// Addresses are names: a segment in the upper bits, an offset in it below. A segment is the window of a rank, or what
// an argument points to. Of a segment there is what the host has given, a table, and above it what kernels have stored,
// where that is known. What was copied from memory that nobody knows, rows, is unknown wherever it goes, until a
// kernel's control flow asks for it, which is an error. Segment 0 is this process's own memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "meeting.h"
#include "types.h"

namespace moe::emulation {

constexpr uint32_t SEGMENT_SHIFT = 48;
constexpr uint64_t UNIT_BYTES = AscendC::BLOCK_BYTES;

inline uint64_t SegmentOf(uint64_t address) { return address >> SEGMENT_SHIFT; }

// Which units of 32 bytes of UB hold what nobody knows. At the start of a block, all of them.
class Unknown {
public:
    Unknown() { units_.fill(~uint64_t{0}); }

    bool HasAny(uint64_t offset, uint64_t bytes) const {
        return Scan(offset, bytes, [this](uint64_t word, uint64_t bits) { return (units_[word] & bits) != 0; });
    }

    bool HasOthers(uint64_t offset, uint64_t bytes) const {
        return Scan(offset, bytes, [this](uint64_t word, uint64_t bits) { return (units_[word] & bits) != bits; });
    }

    void Set(uint64_t offset, uint64_t bytes, bool is_unknown) {
        Scan(offset, bytes, [this, is_unknown](uint64_t word, uint64_t bits) {
            units_[word] = is_unknown ? units_[word] | bits : units_[word] & ~bits;
            return false;
        });
    }

private:
    static constexpr uint64_t BITS = 64;

    // Tests words, by their numbers and these bytes' bits in them, up to the first of which it holds.
    template <typename Test>
    static bool Scan(uint64_t offset, uint64_t bytes, Test&& test) {
        if (bytes == 0) return false;
        const uint64_t last = (offset + bytes - 1) / UNIT_BYTES;
        for (uint64_t unit = offset / UNIT_BYTES; unit <= last; unit = (unit / BITS + 1) * BITS) {
            const uint64_t count = std::min(last - unit + 1, BITS - unit % BITS);
            const uint64_t bits = count == BITS ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
            if (test(unit / BITS, bits << unit % BITS)) return true;
        }
        return false;
    }

    std::array<uint64_t, AscendC::UB_BYTES / UNIT_BYTES / BITS> units_;
};

// UB of a block.
struct UnifiedBuffer {
    uint8_t* bytes;
    Unknown unknown;
};

// Who stored something, and when: bits from the lowest one on. 0 for nobody.
struct Writer {
    static constexpr uint32_t RECORD = 0;  // the number of the store in its block's log
    static constexpr uint32_t BLOCK = 32;
    static constexpr uint32_t STEP = 38;  // the kind of step that the block was in
    static constexpr uint32_t RANK = 42;
    static constexpr uint32_t LAUNCH = 52;  // one more
    static constexpr uint32_t POSTED = 63;  // by a queue
};

// What a segment holds before kernels store anything.
enum class Contents : uint32_t {
    ZEROS,  // such as a window
    VALUES,  // a table
    UNKNOWN,  // such as rows
};

class Memory {
public:
    // Of a segment; one that the host says nothing of holds zeros.
    void Give(uint64_t segment, Contents contents, const void* bytes, uint64_t size) {
        for (Segment& known : segments_) {
            if (known.number == segment) {
                known = {segment, contents, static_cast<const uint8_t*>(bytes), size};
                return;
            }
        }
        segments_.push_back({segment, contents, static_cast<const uint8_t*>(bytes), size});
    }

    void Load(UnifiedBuffer& ub, uint32_t to, uint64_t from, uint64_t bytes) const {
        LoadContents(ub, to, from, bytes);
        const Line* const first = Find(from / LINE);
        const bool is_row = first != nullptr && Has(first->rows, from % LINE / UNIT_BYTES);
        if (is_row) ub.unknown.Set(to, bytes, true);
        EachUnit(from, bytes, [&](const Line& line, uint64_t unit, uint64_t begin, uint64_t end) {
            if (!Has(line.stored, unit)) return;
            const uint64_t at = to + (begin - from);
            std::memcpy(ub.bytes + at, line.bytes + begin % LINE, end - begin);
            ub.unknown.Set(at, end - begin, false);
        });
    }

    void Store(const UnifiedBuffer& ub, uint64_t to, uint32_t from, uint64_t bytes, uint64_t writer) {
        const bool is_known = ub.unknown.HasOthers(from, bytes);
        bool is_row = false;
        for (uint64_t at = 0; at < bytes; at += UNIT_BYTES) {
            const bool was_row = is_row;
            is_row = ub.unknown.HasAny(from + at, UNIT_BYTES);
            if (is_row && !was_row) BeginRow(to + at);
            if (!is_known) return;
            if (!is_row) StoreBytes(to + at, ub.bytes + from + at, std::min(UNIT_BYTES, bytes - at), writer);
        }
    }

    // What a post moves: what is known of it, and where rows begin.
    void Receive(const Memory& other, uint64_t to, uint64_t from, uint64_t bytes, uint64_t writer) {
        other.EachUnit(from, bytes, [&](const Line& line, uint64_t unit, uint64_t begin, uint64_t end) {
            const uint64_t target = to + (begin - from);
            if (Has(line.stored, unit)) StoreBytes(target, line.bytes + begin % LINE, end - begin, writer);
            if (Has(line.rows, unit)) Make(target / LINE).rows |= 1U << target % LINE / UNIT_BYTES;
        });
    }

    // Of all that is known there.
    void AddWriters(uint64_t from, uint64_t bytes, std::vector<uint64_t>& writers) const {
        EachUnit(from, bytes, [&](const Line& line, uint64_t unit, uint64_t, uint64_t) {
            if (Has(line.stored, unit)) writers.push_back(line.writers[unit]);
        });
    }

    template <typename T>
    T Value(uint64_t address) const {
        Load(scratch_, 0, address, sizeof(T));
        if (scratch_.unknown.HasAny(0, sizeof(T))) {
            throw CheckFailed("what it does depends on memory that nobody knows");
        }
        T value;
        std::memcpy(&value, scratch_.bytes, sizeof(T));
        return value;
    }

    void StoreBytes(uint64_t to, const uint8_t* from, uint64_t bytes, uint64_t writer) {
        while (bytes > 0) {
            Line& line = Make(to / LINE);
            const uint64_t at = to % LINE;
            const uint64_t part = std::min(bytes, LINE - at);
            // The rest of its unit is as it was.
            for (uint64_t unit = at / UNIT_BYTES; unit <= (at + part - 1) / UNIT_BYTES; ++unit) {
                if (!Has(line.stored, unit)) FillUnit(line, unit);
                line.writers[unit] = writer;
            }
            std::memcpy(line.bytes + at, from, part);
            to += part;
            from += part;
            bytes -= part;
        }
    }

private:
    static constexpr uint64_t LINE = 256;

    struct Segment {
        uint64_t number;
        Contents contents;
        const uint8_t* bytes;
        uint64_t size;
    };

    struct Line {
        uint64_t number;
        uint8_t stored;  // a bit for each unit with known bytes
        uint8_t rows;  // a bit for each unit where something unknown begins
        uint8_t bytes[LINE];
        uint64_t writers[LINE / UNIT_BYTES];
    };

    void BeginRow(uint64_t at) {
        if (SegmentAt(at).contents == Contents::UNKNOWN) return;
        Line& line = Make(at / LINE);
        const auto bit = static_cast<uint8_t>(1U << at % LINE / UNIT_BYTES);
        line.rows |= bit;
        line.stored &= static_cast<uint8_t>(~bit);
    }

    const Segment& SegmentAt(uint64_t address) const {
        static constexpr Segment unsaid{0, Contents::ZEROS, nullptr, 0};
        for (const Segment& segment : segments_) {
            if (segment.number == SegmentOf(address)) return segment;
        }
        return unsaid;
    }

    // How many bytes from an address on the host has given, which are copied.
    static uint64_t ReadContents(const Segment& segment, uint64_t from, uint8_t* to, uint64_t bytes) {
        if (segment.contents == Contents::ZEROS) {
            std::memset(to, 0, bytes);
            return bytes;
        }
        const uint64_t offset = from & ((uint64_t{1} << SEGMENT_SHIFT) - 1);
        if (segment.contents == Contents::UNKNOWN || offset >= segment.size) return 0;
        const uint64_t known = std::min(bytes, segment.size - offset);
        std::memcpy(to, segment.bytes + offset, known);
        return known;
    }

    void LoadContents(UnifiedBuffer& ub, uint32_t to, uint64_t from, uint64_t bytes) const {
        const uint64_t known = ReadContents(SegmentAt(from), from, ub.bytes + to, bytes);
        // What lies behind a table is not known.
        const uint64_t whole = std::min((known + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES, bytes);
        ub.unknown.Set(to, whole, false);
        ub.unknown.Set(to + whole, bytes - whole, true);
    }

    static bool Has(uint8_t units, uint64_t unit) { return (units >> unit & 1) != 0; }

    // Each unit of the lines that there are of some bytes, and where those of them that are in it begin and end.
    template <typename Visit>
    void EachUnit(uint64_t from, uint64_t bytes, Visit&& visit) const {
        for (uint64_t number = from / LINE; number <= (from + bytes - 1) / LINE; ++number) {
            const Line* const line = Find(number);
            for (uint64_t unit = 0; line != nullptr && unit < LINE / UNIT_BYTES; ++unit) {
                const uint64_t begin = std::max(number * LINE + unit * UNIT_BYTES, from);
                const uint64_t end = std::min(number * LINE + (unit + 1) * UNIT_BYTES, from + bytes);
                if (begin < end) visit(*line, unit, begin, end);
            }
        }
    }

    // With what it held before its first store.
    void FillUnit(Line& line, uint64_t unit) const {
        const uint64_t address = line.number * LINE + unit * UNIT_BYTES;
        ReadContents(SegmentAt(address), address, line.bytes + unit * UNIT_BYTES, UNIT_BYTES);
        line.stored |= static_cast<uint8_t>(1U << unit);
    }

    // Where its line's place is, or would be.
    uint64_t PlaceOf(uint64_t number) const {
        const uint64_t mask = places_.size() - 1;  // a power of two
        uint64_t place = (number * 0x9E3779B97F4A7C15ULL >> 20) & mask;
        while (places_[place] != 0 && lines_[places_[place] - 1].number != number) place = (place + 1) & mask;
        return place;
    }

    const Line* Find(uint64_t number) const {
        if (lines_.empty()) return nullptr;
        const uint32_t index = places_[PlaceOf(number)];
        return index == 0 ? nullptr : &lines_[index - 1];
    }

    Line& Make(uint64_t number) {
        if (places_.size() < 4 * (lines_.size() + 1)) Grow();
        uint32_t& index = places_[PlaceOf(number)];
        if (index == 0) {
            lines_.emplace_back();
            lines_.back().number = number;
            index = static_cast<uint32_t>(lines_.size());
        }
        return lines_[index - 1];
    }

    void Grow() {
        constexpr uint64_t LEAST = 64;
        places_.assign(std::max(LEAST, 4 * places_.size()), 0);
        for (uint32_t index = 0; index < lines_.size(); ++index) places_[PlaceOf(lines_[index].number)] = index + 1;
    }

    std::vector<Segment> segments_;
    std::vector<Line> lines_;
    std::vector<uint32_t> places_;  // of lines, one more; 0 for none: a hash table
    std::unique_ptr<uint8_t[]> scratch_bytes_{new uint8_t[UNIT_BYTES]};
    mutable UnifiedBuffer scratch_{scratch_bytes_.get(), {}};
};

// The ranks of a group. Into the windows of some of them others write; what goes to the others is dropped.
struct RankMemory {
    Memory memory;
    bool takes = false;
    // Bytes that others have written to the window, and posted to it, in how many messages, since somebody asked.
    uint64_t written = 0;
    uint64_t posted = 0;
    uint64_t messages = 0;
};

}  // namespace moe::emulation
