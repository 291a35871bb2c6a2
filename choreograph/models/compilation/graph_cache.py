"""Compiled graphs on disk, which later processes load without tracing the model.

Tracing takes seconds for each graph, even where inductor finds the result in its own cache. A file is named after all
that a graph depends on: the model's modules and configuration, versions, sources of this package, processor, threads and
compiler options. Weights are inputs of a graph and not in its file. The files hold pickled objects, as those of inductor's
cache do, so they are read only from a folder of the user in which others cannot write.
"""

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from platformdirs import user_cache_path
from torch import Tensor, nn

from ...attention.cpp_backend import cpu_flags, cpu_limits
from ...namespace import serialize
from ...utils import atomic_write_text

_log = logging.getLogger("choreograph")

_KNOWN_PACKAGES = {"torch", "transformers", "choreograph"}  # whose versions or sources are part of a graph's name
_PLAIN_TYPES = (str, int, float, bool, type(None), torch.dtype, torch.device)
_INPUT_NAMES = ("L_ids_", "L_positions_", "L_rows_")  # dynamo's names of the traced function's arguments

Slot = tuple[int, int, int | None]  # index of a graph's argument, index of the input, and its dimension for a size


class LoadedGraph:
    """Graph from a file, called with the traced function's inputs."""

    def __init__(self, artifact: Callable[..., Any], weights: list[Tensor | None], slots: Sequence[Slot]) -> None:
        self._artifact = artifact
        self._weights = weights  # by argument; None for those of `slots`
        self._slots = slots

    def __call__(self, *inputs: Tensor) -> Tensor:
        arguments: list[Any] = self._weights.copy()
        for slot, index, dim in self._slots:
            arguments[slot] = inputs[index] if dim is None else inputs[index].shape[dim]
        result: Tensor = self._artifact(*arguments)[0]
        return result


class GraphFile:
    """Compiled graph on disk: metadata in JSON and an artifact."""

    def __init__(self, path: Path, model: nn.Module) -> None:
        self._path, self._model = path, model
        self._artifact: Any = None  # what `compile` made
        self._metadata: dict[str, Any] = {}
        self.error: Exception | None = None  # of `compile`

    def load(self) -> LoadedGraph | None:
        """Return the graph that an earlier process stored, or None."""
        if not self._path.is_file():
            return None
        try:
            metadata = json.loads(self._path.read_bytes())
            artifact = self._path.with_name(metadata["artifact"])
            if _digest(artifact) != artifact.stem:
                raise ValueError(f"{artifact.name} has another hash")
            return self._load(artifact, metadata)
        except Exception as exc:  # a damaged file, or changed private parts of PyTorch
            _log.warning("%s cannot be loaded, the graph is traced: %s", self._path, str(exc)[:300])
            return None

    def compile(self, graph: torch.fx.GraphModule, arguments: list[Any], *, options: dict[str, Any]) -> Any:
        """Compile a traced graph; a backend of `torch.compile`.

        Raises:
            KeyError: if the graph reads a tensor that is neither an input nor one of the model.
        """
        from torch._inductor import standalone_compile

        try:
            nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
            # The fake tensors of the trace have the dimensions that are dynamic. From the real tensors, inductor would make
            # new ones with a symbol for each size: that of 2 tokens would be that of the pairs in packed weights, which is fixed.
            examples = [node.meta["example_value"] for node in nodes]
            self._metadata = self._describe_arguments([node.target for node in nodes], arguments, examples)
            self._artifact = standalone_compile(
                graph, examples, dynamic_shapes="from_graph", options={"config_patches": options}, aot=True
            )
        except Exception as exc:
            self.error = exc
            raise
        return self._artifact

    def save(self, check: Callable[[LoadedGraph], None]) -> LoadedGraph:
        """Store what was compiled; return it as a later process loads it.

        Args:
            check: raises an exception for a graph that must not be stored.
        """
        with tempfile.TemporaryDirectory(dir=self._path.parent) as folder:
            temporary = Path(folder) / "artifact"
            self._artifact.save(path=str(temporary))
            graph = self._load(temporary, self._metadata)
            check(graph)
            name = f"{_digest(temporary)}.graph"
            os.replace(temporary, self._path.with_name(name))
        atomic_write_text(self._path, json.dumps({**self._metadata, "artifact": name}))
        return graph

    def _load(self, artifact: Path, metadata: dict[str, Any]) -> LoadedGraph:
        from torch._inductor import CompiledArtifact

        tensors = dict(_named_tensors(self._model))
        weights = [None if name is None else tensors[name] for name in metadata["weights"]]
        return LoadedGraph(
            CompiledArtifact.load(path=str(artifact)), weights, [tuple(slot) for slot in metadata["slots"]]
        )

    def _describe_arguments(self, targets: list[str], arguments: list[Any], examples: list[Any]) -> dict[str, Any]:
        """Return weights by name and slots of inputs."""
        names = {id(tensor): name for name, tensor in _named_tensors(self._model)}
        inputs = {target: _INPUT_NAMES.index(target) for target in targets if target in _INPUT_NAMES}
        sizes = {
            str(size): (inputs[target], dim)
            for target, example in zip(targets, examples, strict=True)
            if target in inputs
            for dim, size in enumerate(example.shape)
        }
        weights: list[str | None] = []
        slots: list[Slot] = []
        for slot, (target, argument, example) in enumerate(zip(targets, arguments, examples, strict=True)):
            is_weight = target not in inputs and isinstance(argument, Tensor)
            if is_weight and id(argument) not in names:
                raise KeyError(f"{target} is not a tensor of the model")
            weights.append(names[id(argument)] if is_weight else None)
            if target in inputs:
                slots.append((slot, inputs[target], None))
            elif not is_weight:
                slots.append((slot, *sizes[str(example)]))
        return {"weights": weights, "slots": slots}


