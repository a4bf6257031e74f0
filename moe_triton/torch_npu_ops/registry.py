"""Process groups by name, and the communicators behind them, made when a call first needs them.

torch_npu's functions know a group by its name only. Names are those of torch.distributed; another name can
be given with `register_group`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d

from moe_triton.backends import has_windows_in_memory
from moe_triton.backends.waits import Waiting
from moe_triton.core.checks import check_text, shown
from moe_triton.core.config import Config
from moe_triton.core.errors import ArgumentError, BufferStateError
from moe_triton.core.hccl import read_environment
from moe_triton.limits import MAX_GROUP_NAME
from moe_triton.rendezvous import hosts
from moe_triton.rendezvous.meeting import Meeting
from moe_triton.runtime import plan_calls
from moe_triton.runtime.communicator import Communicator
from moe_triton.runtime.construction import Order, seconds_to_meet
from moe_triton.runtime.plan_cache import PlanCache
from moe_triton.torch_npu_ops import servers, settings
from moe_triton.torch_npu_ops.declared import check_group, invalid
from moe_triton.torch_npu_ops.tallies import Fields, Tallies, fields_of

# Shapes that one group serves at a time. Every rank makes the same calls, so all drop the same one.
KEPT_PER_GROUP = 8

# Weak, as everything here: torch.distributed keeps a group until it is destroyed.
# References in a plain table: every call looks into it, and one of weak values takes several times as long.
_registered: dict[str, Callable[[], dist.ProcessGroup | None]] = {}


@dataclass(frozen=True)
class Place:
    """Which communicator a call runs on.

    Attributes:
        group_ep: name of the expert-parallel group.
        group_tp: name of the tensor-parallel group, "" for none.
        config: settings of the ranks that take part.
        members: ranks of the expert-parallel group that are left, in the order of their new numbers; None
            for all of them.
    """

    group_ep: str
    group_tp: str
    config: Config
    members: tuple[int, ...] | None = None

    @cached_property
    def fields(self) -> Fields:
        """What ranks compare that have gone to other places."""
        return fields_of(self.config, self.members, bool(self.group_tp))

    def number_of(self, rank: int) -> int | None:
        """The number of a rank of the group among those that take part; None where it does not."""
        if self.members is None:
            return rank
        return self.members.index(rank) if rank in self.members else None


Windows = list[tuple[Fields, int]]
Kept = dict[tuple[Place, settings.Settings], Communicator]

# The group that a name's communicators were made for: names come again when groups are made anew.
_made_for: WeakValueDictionary[str, dist.ProcessGroup] = WeakValueDictionary()
_communicators: dict[str, Kept] = {}
# Of calls whose shapes may come again, for all groups.
plans: PlanCache[Any] = PlanCache()
_tallies: dict[str, Tallies] = {}
# HCCL's variables as they were when a group's first communicator was made: HCCL, too, reads them then.
_environments: dict[str, Mapping[str, str]] = {}
# Ranks that are masked, and what had run in the group when they were. They go with its windows.
_masked: dict[str, dict[int, Windows]] = {}
_queried: dict[str, frozenset[int]] = {}
# Of each group and its members, the meeting for their first window: in all of theirs they agree together on
# whom they mask, or two ranks that wait in different ones could mask each other.
_agreed_at: dict[str, dict[tuple[int, ...] | None, int]] = {}


_DIFFERENT = (
    "{}: ranks made different calls:{}\n"
    "Make the same calls on every rank, and release the group on each of them."
)


class StalePlanError(Exception):
    """A plan was made under other variables than its group's calls go by, or for other servers than its ranks
    have turned out to be on. Nothing was sent."""


def group_name(group: dist.ProcessGroup | None = None) -> str:
    """The name of a process group, for ``group_ep`` and ``group_tp``; None is the default group.

    Raises:
        ArgumentError: torch.distributed is not initialised.

    Examples:
        >>> group = torch_npu.group_name(), dist.get_world_size(), dist.get_rank(), 32
    """
    if not dist.is_initialized():
        rule = "torch.distributed must be initialised"
        raise invalid("group", group, rule, "Call init_process_group first.")
    chosen = dist.group.WORLD if group is None else _checked("group", group)
    for name, registered in list(_registered.items()):
        if registered() is chosen:
            return name
    return str(chosen.group_name)  # type: ignore[union-attr]


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Makes a process group known by another name.

    Raises:
        ArgumentError: the name is empty or too long.

    Examples:
        >>> torch_npu.register_group("experts", dist.group.WORLD)
        >>> outputs = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, "experts", *group[1:])
    """
    name = check_text("name", name)
    if not 1 <= len(name) <= MAX_GROUP_NAME:
        raise invalid("name", shown(name), f"it must be 1 to {MAX_GROUP_NAME} characters", "Shorten it.")
    _registered[name] = weakref.ref(_checked("group", group))


