"""Search over settings of anything that can be priced: tasks in, studies on disk, what was found out.

- `search.task`: what is searched, and what one candidate came to;
- `search.study`: candidates and outcomes in a file, shared by all workers;
- `search.run`: workers, their end, and what they report.
"""

from autotune.search.run import Found, Options, run
from autotune.search.study import Trial
from autotune.search.task import Outcome, Task

__all__ = ["Found", "Options", "Outcome", "Task", "Trial", "run"]
