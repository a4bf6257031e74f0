"""DeepEP's names: whoever asks for one is told what is here in its place (docs/from-deepep.md)."""

from __future__ import annotations

from types import FrameType
from typing import NoReturn, TypeVar

Class = TypeVar("Class", bound=type)

PAGE = "docs/from-deepep.md"
OF_MODULE = {
    "Buffer": "use EPBuffer",
    "ElasticBuffer": "use EPBuffer",
    "BufferAllocator": "use moe_triton.balance.allocate_redundant_experts",
    "EventOverlap": "calls run on the current stream, and those with wait=False return a Pending",
}
OF_BUFFER = {
    "low_latency_dispatch": "use dispatch",
    "low_latency_combine": "use combine",
    "destroy": "use close",
    "get_low_latency_rdma_size_hint": "use get_buffer_size_hint",
    "clean_low_latency_buffer": "it is never needed",
    "get_next_low_latency_combine_buffer": "use expert_output",
    "low_latency_update_mask_buffer": "use update_mask",
    "get_dispatch_layout": "dispatch works the layout out",
    "lb_prefetch_weights": "use moe_triton.balance.allocate_redundant_experts",
    "lb_reduce_grads": "use moe_triton.balance.allocate_redundant_experts",
}


class Elsewhere:
    """A class's attribute that is not there, as ``hasattr`` says, and says in its error what is.

    Args:
        name: of the attribute.
        instead: what to do instead.
    """

    def __init__(self, name: str, instead: str) -> None:
        self._name, self._instead = name, instead

    def __get__(self, instance: object, owner: type) -> NoReturn:
        message = f"{owner.__name__!r} object has no attribute {self._name!r}: {self._instead} ({PAGE})"
        raise AttributeError(message, name=self._name, obj=owner if instance is None else instance)


def with_names_of_deepep(owner: Class) -> Class:
    """Adds `OF_BUFFER` to a class. A ``__getattr__`` would make every attribute that is there slower."""
    for name, instead in OF_BUFFER.items():
        setattr(owner, name, Elsewhere(name, instead))
    return owner


def missing(module: str, name: str, asker: FrameType) -> AttributeError | ImportError:
    """The error about a name that a module does not have.

    Args:
        module: its name.
        name: the one that is not there.
        asker: the frame that asks. ``from module import name`` asks in importlib's, and would leave the
            message of an AttributeError out.
    """
    if name not in OF_MODULE:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    told = f"{OF_MODULE[name]} ({PAGE})"
    if asker.f_code.co_name == "_handle_fromlist":
        return ImportError(f"cannot import name {name!r} from {module!r}: {told}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}: {told}")