def _checked(argument: str, group: object) -> dist.ProcessGroup:
    """A process group, if it is one.

    Raises:
        ArgumentError: it is not.
    """
    if isinstance(group, dist.ProcessGroup):
        return group
    rule = "it must be a process group that this process is in"
    raise invalid(argument, shown(group), rule, "Pass what torch.distributed.new_group returned.")


def process_group(name: str) -> dist.ProcessGroup:
    """The process group that `group_name` gave this name.

    Raises:
        ArgumentError: there is none.

    Examples:
        >>> torch_npu.process_group(torch_npu.group_name()) is dist.group.WORLD
        True
    """
    return group_of(name, "name")


def group_of(name: str, argument: str) -> dist.ProcessGroup:
    """The process group of this name.

    Raises:
        ArgumentError: there is none.
    """
    if type(name) is not str:  # every call asks
        name = check_group(argument, name)
    reference = _registered.get(name)
    if reference is not None and (registered := reference()) is not None:
        return registered
    try:
        group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]
    except (RuntimeError, ValueError, LookupError) as error:
        rule = "no process group of this process has that name"
        raise invalid(argument, shown(name), rule, "Pass group_name(process_group).") from error
    return group


def known_group(name: object) -> dist.ProcessGroup | None:
    """The process group of a name; None where there is none, which another check refuses."""
    try:
        return group_of(name, "group_ep") if isinstance(name, str) else None
    except ArgumentError:
        return None


def may_be_on_hosts(name: object) -> bool:
    """Whether ranks of a group could be on several hosts, as nobody has looked yet."""
    group = known_group(name)
    if group is None or group.size() == 1 or not has_windows_in_memory(settings.current().backend):
        return False
    return not servers.are_known(group, None)


def find_hosts(name: str, members: tuple[int, ...] | None) -> None:
    """Finds the hosts that ranks of a group are on. Collective.

    Args:
        name: of the group.
        members: its ranks that are left, or None for all of them.

    Raises:
        MoeTritonError: what `moe_triton.rendezvous.hosts.find_unwatched` raises.
    """
    timeout_s = seconds_to_meet(settings.current().timeout_s)
    meeting = Meeting(group_of(name, "group_ep"), timeout_s, members, "elastic_info")
    hosts.find_unwatched(meeting)
    _note_hosts(meeting)
    meeting.leave()


def _note_hosts(meeting: Meeting) -> None:
    """Keeps where the ranks of a meeting are. Plans may have been made without knowing that."""
    if servers.note(meeting) and meeting.num_hosts > 1:
        plans.clear()


def check_membership(name: str, argument: str, **said: int) -> dist.ProcessGroup:
    """Checks that what a call says of its group is so, and returns the group.

    Args:
        name: of the group.
        argument: that it was passed as.
        said: the world size, and this rank where the call says it, by their arguments.

    Raises:
        ArgumentError: it is not.
    """
    group = group_of(name, argument)
    for (called, given), true in zip(said.items(), (group.size(), group.rank()), strict=False):
        if given != true:
            rule = f"it is {true} in the group {name!r}"
            raise ArgumentError(called, given, rule, f"Pass {called}={true}.")
    return group


