"""Wheels for both architectures, made on one machine: ``make wheels``, or ``python -m wheels``.

zig brings compilers and C libraries of every target, so that a library asks for no newer glibc than it is
told, and has its C++ library in it; auditwheel checks what came out (docs/wheels.md).
"""
