"""What the cross compiler made of the emulation's headers: which accesses and barriers, in which order.

Probes (``probes/*.cpp``) call what the headers have, and are compiled for aarch64 as its libraries are.
Then they run, instruction by instruction, in an emulator without threads (Unicorn): each access of a place
that other threads know, and each barrier, is written down. What comes out is a thread of the model
(`armv8`). Dependencies are left out, so that nothing rests on one that a compiler may take away.

A probe that waits is told what its loads find. The model then asks that they find it: it decides with what
else that goes together.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ascendc.library import Patch, patched
from tests.memory_order.armv8 import Acquire, Fence, Instruction, Load, Store, Update
from tests.patience import seconds
from tests.processor_time import of_nobody

SOURCES = Path(__file__).resolve().parents[2] / "kernels_ascendc"
PROBES = Path(__file__).with_name("probes")
TOOLS = "aarch64-linux-gnu-"
BUILDS = SOURCES.parent / "build" / "memory-order"  # kept between runs; `make clean` removes it
# As CMakeLists.txt has them for the library.
FLAGS = ("-std=gnu++17", "-O3", "-DNDEBUG", "-fPIC", "-fvisibility-inlines-hidden", "-fno-gnu-unique")
SEES_ALL = "-fno-access-control"  # probes ask where private members lie
COMPILE_S = seconds(120)


def missing() -> str:
    """What this takes and is not there, with the remedy; "" if all is."""
    if shutil.which(f"{TOOLS}g++") is None:
        return "the cross compiler is missing: apt-get install g++-aarch64-linux-gnu"
    if importlib.util.find_spec("unicorn") is None:
        return "Unicorn, which runs the compiled code, is missing: pip install unicorn"
    return ""


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
    return done.stdout


@dataclass(frozen=True)
class Image:
    """A program without a beginning, at fixed addresses.

    Attributes:
        segments: bytes by where they lie, and how many there are with zeros behind them.
        symbols: addresses by name.
        stubs: names of functions that are somebody else's, by address.
        lines: instructions by address: mnemonic and operands.
    """

    segments: Sequence[tuple[int, bytes, int]]
    symbols: Mapping[str, int]
    stubs: Mapping[int, str]
    lines: Mapping[int, tuple[str, str]]


@functools.cache
def build(probe: str, patches: tuple[Patch, ...] = ()) -> Image:
    """Compiles a probe with the headers as they are, or changed, unless the same was compiled before.

    Args:
        probe: its name: ``probes/<name>.cpp``.
        patches: of files of ``kernels_ascendc``; each must apply exactly once.

    Raises:
        AssertionError: a patch does not apply exactly once.
        subprocess.CalledProcessError: the compiler refuses the text.
    """
    texts = patched(patches)
    texts["probe.cpp"] = (PROBES / f"{probe}.cpp").read_text()
    digest = hashlib.sha256(repr((FLAGS, sorted(texts.items()))).encode()).hexdigest()[:24]
    program = BUILDS / digest / "program"
    if not program.exists():
        BUILDS.mkdir(parents=True, exist_ok=True)
        # Of what all tests use none is charged with the build.
        charged = contextlib.nullcontext() if patches else of_nobody()
        with tempfile.TemporaryDirectory(dir=BUILDS) as made, charged:
            folder = Path(made)
            _compile(folder, texts)
            program.parent.mkdir(exist_ok=True)
            (folder / "program").replace(program)
    return _load(program)


def _compile(folder: Path, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    probe = folder / "probe.o"
    include = [f"-I{folder / name}" for name in ("emulation", "include", "host")]
    _run(f"{TOOLS}g++", *FLAGS, SEES_ALL, "-Werror", *include, "-c", folder / "probe.cpp", "-o", probe)
    # Functions of other libraries do nothing here by themselves; libgcc has the atomics.
    names = re.findall(r"^\s+U (\S+)$", _run(f"{TOOLS}nm", probe), re.MULTILINE)
    stubs = sorted({"__getauxval", *(name for name in names if not name.startswith("__aarch64_"))})
    text = '.section .text.stubs,"ax"\n' + "".join(f".global {n}\n{n}: ret\n" for n in stubs)
    (folder / "stubs.s").write_text(text)
    _run(f"{TOOLS}g++", "-c", folder / "stubs.s", "-o", folder / "stubs.o")
    link = ("-nostdlib", "-static", "-Wl,-e,0", "-Wl,-z,noexecstack", "-Wl,--no-warn-rwx-segments")
    _run(f"{TOOLS}g++", *link, probe, folder / "stubs.o", "-lgcc", "-o", folder / "program")


_LINE = re.compile(r"^\s*([0-9a-f]+):\t(\S+)(?:\t(.*?))?(?:\s*//.*)?$", re.MULTILINE)


def _load(program: Path) -> Image:
    data = program.read_bytes()
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    segments = []
    for at in range(offset, offset + size * count, size):
        kind, _, start, address, _, in_file, in_memory, _ = struct.unpack_from("<IIQQQQQQ", data, at)
        if kind == 1:
            segments.append((address, data[start : start + in_file], in_memory))
    symbols, stubs = {}, {}
    for line in _run(f"{TOOLS}nm", program).splitlines():
        address, _, name = line.split()
        symbols[name] = int(address, 16)
    dump = _run(f"{TOOLS}objdump", "-d", "--no-show-raw-insn", program)
    lines = {int(at, 16): (word, rest or "") for at, word, rest in _LINE.findall(dump)}
    for name, at in symbols.items():
        if lines.get(at) == ("ret", "") and not name.startswith(("__aarch64_", "$")):
            stubs[at] = name
    return Image(segments, symbols, stubs, lines)


FULL_SYSTEM_CALL = Fence.FULL  # what futex(2) promises on both sides: Linux's kernel/futex says so at its top
FUTEX, FUTEX_WAKE = 98, 1
WAITERS = "waiters"
"""A place of the kernel's: how many sleep on a futex."""
STACK, HEAP, TLS, END = 0x7000_0000, 0x6000_0000, 0x5000_0000, 0x4F00_0000
AREA = 1 << 22
SHARED = 0x2000_0000
"""Where probes find what is shared; all zeros at first."""