def environment_of(name: str) -> Mapping[str, str]:
    """HCCL's variables as calls of a group go by them: as read for its first window; until then, as they are.

    Args:
        name: of the expert-parallel group.

    Raises:
        ArgumentError: the group of that name is gone.
    """
    environment = _environments.get(name)
    if environment is None or _made_for.get(name) is not group_of(name, "group_ep"):
        return read_environment()
    return environment


def communicator(place: Place) -> Communicator:
    """The communicator of a place. Collective where it has to be made.

    Raises:
        BufferStateError: an earlier failure broke it, or there is no room for another.
        StalePlanError: the place was found with other servers than its ranks are on, on all of them alike.
        MoeTritonError: what constructing one raises.
    """
    chosen = settings.current()
    _forget_former_group(place.group_ep)
    kept = _communicators.setdefault(place.group_ep, {})
    existing = kept.get((place, chosen))
    if existing is not None:
        _refuse_broken(existing)
        return existing
    if settings.host().is_capturing():
        raise BufferStateError(
            f"the group {place.group_ep!r} has no buffer for these shapes and attributes yet, and none can "
            f"be made inside a graph. Run the same calls once before the capture."
        )
    _refuse_masked(place)
    group = group_of(place.group_ep, "group_ep")
    if servers.are_known(group, place.members):
        _check_servers(place, group)
    if _posts_from_one(place):
        posting = _posting(kept)
        if posting:
            _close(place.group_ep, kept, _oldest_idle(place.group_ep, posting))
    oldest = _oldest_idle(place.group_ep, kept) if len(kept) >= KEPT_PER_GROUP else None
    timeout_s = seconds_to_meet(chosen.timeout_s)
    meeting = Meeting(group, timeout_s, place.members, "elastic_info")
    exchange = None
    if place.group_tp:
        exchange = Meeting(group_of(place.group_tp, "group_tp"), meeting.timeout_s)
    environment = environment_of(place.group_ep)

    def config_where_ranks_are() -> Config:
        if order.on_hosts:
            _note_hosts(meeting)
            try:
                _check_servers(place, group)
            except StalePlanError:  # on all ranks alike, which meet again
                # Once more before: what one closes here others may still be on the way to.
                meeting.exchange({}, "hosts are found")
                for each in filter(None, (meeting, exchange)):
                    each.end()
                raise
        return place.config

    order = Order(
        config_where_ranks_are,
        chosen.make_backend,
        num_blocks=chosen.num_blocks,
        timeout_s=chosen.timeout_s,
        tuning=chosen.tuning,
        trace=chosen.trace,
        environment=environment,
        on_lost=chosen.on_lost,
        agreed_at=_agreed_at.get(place.group_ep, {}).get(place.members),
        on_hosts=has_windows_in_memory(chosen.backend),
        network=chosen.network,
        servers=lambda: place.config.topology.servers,
    )
    try:
        with settings.keeping_tables(), _watching(place, group, meeting):
            made = Communicator(meeting, order, exchange)
    except ArgumentError as error:
        raise error.renamed({"tp_group": "group_tp"}) from None
    plan_calls.attach(made)
    if oldest is not None:
        _close(place.group_ep, kept, oldest)
    kept[place, chosen] = made
    _agreed_at.setdefault(place.group_ep, {}).setdefault(place.members, meeting.number)
    tallies = _tallies[place.group_ep]
    tallies.since = tallies.since or f"{meeting.number} of {meeting.members}"
    made.on_long_wait = partial(_watch_call, place, chosen)
    for rank in _masked_at(place):  # meanwhile, by another thread
        made.participants.update_mask(place.members.index(rank) if place.members else rank, True)
    if chosen.on_lost == "mask":
        note = partial(_note_lost, place, chosen)
        made.masks.on_masked.append(note)
        for number in made.masks.masked:  # before anybody was told
            note(number, made.masks.reasons[number][0])
    _environments[place.group_ep] = environment
    return made


