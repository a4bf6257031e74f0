"""Traces: what ran when on each rank, in one file for Perfetto.

A rank collects in memory (`Trace`), turns its events into Chrome's JSON when it writes (`chrome`), and adds
them to the file that all ranks share (`file`).
"""

from __future__ import annotations

from moe_triton.runtime.trace.file import TraceFile, TracePath
from moe_triton.runtime.trace.trace import Trace

__all__ = ["Trace", "TraceFile", "TracePath"]