@dataclass(frozen=True)
class Place:
    """Something that several threads use, and that is read and written as a whole.

    Attributes:
        address: where it lies.
        size: 1, 2, 4 or 8 bytes.
        is_data: whether the way through the program does not depend on it.
        is_polled: whether it is looked at while it is written: a library's copy may then tear it.
    """

    address: int
    size: int = 8
    is_data: bool = False
    is_polled: bool = True


class TornError(AssertionError):
    """A place is not read or written as a whole, or by a copy that may tear it."""


@dataclass
class _Running:
    """What of the current instruction is known so far."""

    pc: int = 0
    exclusive: tuple[str, int, bool] | None = (
        None  # of a load: its place, what was there, whether it acquires
    )


_ATOMIC = re.compile(r"(swp|ldadd|ldclr|ldset|ldeor|cas)(a?)(l?)[bh]?$")
_STORE_ATOMIC = re.compile(r"(stadd|stclr|stset|steor)(l?)[bh]?$")
_EXCLUSIVE = re.compile(r"ld(a?)xr[bh]?$")
_EXCLUSIVE_STORE = re.compile(r"st(l?)xr[bh]?$")
_LOAD_ACQUIRE, _LOAD_PC = re.compile(r"ldar[bh]?$"), re.compile(r"ldapu?r[bh]?$")
_STORE_RELEASE = re.compile(r"stlu?r[bh]?$")
_PLAIN = re.compile(r"(ld|st)(r|p|ur|np|1)(b|h|sb|sh|sw)?$")
_FENCES = {"ish": Fence.FULL, "sy": Fence.FULL, "ishld": Fence.LOADS, "ishst": Fence.STORES}


