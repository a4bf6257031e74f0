"""What a rank needs for its first call and takes seconds to import: once, in the server that forks ranks.

What is not there, or is broken, is left out: a rank that needs it says what is wrong, as elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib

from moe_triton.schemes import SCHEMES

MODULES = (
    "torch.distributed",
    "moe_triton.buffer",
    "moe_triton.torch_npu_ops",
    *sorted({place.partition(":")[0] for schemes in SCHEMES.values() for place in schemes.values()}),
    "moe_triton.backends.cpu.backend",
    "triton.backends.ascend.compiler",
)

for _module in MODULES:
    # Not ImportError alone, which is all that the server takes: files of two Tritons may fail in any way.
    with contextlib.suppress(Exception):
        importlib.import_module(_module)
