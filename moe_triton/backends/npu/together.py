"""Failures that all ranks have to hear of before any of them goes on."""

from __future__ import annotations

from moe_triton.errors import WindowError
from moe_triton.rendezvous import Meeting

MAX_TEXT = 2000


def raise_together(meeting: Meeting, failure: str) -> None:
    """Raises on every rank what any of them met.

    Args:
        meeting: the group.
        failure: what this rank met; empty if nothing.

    Raises:
        WindowError: a rank met something; it names each with what it says.
        CommunicationTimeoutError: a rank did not come.
    """
    messages = meeting.exchange({"failure": failure[:MAX_TEXT]}, "windows")
    said = [f"rank {rank}: {text}" for rank, m in enumerate(messages) if (text := m.get("failure", ""))]
    if said:
        raise WindowError("; ".join(said))