def _check_servers(place: Place, group: dist.ProcessGroup) -> None:
    """Checks that a place was found with the servers that its ranks are on, whose hosts are known.

    Raises:
        StalePlanError: it was found before.
    """
    if not servers.is_found_with(place.config, place.members, group, settings.current().ranks_per_server):
        raise StalePlanError("the ranks of its group are on several hosts. Make it again.")


def _note_lost(place: Place, chosen: settings.Settings, number: int, why: str) -> None:
    """A window has masked a rank, which has this number there: all of the group's do. From any thread."""
    name, kept = place.group_ep, _communicators.get(place.group_ep, {})
    if (place, chosen) not in kept:  # another thread has released the group
        return
    rank = place.members[number] if place.members else number
    _masked.setdefault(name, {}).setdefault(rank, windows_of(name))
    for (other, _), each in list(kept.items()):
        its_number = other.number_of(rank)
        if its_number is not None and each.is_usable and its_number not in each.masks.masked:
            with contextlib.suppress(ArgumentError):  # of shared experts: calls there will say so
                each.masks.update(its_number, True, why)


@contextlib.contextmanager
def _watching(place: Place, group: dist.ProcessGroup, meeting: Meeting) -> Iterator[None]:
    """Ends the meeting for a window if other ranks are in calls that go elsewhere."""
    ended, failed = threading.Event(), threading.Event()
    _tallies.setdefault(place.group_ep, Tallies(group)).watch(
        [*windows_of(place.group_ep), (place.fields, 1)],
        place.fields,
        "",
        place.members,
        lambda: not ended.is_set(),
        lambda lines: meeting.stop(_DIFFERENT.format("a new window", lines)),
        ended,
        lambda: not failed.is_set(),
    )
    try:
        yield
    except BaseException:
        failed.set()
        raise
    finally:
        ended.set()


def _watch_call(place: Place, chosen: settings.Settings, waiting: Waiting) -> None:
    """Ends a wait that lasts if other ranks are in calls that go elsewhere."""
    name, plan = place.group_ep, waiting.plan
    kept, tallies = _communicators.get(name, {}), _tallies.get(name)
    made = kept.get((place, chosen))
    if made is None or tallies is None:  # another thread has released the group
        return
    # Calls of several threads have no order; and after a failure ranks may differ in what they have done.
    if sum(each.is_busy for each in kept.values()) > 1 or not all(each.is_usable for each in kept.values()):
        return
    # A setup is counted by its teardown.
    is_counted = plan.operator == "barrier" or plan.half != " setup"
    call = f"{plan.operator} number {made.counts[plan.operator]}"
    tallies.watch(
        [*windows_of(name), (place.fields, int(is_counted))],
        place.fields,
        plan.operator,
        _listened_to(place),
        waiting.pending,
        lambda lines: made.stop(_DIFFERENT.format(call, lines)),
    )


def _listened_to(place: Place) -> Sequence[int] | None:
    """Ranks whose calls should be the same as this one's: a masked one may go on by itself."""
    masked = masked_ranks(place.group_ep)
    if not masked:
        return place.members
    members = place.members or range(group_of(place.group_ep, "group_ep").size())
    return [rank for rank in members if rank not in masked]


def windows_of(name: str) -> Windows:
    """Each window of a group, and the calls in it: its making, and what has ended."""
    kept = list(_communicators.get(name, {}).items())
    return [(place.fields, 1 + sum(made.counts.values())) for (place, _), made in kept]


def _close(name: str, kept: Kept, key: tuple[Place, settings.Settings]) -> None:
    """Gives one window back for another."""
    made = kept.pop(key)
    tallies = _tallies[name]
    tallies.is_sound &= made.is_usable
    tallies.retire(key[0].fields, 1 + sum(made.counts.values()))
    made.close()


