"""What strict mode makes of scalar code that reads and writes GM: a cache that nothing keeps coherent."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.patience import seconds
from tests.surroundings import cxx

from .library import COMPILE_SECONDS, include_options, program

PROGRAM = """
#include <cstdio>
#include <string>
#include "kernel_operator.h"
using namespace AscendC;

constexpr int SEEDS = 200;
alignas(64) int memory[64];
GlobalTensor<int> gm;

void Invalidate(const GlobalTensor<int>& at) {
    DataCacheCleanAndInvalid<int, CacheLine::SINGLE_CACHE_LINE, DcciDst::CACHELINE_OUT>(at);
}

// What the launch says of `kernel`, or the number that it returns.
template <typename Kernel>
std::string Run(const Kernel& kernel, int seed = 0) {
    for (int i = 0; i < 64; ++i) memory[i] = 100 + i;
    moe::emulation::Seed() = seed;
    int result = 0;
    const auto body = [&] {
        gm.SetGlobalBuffer(memory, 64);
        result = kernel();
    };
    if (moe::emulation::RunBlocks(1, body) != 0) return moe::emulation::LastError();
    return std::to_string(result);
}

int main() {
    const auto say = [](const char* name, const std::string& what) {
        std::printf("%s=%s\\n", name, what.c_str());
    };
    say("read", Run([] { return gm.GetValue(1); }));
    say("invalidated", Run([] { Invalidate(gm); return gm.GetValue(1); }));
    say("invalidated from behind", Run([] { Invalidate(gm[2]); return gm.GetValue(1); }));
    say("another line", Run([] { Invalidate(gm); return gm.GetValue(16); }));
    say("everything", Run([] {
        DataCacheCleanAndInvalid<int, CacheLine::ENTIRE_DATA_CACHE, DcciDst::CACHELINE_OUT>(gm);
        return gm.GetValue(16);
    }));
    say("a neighbour written later", Run([] {
        Invalidate(gm);
        const int first = gm.GetValue(0);
        memory[1] = 7;
        return first + gm.GetValue(1);
    }));
    say("invalidated again", Run([] {
        Invalidate(gm);
        const int first = gm.GetValue(0);
        memory[1] = 7;
        Invalidate(gm);
        return first + gm.GetValue(1);
    }));
    say("a store", Run([] { gm.SetValue(0, 7); return 0; }));
    say("a store that is cleaned", Run([] { gm.SetValue(0, 7); Invalidate(gm); return memory[0]; }));
    say("a store over a neighbour", Run([] {
        gm.SetValue(0, 7);
        memory[1] = 8;
        Invalidate(gm);
        return memory[1];
    }));
    say("cleaned from behind", Run([] { gm.SetValue(0, 7); Invalidate(gm[1]); return memory[0]; }));
    int early = 0;
    for (int seed = 0; seed < SEEDS; ++seed) {
        const std::string seen = Run([] {
            gm.SetValue(0, 7);
            moe::emulation::PollPause(0, 0, 1, 0, 1);
            const int now = memory[0];
            Invalidate(gm);
            return now;
        }, seed);
        early += seen == "7" ? 1 : 0;
    }
    say("early", early > 0 && early < SEEDS ? "sometimes" : std::to_string(early));
}
"""

FROM_BEFORE = "GetValue of GM that the core's cache may hold from an earlier kernel"
UNCLEANED = "SetValue of GM without DataCacheCleanAndInvalid"

STRICT = {
    "read": FROM_BEFORE,
    "invalidated": "101",
    "invalidated from behind": FROM_BEFORE,
    "another line": FROM_BEFORE,
    "everything": "116",
    "a neighbour written later": "201",
    "invalidated again": "107",
    "a store": UNCLEANED,
    "a store that is cleaned": "7",
    "a store over a neighbour": "101",
    "cleaned from behind": UNCLEANED,
    "early": "sometimes",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What the strict emulation makes of each kernel."""
    command = [program(PROGRAM, "-O1", "-DMOE_EMULATION_STRICT")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds(30))
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", STRICT)
def test_the_cache_is_not_coherent(said: dict[str, str], name: str) -> None:
    assert STRICT[name] in said[name]


def test_nothing_is_left_out(said: dict[str, str]) -> None:
    assert set(said) == set(STRICT)


def test_a_host_pays_nothing_for_an_invalidation(tmp_path: Path) -> None:
    """In the fast build a fresh read and a plain one are the same instructions."""
    texts = []
    for call in ("ReadFresh<int32_t>(address)", "GlobalAt<int32_t>(address).GetValue(0)"):
        function = f'extern "C" int Read(uint64_t address) {{ using namespace moe; return {call}; }}'
        (tmp_path / "read.cpp").write_text(f'#include "flags.h"\n{function}\n', encoding="utf-8")
        include = include_options(tmp_path)
        command = [*cxx(), "-std=c++17", "-O2", *include, "-S", "-o", "-", "read.cpp"]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS
        )
        body = done.stdout.split("\nRead:\n")[1].split("ret\n")[0]
        texts.append([line for line in body.splitlines() if not line.lstrip().startswith(("#", ".L"))])
    assert texts[0] == texts[1]
    assert texts[0]
