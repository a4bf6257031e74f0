// Two accesses to the same bytes by each pair of pipes, with and without what orders them. Prints a line for each: its
// name, and what the strict emulation says.
#include <cstdio>
#include <string>

#include "flags.h"

using AscendC::HardEvent;
using moe::GlobalAt;
using moe::Order;

namespace {

constexpr int WORDS = 8;
alignas(64) int memory[64];

struct Core {
    AscendC::TPipe pipe;
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
    AscendC::LocalTensor<int> words;  // that both touch
    AscendC::LocalTensor<int> others;

    Core() {
        pipe.InitBuffer(buffer, 64);
        words = buffer.Get<int>();
        others = words[WORDS];
    }
};

uint64_t Address() { return reinterpret_cast<uint64_t>(memory); }

// Accesses to UB.
void ReadByScalar(Core& core) { core.words.GetValue(WORDS - 1); }
void WriteByScalar(Core& core) { core.words.SetValue(WORDS - 1, 7); }
void ReadByVector(Core& core) { AscendC::Adds(core.others, core.words, 1, WORDS); }
void WriteByVector(Core& core) { AscendC::Duplicate(core.words, 1, WORDS); }
void Load(Core& core) { AscendC::DataCopy(core.words, GlobalAt<int>(Address()), WORDS); }
void Store(Core& core) { AscendC::DataCopy(GlobalAt<int>(Address()), core.words, WORDS); }

// Accesses to GM, through words that nothing else touches.
void LoadGlobal(Core& core) { AscendC::DataCopy(core.others, GlobalAt<int>(Address()), WORDS); }
void StoreGlobal(Core&) {
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
    GetTPipePtr()->InitBuffer(buffer, 32);
    AscendC::DataCopy(GlobalAt<int>(Address()), buffer.Get<int>(), WORDS);
}
void ReadGlobal(Core&) { moe::ReadFresh<int>(Address(), WORDS - 1); }
void RaiseGlobal(Core&) {
    AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
    GetTPipePtr()->InitBuffer(buffer, 32);
    moe::RaiseFlags(GlobalAt<int>(Address()), buffer.Get<int>(), WORDS, 1);
}

template <typename Kernel>
void Say(const std::string& name, const Kernel& kernel) {
    const auto run = [&] {
        Core core;
        kernel(core);
        AscendC::PipeBarrier<PIPE_ALL>();
    };
    const bool failed = moe::emulation::RunBlocks(1, run) != 0;
    std::printf("%s=%s\n", name.c_str(), failed ? moe::emulation::LastError().c_str() : "");
}

using Access = void (*)(Core&);

// The first access and then the second one: as they are, and ordered.
void SayBoth(const std::string& name, Access first, Access second, void (*order)()) {
    Say(name, [&](Core& core) {
        first(core);
        second(core);
    });
    Say(name + ", ordered", [&](Core& core) {
        first(core);
        order();
        second(core);
    });
}

// By an event that its name ends with.
#define SAY(event, first, second) \
    SayBoth(#first " " #second " " #event, first, second, [] { Order<HardEvent::event>(); })

}  // namespace

int main() {
    SAY(S_V, ReadByScalar, WriteByVector);
    SAY(S_V, WriteByScalar, ReadByVector);
    SAY(S_V, WriteByScalar, WriteByVector);
    SAY(S_MTE2, ReadByScalar, Load);
    SAY(S_MTE2, WriteByScalar, Load);
    SAY(S_MTE3, WriteByScalar, Store);
    SAY(V_S, WriteByVector, ReadByScalar);
    SAY(V_S, WriteByVector, WriteByScalar);
    SAY(V_S, ReadByVector, WriteByScalar);
    SAY(V_MTE2, ReadByVector, Load);
    SAY(V_MTE2, WriteByVector, Load);
    SAY(V_MTE3, WriteByVector, Store);
    SAY(MTE2_S, Load, ReadByScalar);
    SAY(MTE2_S, Load, WriteByScalar);
    SAY(MTE2_V, Load, ReadByVector);
    SAY(MTE2_V, Load, WriteByVector);
    SAY(MTE2_MTE3, Load, Store);
    SAY(MTE3_S, Store, WriteByScalar);
    SAY(MTE3_V, Store, WriteByVector);
    SAY(MTE3_MTE2, Store, Load);
    SAY(MTE3_S, StoreGlobal, ReadGlobal);
    SAY(S_MTE3, ReadGlobal, StoreGlobal);
    SAY(MTE3_MTE2, StoreGlobal, LoadGlobal);
    SAY(MTE2_MTE3, LoadGlobal, StoreGlobal);
    const auto vector = [] { AscendC::PipeBarrier<PIPE_V>(); };
    SayBoth("WriteByVector ReadByVector V", WriteByVector, ReadByVector, vector);
    SayBoth("Load Load MTE2", Load, Load, [] { AscendC::PipeBarrier<PIPE_MTE2>(); });
    SayBoth("StoreGlobal StoreGlobal MTE3", StoreGlobal, StoreGlobal, [] { AscendC::PipeBarrier<PIPE_MTE3>(); });

    // What no order is asked of.
    Say("two reads", [](Core& core) {
        ReadByScalar(core);
        ReadByVector(core);
        Store(core);
    });
    Say("other words", [](Core& core) {
        core.words.SetValue(WORDS - 1, 7);
        AscendC::Duplicate(core.others, 1, WORDS);
    });
    Say("a barrier of all pipes", [](Core& core) {
        WriteByScalar(core);
        AscendC::PipeBarrier<PIPE_ALL>();
        WriteByVector(core);
    });
    Say("by way of another pipe", [](Core& core) {
        WriteByScalar(core);
        Order<HardEvent::S_MTE3>();
        Store(core);
        Order<HardEvent::MTE3_V>();
        WriteByVector(core);
    });
    Say("behind what the scalar unit has waited for", [](Core& core) {
        Load(core);
        Order<HardEvent::MTE2_S>();
        ReadByVector(core);
    });
    Say("a flag that is polled", [](Core& core) {
        RaiseGlobal(core);
        LoadGlobal(core);
    });
    Say("a flag that is polled and cleared", [](Core& core) {
        RaiseGlobal(core);
        LoadGlobal(core);
        Order<HardEvent::MTE2_MTE3>();
        StoreGlobal(core);
    });
    // What nothing else orders.
    Say("what was written where a flag had been", [](Core& core) {
        RaiseGlobal(core);
        StoreGlobal(core);
        LoadGlobal(core);
    });
    Say("a flag read by the scalar unit", [](Core& core) {
        RaiseGlobal(core);
        ReadGlobal(core);
    });
    Say("an order before the access", [](Core& core) {
        Order<HardEvent::S_V>();
        ReadByScalar(core);
        WriteByVector(core);
    });
    Say("an order the other way round", [](Core& core) {
        ReadByScalar(core);
        Order<HardEvent::V_S>();
        WriteByVector(core);
    });

    // Buffers.
    Say("a buffer without memory", [](Core&) {
        AscendC::TBuf<AscendC::TPosition::VECCALC> buffer;
        buffer.Get<int>();
    });
    Say("a queue without memory", [](Core&) {
        AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, 1> queue;
        queue.AllocTensor<int>();
    });
    Say("a buffer from before Reset", [](Core& core) {
        AscendC::PipeBarrier<PIPE_ALL>();
        core.pipe.Reset();
        core.buffer.Get<int>();
    });
    Say("memory again after Reset", [](Core& core) {
        AscendC::PipeBarrier<PIPE_ALL>();
        core.pipe.Reset();
        core.pipe.InitBuffer(core.buffer, 32);
        core.buffer.Get<int>();
    });
    return 0;
}
