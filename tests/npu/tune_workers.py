"""``moe-triton tune kernels --measure`` on the stand-in, whose clock goes by the programs of launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from autotune.kernels import npu
from autotune.kernels.scope import Scope
from autotune.kernels.tunables import Tunable, tunables_of
from autotune.search import Options, run
from autotune.search.task import WrongBitsError
from moe_triton.core.errors import ArgumentError
from moe_triton.core.space import PROGRAMS, Space
from moe_triton.tools.cli.app import app
from tests.npu import standin
from tests.npu.device import Device, FakeEvent, Work

CHIP = "Ascend910_9391"
MS_OF_A_PROGRAM = 1e-3
Best = tuple[dict[str, int], dict[str, float], int]


def install(policy: str = "random", soc: str = CHIP) -> Device:
    device = standin.install(policy, soc=soc)

    def elapsed_time(begin: FakeEvent, end: FakeEvent) -> float:
        assert begin.is_timed
        assert end.is_timed
        assert begin.query()
        assert end.query()
        works = [work for work in device.log if isinstance(work, Work)]
        first, last = (
            max(number for number, work in enumerate(works) if work.event is event) for event in (begin, end)
        )
        between = works[first:last]
        return MS_OF_A_PROGRAM * sum(work.words[0] for work in between if work.kind == "launch")

    FakeEvent.elapsed_time = elapsed_time  # type: ignore[method-assign]
    return device


def tunable(kernel: str, variant: str, space: Space, **changes: object) -> Tunable:
    scope = Scope("A3", (1024,), (2,), (4,), (16,), ("bf16",), (kernel,))
    of = next(each for each in tunables_of(scope) if each.keys[1].startswith(variant))
    return replace(of, kernel=replace(of.kernel, space=space, **changes))  # type: ignore[arg-type]


def search(rank: int, num_ranks: int, policy: str, study: Path) -> Best:
    """The best settings of a kernel, its figures, and the most programs of a launch."""
    device = install(policy)
    of = tunable("returns", "plain", Space({PROGRAMS: (0, 8, 16)}))
    (found,) = run(lambda: [npu.task_of(of, CHIP)], Options(study))
    assert found.best is not None
    assert all(trial.outcome.value is not None for trial in found.trials), found.trials
    most = max(work.words[0] for work in device.launches())
    return found.best.settings, dict(found.best.outcome.facts), most


def other_bits(rank: int, num_ranks: int, study: Path) -> str:
    install()
    of = tunable("weighted_sum", "weights", Space({"HAS_WEIGHTS": (0,)}))
    try:
        run(lambda: [npu.task_of(of, CHIP)], Options(study))
    except WrongBitsError as error:
        return str(error)
    return ""


def of_another_product(rank: int, num_ranks: int) -> str:
    install(soc="Ascend910B3")
    try:
        npu.device_of(CHIP)
    except ArgumentError as error:
        return str(error)
    return ""


def command(rank: int, num_ranks: int, folder: Path) -> str:
    """What the command prints."""
    install()
    sizes = "--kernel returns --tokens 16 --dtype bf16 --budget 3 --seed 1"
    line = f"tune kernels --soc A3 --measure {sizes} --study {folder}/study.db --output {folder}"
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, line)
    assert result.exit_code == 0, result.output
    return result.output
