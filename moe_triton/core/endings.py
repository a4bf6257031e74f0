"""What has to be done before an object is gone, or its process."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.util import Finalize


def at_end(owner: object, call: Callable[[], object]) -> Finalize:
    """Makes a call when its owner is gone or the process ends, whichever is first, once.

    Unlike `weakref.finalize`, in processes of multiprocessing too, which end without atexit. A child that is
    forked meanwhile leaves it to its parent.

    Args:
        owner: the call must not keep it.
        call: what to do.

    Returns:
        What makes the call at once when it is called; its ``cancel`` forgets it.
    """
    return Finalize(owner, call, exitpriority=0)
