"""`sampled`: the candidate of a large space that is worth pricing next, as Optuna sees it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.search.task import Outcome, Task
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import install
from moe_triton.core.space import settings_of, text_of

STARTUP = 10  # candidates that are drawn at random before the sampler begins to learn
TRIES = 16  # for one that is allowed and nobody has


def sampled(
    task: Task, free: Sequence[dict[str, int]], known: Mapping[str, Outcome | None], seed: int
) -> dict[str, int]:
    """The next candidate: the same for the same seed and the same that is known.

    Args:
        task: whose.
        free: candidates that nobody has, at least one.
        known: outcomes by settings; None for those that are being priced.
        seed: of the sampler.

    Raises:
        ToolchainError: Optuna is not installed.
    """
    drawn = random.Random(f"{seed} {len(known)}")
    if len(known) < STARTUP:
        return drawn.choice(free)
    optuna, distributions = _optuna(), _distributions(task)
    sampler = optuna.samplers.TPESampler(
        seed=drawn.randrange(2**31), n_startup_trials=STARTUP, constant_liar=True
    )
    study = optuna.create_study(sampler=sampler)
    study.add_trials([_trial(text, outcome, distributions) for text, outcome in known.items()])
    texts = {text_of(each): each for each in free}
    for _ in range(TRIES):
        trial = study.ask(distributions)
        text = text_of({name: int(value) for name, value in trial.params.items()})
        if text in texts:
            return texts[text]
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return drawn.choice(free)


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ToolchainError(f"optuna is missing: {error}. Run: {install('tune')}") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _distributions(task: Task) -> dict[str, Any]:
    pools = task.choices().items()
    return {name: _optuna().distributions.CategoricalDistribution(values) for name, values in pools}


def _trial(text: str, outcome: Outcome | None, distributions: dict[str, Any]) -> Any:
    states = _optuna().trial.TrialState
    is_exact = outcome is not None and outcome.is_exact
    state = states.RUNNING if outcome is None else states.COMPLETE if is_exact else states.PRUNED
    return _optuna().trial.create_trial(
        state=state,
        params=settings_of(text),
        distributions=distributions,
        value=outcome.value if outcome is not None and is_exact else None,
    )
