"""Replays what the NPU compiler made of a Triton kernel, on four in-order pipes.

- `replay.attributes`, `replay.scalars`, `replay.views`, `replay.functions`: what stands in the compiler's
  last module;
- `replay.translate` makes a Python function of it, and `replay.program` runs that on a launch's arguments,
  which lists the instructions of each program;
- `replay.result` is what the clock of one core says of them (`autotune.model.bodies.clock`);
- `replay.body` puts the cores of a launch together.
"""

from autotune.model.bodies.replay.body import Replayed, replay_of, replayed
from autotune.model.bodies.replay.program import ReplayError
from autotune.model.bodies.replay.result import Replay

__all__ = ["Replay", "ReplayError", "Replayed", "replay_of", "replayed"]