class Machine:
    """Runs probes of an image, one after the other, on one memory.

    Args:
        image: the program.
        has_lse: whether atomics are single instructions, as from Armv8.1 on, or pairs of exclusives.

    Attributes:
        places: what threads share, by name; the rest is each thread's own.
        starts: what those held that a thread has used, before the first one did.
    """

    def __init__(self, image: Image, has_lse: bool) -> None:
        import unicorn
        from unicorn import arm64_const

        self._image, self._registers = image, arm64_const
        self.places: dict[str, Place] = {}
        self.starts: dict[str, int] = {}
        self._uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._uc.ctl_set_cpu_model(arm64_const.UC_CPU_ARM64_MAX)
        page = 0x1000
        begin = min(address for address, _, _ in image.segments) // page * page
        end = max(address + size for address, _, size in image.segments)
        self._uc.mem_map(begin, (end - begin + page) // page * page + page)
        for address, data, _ in image.segments:
            self._uc.mem_write(address, data)
        for area in (STACK, HEAP, TLS, END, SHARED):
            self._uc.mem_map(area, AREA)
        self._uc.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)
        self._uc.reg_write(arm64_const.UC_ARM64_REG_TPIDR_EL0, TLS)
        if "__aarch64_have_lse_atomics" in image.symbols:
            self._uc.mem_write(image.symbols["__aarch64_have_lse_atomics"], bytes([has_lse]))
        self._uc.hook_add(unicorn.UC_HOOK_CODE, self._step)
        self._uc.hook_add(unicorn.UC_HOOK_MEM_READ, self._read)
        self._uc.hook_add(unicorn.UC_HOOK_MEM_WRITE, self._write)
        self._heap, self._now_ns = HEAP, 1
        self._trace: list[Instruction] = []
        self._script: dict[str, list[int]] = {}
        self._counts: dict[tuple[str, str], int] = defaultdict(int)
        self._thread = ""
        self._now = _Running()
        self._until: tuple[str, int] | None = None
        self._error: Exception | None = None

    def run(
        self,
        thread: str,
        *calls: tuple[str | int, ...],
        finds: Mapping[str, Sequence[int]] | None = None,
        until: tuple[str, int] | None = None,
    ) -> list[Instruction]:
        """Runs functions as one thread, and returns what it does to places.

        Args:
            thread: its name, with which registers begin.
            calls: each a function and its arguments.
            finds: by place, what its loads find, one after the other; then it is what is there.
            until: a place, and how many accesses of it are the last ones: the rest is no matter.

        Raises:
            TornError: see there.
            AssertionError: the functions do not read what they are to find.
        """
        self._thread, self._trace, self._now = thread, [], _Running()
        self._until = until
        self._script = {name: list(values) for name, values in (finds or {}).items()}
        for function, *arguments in calls:
            assert isinstance(function, str)
            self.call(function, *arguments)
        self._end_exclusive()
        assert self._until is None, f"{thread} does not get to {until}"
        left = {name: values for name, values in self._script.items() if values}
        assert not left, f"{thread} did not read {left}: it goes another way"
        self._thread = ""
        return self._trace

    def locate(self, name: str, function: str, *arguments: int, **kind: bool | int) -> None:
        """Gives a place a name.

        Args:
            name: the name.
            function: returns the place's address; and its arguments.
            kind: further fields of a `Place`.
        """
        self.call(function, *arguments)
        self.places[name] = Place(self.result(), **kind)  # type: ignore[arg-type]

    def call(self, function: str, *arguments: str | int) -> None:
        """Runs a function; its arguments are numbers, or names of places."""
        uc, registers = self._uc, self._registers
        for number, argument in enumerate(arguments):
            value = self.places[argument].address if isinstance(argument, str) else argument
            uc.reg_write(getattr(registers, f"UC_ARM64_REG_X{number}"), value)
        uc.reg_write(registers.UC_ARM64_REG_SP, STACK + AREA - 0x1000)
        uc.reg_write(registers.UC_ARM64_REG_LR, END)
        begins = self._until
        uc.emu_start(self._image.symbols[function], END, count=1_000_000)
        if self._error is not None:
            raise self._error
        if begins is not None and self._until is None:
            return
        assert uc.reg_read(registers.UC_ARM64_REG_PC) == END, f"{function} does not end"

    def value(self, place: str) -> int:
        """What a place holds."""
        found = self.places[place]
        return int.from_bytes(self._uc.mem_read(found.address, found.size), "little")

    def set(self, place: str, value: int) -> None:
        """Has a place hold something."""
        found = self.places[place]
        self._uc.mem_write(found.address, value.to_bytes(found.size, "little"))

    def fill(self, address: int, num_bytes: int) -> None:
        """Sets bytes to ones, beside all threads."""
        self._uc.mem_write(address, b"\1" * num_bytes)

    def result(self) -> int:
        """What the last function has returned."""
        return int(self._uc.reg_read(self._registers.UC_ARM64_REG_X0))

    # Hooks: an exception in one would not come out of it.

    def _guarded(self, does: Callable[[], None]) -> None:
        try:
            if self._error is None:
                does()
        except Exception as error:
            self._error = error
            self._uc.emu_stop()

    def _step(self, _uc: object, pc: int, _size: int, _data: object) -> None:
        self._now.pc = pc
        if pc in self._image.stubs:
            self._guarded(lambda: self._stub(self._image.stubs[pc]))
            return
        word, operands = self._image.lines[pc]
        fence = _FENCES[operands] if word == "dmb" else Fence.INSTRUCTIONS if word == "isb" else None
        # Between two fences of a kind there may have been accesses that nobody else knows of.
        if fence is not None and self._trace[-1:] != [fence]:
            self._end_exclusive()
            self._trace.append(fence)

    def _end_exclusive(self) -> None:
        """A pair that has not stored, since it found something else, was a load."""
        if self._now.exclusive is not None:
            name, found, acquire = self._now.exclusive
            self._now.exclusive = None
            order = Acquire.YES if acquire else Acquire.NO
            self._append(Load(name, self._register(name), order, reads=found))

    def _append(self, access: Load | Store | Update) -> None:
        """Writes an access down."""
        self._end_exclusive()
        self._trace.append(access)
        if self._until is None or access.place != self._until[0]:
            return
        place, left = self._until
        self._until = (place, left - 1) if left > 1 else None
        if self._until is None:
            self._uc.emu_stop()

    def _touched(self, address: int, size: int) -> list[tuple[str, Place]]:
        found = []
        for name, place in self.places.items():
            if address < place.address + place.size and place.address < address + size:
                if not (address <= place.address and place.address + place.size <= address + size):
                    raise TornError(f"{name} is not read or written as a whole")
                found.append((name, place))
                if self._thread:  # and not while something is set up
                    self.starts.setdefault(name, self.value(name))
        return found

    def _read(self, _uc: object, _kind: int, address: int, size: int, _v: int, _data: object) -> None:
        self._guarded(lambda: self._on_read(address, size))

    def _write(self, _uc: object, _kind: int, address: int, size: int, value: int, _data: object) -> None:
        self._guarded(lambda: self._on_write(address, size, value))

    def _finds(self, name: str) -> int:
        if self._script.get(name):
            self.set(name, self._script[name].pop(0))
        return self.value(name)

    def _register(self, name: str) -> str:
        number = self._counts[self._thread, name]
        self._counts[self._thread, name] += 1
        return f"{self._thread}.{name}.{number}"

    def _load(self, name: str, place: Place, acquire: Acquire) -> None:
        found = self._finds(name)
        reads = None if place.is_data else found
        self._append(Load(name, self._register(name), acquire, reads=reads))

    def _on_read(self, address: int, size: int) -> None:
        for name, place in self._touched(address, size):
            word, operands = self._image.lines[self._now.pc]
            if _EXCLUSIVE_STORE.match(word):
                continue  # the emulator compares with what its load found
            if _ATOMIC.match(word) or _STORE_ATOMIC.match(word):
                self._atomic(name, word, operands)
            elif exclusive := _EXCLUSIVE.match(word):
                self._now.exclusive = (name, self._finds(name), bool(exclusive[1]))
            elif _LOAD_ACQUIRE.match(word):
                self._load(name, place, Acquire.YES)
            elif _LOAD_PC.match(word):
                self._load(name, place, Acquire.PC)
            else:
                assert _PLAIN.match(word), f"what does {word} {operands} do?"
                self._load(name, place, Acquire.NO)

    def _atomic(self, name: str, word: str, operands: str) -> None:
        """One instruction. Its parts are known before it runs; what it writes is computed here."""
        found, registers = self._finds(name), [each.strip() for each in operands.split(",")]
        if parts := _STORE_ATOMIC.match(word):
            kind, acquire, release = parts[1].replace("st", "ld", 1), False, bool(parts[2])
        else:
            parts = _ATOMIC.match(word)
            assert parts is not None
            kind, acquire, release = parts[1], bool(parts[2]), bool(parts[3])
            # Without a register for what was there, nothing is acquired.
            acquire = acquire and (kind == "cas" or registers[1] not in ("xzr", "wzr"))
        bits = 8 * self.places[name].size
        given = self._value_of(registers[0]) % (1 << bits)
        if kind == "cas":
            if given != found:
                order = Acquire.YES if acquire else Acquire.NO
                self._append(Load(name, self._register(name), order, reads=found))
                return
            written = self._value_of(registers[1]) % (1 << bits)
        elif kind == "swp":
            written = given
        else:
            assert kind == "ldadd", f"what does {word} do?"
            written = (found + given) % (1 << bits)
        into = self._register(name)
        self._append(Update(name, into, sets=written, acquire=acquire, release=release, reads=found))

    def _value_of(self, register: str) -> int:
        if register in ("xzr", "wzr"):
            return 0
        return int(self._uc.reg_read(getattr(self._registers, f"UC_ARM64_REG_{register.upper()}")))

    def _on_write(self, address: int, size: int, value: int) -> None:
        for name, place in self._touched(address, size):
            word, operands = self._image.lines[self._now.pc]
            if _ATOMIC.match(word) or _STORE_ATOMIC.match(word):
                continue  # written down with its read
            assert size <= 8, f"{word} writes more than the emulator tells"
            part = value % (1 << 64) >> 8 * (place.address - address) & ((1 << 8 * place.size) - 1)
            if exclusive := _EXCLUSIVE_STORE.match(word):
                assert self._now.exclusive is not None, "a store without its load"
                of, found, acquire = self._now.exclusive
                assert of == name, f"a store to {name}, and a load of {of}"
                self._now.exclusive = None
                into, release = self._register(name), bool(exclusive[1])
                self._append(Update(name, into, sets=part, acquire=acquire, release=release, reads=found))
            else:
                release = bool(_STORE_RELEASE.match(word))
                assert release or _PLAIN.match(word), f"what does {word} {operands} do?"
                self._append(Store(name, part, release))

    # Functions of other libraries.

    def _argument(self, number: int) -> int:
        return int(self._uc.reg_read(getattr(self._registers, f"UC_ARM64_REG_X{number}")))

    def _stub(self, name: str) -> None:
        result = 0
        if name in ("memcpy", "memmove"):
            result = self._argument(0)
            self._copy(result, self._argument(1), self._argument(2))
        elif name == "memset":
            result = self._argument(0)
            self._uc.mem_write(result, bytes([self._argument(1) & 255]) * self._argument(2))
        elif name in ("_Znwm", "malloc", "_ZnwmSt11align_val_t"):
            result = self._heap
            self._heap += (self._argument(0) + 63) // 64 * 64
        elif name == "clock_gettime":
            self._now_ns += 1_000_000_000
            self._uc.mem_write(self._argument(1), struct.pack("<QQ", *divmod(self._now_ns, 1_000_000_000)))
        elif name == "syscall":
            self._system_call()
        elif "basic_string" in name and "_M_assign" in name:
            self._assign_string()
        elif name.startswith("_ZSt") or name in ("abort", "__cxa_throw"):
            raise AssertionError(f"{self._thread} calls {name}")
        self._uc.reg_write(self._registers.UC_ARM64_REG_X0, result)

    def _copy(self, to: int, source: int, size: int) -> None:
        """A copy of the library's: in what order and by which pieces it moves bytes is its own matter."""
        read, written = self._touched(source, size), self._touched(to, size)
        for name, place in read:
            if place.is_polled:
                raise TornError(f"{name} is read by memcpy")
            self._load(name, place, Acquire.NO)
        self._uc.mem_write(to, bytes(self._uc.mem_read(source, size)))
        for name, place in written:
            if place.is_polled:
                raise TornError(f"{name} is written by memcpy")
            self._append(Store(name, self.value(name)))

    def _assign_string(self) -> None:
        """Its length is the word behind its address."""
        size = int.from_bytes(self._uc.mem_read(self._argument(1) + 8, 8), "little")
        self._uc.mem_write(self._argument(0) + 8, size.to_bytes(8, "little"))
        for name, _ in self._touched(self._argument(0) + 8, 8):
            self._append(Store(name, size))

    def _system_call(self) -> None:
        number, address, kind = self._argument(0), self._argument(1), self._argument(2) & 127
        if number != FUTEX:
            return
        name = next(name for name, place in self.places.items() if place.address == address)
        if kind == FUTEX_WAKE:
            # The kernel looks whether anybody sleeps: here nobody does.
            self._trace += [FULL_SYSTEM_CALL, Load(WAITERS, self._register(WAITERS), reads=0)]
        else:
            # The kernel counts the sleeper, and then looks once more.
            found = self._argument(3) & 0xFFFF_FFFF
            counted = Update(WAITERS, self._register(WAITERS), adds=1)
            self._trace += [counted, FULL_SYSTEM_CALL, Load(name, self._register(name), reads=found)]
