"""What of the machine around them tests do not see: its user's settings, home, locale and current folder.

Importing this takes it away, once for a run with all of the processes that it starts; so it comes first,
before torch, which reads some of it when it is loaded. `FORGOTTEN` are variables by which results, messages
or their form could change. What only says where things are, or how patient to be, stays: PATH,
LD_LIBRARY_PATH, PYTHONPATH, TMPDIR, what pip and proxies need, CI and MOE_TEST_PATIENCE, and the compiler
that the user has chosen with its options (CXX, CXXFLAGS).

A path that is to be nowhere begins with `NOWHERE`: below a device there is nothing on any machine.
"""

from __future__ import annotations

import contextlib
import locale
import os
import secrets
import shlex
import shutil
import site
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOWHERE = "/dev/null"

FORGOTTEN = (
    # Settings of this package, and of what it runs on.
    *("MOE_TRITON_*", "HCCL_*", "ASCEND_*", "BISHENG*", "TRITON_*"),
    # A job that the tests may run in: torchrun's, MPI's, a scheduler's.
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_*"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "OMPI_*", "PMI_*", "PMIX_*", "PRTE_*", "SLURM_*"),
    # How many threads libraries start, and what they compile and say.
    *("OMP_*", "MKL_*", "GOMP_*", "KMP_*", "OPENBLAS_*", "TORCHDYNAMO_*", "TORCHINDUCTOR_*", "TORCH_LOGS*"),
    *("TORCH_COMPILE_*", "TORCH_CPP_LOG_LEVEL", "TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES"),
    # How Python runs what tests start.
    *("PYTHONDEVMODE", "PYTHONINSPECT", "PYTHONIOENCODING", "PYTHONOPTIMIZE", "PYTHONPLATLIBDIR"),
    *("PYTHONPROFILEIMPORTTIME", "PYTHONSAFEPATH", "PYTHONSTARTUP", "PYTHONUTF8", "PYTHONVERBOSE"),
    *("PYTHONWARNDEFAULTENCODING", "PYTHONWARNINGS"),
    # What a build adds to what it is told: make's options are those of whoever runs the tests.
    *("MAKEFLAGS", "MFLAGS", "GNUMAKEFLAGS", "MAKELEVEL", "DESTDIR", "VERBOSE", "NINJA_STATUS", "SKBUILD_*"),
    *("CMAKE_BUILD_TYPE", "CMAKE_CONFIG_TYPE", "CMAKE_GENERATOR*", "CMAKE_INSTALL_MODE"),
    # The locale is set.
    *("LANG", "LANGUAGE", "LC_*"),
)
TERMINAL = (
    *("COLUMNS", "LINES", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "CLICOLOR*", "TTY_*"),
    *("TERMINAL_WIDTH", "GITHUB_ACTIONS", "TYPER_*", "_TYPER_*", "JUPYTER_*", "GCC_COLORS"),
)
"""How wide a terminal is, and whether it has colours. pytest looks at it, too, and before any test does."""

LOCALE = "C.UTF-8"
UMASK = 0o022
RUN = "MOE_TEST_RUN"
"""Names the run that a process belongs to, in which all of this is done; and by it, files in /dev/shm."""

HOME_NAME = "user"  # of those that reports take for no name (moe_triton/tools/selftest/private.py)
USERS = ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
of_user: dict[str, str] = {}
"""Where the user's own files are: for pip, whose index may be named there."""


def forget(patterns: Sequence[str] = FORGOTTEN) -> None:
    """Takes variables away, from this process and those that it starts."""
    for name in [name for name in os.environ if any(fnmatchcase(name, pattern) for pattern in patterns)]:
        del os.environ[name]
    # readline, which pytest imports, tells processes that are started the terminal's size past os.environ.
    for name in ("COLUMNS", "LINES"):
        if name in patterns:
            os.unsetenv(name)


def run_name() -> str:
    """For names of files that a worker of a run shares with the processes that it starts alone."""
    return os.environ[RUN] + os.environ.get("PYTEST_XDIST_WORKER", "")


@contextlib.contextmanager
def away_from_home(home: Path) -> Iterator[None]:
    """The user's home is this folder, and the current folder the checkout, wherever tests were started."""
    home.mkdir(mode=0o700, exist_ok=True)
    kept, here = {name: os.environ.get(name) for name in (*USERS, "PYTHONUSERBASE")}, Path.cwd()
    of_user.update({name: value for name in USERS if (value := kept[name]) is not None})
    # Packages that were installed for this user alone stay in sight.
    os.environ["PYTHONUSERBASE"] = site.getuserbase()
    for name in USERS:
        os.environ.pop(name, None)
    os.environ["HOME"] = str(home)
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(here)
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def cxx() -> list[str]:
    """The C++ compiler as CMake and make find it: the user's choice, or else g++."""
    return shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or "c++"]


def _without_cann(path: str) -> str:
    """A PATH without the folders of CANN's compiler: its set_env.sh puts them there."""
    return os.pathsep.join(f for f in path.split(os.pathsep) if not Path(f, "bisheng").exists())


def _set_locale() -> None:
    """For this process and those that it starts: the same encoding everywhere, and messages in English."""
    try:
        locale.setlocale(locale.LC_ALL, LOCALE)
        os.environ["LC_ALL"] = LOCALE
    except locale.Error:  # Python takes UTF-8 then
        os.environ["LC_ALL"] = "C"


if RUN not in os.environ:
    forget()
    _set_locale()
    os.environ["PATH"] = _without_cann(os.environ.get("PATH", os.defpath))
    os.environ[RUN] = secrets.token_hex(8)
    os.umask(UMASK)
