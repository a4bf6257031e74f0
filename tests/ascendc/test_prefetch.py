"""A kernel that loads the next row before it sends this one: both builds deliver both rows."""

from __future__ import annotations

import subprocess

import pytest

from tests.patience import seconds

from .library import program

PROGRAM = """
#include <cstdio>
#include <vector>
#include "kernel_operator.h"
using namespace AscendC;

constexpr uint32_t ROW = 4096;

void Prefetch(const uint8_t* from, uint8_t* to) {
    TPipe pipe;
    TQueBind<TPosition::VECIN, TPosition::VECOUT, 2> rows;
    pipe.InitBuffer(rows, 2, ROW);
    GlobalTensor<uint8_t> source, target;
    source.SetGlobalBuffer(const_cast<uint8_t*>(from), 2 * ROW);
    target.SetGlobalBuffer(to, 2 * ROW);
    for (uint32_t row = 0; row < 2; ++row) {
        LocalTensor<uint8_t> in = rows.AllocTensor<uint8_t>();
        DataCopy(in, source[row * ROW], ROW);
        rows.EnQue(in);
    }
    for (uint32_t row = 0; row < 2; ++row) {
        LocalTensor<uint8_t> out = rows.DeQue<uint8_t>();
        DataCopy(target[row * ROW], out, ROW);
        rows.FreeTensor(out);
    }
    PipeBarrier<PIPE_ALL>();
}

int main() {
    std::vector<uint8_t> from(2 * ROW), to(2 * ROW);
    for (uint32_t i = 0; i < 2 * ROW; ++i) from[i] = static_cast<uint8_t>(i * 7 + i / ROW);
    if (moe::emulation::RunBlocks(1, [&] { Prefetch(from.data(), to.data()); }) != 0) {
        std::puts(moe::emulation::LastError().c_str());
        return 1;
    }
    return from == to ? 0 : 2;
}
"""


@pytest.mark.parametrize("options", [[], ["-DMOE_EMULATION_STRICT"]], ids=["fast", "strict"])
def test_rows_loaded_ahead_arrive(options: list[str]) -> None:
    command = [program(PROGRAM, "-O1", *options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds(30))
    assert done.returncode == 0, done.stdout
