"""Finds settings that change speed and no result, by the compiler, the model and the stop-watch.

- `autotune.search`: tasks, studies on disk, workers; knows nothing of kernels;
- `autotune.kernels`: which kernels a group's plans launch, and what a candidate costs;
- `autotune.pipeline`: schemes, parts and waits of whole groups;
- `autotune.tuning`, `autotune.results`: a whole search, and the table of what it found;
- `autotune.cli`: ``moe-triton tune``.

Nothing that serves a call imports this package: buffers look tables up (`moe_triton.tables`).
"""

from autotune.kernels.scope import Scope
from autotune.tuning import Tuned, tune

__all__ = ["Scope", "Tuned", "tune"]
