"""How processes of one machine notice each other's end: by a pidfd, or by a lock that ends with its process.

Each process has a `Board`: a byte in memory without a name, which says how it leaves, and a lock on it. While
ranks construct, who does not know another one's board connects to its socket, and both hand over what the
other one needs: the board, and a pidfd that each opens of itself, so that it means the same in another pid
namespace. A pidfd is readable from the moment the process has ended, even while somebody whom it has forked
lives on. Where there is none, the lock is looked at: a record lock (fcntl), which no child inherits, unlike
flock's.

The socket has a name only while ranks construct. Nothing but the file descriptors and a token is read from
it, and only from processes of the same user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import selectors
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from moe_triton.core.logs import log_of

# Between looks at a lock.
LOOK_S = 0.05
# After its construction a rank takes connections for so long: all of them have come by then.
LISTEN_S = 10.0

TOKEN_BYTES = 8
TOKEN = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
PREFIX, SUFFIX = "moe_triton-", ".socket"
NAME = re.compile(rf"{PREFIX}\d+-[0-9a-f]{{24}}{SUFFIX}")
# In front of a token on the socket.
_HELLO = b"moe_triton 1 "
HELLO_BYTES = len(_HELLO) + TOKEN_BYTES
_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid (unix(7))
_MOST_FDS, BACKLOG = 2, 4096
_log = log_of("deaths")

HERE, LEFT, ENDED, CLOSED, UNREADABLE = b"h", b"l", b"e", b"c", b"?"
"""What a board says, or what comes over a connection: its process takes part; has closed its buffers; ended
in Python's way with one open; has closed those that the two have in common; or what nobody says."""
BY_PIDFD, BY_LOCK = "its process, by a pidfd", "its process, by a lock"
BY_LINE = "its process, by a connection"
BY_SOCKET = "its process, by the socket that it is to hand a pidfd over"


def _open_pidfd() -> int:
    """A pidfd of this process; -1 where the kernel, or what filters its calls, has none."""
    try:
        return os.pidfd_open(os.getpid())
    except (OSError, AttributeError):
        return -1


class Board:
    """What this process hands to others, in one group.

    Attributes:
        token: that others know it by.
        word: what it says.

    Raises:
        OSError: no file descriptor, or no memory, for it.
    """

    def __init__(self) -> None:
        self.token, self.word = secrets.token_hex(TOKEN_BYTES), HERE
        # The lock goes with the first descriptor of this file that this process closes: there is no other.
        self._fd = os.memfd_create(f"{PREFIX}board", os.MFD_CLOEXEC)
        try:
            os.pwrite(self._fd, HERE, 0)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._pidfd = _open_pidfd()
        except BaseException:
            os.close(self._fd)
            raise

    def hand_to(self, line: socket.socket) -> None:
        """Sends it to another process.

        Raises:
            OSError: nobody reads there.
        """
        descriptors = [self._fd, self._pidfd] if self._pidfd >= 0 else [self._fd]
        socket.send_fds(line, [_HELLO + bytes.fromhex(self.token)], descriptors, socket.MSG_NOSIGNAL)

    def greet(self, line: socket.socket) -> None:
        """Says whose process this is to one of another server.

        Raises:
            OSError: nobody reads there.
        """
        line.sendall(_HELLO + bytes.fromhex(self.token), socket.MSG_NOSIGNAL)

    def say(self, word: bytes) -> None:
        """Says how this process leaves."""
        self.word = word
        if self._fd >= 0:
            os.pwrite(self._fd, word, 0)

    def close(self) -> None:
        """Gives everything back; whoever looks at the lock then reads what was said last."""
        for descriptor in (self._pidfd, self._fd):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._pidfd = -1


