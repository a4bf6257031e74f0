"""Replays what the NPU compiler made of a Triton kernel, on four in-order pipes.

- `replay.operations`, `replay.instructions`: what stands in the compiler's last module;
- `replay.translate` makes a Python function of it, and `replay.kernel_cost` runs that on a launch's
  arguments, which lists the instructions of each program, asks the clock of each core what they take
  (`autotune.model.kernel_costs.clock`), and puts the cores of a launch together.
"""

from autotune.model.kernel_costs.replay.kernel_cost import Replay, Replayed, ReplayError, replay_of, replayed

__all__ = ["Replay", "ReplayError", "Replayed", "replay_of", "replayed"]
