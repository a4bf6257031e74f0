"""Everything that the back end uses of torch_npu: streams, events, graphs, memory.

Sources: torch_npu's own Python sources, release 2.14.0 (``npu/streams.py``, ``npu/graphs.py``,
``npu/utils.py``, ``dynamo/torchair/_acl_concrete_graph/utils.py``) and its header ``NPUStream.h``. What
is not confirmed on a machine yet is listed in `moe_triton.tools.selftest.npu_assumptions`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch

from moe_triton.backends.npu.capabilities import CAPABILITIES
from moe_triton.core import plain_tensors
from moe_triton.core.errors import ToolchainError
from moe_triton.core.installing import install
from moe_triton.core.threads import in_thread

Stream = Any  # torch.npu.Stream
Event = Any  # torch.npu.Event


def imported() -> Any:
    """torch_npu.

    Raises:
        ToolchainError: it is missing, or its libraries are.
    """
    try:
        import torch_npu
    except ImportError as error:
        raise ToolchainError(
            f"the npu back end needs torch_npu, which cannot be imported ({error}). "
            f"Install it ({install('npu')}) and source CANN's set_env.sh."
        ) from error
    return torch_npu


class Runtime:
    """torch_npu on the device that is current at construction.

    Raises:
        ToolchainError: torch_npu is missing, or finds no device.
    """

    is_asynchronous = CAPABILITIES.is_asynchronous
    posts_from_one = True  # see `moe_triton.backends.npu.memfabric`

    def __init__(self) -> None:
        self._c = imported()._C
        self._npu: Any = torch.npu  # type: ignore[attr-defined]
        if not self._npu.is_available():
            raise ToolchainError(
                "torch_npu finds no NPU. See that `npu-smi info` lists one, and that "
                "ASCEND_RT_VISIBLE_DEVICES does not hide it."
            )
        self.device: torch.device = self._npu.current_stream().device

    @property
    def device_index(self) -> int:
        """Number of the device in this process."""
        return int(self.device.index or 0)

    def soc_name(self) -> str:
        """As ``Ascend910B3``."""
        return str(self._npu.get_device_name(self.device_index))

    def current_stream(self) -> Stream:
        """The stream of the user's own work."""
        return self._npu.current_stream()

    def make_stream(self) -> Stream:
        """A stream of our own."""
        return self._npu.Stream()

    def make_event(self, timed: bool = False) -> Event:
        """An event; a timed one can measure the time since another."""
        return self._npu.Event(enable_timing=timed)

    def handle(self, stream: Stream) -> int:
        """The stream as CANN's run time knows it.

        torch_npu submits work to its streams from a thread of its own. Asking for the handle waits until that
        thread has submitted everything, so that launches through the handle come after it.
        """
        return int(stream.npu_stream)

    def describe(self, *tensors: object) -> Hashable | None:
        """Returns a key of the dtypes, sizes, contiguity and devices of a call's tensors, or None."""
        return plain_tensors.describe(*tensors)

    def is_capturing(self) -> bool:
        """Whether the current stream's work goes into a graph."""
        return bool(self._npu.is_current_stream_capturing())

    def captured(self, run: Callable[[], object]) -> Callable[[], None]:
        """Captures work in a graph, as ``torch.npu.graph`` does.

        Args:
            run: puts it on the current stream.

        Returns:
            What runs the graph on the stream that is current then.
        """
        graph = self._npu.NPUGraph()
        with self._npu.graph(graph):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def synchronize(self) -> None:
        """Waits for all streams of the device, or until a signal handler raises, as with Ctrl-C."""
        # The device is named, because another thread's current one may differ.
        if threading.current_thread() is threading.main_thread():
            # In another thread: this one handles signals, which it could not do inside the library.
            in_thread(lambda: self._npu.synchronize(self.device), "synchronize").result()
        else:
            self._npu.synchronize(self.device)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned host memory of the same shape, which the device can copy to asynchronously."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").pin_memory()

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's contents in host memory; waits for the current stream."""
        return tensor.cpu()

    def copy(self, to: torch.Tensor, source: torch.Tensor, stream: Stream | None = None) -> None:
        """Copies on a stream, asynchronously; None for the current one."""
        if stream is None:
            to.copy_(source, non_blocking=True)
            return
        with self._npu.stream(stream):
            to.copy_(source, non_blocking=True)

    def tensor_at(self, address: int, num_bytes: int) -> torch.Tensor:
        """Device memory that torch does not own, as a flat uint8 tensor."""
        storage = self._c._construct_storage_from_data_pointer(address, self.device, num_bytes)
        metadata = {
            "data_ptr": address,
            "nbytes": num_bytes,
            "size": torch.Size([num_bytes]),
            "stride": (1,),
            "dtype": torch.uint8,
            "device": self.device,
            "storage_offset": 0,
        }
        tensor: torch.Tensor = self._c._construct_NPU_Tensor_From_Storage_And_Metadata(metadata, storage)
        return tensor
