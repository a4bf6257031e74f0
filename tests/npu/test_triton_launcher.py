"""triton-ascend's own launcher for our kernels: the arguments that it takes are those that a step passes."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest

from moe_triton.backends.npu import triton_kernels
from moe_triton.core.errors import ToolchainError
from moe_triton.core.kernel import TritonKernel
from moe_triton.kernels.language import HAVE_TRITON
from tests.test_abi import built

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="triton-ascend is not installed")

KERNELS = list(built()) if HAVE_TRITON else []
# What the launcher's C++ side reads an argument as (PyArg_ParseTuple), and passes it on as.
READ_AS = {"i32": ("i", "int32_t"), "i64": ("L", "int64_t")}
# Grid, stream, function; metadata and hooks.
BEFORE = "iiiKKOOOO"


def wrapper(kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C++ text that triton-ascend compiles for a kernel, as on a machine with 48 vector cores."""
    from triton.backends.ascend import driver
    from triton.compiler import ASTSource

    cores = types.SimpleNamespace(get_aivector_core_num=lambda: 48, get_aicore_num=lambda: 24)
    monkeypatch.setattr(driver, "NPUUtils", lambda: cores)
    monkeypatch.setattr(driver, "get_ascend_arch_from_env", lambda: "Ascend910B3")
    source = ASTSource(kernel.fn, {arg.name: arg.type for arg in kernel.args}, dict(kernel.constants))
    number = kernel.fn.arg_names.index
    metadata = types.SimpleNamespace(
        mix_mode="aiv", compile_on_910_95=False, parallel_mode="simd", force_simt_only=False
    )
    signature = {number(name): type_ for name, type_ in source.signature.items()}
    text: str = driver.generate_npu_wrapper_src({}, signature, metadata)
    return text


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_arguments_are_read_in_our_order(kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = wrapper(kernel, monkeypatch)
    (read,) = re.findall(r'args, "(\w+)",', text)
    assert read == BEFORE + "".join("O" if arg.is_pointer else READ_AS[arg.type][0] for arg in kernel.args)
    (packed,) = re.findall(r"struct __attribute__\(\(packed\)\) \{(.*?)\} args = ", text, flags=re.S)
    fields = re.findall(r"(void\*|int\w+_t) arg(\d+) ", packed)
    assert [kind for kind, _ in fields] == [
        "void*" if arg.is_pointer else READ_AS[arg.type][1] for arg in kernel.args
    ]
    # Fields are numbered by the function's parameters: in our order, and these very ones.
    assert [kernel.fn.arg_names[int(number)] for _, number in fields] == [arg.name for arg in kernel.args]


def test_an_address_is_taken_as_a_number() -> None:
    """The launcher asks a pointer argument for ``data_ptr()`` unless it is an integer, as ours are."""
    from triton.backends.ascend import driver

    source = Path(driver.__file__).read_text(encoding="utf-8")
    assert "PyLong_Check(obj)" in source
    assert "PyLong_AsUnsignedLongLong(obj)" in source


def test_without_a_compiler_the_error_names_the_kernel() -> None:
    with pytest.raises(ToolchainError, match=rf"triton-ascend cannot compile kernel {KERNELS[0].name}"):
        triton_kernels.launcher(KERNELS[0])
