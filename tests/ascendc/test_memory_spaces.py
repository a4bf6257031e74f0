"""GM and UB are different memories: mixing their addresses does not compile in strict mode."""

from __future__ import annotations

import subprocess

import pytest

from .library import Patch, build
from .mutants import ROW_COPY

PLACE = "            rows_.FreeTensor(out);\n"


@pytest.mark.parametrize(
    "line",
    [
        "__gm__ uint8_t* mixed = out.GetPhyAddr();",
        "uint8_t* mixed = GlobalAt<uint8_t>(source).GetPhyAddr();",
        "AscendC::GlobalTensor<uint8_t> mixed; mixed.SetGlobalBuffer(out.GetPhyAddr());",
        "AscendC::DataCopy(GlobalAt<uint8_t>(slots[0]), GlobalAt<uint8_t>(source), bytes);",
        "AscendC::DataCopy(out, out.GetPhyAddr(), bytes);",
    ],
    ids=["ub_as_gm", "gm_as_host", "ub_as_global_tensor", "gm_to_gm", "pointer_as_tensor"],
)
def test_mixing_does_not_compile(line: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        build(strict=True, patches=(Patch(ROW_COPY, PLACE, f"            {line}\n{PLACE}"),))
    assert "row_copy.h" in refused.value.stderr
    assert "error:" in refused.value.stderr
