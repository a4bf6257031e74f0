"""Every argument of the constructor with every odd value: our own error that names it, and nothing else."""

from __future__ import annotations

import decimal
import fractions
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_triton import ArgumentError, EPBuffer, Tuning
from moe_triton.core.checks import MAX_SECONDS
from moe_triton.core.config import Config
from moe_triton.processes import RankGroup
from tests.distributed.cases import inputs_of, small_case
from tests.distributed.workers import one_round

Groups = Callable[[int], RankGroup]
SIZES: dict[str, Any] = {"num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2, "num_experts": 8}


class Hostile:
    """What raises, whatever is asked of it."""

    def __fspath__(self) -> str:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]
    __bool__ = __len__ = __index__ = __float__ = __fspath__  # type: ignore[assignment]


def of_no_use() -> list[Any]:
    """Values that no argument takes."""
    return [
        b"64",
        1j,
        [64],
        {"a": 1},
        object(),
        Hostile(),
        Hostile,
        np.array([64, 2]),
        torch.tensor([64, 2]),
        decimal.Decimal(2),
        Ellipsis,
    ]


NOT_FINITE = [float("nan"), float("inf"), -float("inf"), np.float32("nan")]
TEXTS = ["", "64", "\0", "x" * 10**5, "\udcff", "/", "..", "/dev/null/trace.json"]
# By what an argument is declared as; each value is wrong for it, whatever the other arguments are.
ODD: dict[str, list[Any]] = {
    "int": [None, "64", 2.0, True, np.float32(2), 0, -1, 10**30, 10**5000, *NOT_FINITE],
    "int | None": ["64", 2.0, True, np.float32(2), 0, -1, -(10**30), *NOT_FINITE],
    "bool": [None, "yes", 1, 0, 1.0, np.int64(1)],
    "float": [None, "1", True, 0, -1.0, 2 * MAX_SECONDS, 10**30, fractions.Fraction(-1, 3), *NOT_FINITE],
    "str": [None, 3, True, 2.5, *TEXTS[1:]],
    "str | None": [3, True, 2.5, *TEXTS[1:]],
    "Outputs": [None, 3, True, 2.5, *TEXTS],
    "Product": [None, 3, True, 2.5, *TEXTS],
    "OnLost": [None, 3, True, 2.5, *TEXTS],
    "Tuning | None": [3, True, "fast", *NOT_FINITE],
    "Network | None": [3, True, "eth0", *NOT_FINITE],
    "TracePath | None": [3, True, *NOT_FINITE, *(t for t in TEXTS if t not in ("64", "\udcff"))],
    "RanksPerServer": [
        "64",
        2.0,
        True,
        np.float32(2),
        0,
        -1,
        10**30,
        [],
        [4, 0],
        *NOT_FINITE,
        *TEXTS,
    ],
    "Sequence[int] | None": [
        *("64", 2.0, True, 0, -1, 8, 10**30, [], [9, -1], [8.0], [True], [10**30]),
        *(*NOT_FINITE, *TEXTS),
    ],
    "Collection[int]": [None, 3, True, -1.0, *NOT_FINITE, *TEXTS[1:]],
    "dist.ProcessGroup | None": [3, True, *NOT_FINITE, *TEXTS],
}
# A number of its kind that is none of these arguments': 0 shared experts, and any bound on bytes, are fine.
FINE: dict[str, list[Any]] = {
    "num_shared_experts": [0],
    "num_zero_experts": [0],
    "num_copy_experts": [0],
    "num_const_experts": [0],
    "num_shared_ranks": [0],
}


def odd_arguments() -> list[tuple[str, Any]]:
    """From the declaration of the constructor."""
    found = []
    for name, parameter in inspect.signature(EPBuffer.__init__).parameters.items():
        if name == "self":
            continue
        values = ODD[str(parameter.annotation)] + of_no_use()
        fine = FINE.get(name, [])
        found += [(name, v) for v in values if not any(type(v) is type(f) and v == f for f in fine)]
    return found


def refused(call: Callable[[], Any], argument: str, shown: str) -> list[str]:
    try:
        call()
    except ArgumentError as error:
        # Sizes are held against each other: the error may be about one that does not go with this one.
        names = {argument} if argument not in ("num_shared_experts",) else {argument, "num_shared_ranks"}
        if error.argument in names and len(str(error)) < 2000:
            return []
        return [f"{shown} gave {error.argument}: {error}"[:300]]
    except BaseException as error:
        return [f"{shown} gave {type(error).__name__}: {error}"[:300]]
    return [f"{shown} was taken"]


