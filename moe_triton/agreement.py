"""Ranks compare what they were constructed with, before any of them takes memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from moe_triton.backends.base import Backend
from moe_triton.config import PROTOCOL_VERSION, Config
from moe_triton.errors import ConfigMismatchError, MoeTritonError
from moe_triton.rendezvous import Meeting


def agree(meeting: Meeting, config: Config, make_backend: Callable[[], Backend], **others: object) -> Backend:
    """Makes the back end and compares settings and versions; a rank that cannot go on tells the others.

    Args:
        meeting: the group.
        config: the group's settings.
        make_backend: raises what keeps this rank from going on.
        others: settings besides, by name: whatever JSON can carry.

    Raises:
        MoeTritonError: this rank's back end cannot be made.
        ConfigMismatchError: another rank's cannot, or settings differ; it names ranks and fields.
        CommunicationTimeoutError: a rank did not come.
    """
    backend, failure = None, None
    try:
        backend = make_backend()
    except MoeTritonError as error:
        failure = error
    settings = {
        "protocol": PROTOCOL_VERSION,
        "moe_triton": metadata.version("moe_triton"),
        "torch": torch.__version__,
        **dataclasses.asdict(config),
        **(backend.identity() if backend else {}),
        **others,
    }
    messages = meeting.exchange({"failure": str(failure or ""), "settings": settings}, "settings")
    if failure is not None:
        raise failure
    failed = {rank: m.get("failure") for rank, m in enumerate(messages) if m.get("failure")}
    if failed:
        raise ConfigMismatchError(
            "; ".join(f"rank {rank} cannot be constructed: {why}" for rank, why in failed.items())
        )
    check_same([m.get("settings", {}) for m in messages])
    assert backend is not None
    return backend


def check_same(settings: Sequence[Mapping[str, Any]]) -> None:
    """Checks that every rank was constructed with the same settings.

    Args:
        settings: one mapping per rank.

    Raises:
        ConfigMismatchError: names each field that differs, and which ranks have which value.
    """
    fields = dict.fromkeys(name for setting in settings for name in setting)
    lines = []
    for name in fields:
        ranks_of: dict[str, list[int]] = {}
        for rank, setting in enumerate(settings):
            ranks_of.setdefault(repr(setting.get(name)), []).append(rank)
        if len(ranks_of) > 1:
            values = ", ".join(f"{value} on rank(s) {ranks}" for value, ranks in ranks_of.items())
            lines.append(f"  {name}: {values}")
    if lines:
        raise ConfigMismatchError(
            "ranks of one group must be constructed with the same settings, but these differ:\n"
            + "\n".join(lines)
        )
