"""A pretended GPU: tensors that say they are on a CUDA device and are computed by the CPU.

They keep to the rules of a device: an operation over tensors of both is refused, values come to the host by a copy
alone, and what may not be recorded as a graph is refused while one is recorded. So what only a GPU would show of where
tensors are, and of when the host waits, is shown here; a GPU's numbers, speed and order of work are not.
"""

import ctypes
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from choreograph.attention import triton_kernels as attention

aten = torch.ops.aten
CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
SYNCHRONIZING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
PINNED: WeakKeyDictionary[torch.UntypedStorage, bool] = WeakKeyDictionary()
# torch refuses even the name of a device for which nobody says how to make it the current one
GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);"""


class FakeCudaTensor(torch.Tensor):
    """Numbers that a pretended GPU has. inner: where they really are. Below Python it passes for a tensor of the host,
    so that torch's own backward passes take it."""

    inner: torch.Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "FakeCudaTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def to(self, *args: Any, non_blocking: bool = False, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        device, dtype, waits_not, _ = torch._C._nn._parse_to(*args, **kwargs)
        if not copy and (device is None or device.type == "cuda") and dtype in (None, self.dtype):
            return self
        return aten._to_copy(self, dtype=dtype, device=device or CUDA, non_blocking=non_blocking or waits_not)

    def cpu(self) -> torch.Tensor:
        return self.to(HOST)

    def cuda(self, *_: Any, **__: Any) -> torch.Tensor:
        return self

    def get_device(self) -> int:
        return 0

    def tolist(self) -> Any:
        GPU.record_sync("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return torch.tensor(data, dtype=dtype or self.dtype, device=CUDA)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def storage(self) -> Any:
        return self.inner.storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"OnGpu({self.inner!r})"


class FakeGpu:
    """What happens on it. asked: how often the host waited, and for what. recording: what a graph will play."""

    def __init__(self) -> None:
        self.sync_counts: Counter[str] = Counter()
        self.capture: list[Callable[[], object]] | None = None

    def record_sync(self, reason: str) -> None:
        if self.capture is not None:
            raise RuntimeError(f"{reason}: operation not permitted when stream is capturing")
        self.sync_counts[reason] += 1


GPU = FakeGpu()


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation of torch, on tensors of one device."""
    if func is aten.index_put.default and any(isinstance(x, FakeCudaTensor) for x in _tensors(args[1])):
        args = (_wrap(args[0]), *args[1:])  # zeros that a backward pass made
    given = list(_tensors((args, kwargs)))
    there = [x for x in given if isinstance(x, FakeCudaTensor)]
    device = kwargs.get("device")
    on_gpu = device.type == "cuda" if device is not None else bool(there)
    if func is aten.is_pinned.default:
        return not there and args[0].untyped_storage() in PINNED
    if there:
        _check(func, args, given)
    if func in (aten._to_copy.default, aten.copy_.default):
        _copy_between_devices(func, args, kwargs, on_gpu)
    kwargs = kwargs | ({"device": HOST} if on_gpu and device else {})
    pinned = kwargs.pop("pin_memory", None)
    if there and func is aten._fused_sdp_choice.default:
        return 0  # the only kernel that both devices have
    if there and func is aten.histc.default:
        return FakeCudaTensor(
            func(args[0].inner.float(), *args[1:], **kwargs).to(args[0].dtype)
        )  # a GPU counts integers, too

    def work() -> Any:
        return func(*_unwrap(args), **_unwrap(kwargs))

    if func is aten._pin_memory.default:
        made = args[0].clone()
        PINNED[made.untyped_storage()] = True
        return made
    if not on_gpu:
        out = work()
        if pinned:
            PINNED[out.untyped_storage()] = True
        return out
    if func._schema.is_mutable:
        if GPU.capture is not None:
            GPU.capture.append(work)
        return _written_inputs(func, args, kwargs, work())
    return run_and_capture(work, there)


def _check(func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> None:
    """Refuses tensors of both devices; but a GPU takes single numbers of the host, and indices, which it waits for."""
    apart = [x for x in tensors if not isinstance(x, FakeCudaTensor)]
    if func in SYNCHRONIZING:
        GPU.record_sync(str(func))
    if func in INDEXED and isinstance(args[0], FakeCudaTensor):
        indices = list(_tensors(args[1]))
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            GPU.record_sync("index by truth")
        if any(not isinstance(x, FakeCudaTensor) for x in indices):
            GPU.record_sync("index of the host")
        apart = [x for x in apart if not any(x is one for one in indices)]
    copies = func in (aten.copy_.default, aten._to_copy.default)
    if not copies and any(x.dim() or (x is tensors[0] and func._schema.is_mutable) for x in apart):
        raise RuntimeError(f"{func}: tensors on the host and on the GPU: {[tuple(x.shape) for x in apart]}")


def _copy_between_devices(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], to_gpu: bool) -> None:
    """A copy between the devices. Of pageable memory none can be recorded."""
    source = args[0]
    if func is aten.copy_.default:
        to_gpu, source = isinstance(args[0], FakeCudaTensor), args[1]
    waits = not (kwargs.get("non_blocking") or (func is aten.copy_.default and args[2:] and args[2]))
    if isinstance(source, FakeCudaTensor) and not to_gpu:
        GPU.record_sync("copy to the host")
    elif to_gpu and not isinstance(source, FakeCudaTensor):
        pinned = source.untyped_storage() in PINNED
        if waits or (GPU.capture is not None and not pinned):
            GPU.record_sync("copy to the GPU")
    kwargs.pop("non_blocking", None)


def _written_inputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Of an operation that writes: the tensors that it was given to write into."""
    by_name = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    known = {id(x.inner): x for x in _tensors(list(by_name.values())) if isinstance(x, FakeCudaTensor)}
    return _map(torch.Tensor, lambda x: known.get(id(x)) if id(x) in known else FakeCudaTensor(x), out)


def run_and_capture(work: Callable[[], Any], gpu_inputs: list[FakeCudaTensor]) -> Any:
    """Work over what is there, now; a graph does it again, and writes where it wrote first. Views need nothing."""
    out = work()
    owned = {x.untyped_storage().data_ptr() for x in gpu_inputs}
    made = list(_tensors(out))

    def again() -> None:
        for old, new in zip(made, _tensors(work()), strict=False):
            old.copy_(new)

    if GPU.capture is not None and not any(x.untyped_storage().data_ptr() in owned for x in made):
        GPU.capture.append(again)
    return _map(torch.Tensor, FakeCudaTensor, out)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list, dict)):
        for x in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(x)


