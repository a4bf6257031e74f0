"""`Mover`: moves experts' weights from placement to placement, a few bytes at a time, beside dispatches.

What a rank needs it copies out of the weights of ranks that hold it, where they lie, to memory at its side.
Nothing that is in use changes until all ranks have what they need. Then all of them change weights and tables
at the same step, which takes no message but what each has left in its memory: a rank that begins step t has
ended the dispatch of step t - 1, which waits for every rank to have begun it. So it sees whatever a rank has
left before its own dispatch of t - 1. Each rank says in which step it had everything; the step after the
last of these is the one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from moe_triton.balance.arguments import check_at_least
from moe_triton.balance.placement import Placement
from moe_triton.balance.stage import Bytes
from moe_triton.balance.weights import ExpertWeights
from moe_triton.core.checks import shown
from moe_triton.core.errors import INVALID_ARGUMENT, ArgumentError, BufferStateError, ConfigMismatchError

KEPT = 2  # moves and parts that a rank's words stay of: it is one ahead of the slowest rank at most
# Where these words begin.
MOVE, STEP, SWITCHED, PLACEMENTS = range(4)
HAD = PLACEMENTS + KEPT
NUM_WORDS = HAD + 2 * KEPT


class Said(NamedTuple):
    """What a rank has left of itself: 64-bit words at the beginning of its memory, in this order.

    Attributes:
        move: number of its latest move, from 1; 0 before the first.
        step: one more than that which it has begun last; 0 before the first.
        switched: parts that it has changed to, of all moves.
        placements: of move m, at ``m % KEPT``, what stands for its placement: written before its number, so
            that who reads the number of the move before finds that one's.
        had: of part p, from 1, at ``2 * (p % KEPT)`` the number p, once it has all of that, and behind it the
            step in which it had.
    """

    move: int
    step: int
    switched: int
    placements: tuple[int, ...]
    had: tuple[int, ...]

    @staticmethod
    def of(words: list[int]) -> Said:
        """What stands in some words."""
        return Said(
            words[MOVE], words[STEP], words[SWITCHED], tuple(words[PLACEMENTS:HAD]), tuple(words[HAD:])
        )


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
        source: the bytes, None where they come through a stage.
        targets: where they go, none of what goes to another rank.
        done: bytes so far.
    """

    copy: Copy | None
    source: Bytes | None
    targets: list[Bytes]
    done: int = 0


@dataclass
class Part:
    """Of a move, what changes at once: a layer, or with two halves all that change.

    Attributes:
        layers: which.
        placement: of all layers afterwards.
        tables: (layers, N, F) int32, theirs.
        copies: that come to this rank.
        pieces: of them what is left that this rank reads where it lies.
        coming, going: what is left that comes and goes through a stage, by rank.
    """

    layers: torch.Tensor
    placement: Placement
    tables: torch.Tensor
    copies: list[Copy]
    pieces: deque[Piece]
    coming: dict[int, deque[Piece]]
    going: dict[int, deque[Piece]]

    @property
    def is_here(self) -> bool:
        """Whether this rank has all of it."""
        return not self.pieces and not any(self.coming.values())