def waiting_communicator(place: Place) -> Communicator:
    """One whose barrier is that of a place's members.

    It is of other shapes where one window serves all that post, and where ranks are masked, without whom none
    can be made.

    Raises:
        MoeTritonError: what `communicator` raises.
    """
    _forget_former_group(place.group_ep)
    kept, key = _communicators.get(place.group_ep, {}), (place, settings.current())
    others: Kept = {}
    if _posts_from_one(place):
        others = _posting(kept)
    elif _masked_at(place) and key not in kept:
        others = kept
    # The first in the order of their making, which is the same on every rank.
    for (other, chosen), made in others.items():
        if other.members == place.members and chosen == settings.current():
            _refuse_broken(made)
            return made
    return communicator(place)


def _posts_from_one(place: Place) -> bool:
    """Whether a place's communicator posts, and is the only one that may."""
    return place.config.topology.num_servers > 1 and settings.host().posts_from_one


def _posting(kept: Kept) -> Kept:
    return {key: made for key, made in kept.items() if made.memory.posts}


def _forget_former_group(name: str) -> None:
    """Drops what was made for another group of that name, as after `destroy_process_group`."""
    group = group_of(name, "group_ep")
    if _made_for.get(name) is not group:
        release(name)
        _made_for[name] = group


def _oldest_idle(name: str, kept: Kept) -> tuple[Place, settings.Settings]:
    idle = [key for key, communicator in kept.items() if communicator.is_idle]
    if not idle:
        raise BufferStateError(
            f"the group {name!r} has {len(kept)} buffer(s) with a setup in flight or in a graph, and no "
            f"room for another. Call a teardown first; or pass the same global_bs with every batch, so that "
            f"they share one; or release the group, and capture anew."
        )
    return min(idle, key=lambda key: kept[key].last_use)


Native = Callable[..., Any] | Literal[False]


class Access:
    """Leads a plan to its communicator, by a short way where the communicator is there already.

    Args:
        place: of the communicator.
        environment: that the place was found under.

    Attributes:
        native: a native call for the plan there; False where there is none, None where nobody has looked.
        program: of that call, which native code forgets with this.
        tell: called when a communicator is found.
    """

    def __init__(self, place: Place, environment: Mapping[str, str]) -> None:
        self._place, self._environment = place, environment
        self._found: Communicator | None = None
        self._group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.native: Native | None = None
        self.program: object = None
        self.tell: Callable[[], None] = lambda: None

    def __call__(self) -> Communicator:
        """The communicator: made, with all ranks of the group, when a call first needs it.

        Raises:
            StalePlanError: the place was found under other variables than now hold.
            MoeTritonError: what `communicator` raises.
        """
        current = self._found
        group = group_of(self._place.group_ep, "group_ep")
        if group is not self._group() or current is None or not current.is_usable:
            self.check_current()
            current = self._found = communicator(self._place)
            self.tell()
            self._group, self.native = weakref.ref(group), None
        return current

    def check_current(self) -> None:
        """Checks that the group's calls go by the variables that the place was found under.

        Raises:
            StalePlanError: by others.
        """
        if environment_of(self._place.group_ep) != self._environment:
            raise StalePlanError

    @property
    def is_made(self) -> bool:
        """Whether a call has needed it before."""
        name = self._place.group_ep
        if _made_for.get(name) is not group_of(name, "group_ep"):
            return False
        return (self._place, settings.current()) in _communicators.get(name, {})


def windows(name: str) -> list[tuple[Place, Communicator]]:
    """The communicators of a group, in the order of their making, and where each is.

    Args:
        name: of the expert-parallel group.
    """
    group = group_of(name, "name")
    if _made_for.get(name) is not group:
        return []
    return [(place, made) for (place, _), made in list(_communicators.get(name, {}).items())]


def is_tensor_parallel(name: str) -> bool:
    """Whether a group has windows of calls with tensor parallelism, as either of their two groups."""
    return any(
        place.group_tp and name in (place.group_ep, place.group_tp)
        for kept in list(_communicators.values())
        for place, _ in list(kept)
    )