def _map(tensor_type: type, function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tensor_type):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        made = [_map(tensor_type, function, x) for x in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return {name: _map(tensor_type, function, x) for name, x in tree.items()} if isinstance(tree, dict) else tree


def _unwrap(tree: Any) -> Any:
    return _map(FakeCudaTensor, lambda x: x.inner, tree)


def _wrap(x: torch.Tensor) -> FakeCudaTensor:
    return x if isinstance(x, FakeCudaTensor) else FakeCudaTensor(x)


class FakeCudaMode(TorchDispatchMode):
    """Takes over what makes tensors on the device, or brings them there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


class FakeKernel:
    """A Triton program of the interpreter, or what stands in for one, over where the numbers really are."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start

    def __getitem__(self, grid: Any) -> "FakeKernel":
        return FakeKernel(self._start[grid])  # type: ignore[index]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(not isinstance(x, FakeCudaTensor) for x in _tensors((args, kwargs))):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return run_and_capture(lambda: self._start(*_unwrap(args), **_unwrap(kwargs)), [])


class Stream:
    """Its work is done when it is asked for; who waits is counted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def synchronize(self) -> None:
        GPU.record_sync("synchronize a stream")

    wait_stream = wait_event = lambda self, other: None


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other._at - self._at)

    def query(self) -> bool:
        return True

    wait = synchronize = lambda self, stream=None: None


class Graph:
    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        for one in self.work:
            one()


@contextmanager
def capture_graph(graph: Graph, **_: Any) -> Iterator[None]:
    GPU.capture = graph.work
    try:
        yield
    finally:
        GPU.capture = None


@contextmanager
def _stream_context(_: Any) -> Iterator[None]:
    yield


def _module_to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """As `Module.to`. A tensor cannot become one of the pretended GPU, so others take its place; tied ones stay so."""
    device, dtype, waits_not, _ = torch._C._nn._parse_to(*args, **kwargs)
    device = CUDA if device is not None and device.type == "cuda" else device
    known: dict[torch.nn.Parameter, torch.nn.Parameter] = {}

    def there(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(device, dtype if x.is_floating_point() else None, waits_not)

    for part in module.modules():
        for name, x in part._parameters.items():
            if x is not None and (device not in (None, x.device) or dtype not in (None, x.dtype)):
                if x not in known:
                    known[x] = torch.nn.Parameter(there(x), x.requires_grad)
                part._parameters[name] = known[x]
        for name, x in part._buffers.items():
            part._buffers[name] = None if x is None else there(x)
    return module


@cache
def _guard() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library, torchs = Path(folder, "guard.cpp"), Path(folder, "guard.so"), Path(torch.__file__).parent
        source.write_text(GUARD)
        command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{torchs}/include", source, "-o", library]
        subprocess.run([*command, f"-L{torchs}/lib", "-lc10"], check=True)
        return ctypes.CDLL(str(library))


@contextmanager
def fake_cuda(memory: int = 1 << 26, kernels: Iterable[tuple[Any, str]] = ()) -> Iterator[FakeGpu]:
    """Within, `device="cuda"` works, in threads that begin within too. memory: bytes that are said to be free.
    programs: further functions, as (module, name), that stand in for programs of the GPU."""
    run, stream = threading.Thread.run, Stream()

    def in_thread(self: threading.Thread) -> None:
        with FakeCudaMode():
            run(self)

    def nothing(*_: Any, **__: Any) -> None:
        pass

    state = {
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": list,
        "set_rng_state": nothing,
        "set_rng_state_all": nothing,
        "manual_seed_all": nothing,
    }
    stand_ins = state | {
        "_lazy_init": nothing,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "mem_get_info": lambda *_: (memory, memory),
        "get_device_name": lambda *_: "pretended",
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=8, total_memory=memory),
        "get_device_capability": lambda *_: (9, 0),
        "is_bf16_supported": lambda *_, **__: True,
        "synchronize": lambda *_: GPU.record_sync("synchronize"),
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": nothing,
        "empty_cache": nothing,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "set_stream": nothing,
        "stream": _stream_context,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capture_graph,
        "graph_pool_handle": lambda: (0, 0),
    }
    _guard()
    with ExitStack() as stack:
        for module, names in ((torch.cuda, stand_ins), (torch.cuda.random, state)):
            for name, value in names.items():
                stack.enter_context(patch.object(module, name, value))
        for module, name in [*((attention, name) for name in ("write", "attend", "merge")), *kernels]:
            stack.enter_context(patch.object(module, name, FakeKernel(getattr(module, name))))
        stack.enter_context(patch.object(torch.nn.Module, "to", _module_to))
        stack.enter_context(patch.object(threading.Thread, "run", in_thread))
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` makes them there, and sends them where modes see it
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(FakeCudaMode())
        GPU.sync_counts.clear()
        yield GPU