class Mover:
    """Moves weights, and changes the tables by which rows find them. Every rank makes one, alike.

    In each step all ranks call, in this order and before the step's first dispatch, `switch` and, while there
    is something to move, `step`. Each step has a dispatch of the weights' buffer.

    Args:
        weights: filled as the placement says.
        placement: of the weights.
        num_columns: F of the tables, one more than an expert can have replicas; None for as many as there are
            ranks of routed experts. Few columns are mapped faster.

    Raises:
        ArgumentError: a placement that does not fit the weights.
    """

    def __init__(self, weights: ExpertWeights, placement: Placement, num_columns: int | None = None) -> None:
        if not isinstance(weights, ExpertWeights):
            rule = "it moves weights of moe_triton.balance.allocate, or adopt"
            raise ArgumentError("weights", shown(weights), rule, "Pass those.", code=INVALID_ARGUMENT)
        self._weights, self._parts = weights, weights.parts
        self._check_placement(placement)
        self.placement = placement
        self._rank, self._num_ranks = weights.rank, placement.num_ranks
        most = placement.num_ranks - placement.num_shared_ranks + 1
        self._columns = most if num_columns is None else check_at_least("num_columns", num_columns, 2)
        self._all_tables = torch.stack(
            [placement.table(layer, self._columns) for layer in range(placement.num_layers)]
        )
        self._tables = self._all_tables.unbind()
        # What each rank has said, by rank: its words where they lie.
        self._words_of = [
            weights.memory.of(rank)[: 8 * NUM_WORDS].view(torch.int64).numpy()
            for rank in range(self._num_ranks)
        ]
        self._words = self._words_of[self._rank]
        self._next: Placement | None = None
        self._queue: list[list[int]] = []  # the layers of each part that is left, the current one first
        self._part: Part | None = None  # the current one, once it is laid out
        self._last_step: int | None = None
        # (halves, L, P) the experts that all ranks' slots hold: only what differs is copied.
        self._held = torch.full((self._parts.halves, *placement.phy2log.shape), -1)
        self._held[0] = placement.phy2log
        self._side: dict[str, list[Bytes]] = {}  # of the one layer that moves
        if self._parts.halves == 1:
            self._side = {
                name: list(np.empty((self._parts.num_slots, size), np.uint8))
                for name, size in self._parts.sizes.items()
            }

    def table(self, layer: int) -> torch.Tensor:
        """A layer's table, (N, F) int32, for `EPBuffer.dispatch`'s eplb_table: always the same tensor."""
        return self._tables[layer]

    @property
    def is_moving(self) -> bool:
        """Whether a move has begun and not ended."""
        return self._next is not None

    def begin(self, placement: Placement) -> int:
        """Begins to move to another placement, the same on every rank. Nothing is copied yet.

        Returns:
            Bytes that will be copied to this rank.

        Raises:
            ArgumentError: a placement that does not fit the weights, or needs more columns than tables have.
            BufferStateError: a move is under way.
        """
        if self._next is not None:
            raise BufferStateError("a move is under way. Call step and switch until it has ended.")
        self._check_placement(placement)
        most = int(placement.logcnt.max())
        if most >= self._columns:
            rule = f"tables of {self._columns} columns have room for {self._columns - 1} replicas"
            raise ArgumentError("placement", f"with {most} of an expert", rule, "Pass a larger num_columns.")
        old = self.placement
        changed = (placement.phy2log != old.phy2log).any(1).nonzero()[:, 0].tolist()
        self._next = placement
        is_doubled = self._parts.halves > 1
        self._queue = [changed] if is_doubled and changed else [[layer] for layer in changed]
        digest = hashlib.blake2b(placement.phy2log.numpy().tobytes(), digest_size=7).digest()
        number = int(self._words[MOVE]) + 1
        self._words[PLACEMENTS + number % KEPT] = int.from_bytes(digest, "little")
        self._words[MOVE] = number
        total = sum(len(self._of_layers(layers, self._rank)) for layers in self._queue)
        self._part = self._lay_out(self._queue[0]) if self._queue else None
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
            ConfigMismatchError: a rank moves to another placement.
        """
        left = check_at_least("max_bytes", max_bytes, 1)
        if self._next is None:
            return 0
        said = self._all_said()
        if self._part is None and self._queue:
            self._part = self._lay_out(self._queue[0])
        if (part := self._part) is None:
            return 0
        done = self._read(part.pieces, said, left)
        # What comes makes room at others; what goes gives them something to do. Neither waits for the other.
        done += self._through(part.coming, (left - done + 1) // 2)
        done += self._through(part.going, left - done)
        done += self._through(part.coming, left - done)
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
            ConfigMismatchError: a rank moves to another placement, or is in a step that cannot be.
        """
        number = check_at_least("step", step, 0)
        if self._last_step is not None and number != self._last_step + 1:
            rule = f"the latest was {self._last_step}, and each step is begun once"
            raise ArgumentError("step", number, rule, f"Pass {self._last_step + 1}.")
        self._last_step = number
        self._words[STEP] = number + 1
        if self._next is None:
            return ()
        said = self._all_said()
        if not self._queue:
            self._next = None
            return ()
        coming = self._switched + 1
        index = 2 * (coming % KEPT)
        at = HAD + index
        if self._part and self._part.is_here and self._words[at] != coming:
            self._words[at + 1] = number
            self._words[at] = coming  # after its step: others look at the number first
            return ()
        if self._part is None or any(each.had[index] != coming for each in said):
            return ()
        due = max(each.had[index + 1] for each in said) + 1
        if number < due:
            return ()
        if number > due:
            raise ConfigMismatchError(f"the ranks change weights in step {due}, and this one is in {number}")
        return self._change(self._part)

    def _change(self, part: Part) -> tuple[int, ...]:
        layers = self._queue.pop(0)
        weights = self._weights
        if self._parts.halves > 1:
            for layer in layers:
                weights.halves[layer] = 1 - weights.halves[layer]
        else:
            for copy, name, slot in self._places(part.copies):
                np.copyto(weights.bytes_of(self._rank, 0, copy.layer, name, slot), self._side[name][slot])
        self.placement = part.placement
        self._all_tables[part.layers] = part.tables
        self._words[SWITCHED] += 1
        self._part = None  # the next one is laid out in a step
        if not self._queue:
            self._next = None
        return tuple(layers)

    @property
    def _switched(self) -> int:
        return int(self._words[SWITCHED])

    def _lay_out(self, layers: Sequence[int]) -> Part:
        """What has to be done for some layers, and how all is afterwards."""
        assert self._next is not None
        old, stage = self.placement, self._weights.stage
        mixed = old.phy2log.clone()
        index = torch.tensor(layers)
        mixed[index] = self._next.phy2log[index]
        placement = Placement(mixed, old.num_experts, self._num_ranks, old.num_shared_ranks)
        tables = torch.stack([placement.table(layer, self._columns) for layer in layers])
        part = Part(index, placement, tables, self._of_layers(layers, self._rank), deque(), {}, {})
        for copy in part.copies:
            for name in self._parts.specs:
                targets = [self._target(copy.layer, name, slot) for slot in copy.slots]
                if stage is None or copy.source == self._rank:
                    part.pieces.append(Piece(copy, self._source(copy, name), targets))
                else:
                    part.coming.setdefault(copy.source, deque()).append(Piece(copy, None, targets))
        for rank in range(self._num_ranks) if stage is not None else ():
            for copy in self._of_layers(layers, rank) if rank != self._rank else ():
                if copy.source == self._rank:
                    pieces = [Piece(None, self._source(copy, name), []) for name in self._parts.specs]
                    part.going.setdefault(rank, deque()).extend(pieces)
        for layer in layers:
            self._held[self._other_half(layer), layer] = mixed[layer]  # once it has changed
        return part

    def _of_layers(self, layers: Sequence[int], rank: int) -> list[Copy]:
        """What comes to a rank in some layers, each expert once."""
        assert self._next is not None
        old = self.placement
        first = (rank - old.num_shared_ranks) * old.slots_per_rank
        if first < 0:  # it has shared experts alone
            return []
        wanted = self._next.phy2log[:, first : first + old.slots_per_rank]
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

    def _places(self, copies: Sequence[Copy]) -> Iterator[tuple[Copy, str, int]]:
        """All tensors of all slots that something comes to."""
        for copy in copies:
            for name in self._parts.specs:
                for slot in copy.slots:
                    yield copy, name, slot

    def _source(self, copy: Copy, name: str) -> Bytes:
        """Where a tensor lies. All ranks change a layer's half together."""
        half = self._weights.halves[copy.layer]
        return self._weights.bytes_of(copy.source, half, copy.layer, name, copy.source_slot)

    def _target(self, layer: int, name: str, slot: int) -> Bytes:
        if self._side:
            return self._side[name][slot]
        return self._weights.bytes_of(self._rank, self._other_half(layer), layer, name, slot)

    def _read(self, pieces: deque[Piece], said: Sequence[Said], most: int) -> int:
        """Copies what lies in memory that this rank reads; how many bytes."""
        done = 0
        waiting: list[Piece] = []
        while pieces and done < most:
            piece = pieces[0]
            assert piece.copy is not None
            assert piece.source is not None
            # Who is behind may still have other weights there. Nobody is ahead of what this rank lacks.
            if said[piece.copy.source].switched < self._switched:
                waiting.append(pieces.popleft())
                continue
            end = min(piece.done + most - done, len(piece.source))
            for target in piece.targets:
                np.copyto(target[piece.done : end], piece.source[piece.done : end])
            done += end - piece.done
            piece.done = end
            if end == len(piece.source):
                pieces.popleft()
        pieces.extendleft(reversed(waiting))
        return done

    def _through(self, queues: dict[int, deque[Piece]], most: int) -> int:
        """Copies into the stage, or out of others'; how many bytes."""
        stage, done = self._weights.stage, 0
        for rank, queue in queues.items():
            while queue and done < most:
                assert stage is not None
                piece = queue[0]
                data = piece.targets[0] if piece.source is None else piece.source
                wanted = data[piece.done : piece.done + most - done]
                moved = stage.get(rank, wanted) if piece.source is None else stage.put(rank, wanted)
                for other in piece.targets[1:]:
                    np.copyto(other[piece.done :][:moved], wanted[:moved])
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

    def _all_said(self) -> list[Said]:
        """What all ranks have left.

        Raises:
            ConfigMismatchError: one moves elsewhere, or counts its steps otherwise.
        """
        self._weights.memory.of(self._rank)  # an error once it was given back
        said = [Said.of(words.tolist()) for words in self._words_of]
        mine = said[self._rank]
        numbered = list(enumerate(said))
        at = mine.move % KEPT
        others = [
            r for r, each in numbered if each.move == mine.move and each.placements[at] != mine.placements[at]
        ]
        if others:
            raise ConfigMismatchError(
                f"rank(s) {others} move to another placement than rank {self._rank} in move {mine.move}. "
                "Pass the same placement on every rank."
            )
        far = {r: each.step - 1 for r, each in numbered if each.step and abs(each.step - mine.step) > 1}
        if far and mine.step:
            raise ConfigMismatchError(
                f"rank {self._rank} is in step {mine.step - 1}, and others, by rank, in {far}: ranks are "
                "never more than a step apart. Count steps alike on every rank."
            )
        return said

    def _check_placement(self, placement: object) -> None:
        """Checks a placement against the weights.

        Raises:
            ArgumentError: it is none, or of other sizes.
        """
        if not isinstance(placement, Placement):
            raise ArgumentError(
                "placement", shown(placement), "it is a Placement", "Pass one.", code=INVALID_ARGUMENT
            )
        mine = self._parts.num_layers, self._parts.num_slots
        its = placement.num_layers, placement.slots_per_rank
        if mine != its:
            rule = (
                f"weights are of {mine[0]} layers, {mine[1]} slots a rank, and it has {its[0]} with {its[1]}"
            )
            raise ArgumentError("placement", "of other sizes", rule, "Pass one of the same.")