def shown(name: str, value: object) -> str:
    kind = type(value).__name__
    cannot = kind in ("Hostile", "type", "int")
    return f"{name} of {kind}" if cannot else f"{name}={str(value)[:40]!r} ({kind})"


def refuse_everything(rank: int, num_ranks: int, folder: str) -> tuple[int, list[str]]:
    wrong = []
    cases = odd_arguments()
    extra: list[tuple[str, Any]] = [
        ("trace", folder),
        ("trace", f"{folder}/link"),
        ("trace", f"{folder}/{'x' * 300}"),
        ("trace", Path(folder) / "nowhere" / "trace.json"),
        ("timeout_s", 10**400),
        ("timeout_s", fractions.Fraction(10**400)),
    ]
    for name, value in cases + extra:
        options = {**SIZES, "relaxed": True, "timeout_s": 60.0, name: value}
        wrong += refused(lambda options=options: EPBuffer(**options), name, shown(name, value))  # type: ignore[misc]
    case = small_case(num_ranks)
    taken: dict[str, Any] = {
        **{name: np.int64(value) for name, value in SIZES.items()},
        "num_blocks": np.int32(1),
        "num_bytes": 10**30,
        "timeout_s": np.float32(60),
        "relaxed": np.bool_(True),
        "tuning": Tuning(dispatch_tokens=np.int16(3)),  # type: ignore[arg-type]
    }
    with EPBuffer(**taken) as buffer:
        assert type(buffer.config.hidden) is int
        one_round(buffer, case, inputs_of(case, rank, 0), None)
    dist.barrier()
    return len(cases) + len(extra), wrong


def test_only_our_own_error_comes_out_and_names_the_argument(ranks: Groups, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    for count, wrong in ranks(2).run(refuse_everything, str(tmp_path)):
        assert wrong == []
        assert count > 250
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.parametrize("seconds", [1e-6, MAX_SECONDS, 1])
def test_the_bounds_of_time_outs_are_taken(ranks: Groups, seconds: float) -> None:
    assert ranks(2).run(with_time_out, seconds) == [True, True]


def with_time_out(rank: int, num_ranks: int, seconds: float) -> bool:
    case = small_case(num_ranks)
    dist.barrier()
    if seconds < 1:  # nobody meets in a microsecond, but it is a time-out
        with pytest.raises(TimeoutError):
            EPBuffer(**SIZES, relaxed=True, timeout_s=seconds)
        return True
    with EPBuffer(**SIZES, relaxed=True, timeout_s=seconds) as buffer:
        one_round(buffer, case, inputs_of(case, rank, 0), None)
    return True


def test_the_size_hint_refuses_the_same() -> None:
    wrong = []
    parameters = inspect.signature(EPBuffer.get_buffer_size_hint).parameters
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 1024, "num_topk": 2, "num_experts": 8}
    for name, parameter in parameters.items():
        for value in ODD[str(parameter.annotation)] + of_no_use():
            if not any(type(value) is type(f) and value == f for f in FINE.get(name, [])):
                options: dict[str, Any] = {"num_ranks": 4, **sizes, name: value}
                call = lambda o=options: EPBuffer.get_buffer_size_hint(**o)  # type: ignore[misc]  # noqa: E731
                wrong += refused(call, name, shown(name, value))
    assert wrong == []


FIELDS = [name for name, kind in typing.get_type_hints(Config).items() if kind is int]
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=3),
    st.integers(min_value=2**63),
    st.binary(max_size=3),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=40)
@given(st.sampled_from(FIELDS), ANYTHING)
def test_a_config_holds_integers(name: str, value: object) -> None:
    sizes: dict[str, Any] = {"num_ranks": 4, "num_max_tokens_per_rank": 4, "hidden": 64, "num_topk": 2}
    with pytest.raises(ArgumentError) as caught:
        Config(**{**sizes, "num_experts": 8, name: value})
    assert caught.value.argument == name


# Read from the declarations: a list by hand forgets the next setting, and its test fails by chance only.
OPTIONAL = {
    name for name, kind in typing.get_type_hints(Tuning).items() if type(None) in typing.get_args(kind)
}


@given(st.sampled_from([*Tuning.__dataclass_fields__]), ANYTHING)
def test_a_tuning_holds_integers(name: str, value: Any) -> None:
    if (value is None and name in OPTIONAL) or (name == "tables" and isinstance(value, str)):
        return
    with pytest.raises(ArgumentError) as caught:
        Tuning(**{name: value}).check(4)
    assert caught.value.argument == f"tuning.{name}"