class OtherProcess:
    """Another rank's process, as this one watches it.

    Args:
        token: of its board.
        gone: called once with what its board says, and whether its process has ended, on the thread that
            watches.
    """

    def __init__(self, token: str, gone: Callable[[bytes, bool], None], is_far: bool = False) -> None:
        self.token, self._gone, self.is_far = token, gone, is_far
        self._board = self._pidfd = -1
        self.line: socket.socket | None = None
        self._word = HERE
        self._is_over = False

    @property
    def sign(self) -> str:
        """How it is watched; "" while nothing has come of it."""
        if self.is_far:
            return BY_LINE if self.line else ""
        return "" if self._board < 0 else BY_PIDFD if self._pidfd >= 0 else BY_LOCK

    @property
    def pidfd(self) -> int:
        """To be polled; -1 for none."""
        return self._pidfd

    @property
    def is_locked_only(self) -> bool:
        """Whether its lock has to be looked at."""
        return self._board >= 0 > self._pidfd and not self._is_over

    def take(self, descriptors: list[int]) -> None:
        """Takes what it has handed over, or closes what is not what it should be: then it is not watched."""
        board, *pidfds = descriptors or [-1]
        if self._board >= 0 or self._is_over or not _is_board(board):
            close_all(descriptors)
            return
        for pidfd in pidfds:
            if self._pidfd < 0 and _is_pidfd(pidfd):
                self._pidfd = pidfd
            else:
                os.close(pidfd)
        self._board = board

    def word(self) -> bytes:
        """What it says now."""
        if self.is_far:
            return self._word
        try:
            said = os.pread(self._board, 1, 0)
        except OSError:
            return UNREADABLE
        return said if said in (HERE, LEFT, ENDED) else UNREADABLE

    def hold(self, line: socket.socket) -> None:
        """Takes the connection to one of another server."""
        self.line, self._word = line, HERE

    def read_line(self) -> bool:
        """Reads what one of another server says. Returns whether there may be more."""
        assert self.line is not None
        try:
            said = self.line.recv(1)
        except BlockingIOError:
            return True
        except OSError:
            said = b""
        if said:
            self._word = said
            return True
        if self._word in (HERE, ENDED):
            self.end(has_ended=True)
        elif self._word == LEFT:
            self.end(has_ended=False)
        return False

    def say(self, word: bytes) -> None:
        """Says to one of another server how this process leaves."""
        if self.line is not None:
            with contextlib.suppress(OSError):
                self.line.send(word, socket.MSG_NOSIGNAL)

    def look_at_lock(self) -> None:
        """Tells if it has let go of its lock."""
        try:
            # A shared one, which others that look at the same time do not keep from us.
            fcntl.lockf(self._board, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return
        # Who has only left may run on, as far as its lock says.
        self.end(has_ended=self.word() != LEFT)

    def end(self, has_ended: bool) -> None:
        """Tells of its end."""
        if not self._is_over:
            self._is_over = True
            self._gone(self.word(), has_ended)

    def vanish(self) -> None:
        """It has closed its socket before it has handed anything over."""
        if self._board < 0 and not self.is_far:
            self.end(has_ended=True)

    def close(self, *, is_parents: bool = False) -> None:
        """Stops watching it.

        Args:
            is_parents: in a forked child, whose parent still reads from the connection.
        """
        self._is_over = True
        close_all((self._pidfd, self._board))
        self._board = self._pidfd = -1
        if self.line is not None:
            # What the other end has said is read, or the kernel ends the connection in a way that may take
            # the word from it that this one has said last.
            with contextlib.suppress(OSError):
                if not is_parents:
                    self.line.recv(1)
            self.line.close()
            self.line = None


def close_all(descriptors: Iterable[int]) -> None:
    """Closes those that there are."""
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _is_board(descriptor: int) -> bool:
    try:
        state = os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid() and state.st_size == 1


def _is_pidfd(descriptor: int) -> bool:
    """Whether the kernel says so, or says nothing: another file may be readable at any time."""
    try:
        return b"\nPid:" in Path(f"/proc/self/fdinfo/{descriptor}").read_bytes()
    except OSError:
        return not Path("/proc/self/fdinfo").exists()


def _answer(line: socket.socket, descriptors: list[int], board: Board) -> None:
    """Answers somebody whom this process does not watch: one of this server has handed something over."""
    if descriptors:
        board.hand_to(line)
    else:
        line.send(CLOSED if board.word == HERE else board.word, socket.MSG_NOSIGNAL)
    close_all(descriptors)


class Entrance:
    """A socket that others connect to while ranks construct.

    Args:
        folder: that all ranks of the machine see.

    Attributes:
        name: of it in the folder; "" if it cannot be made.
        is_for_hosts: others connect to it from other hosts.
    """

    is_for_hosts = False

    def __init__(self, folder: Path) -> None:
        self._folder, self.name = folder, f"{PREFIX}{os.getuid()}-{secrets.token_hex(12)}{SUFFIX}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.listener.setblocking(False)
        try:
            # The mode of a socket's file is that of the socket when it is bound, and no other user is let in
            # for a moment.
            os.fchmod(self.listener.fileno(), 0o600)
            self.listener.bind(str(folder / self.name))
            self.listener.listen(BACKLOG)
        except OSError:  # a folder that is not there, or whose path is too long
            self.close()

    def hand_out(self, board: Board) -> None:
        """Hands a board to all who have connected, and watches none of them."""
        while (line := self.let_in()) is not None:
            with line, contextlib.suppress(OSError):
                _, descriptors = self.greeting(line) or ("", [])
                _answer(line, descriptors, board)

    def let_in(self) -> socket.socket | None:
        """The next one who has connected; None if all are in."""
        while True:
            try:
                line, _ = self.listener.accept()
            except OSError:
                return None
            if is_of_this_user(line):
                line.setblocking(False)
                return line
            line.close()

    def greeting(self, line: socket.socket) -> tuple[str, list[int]] | None:
        """What somebody says who has connected: a token and file descriptors; None if that is to come."""
        return _received(line)

    def close(self) -> None:
        """Removes it."""
        remove_names(self._folder, [self.name])
        self.name = ""
        self.listener.close()


def connect(folder: Path, name: str) -> socket.socket | None:
    """A connection to another process of this user, by its entrance's name; None if there is none.

    Raises:
        ConnectionRefusedError: nobody listens there any more, since its process has ended.
    """
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    line.setblocking(False)
    try:
        if NAME.fullmatch(name):
            line.connect(str(folder / name))
            if is_of_this_user(line):
                return line
    except ConnectionRefusedError:
        line.close()
        raise
    except OSError:
        pass
    line.close()
    return None


def remove_names(folder: Path, names: Iterable[str]) -> None:
    """Lets nobody in any more who is not there yet, at any rank's entrance."""
    for name in names:
        if NAME.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def is_of_this_user(line: socket.socket) -> bool:
    """Whether the other end is."""
    said = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.getuid())


