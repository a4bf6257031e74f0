// The data cache through which one core's scalar unit reads and writes GM, in the strict build. Nothing keeps it
// coherent (Ascend C: "Reading/Writing Data by the Scalar Unit", "DataCacheCleanAndInvalid", "SetValue"):
//
// - a line keeps the contents that it was filled with;
// - a line that was not invalidated in this launch may still hold data of an earlier kernel, for any earlier use of
//   the memory: reading it is an error;
// - stores stay here until they are cleaned, or until the line is written back at any time; a line is written back
//   whole, over what others have written beside it.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <map>

#include "meeting.h"
#include "memory.h"

namespace moe::emulation {

class ScalarCache {
public:
    template <typename T>
    T Load(const T* from) {
        Line& line = LineOf(from);
        if ((line.from_before & Bits(from, sizeof(T))) != 0) {
            throw CheckFailed(
                "GetValue of GM that the core's cache may hold from an earlier kernel: DataCacheCleanAndInvalid first");
        }
        Fill(line, from);
        T value;
        std::memcpy(&value, line.bytes.data() + Offset(from), sizeof(T));
        return value;
    }

    template <typename T>
    void Store(T* to, T value) {
        Line& line = LineOf(to);
        Fill(line, to);
        std::memcpy(line.bytes.data() + Offset(to), &value, sizeof(T));
        line.dirty |= Bits(to, sizeof(T));
        line.from_before &= ~Bits(to, sizeof(T));
    }

    // The bytes from this address to the end of its line; those before it in the line stay as they are.
    void CleanAndInvalidate(const void* address) {
        Line& line = LineOf(address);
        const uint64_t bits = Bits(address, LINE_BYTES - Offset(address));
        if ((line.dirty & bits) != 0) WriteBack(line, address, bits);
        line.held &= ~bits;
        line.dirty &= ~bits;
        line.from_before &= ~bits;
    }

    void CleanAndInvalidateAll() {
        while (HasDirty()) WriteBackOne(0);
        lines_.clear();
        was_emptied_ = true;
    }

    bool HasDirty() const {
        for (const auto& [begin, line] : lines_) {
            if (line.dirty != 0) return true;
        }
        return false;
    }

    // One of the dirty lines, which stays in the cache.
    void WriteBackOne(uint64_t chance) {
        uint64_t number = 0;
        for (const auto& [begin, line] : lines_) number += line.dirty != 0 ? 1 : 0;
        uint64_t left = number == 0 ? 0 : chance % number;
        for (auto& [begin, line] : lines_) {
            if (line.dirty == 0 || left-- != 0) continue;
            WriteBack(line, reinterpret_cast<const void*>(begin), line.held);
            line.dirty = 0;
            return;
        }
    }

private:
    static constexpr uint64_t ALL = ~uint64_t{0};
    static_assert(LINE_BYTES == 64, "a bit for each byte of a line");

    // Bit i is for byte i.
    struct Line {
        std::array<uint8_t, LINE_BYTES> bytes;
        uint64_t held;
        uint64_t dirty;
        uint64_t from_before;
    };

    static uint64_t Offset(const void* address) { return reinterpret_cast<uint64_t>(address) % LINE_BYTES; }
    static uint64_t Begin(const void* address) { return reinterpret_cast<uint64_t>(address) - Offset(address); }

    static uint64_t Bits(const void* address, uint64_t bytes) {
        return (bytes == LINE_BYTES ? ALL : (uint64_t{1} << bytes) - 1) << Offset(address);
    }

    Line& LineOf(const void* address) {
        const auto [at, is_new] = lines_.try_emplace(Begin(address));
        if (is_new) at->second = {{}, 0, 0, was_emptied_ ? 0 : ALL};
        return at->second;
    }

    static void Fill(Line& line, const void* address) {
        std::array<uint8_t, LINE_BYTES> now;
        const auto* from = reinterpret_cast<const uint8_t*>(Begin(address));
        CopyBlock(now.data(), from);
        CopyBlock(now.data() + LINE_BYTES / 2, from + LINE_BYTES / 2);
        for (uint64_t i = 0; i < LINE_BYTES; ++i) {
            if ((line.held >> i & 1) == 0) line.bytes[i] = now[i];
        }
        line.held = ALL;
    }

    // In the largest aligned pieces that `bits` has, so that readers of a number see all of it or nothing.
    static void WriteBack(const Line& line, const void* address, uint64_t bits) {
        auto* to = reinterpret_cast<uint8_t*>(Begin(address));
        const uint8_t* from = line.bytes.data();
        for (uint64_t at = 0; at < LINE_BYTES;) {
            if (WritePiece<uint64_t>(to, from, at, bits) || WritePiece<uint32_t>(to, from, at, bits) ||
                WritePiece<uint16_t>(to, from, at, bits) || WritePiece<uint8_t>(to, from, at, bits)) {
                continue;
            }
            ++at;
        }
    }

    template <typename T>
    static bool WritePiece(uint8_t* to, const uint8_t* from, uint64_t& at, uint64_t bits) {
        const uint64_t wanted = Bits(to + at, sizeof(T));
        if (at % sizeof(T) != 0 || (bits & wanted) != wanted) return false;
        std::memcpy(to + at, from + at, sizeof(T));
        at += sizeof(T);
        return true;
    }

    std::map<uint64_t, Line> lines_;
    bool was_emptied_ = false;
};

}  // namespace moe::emulation
