"""Compiled graphs on disk, which later processes load without tracing the model.

Tracing takes seconds for each graph, even where inductor finds the result in its own cache. A file is named after all
that a graph depends on: the model's modules and configuration, versions, processor, threads and compiler options. Weights
are inputs of a graph and not in its file. Like those of inductor's cache, the files hold pickled objects, so they are read
from the user's own cache folder only.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from platformdirs import user_cache_path
from torch import Tensor, nn

from ..attention.cpp_backend import cpu_flags
from ..utils import atomic_write_text, ensure_dir

_log = logging.getLogger("choreograph")

_KNOWN_PACKAGES = {"torch", "transformers", "choreograph"}  # whose versions or sources are part of a graph's name
_PLAIN_TYPES = (str, int, float, bool, type(None), torch.dtype, torch.device)

Slot = tuple[int, int, int | None]  # index of a graph's argument, index of the input, and its dimension for a size


class LoadedGraph:
    """Graph from a file, called with the traced function's inputs."""

    def __init__(self, artifact: Callable[..., Any], weights: list[Tensor | None], slots: list[Slot]) -> None:
        self._artifact = artifact
        self._weights = weights  # by argument; None for those of `slots`
        self._slots = slots

    def __call__(self, *inputs: Tensor) -> Tensor:
        arguments: list[Any] = self._weights.copy()
        for slot, index, dim in self._slots:
            arguments[slot] = inputs[index] if dim is None else inputs[index].shape[dim]
        result: Tensor = self._artifact(*arguments)[0]
        return result


class GraphCache:
    """Compiled graphs of one model in the user's cache folder."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def load(self, name: str) -> LoadedGraph | None:
        """Return the graph of an earlier process, or None."""
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        try:
            note = json.loads(path.with_suffix(".json").read_bytes())
            if hashlib.sha256(path.read_bytes()).hexdigest() != note["sha256"]:
                raise ValueError("its hash is another")
            tensors = dict(_named_tensors(self._model))
            weights = [None if key is None else tensors[key] for key in note["weights"]]
            from torch._inductor import CompiledArtifact

            artifact = CompiledArtifact.load(path=str(path))
        except Exception as exc:  # a damaged file, or changed private parts of PyTorch
            _log.warning("%s cannot be loaded and is compiled again: %s", path, str(exc)[:300])
            return None
        return LoadedGraph(artifact, weights, [tuple(slot) for slot in note["slots"]])

    def backend(
        self, name: str, input_names: Sequence[str], graph_pass: Callable[[torch.fx.Graph], None]
    ) -> Callable[..., Any]:
        """Return a backend of `torch.compile`: inductor, and the graph is stored.

        Args:
            input_names: argument names of the traced function, in the order of a `LoadedGraph`'s inputs.
            graph_pass: changes the graph before it is lowered.
        """
        path = self._path(name)  # before the model is prepared for tracing
        options = {"post_grad_custom_pre_pass": graph_pass}

        def compile(graph: torch.fx.GraphModule, arguments: list[Any], **_: object) -> Any:
            from torch._inductor.compile_fx import compile_fx

            if path is not None:
                try:
                    return self._compile_and_store(path, graph, arguments, input_names, options)
                except Exception as exc:
                    _log.warning("graph %s is not stored: %s", name, str(exc)[:300])
            return compile_fx(graph, arguments, config_patches=options)

        return compile

    def _compile_and_store(
        self, path: Path, graph: torch.fx.GraphModule, arguments: list[Any], input_names: Sequence[str], options: Any
    ) -> Any:
        from torch._inductor import standalone_compile

        note = self._describe_arguments(graph, arguments, input_names)
        artifact = standalone_compile(
            graph,
            list(arguments),
            dynamic_shapes="from_tracing_context",
            options={"config_patches": options},
            aot=True,
        )
        ensure_dir(path.parent)
        artifact.save(path=str(path))
        note["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        atomic_write_text(path.with_suffix(".json"), json.dumps(note))
        return artifact

    def _describe_arguments(
        self, graph: torch.fx.GraphModule, arguments: Sequence[Any], input_names: Sequence[str]
    ) -> dict[str, Any]:
        """Return weights by name and slots of inputs.

        Raises:
            KeyError: for other tensors.
        """
        names = {id(tensor): key for key, tensor in _named_tensors(self._model)}
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        inputs = {f"L_{name}_": index for index, name in enumerate(input_names)}
        sizes = {
            str(size): (inputs[node.target], dim)
            for node in nodes
            if node.target in inputs
            for dim, size in enumerate(node.meta["example_value"].shape)
        }
        weights: list[str | None] = []
        slots: list[Slot] = []
        for slot, (node, argument) in enumerate(zip(nodes, arguments, strict=True)):
            is_weight = isinstance(argument, Tensor) and node.target not in inputs
            weights.append(names[id(argument)] if is_weight else None)
            if node.target in inputs:
                slots.append((slot, inputs[node.target], None))
            elif not is_weight:
                slots.append((slot, *sizes[str(argument)]))
        return {"weights": weights, "slots": slots}

    def _path(self, name: str) -> Path | None:
        """Return the file of a graph, or None to store none."""
        from torch._functorch import config as functorch_config
        from torch._inductor import config as inductor_config

        if not all(map(_is_known, self._model.modules())):
            return None
        parts = [
            *(sys.version, torch.__version__, str(torch.version.git_version), transformers.__version__),
            *(cpu_flags(), str(torch.get_num_threads()), str(torch.are_deterministic_algorithms_enabled())),
            *(inductor_config.get_hash().hex(), functorch_config.get_hash().hex()),
            *_describe(self._model),
        ]
        digest = hashlib.sha256("\n".join(parts).encode())
        for file in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(file.read_bytes())
        return user_cache_path("choreograph") / "graphs" / f"{digest.hexdigest()[:32]}-{name}.graph"


def _is_known(module: nn.Module) -> bool:
    """Whether a known package has the code of a module."""
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