def remove_stale_entrances(folder: Path, older_than_s: float = 0.0) -> None:
    """Removes sockets of this user that nobody listens to: their process was killed while it constructed.

    Args:
        folder: of them.
        older_than_s: seconds since they were made, at least: whoever constructs with a rank that has just
            died learns that from its socket.
    """
    for path in folder.glob(f"{PREFIX}{os.getuid()}-*{SUFFIX}"):
        try:
            if time.time() - path.stat().st_mtime < older_than_s:
                continue
        except OSError:
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as line:
            line.setblocking(False)
            try:
                line.connect(str(path))
            except OSError as error:
                if error.errno == errno.ECONNREFUSED:
                    path.unlink(missing_ok=True)


def token_in(data: bytes) -> str:
    """The token that somebody says who has connected; "" if that is none of ours."""
    return data[len(_HELLO) :].hex() if len(data) == HELLO_BYTES and data.startswith(_HELLO) else ""


def _received(line: socket.socket) -> tuple[str, list[int]] | None:
    """A token and file descriptors; an empty token if it is none of ours; None if nothing has come yet."""
    try:
        data, descriptors, *_ = socket.recv_fds(line, HELLO_BYTES, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError:
        return "", []
    if token := token_in(data):
        return token, descriptors
    close_all(descriptors)
    return "", []


def _guarded(call: Callable[[], object]) -> None:
    """An error of one is not to end the watch over all."""
    try:
        call()
    except Exception:
        _log.exception("the end of a process may go unnoticed")


class Watcher:
    """The thread of this process that watches others: there while there are any."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._woken = self._wake = -1
        self._selector = selectors.PollSelector()
        self._processes: set[OtherProcess] = set()
        self._entrances: dict[Entrance, float] = {}
        self._lines: dict[socket.socket, OtherProcess] = {}  # to which an answer comes
        self._strangers: dict[socket.socket, Entrance] = {}  # who has not said yet who it is

    def do(self, job: Callable[[], None]) -> bool:
        """Has a job done on the thread. Returns False if this process can start no thread."""
        with self._lock:
            beginning = self._prepare() if self._thread is None else None
            self._later(job)
        if beginning is None:
            return True
        try:
            # Without the lock: this waits for the thread, which may collect garbage as it begins, and
            # then calls `do_if_there`.
            beginning.start()
        except RuntimeError:
            with self._lock:
                self._stop()
                self._jobs.remove(job)
            return False
        return True

    def do_if_there(self, job: Callable[[], None]) -> None:
        """Has a job done on the thread if there is one. The collector of garbage calls it, at any moment."""
        with self._lock:
            if self._thread is not None:
                self._later(job)

    def _later(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        with contextlib.suppress(OSError):  # full, of what wakes it up
            os.write(self._wake, b"!")

    def _prepare(self) -> threading.Thread:
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain)
        self._thread = threading.Thread(target=self._run, name="moe_triton deaths", daemon=True)
        return self._thread

    def _stop(self) -> None:
        self._thread = None
        self._selector.unregister(self._woken)
        close_all((self._woken, self._wake))
        self._woken = self._wake = -1

    def _drain(self) -> None:
        os.read(self._woken, 1 << 12)

    # All that follows is called on the thread.

    def watch(self, process: OtherProcess, line: socket.socket | None = None) -> None:
        """Watches a process.

        Args:
            process: whose board has come, or comes.
            line: over which it comes; None if it will connect here.
        """
        self._processes.add(process)
        if line is not None and process.is_far:
            self._hold(process, line)
        elif line is not None:
            self._lines[line] = process
            self._selector.register(line, selectors.EVENT_READ, partial(self._hear, line, process))

    def _hold(self, process: OtherProcess, line: socket.socket) -> None:
        """Keeps the connection to one of another server: its end is that of the process."""
        if process.line is not None:  # whose other end has been closed for this one
            self._unregister(process.line)
            process.line.close()
        process.hold(line)
        self._selector.register(line, selectors.EVENT_READ, partial(self._read, process, line))

    def _read(self, process: OtherProcess, line: socket.socket) -> None:
        if process.line is line and not process.read_line():
            self._unregister(line)
            line.close()
            process.line = None

    def admit(self, entrance: Entrance, board: Board) -> None:
        """Hands this process's board to those that connect, until a while after `expire`."""
        if entrance in self._entrances:
            return
        admit = partial(self._let_in, entrance, board)
        self._selector.register(entrance.listener, selectors.EVENT_READ, admit)
        self._entrances[entrance] = math.inf

    def expire(self, entrance: Entrance) -> None:
        """Nobody connects any more who has not yet."""
        if entrance in self._entrances:
            self._entrances[entrance] = time.monotonic() + LISTEN_S

    def forget(self, processes: Iterable[OtherProcess], word: bytes = CLOSED) -> None:
        """Watches them no longer, and says so to those of other servers."""
        for process in processes:
            process.say(word)
            if process.line is not None:
                self._unregister(process.line)
            self._processes.discard(process)
            for line in [line for line, awaited in self._lines.items() if awaited is process]:
                self._drop(line)
            self._unregister(process.pidfd)
            process.close()

    def shut(self, entrance: Entrance, board: Board | None = None) -> None:
        """Lets nobody in any more.

        Args:
            entrance: an open one.
            board: handed to those that still wait; whoever gets none takes this process for dead.
        """
        if self._entrances.pop(entrance, None) is not None:
            self._unregister(entrance.listener)
        if board is not None:
            entrance.hand_out(board)
            for line in [line for line, through in self._strangers.items() if through is entrance]:
                if board is not None:
                    self._greet(line, board)
                if line in self._strangers:
                    with contextlib.suppress(OSError):  # who has said nothing takes a mere end for a death
                        line.send(CLOSED, socket.MSG_NOSIGNAL)
                    self._drop(line)
        entrance.close()

    def _unregister(self, file: int | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def _drop(self, line: socket.socket) -> None:
        self._lines.pop(line, None)
        self._strangers.pop(line, None)
        self._unregister(line)
        line.close()

    def _let_in(self, entrance: Entrance, board: Board) -> None:
        while (line := entrance.let_in()) is not None:
            self._strangers[line] = entrance
            self._selector.register(line, selectors.EVENT_READ, partial(self._greet, line, board))

    def _greet(self, line: socket.socket, board: Board) -> None:
        """Somebody who has connected says who it is."""
        entrance = self._strangers[line]
        said = entrance.greeting(line)
        if said is None:
            return
        token, descriptors = said
        known = (each for each in self._processes if each.is_far or not entrance.is_for_hosts)
        process = next((each for each in known if each.token == token), None)
        if process is not None and process.is_far and not descriptors:
            del self._strangers[line]
            self._unregister(line)
            self._hold(process, line)
            return
        with contextlib.suppress(OSError):
            if process is None:
                _answer(line, descriptors if token else [], board)
            else:
                board.hand_to(line)
                self._take(process, descriptors)
                for own in [own for own, awaited in self._lines.items() if awaited is process]:
                    self._drop(own)  # kept for want of this one
        self._drop(line)

    def _hear(self, line: socket.socket, process: OtherProcess) -> None:
        """The one whom this process has connected to answers."""
        with contextlib.suppress(OSError):
            if line.recv(1, socket.MSG_PEEK) in (CLOSED, LEFT, ENDED):  # it has given up, and is not dead
                self._drop(line)
                return
        said = _received(line)
        if said is None:
            return
        token, descriptors = said
        self._drop(line)
        if token == process.token:
            self._take(process, descriptors)
        else:
            close_all(descriptors)
            process.vanish()

    def _take(self, process: OtherProcess, descriptors: list[int]) -> None:
        process.take(descriptors)
        if process.pidfd >= 0:
            with contextlib.suppress(KeyError):
                self._selector.register(process.pidfd, selectors.EVENT_READ, partial(self._ended, process))

    def _ended(self, process: OtherProcess) -> None:
        self._unregister(process.pidfd)
        process.end(has_ended=True)

    def _run(self) -> None:
        while True:
            while self._jobs:
                _guarded(self._jobs.popleft())
            for entrance in [each for each, end in self._entrances.items() if time.monotonic() > end]:
                self.shut(entrance)
            locked = [process for process in self._processes if process.is_locked_only]
            for process in locked:
                _guarded(process.look_at_lock)
            if not (self._processes or self._entrances or self._lines or self._strangers):
                with self._lock:
                    if not self._jobs:
                        self._stop()
                        return
                continue
            for key, _ in self._selector.select(LOOK_S if locked else LISTEN_S if self._entrances else None):
                _guarded(key.data)

    def leave_to_parent(self) -> None:
        """In a forked child: those are the parent's to watch, and its entrances lead to the parent."""
        for process in self._processes:
            process.close(is_parents=True)
        listeners = [entrance.listener for entrance in self._entrances]
        for line in (*listeners, *self._lines, *self._strangers):
            line.close()
        close_all((self._woken, self._wake))
        self._reset()