def masked_ranks(name: str) -> frozenset[int]:
    """Ranks of a group that are masked in all of its windows, and in those to come.

    Args:
        name: of the expert-parallel group.
    """
    masked = _masked.get(name)  # as a rule nobody is
    return frozenset(masked) if masked and _made_for.get(name) is group_of(name, "name") else frozenset()


def have_masks_changed(name: str) -> bool:
    """Whether other ranks are masked than when this was asked last, or since the group has windows.

    Args:
        name: of the expert-parallel group.
    """
    _forget_former_group(name)
    masked, before = masked_ranks(name), _queried.get(name, frozenset())
    _queried[name] = masked
    return masked != before


def note_masked(name: str, ranks: Iterable[int], masked: bool, before: Windows) -> None:
    """Ranks have been masked in all windows of a group, or un-masked.

    Args:
        name: of the expert-parallel group.
        ranks: of it.
        masked: which of both.
        before: what had run by then: a call that waits for one of them may be over by now.
    """
    _forget_former_group(name)
    noted = _masked.setdefault(name, {})
    for rank in ranks:
        noted.pop(rank, None)
        if masked:
            noted[rank] = before


def check_unmaskable(name: str, ranks: Iterable[int]) -> None:
    """Checks that nothing has run in a group since ranks were masked, and no window was made or given back.

    Whoever has missed something would make other calls than are next here, or give another window back for a
    new one.

    Raises:
        BufferStateError: it has.
    """
    missed = [rank for rank in ranks if _masked[name][rank] != windows_of(name)]
    if missed:
        raise BufferStateError(
            f"rank(s) {missed} have missed calls of the group {name!r} while they were masked. They stay "
            f"masked until all ranks, these included, have called release."
        )


def _masked_at(place: Place) -> list[int]:
    """The masked ranks of a group that take part in a place."""
    return [rank for rank in sorted(masked_ranks(place.group_ep)) if place.number_of(rank) is not None]


def _refuse_masked(place: Place) -> None:
    """Checks that all ranks will come that a new window is made with.

    Raises:
        BufferStateError: some are masked.
    """
    if masked := _masked_at(place):
        raise BufferStateError(
            f"the group {place.group_ep!r} has no window for these shapes and attributes yet, and it cannot "
            f"be made without rank(s) {masked}, which are masked. Run every shape once before ranks are "
            f"masked, or pass elastic_info of those that are left."
        )


def _refuse_broken(kept: Communicator) -> None:
    try:
        kept.check_usable()
    except BufferStateError as error:
        raise BufferStateError(
            f"{error} npu_moe_distribute_buffer_reset does that for all buffers of a group."
        ) from None


def synchronize(name: str) -> None:
    """Waits for every call of this process in a group, graphs included, and raises what went wrong in one.

    With the CPU back end calls have ended when they return, and raise by themselves.

    Args:
        name: of the expert-parallel group.

    Raises:
        BufferStateError: a buffer is broken or in use by another thread.
        CommunicationTimeoutError: a rank's data did not come in time; that buffer is then broken.

    Examples:
        >>> outputs = torch_npu.npu_moe_distribute_dispatch_v2(x, expert_ids, *group)
        >>> torch_npu.synchronize(torch_npu.group_name())
    """
    for kept in list(_communicators.get(check_group("name", name), {}).values()):
        _refuse_broken(kept)
        kept.synchronize()


def release(name: str) -> None:
    """Gives back all memory of a group: its windows, and what is kept for later calls.

    The next call makes new windows; all ranks must release alike. Outputs that the caller still holds stay.

    HCCL's variables are read anew then.

    A call that another thread is inside of ends at once in a `BufferStateError`; this one waits for it.

    Examples:
        >>> torch_npu.release(torch_npu.group_name())
    """
    name = check_group("name", name)
    _environments.pop(name, None)
    _tallies.pop(name, None)
    _masked.pop(name, None)
    _queried.pop(name, None)
    _agreed_at.pop(name, None)
    communicators = _communicators.pop(name, {})
    if communicators:
        plans.clear()  # they lead to these, and have memory there
    for kept in communicators.values():
        kept.close()
