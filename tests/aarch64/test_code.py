"""What is said of aarch64 code is what its disassembly says."""

from __future__ import annotations

from tests.aarch64.code import Code

TEXT = """
kernel.so:     file format elf64-littleaarch64

Disassembly of section .text:

00000000000005f0 <entry>:
 5f0:\ta9bc7bfd \tstp\tx29, x30, [sp, #-64]!
 5f4:\t3d800be0 \tstr\tq0, [sp, #32]
 5f8:\t4ea18400 \tadd\tv0.4s, v0.4s, v1.4s
 5fc:\tad400fe2 \tldp\tq2, q3, [sp]
 600:\t94000010 \tbl\t640 <memcpy@plt>
 604:\t94000010 \tbl\t640 <memcpy@plt>
 608:\ta8c47bfd \tldp\tx29, x30, [sp], #64
 60c:\td65f03c0 \tret
"""


def test_a_disassembly_is_counted() -> None:
    code = Code.of_text(TEXT)
    assert code == Code(8, 3, 1, 1, {"memcpy": 2})
    assert str(code) == ("8 instructions, 37% NEON, 1 vectors to the stack and 1 from it; calls memcpy 2")