def graph_file(model: nn.Module, name: str) -> GraphFile | None:
    """Return the file of a model's graph, or None.

    Graphs of models with hooks, a replaced `forward` or classes of other packages are not stored; other
    replaced methods are not noticed.
    """
    try:
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config
    except ImportError:  # private modules
        return None
    folder = _private_folder()
    if folder is None or not all(map(_is_known, model.modules())):
        return None
    try:
        private = [inductor_config.get_hash().hex(), functorch_config.get_hash().hex()]
    except AttributeError:  # of private modules
        return None
    parts = [
        *(sys.version, str(torch.__version__), str(torch.version.git_version), transformers.__version__),
        *(cpu_flags(), cpu_limits(), str(torch.get_num_threads()), str(torch.are_deterministic_algorithms_enabled())),
        *(str(torch.get_default_dtype()), torch.get_float32_matmul_precision()),
        *private,
        *_describe(model),
    ]
    digest = hashlib.sha256(serialize(parts))
    for path in sorted(Path(__file__).parents[2].rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(path.read_bytes())
    return GraphFile(folder / f"{digest.hexdigest()[:32]}-{name}.json", model)


def _private_folder() -> Path | None:
    """Return the folder of graphs, or None if others can write there."""
    folder = user_cache_path("choreograph") / "graphs"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        _log.warning("%s belongs to another user or others can write there: compiled graphs are not stored", folder)
        return None
    return folder if os.access(folder, os.W_OK) else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_known(module: nn.Module) -> bool:
    """Check that a module's code is that of a known package."""
    kind = type(module)
    modules = kind.__module__, getattr(kind.forward, "__module__", "")
    has_hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not has_hooks and {name.partition(".")[0] for name in modules} <= _KNOWN_PACKAGES


def _describe(model: nn.Module) -> Iterator[str]:
    """Yield configuration, modules, their attributes, and shapes of tensors."""
    yield str(getattr(model, "config", ""))
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"{path} {type(module).__qualname__} of {type(module).__module__}"
        for name, value in vars(module).items():
            values = value if isinstance(value, (tuple, list)) else (value,)
            if all(isinstance(part, _PLAIN_TYPES) for part in values):
                yield f"{name}={value!r}"
        if projection := vars(module).get("packed_projection"):
            yield f"{projection.operator.__name__} {projection.features} {projection.start} {projection.end}"
    for name, tensor in _named_tensors(model):
        yield f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device}"


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters, buffers and packed weights; shared ones several times."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        if projection := vars(module).get("packed_projection"):
            yield f"{path}.packed", projection.packed
            if projection.bias is not None:
                yield f"{path}.packed_bias", projection.bias
