"""`Mover`: moves experts' weights from placement to placement, a few bytes at a time, beside dispatches.

What a rank needs it copies out of the weights of ranks that hold it, where they lie, to memory at its side.
Nothing that is in use changes until all ranks have what they need. Then all of them change weights and tables
at the same step (`moe_triton.balance.agreement`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from moe_triton.balance.arguments import check_at_least, check_layer
from moe_triton.balance.placement import Placement
from moe_triton.balance.stage import Bytes, Stage, digest_of
from moe_triton.balance.weights import ExpertWeights
from moe_triton.core.checks import shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError, BufferStateError
from moe_triton.core.side_copies import View

LAST_STEP = 1 << 62  # words have a sign


class Copy(NamedTuple):
    """An expert that comes to a rank, once.

    Attributes:
        layer: of the expert.
        source: rank that holds it, the same one too.
        source_slot: its number there.
        slots: numbers of those that it comes to.
    """

    layer: int
    source: int
    source_slot: int
    slots: tuple[int, ...]


@dataclass
class Piece:
    """Bytes of one tensor of an expert that are not all copied yet.

    Attributes:
        copy: of which expert; None for what goes to another rank.
        source: a view of the bytes, None where they come through a stage.
        targets: views of where they go, none of what goes to another rank.
        done: bytes so far.
    """

    copy: Copy | None
    source: View | None
    targets: list[View]
    done: int = 0


@dataclass
class Part:
    """Of a move, what changes at once: a layer, or with two halves all that change.

    Attributes:
        placement: of all layers afterwards.
        target: what stands for that.
        changes: views of what is copied at the switch, where to and where from.
        copies: that come to this rank.
        pieces: of them what is left that this rank reads where it lies.
        coming, going: what is left that comes and goes through a stage, by rank.
        readable: ranks that have changed to the placement before, as far as is known.
        has_come: tells whether the device has all of it, once nothing is left.
    """

    placement: Placement
    target: int
    changes: list[tuple[View, View]]
    copies: list[Copy]
    pieces: deque[Piece]
    coming: dict[int, deque[Piece]]
    going: dict[int, deque[Piece]]
    readable: set[int] = field(default_factory=set)
    has_come: Callable[[], bool] | None = None

    @property
    def is_left(self) -> bool:
        """Whether something has yet to be copied to this rank."""
        return bool(self.pieces) or any(self.coming.values())

    @property
    def is_here(self) -> bool:
        """Whether this rank has all of it, and its device too."""
        if not self.copies:
            return True
        return not self.is_left and self.has_come is not None and self.has_come()


class Mover:
    """Moves weights, and changes the tables by which rows find them. Every rank makes one, alike.

    In each step all ranks call, in this order and before the step's first dispatch, `switch` and, while there
    is something to move, `step`. Each step has a dispatch of the weights' buffer. The first `switch` says
    that this rank's weights are filled. `step` may be called again later in the step.

    After an error while something moves a mover is of no more use: weights may be half moved, and the other
    ranks hear of it in their next step. Load them anew, on every rank.

    Args:
        weights: filled as the placement says.
        placement: of the weights.
        num_columns: F of the tables, one more than an expert can have replicas; None for as many as there are
            ranks of routed experts. Few columns are mapped faster.

    Raises:
        ArgumentError: a placement that does not fit the weights, or more columns than there are slots.
        BufferStateError: another mover has the weights, and moves them or has failed.
    """

    def __init__(self, weights: ExpertWeights, placement: Placement, num_columns: int | None = None) -> None:
        if not isinstance(weights, ExpertWeights):
            rule = "it moves weights of moe_triton.balance.allocate, or adopt"
            raise ArgumentError("weights", shown(weights), rule, "Pass those.", code=INVALID_ARGUMENT)
        self._weights, self._parts = weights, weights.parts
        self._check_placement(placement)
        self._rank, self._num_ranks = weights.rank, placement.num_ranks
        self._columns = placement.num_ranks - placement.num_shared_ranks + 1
        if num_columns is not None:
            self._columns = check_at_least("num_columns", num_columns, 2)
            most = placement.num_replicas + 1
            if self._columns > max(2, most):
                rule = f"there are {placement.num_replicas} slots, and a column for the count"
                raise ArgumentError("num_columns", self._columns, rule, f"Pass {most} or less.")
        weights.hand_to(self)
        self.placement = placement
        self._copy, self._agreement = weights.memory.copies, weights.agreement
        self._device = weights.memory.of(self._rank).device
        self._all_tables = self._tables_of(placement, range(placement.num_layers))
        self._tables = self._all_tables.unbind()
        self._next: Placement | None = None
        self._queue: list[list[int]] = []  # the layers of each part that is left, the current one first
        self._part: Part | None = None  # the current one, once it is laid out
        self._past: Part | None = None
        self._gets = False  # out of the stage first, in the next step
        self._last_step: int | None = None
        self._broken = ""
        # (halves, L, P) the experts that all ranks' slots hold: only what differs is copied.
        self._held = torch.full((self._parts.halves, *placement.phy2log.shape), -1)
        for layer, half in enumerate(weights.halves):
            self._held[half, layer] = placement.phy2log[layer]
        self._side: dict[str, list[Bytes]] = {}  # of the one layer that moves
        if self._parts.halves == 1:
            # Written once, so that no step has to wait for fresh pages.
            slots = self._parts.num_slots
            self._side = {
                name: list(torch.full((slots, size), 0xFF, dtype=torch.uint8, device=self._device))
                for name, size in self._parts.sizes.items()
            }

    def table(self, layer: int) -> torch.Tensor:
        """A layer's table, (N, F) int32, for `EPBuffer.dispatch`'s eplb_table: always the same tensor.

        Raises:
            ArgumentError: there is no such layer.
        """
        return self._tables[check_layer(layer, self._parts.num_layers)]

    @property
    def is_moving(self) -> bool:
        """Whether a move has begun and not ended."""
        return self._next is not None

    def begin(self, placement: Placement) -> int:
        """Begins to move to another placement, the same on every rank. Nothing is copied yet.

        Returns:
            Bytes that will be copied to this rank.

        Raises:
            ArgumentError: a placement that does not fit the weights, or needs more columns than tables have;
                or tensors of adopted weights are others now.
            BufferStateError: a move is under way, the mover is broken, or a graph is being captured.
        """
        self.check_usable()
        if self._next is not None:
            raise BufferStateError("a move is under way. Call step and switch until it has ended.")
        self._check_placement(placement)
        self._weights.check_unchanged()
        most = int(placement.logcnt.max())
        if most >= self._columns:
            rule = f"tables of {self._columns} columns have room for {self._columns - 1} replicas"
            remedy = "Make a Mover with a larger num_columns."
            raise ArgumentError("placement", f"with {most} of an expert", rule, remedy)
        changed = (placement.phy2log != self.placement.phy2log).any(1).nonzero()[:, 0].tolist()
        is_doubled = self._parts.halves > 1
        queue = [changed] if is_doubled and changed else [[layer] for layer in changed]
        try:
            self._agreement.begin(_digest(placement))
            total = sum(len(self._of_layers(placement, layers, self._rank)) for layers in queue)
            self._part = self._lay_out(placement, queue[0]) if queue else None
            self._next, self._queue = placement, queue
        except BaseException as error:
            self._give_up(error)
            raise
        return total * self._parts.expert_bytes

    def step(self, max_bytes: int) -> int:
        """Copies some of what this rank needs, and never waits.

        Args:
            max_bytes: that it may copy, at least one.

        Returns:
            Bytes that were copied, into a stage and out of one too; 0 where nothing is left, or others are
            not there yet.

        Raises:
            ArgumentError: ``max_bytes`` is no positive integer.
            BufferStateError: the mover is broken, the memory was given back, or a graph is being captured. Or
                a rank has given up: `switch` looks for that in each step, this until all can be read.
            ConfigMismatchError: found likewise: a rank moves elsewhere, or counts its steps otherwise.
        """
        left = check_at_least("max_bytes", max_bytes, 1)
        self.check_usable()
        if self._next is None or not self._queue:
            return 0
        self._weights.memory.of(self._rank)  # an error once it was given back
        try:
            return self._copied(self._next, left)
        except BaseException as error:
            self._give_up(error)
            raise

    def _copied(self, target: Placement, left: int) -> int:
        self._past = None
        part = self._part = self._part or self._lay_out(target, self._queue[0])
        done = self._read(part, left) if part.pieces else 0
        if (stage := self._weights.stage) is not None:
            stage.refresh()
            # In turn: what comes makes room at others, and what goes gives them something to do.
            first, then = (part.coming, part.going) if self._gets else (part.going, part.coming)
            self._gets = not self._gets
            for queues in (first, then):
                if queues and done < left:
                    done += self._through(stage, queues, left - done)
        if part.has_come is None and not part.is_left:
            part.has_come = self._copy.mark()
        return done

    def ready(self) -> bool:
        """Whether this rank has all that it changes next; also while nothing moves."""
        return self._next is None or (self._part.is_here if self._part else not self._queue)

    def switch(self, step: int) -> tuple[int, ...]:
        """Begins a step. Changes weights and tables, if this is the step in which all ranks do.

        Args:
            step: its number, from 0 or any other on, one more each time and the same on every rank.

        Returns:
            The layers that have other weights and tables from now on.

        Raises:
            ArgumentError: a step is left out or comes again.
            BufferStateError: the mover is broken, a rank has given up, the memory was given back, or a graph
                is being captured.
            ConfigMismatchError: a rank moves to another placement, or counts its steps otherwise.
            CommunicationTimeoutError: on an NPU, and with several servers, a rank has not come to the
                checkpoint before.
        """
        number = check_at_least("step", step, 0)
        if number > LAST_STEP:
            raise ArgumentError("step", number, f"the last one is {LAST_STEP}", "Count from 0.")
        self.check_usable()
        if self._last_step is not None and number != self._last_step + 1:
            rule = f"the latest was {self._last_step}, and each step is begun once"
            raise ArgumentError("step", number, rule, f"Pass {self._last_step + 1}.")
        try:
            self._last_step = number
            if not self._queue:
                self._next = None
                self._agreement.pass_step(number)
                return ()
            part = self._part
            if not self._agreement.arrive(number, *((part.is_here, part.target) if part else (False, 0))):
                return ()
            assert part is not None, "all ranks had it"
            return self._change(part)
        except BaseException as error:
            self._give_up(error)
            raise

    def _change(self, part: Part) -> tuple[int, ...]:
        layers = self._queue.pop(0)
        if self._parts.halves > 1:
            for layer in layers:
                self._weights.halves[layer] = 1 - self._weights.halves[layer]
        for to, source in part.changes:
            self._copy.copy_in_turn(to, source)
        self.placement = part.placement
        self._agreement.changed(self._copy.mark_in_turn())
        # The next one is laid out in a step; this one goes then, as hundreds of views do not go in no time.
        self._part, self._past = None, part
        if not self._queue:
            self._next = None
        return tuple(layers)

    def check_usable(self) -> None:
        """Checks that weights can be moved now.

        Raises:
            BufferStateError: they cannot.
        """
        if self._broken:
            raise BufferStateError(self._broken)
        if self._copy.is_capturing():
            raise BufferStateError("a graph is being captured. Move weights between graphs.")

    def _give_up(self, error: BaseException) -> None:
        """What is not done as a whole, as after Ctrl-C, is of no use to anybody: the other ranks are told."""
        self._broken = f"a move was left by {type(error).__name__}. Load weights anew, on every rank."
        with contextlib.suppress(BufferStateError):  # the memory was given back: they have been told
            self._agreement.give_up()

    def retire(self) -> None:
        """Moves nothing any more: another mover has the weights."""
        self._broken = "another Mover has these weights now. Use that one."

    def _lay_out(self, target: Placement, layers: Sequence[int]) -> Part:
        """What has to be done for some layers, and how all is afterwards."""
        old = self.placement
        mixed = old.phy2log.clone()
        index = torch.tensor(layers)
        mixed[index] = target.phy2log[index]
        placement = Placement(mixed, old.num_experts, self._num_ranks, old.num_shared_ranks)
        copies = self._of_layers(target, layers, self._rank)
        changes = self._changes(copies, placement, layers)
        part = Part(placement, _digest(placement), changes, copies, deque(), {}, {})
        self._copy.follow()  # what was at the side is in use, or was, until the current stream has come here
        for copy in part.copies:
            for name in self._parts.specs:
                targets = [self._target(copy.layer, name, slot) for slot in copy.slots]
                if not self._weights.is_staged(copy.source):
                    part.pieces.append(Piece(copy, self._source(copy, name), targets))
                else:
                    part.coming.setdefault(copy.source, deque()).append(Piece(copy, None, targets))
        for rank in filter(self._weights.is_staged, range(self._num_ranks)):
            for copy in self._of_layers(target, layers, rank):
                if copy.source == self._rank:
                    pieces = [Piece(None, self._source(copy, name), []) for name in self._parts.specs]
                    part.going.setdefault(rank, deque()).extend(pieces)
        for layer in layers:
            self._held[self._other_half(layer), layer] = mixed[layer]  # once it has changed
        return part

    def _of_layers(self, target: Placement, layers: Sequence[int], rank: int) -> list[Copy]:
        """What comes to a rank in some layers, each expert once."""
        old = self.placement
        first = (rank - old.num_shared_ranks) * old.slots_per_rank
        if first < 0:  # it has shared experts alone
            return []
        wanted = target.phy2log[:, first : first + old.slots_per_rank]
        copies = []
        for layer in layers:
            spare = self._held[self._other_half(layer), layer, first : first + old.slots_per_rank]
            slots_of: dict[int, list[int]] = {}
            for slot in (wanted[layer] != spare).nonzero()[:, 0].tolist():
                slots_of.setdefault(int(wanted[layer, slot]), []).append(slot)
            for expert, slots in slots_of.items():
                held = old.log2phy[layer, expert]
                sources = held[held >= 0].tolist()
                # From home if it is there, or from this server; and dealt among those that have it.
                here = [each for each in sources if old.rank_of(each) == rank]
                near = [each for each in sources if old.rank_of(each) in self._weights.neighbours(rank)]
                nearest = here or near or sources
                source = nearest[(rank + expert) % len(nearest)]
                copies.append(Copy(layer, old.rank_of(source), source % old.slots_per_rank, tuple(slots)))
        return copies

    def _changes(
        self, copies: Sequence[Copy], placement: Placement, layers: Sequence[int]
    ) -> list[tuple[View, View]]:
        """What is copied when some layers change: what came, unless that is another half, and tables."""
        found = []
        for copy in copies if self._side else ():
            for name, slot in itertools.product(self._parts.specs, copy.slots):
                to = self._weights.bytes_of(self._rank, 0, copy.layer, name, slot)
                found.append((self._copy.view(to), self._copy.view(self._side[name][slot])))
        for run in _runs(layers):
            to, source = self._all_tables[run.start : run.stop], self._tables_of(placement, run)
            found.append((self._copy.view(_bytes(to)), self._copy.view(_bytes(source))))
        return found

    def _source(self, copy: Copy, name: str) -> View:
        """Where a tensor lies. All ranks change a layer's half together."""
        half = self._weights.halves[copy.layer]
        data = self._weights.bytes_of(copy.source, half, copy.layer, name, copy.source_slot)
        return self._copy.view(data)

    def _target(self, layer: int, name: str, slot: int) -> View:
        if self._side:
            return self._copy.view(self._side[name][slot])
        data = self._weights.bytes_of(self._rank, self._other_half(layer), layer, name, slot)
        return self._copy.view(data)

    def _tables_of(self, placement: Placement, layers: Sequence[int]) -> torch.Tensor:
        """(layers, N, F) int32, on the device."""
        return torch.stack([placement.table(layer, self._columns) for layer in layers]).to(self._device)

    def _read(self, part: Part, most: int) -> int:
        """Copies what lies in memory that this rank reads; how many bytes."""
        pieces, copy = part.pieces, self._copy.copy
        done, has_asked = 0, False
        waiting: list[Piece] = []
        while pieces and done < most:
            piece = pieces[0]
            assert piece.copy is not None
            assert piece.source is not None
            source = piece.copy.source
            if source not in part.readable:
                if not has_asked:
                    has_asked = True
                    part.readable.update(
                        rank for rank, is_so in enumerate(self._agreement.readable()) if is_so
                    )
                if source not in part.readable:  # it may still have other weights there
                    waiting.append(pieces.popleft())
                    continue
            begin, length = piece.done, len(piece.source)
            end = min(begin + most - done, length)
            data = piece.source[begin:end]
            for target in piece.targets:
                copy(target[begin:end], data)
            done += end - begin
            piece.done = end
            if end == length:
                pieces.popleft()
        pieces.extendleft(reversed(waiting))
        return done

    def _through(self, stage: Stage, queues: dict[int, deque[Piece]], most: int) -> int:
        """Copies into the stage, or out of others'; how many bytes."""
        done = 0
        for rank, queue in queues.items():
            while queue and done < most:
                piece = queue[0]
                data = piece.targets[0] if piece.source is None else piece.source
                wanted = data[piece.done : piece.done + most - done]
                moved = stage.get(rank, wanted) if piece.source is None else stage.put(rank, wanted)
                for other in piece.targets[1:]:
                    self._copy.copy(other[piece.done :][:moved], wanted[:moved])
                piece.done += moved
                done += moved
                if piece.done == len(data):
                    queue.popleft()
                elif moved < len(wanted):
                    break  # the rank has to do something first
        return done

    def _other_half(self, layer: int) -> int:
        """Where a layer's next weights go; the one half there is, if there is one."""
        return self._parts.halves - 1 - self._weights.halves[layer]

    def _check_placement(self, placement: object) -> None:
        """Checks a placement against the weights.

        Raises:
            ArgumentError: it is none, or of other sizes.
        """
        if not isinstance(placement, Placement):
            raise ArgumentError(
                "placement", shown(placement), "it is a Placement", "Pass one.", code=INVALID_ARGUMENT
            )
        weights, parts = self._weights, self._parts
        mine = {
            "layers": parts.num_layers,
            "slots of a rank": parts.num_slots,
            "ranks": weights.num_ranks,
            "ranks of shared experts": weights.num_shared_ranks,
        }
        sizes = (
            placement.num_layers,
            placement.slots_per_rank,
            placement.num_ranks,
            placement.num_shared_ranks,
        )
        its = dict(zip(mine, sizes, strict=True))
        if (now := getattr(self, "placement", None)) is not None:
            mine["experts"], its["experts"] = now.num_experts, placement.num_experts
        if mine != its:
            rule = "weights have " + ", ".join(f"{size} {name}" for name, size in mine.items())
            given = "with " + ", ".join(f"{its[name]} {name}" for name in mine if mine[name] != its[name])
            raise ArgumentError("placement", given, rule, "Pass one of the same sizes.")


def _bytes(tensor: torch.Tensor) -> Bytes:
    return tensor.reshape(-1).view(torch.uint8)


def _digest(placement: Placement) -> int:
    """What stands for a placement."""
    return digest_of(placement.phy2log.numpy().tobytes())


def _runs(layers: Sequence[int]) -> list[range]:
    """Ascending numbers as runs without gaps."""
    ends = [n for n, (a, b) in enumerate(pairwise(layers), 1) if b != a + 1]
    return [range(layers[a], layers[b - 1] + 1) for a, b in pairwise([0, *ends, len(layers)])]
