// GlobalTensor and LocalTensor: memory that peers see, and this block's own UB.
#pragma once

#include <cstring>

#include "types.h"

namespace AscendC {

template <typename T>
class GlobalTensor {
public:
    void SetGlobalBuffer(__gm__ T* address, uint64_t size) {
        address_ = address;
        size_ = size;
    }
    void SetGlobalBuffer(__gm__ T* address) { SetGlobalBuffer(address, UINT64_MAX / sizeof(T)); }

    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor part;
        part.address_ = address_ + offset;
        part.size_ = size_ - offset;
        return part;
    }

    const __gm__ T* GetPhyAddr() const { return address_; }
    uint64_t GetSize() const { return size_; }

    T GetValue(uint64_t index) const {
        auto& core = moe::emulation::ThisCore();
        core.Require(index < size_, "GetValue beyond the end of a GlobalTensor");
        return core.ScalarLoad(Host() + index);
    }

    void SetValue(uint64_t index, T value) {
        auto& core = moe::emulation::ThisCore();
        core.Require(index < size_, "SetValue beyond the end of a GlobalTensor");
        core.ScalarStore(Host() + index, value);
    }

    // Plain memory: for the emulation itself.
    T* Host() const { return const_cast<T*>(address_); }

private:
    __gm__ T* address_ = nullptr;
    uint64_t size_ = 0;
};

template <typename T>
class LocalTensor {
public:
    LocalTensor() = default;
    LocalTensor(moe::emulation::UbAddress address, uint32_t bytes) : address_(address), bytes_(bytes) {}

    template <typename U>
    LocalTensor<U> ReinterpretCast() const {
        return LocalTensor<U>(address_, bytes_);
    }

    LocalTensor operator[](uint32_t offset) const {
        const auto skip = static_cast<uint32_t>(offset * sizeof(T));
        moe::emulation::ThisCore().Require(skip <= bytes_, "an offset beyond the end of a LocalTensor");
        return LocalTensor({address_.offset + skip}, bytes_ - skip);
    }

    uint32_t GetSize() const { return static_cast<uint32_t>(bytes_ / sizeof(T)); }
    moe::emulation::UbAddress GetPhyAddr() const { return address_; }

    T GetValue(uint32_t index) const {
        auto& core = moe::emulation::ThisCore();
        core.Require(index < GetSize(), "GetValue beyond the end of a LocalTensor");
        core.BeginInstruction(PIPE_S);
        core.AccessUb(PIPE_S, PlaceOf(index), sizeof(T), false);
        core.DrainScalar();
        T value;
        std::memcpy(&value, Host() + index * sizeof(T), sizeof(T));
        return value;
    }

    void SetValue(uint32_t index, T value) const {
        auto& core = moe::emulation::ThisCore();
        core.Require(index < GetSize(), "SetValue beyond the end of a LocalTensor");
        core.BeginInstruction(PIPE_S);
        core.AccessUb(PIPE_S, PlaceOf(index), sizeof(T), true);
        uint8_t* at = Host() + index * sizeof(T);
        core.Issue(PIPE_S, [=] { std::memcpy(at, &value, sizeof(T)); });
    }

    uint8_t* Host() const { return moe::emulation::ThisCore().Ub(address_); }

private:
    moe::emulation::UbAddress PlaceOf(uint32_t index) const {
        return {address_.offset + static_cast<uint32_t>(index * sizeof(T))};
    }

    moe::emulation::UbAddress address_{0};
    uint32_t bytes_ = 0;
};

}  // namespace AscendC
