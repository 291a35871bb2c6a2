"""Execution of batches: forward pass and sampling; on a GPU, overlapped with scheduling."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..attention.backend import Backend, ForwardContext
from ..attention.metadata import AttentionMetadata, build_metadata
from ..kv_cache.entry import group_layers_by_context
from ..kv_cache.pool import KVPool
from ..layer_pattern import LayerPattern
from ..models.model_set import ModelSet
from ..models.tensor_parallel import TPGroup
from ..outputs import TokenLogprob
from ..request.decode_state import DecodeState
from ..request.request import Request
from .batch import Batch
from .overlap import OverlapScheduler
from .prompt_scoring import record_scores
from .sampler import sample


class ModelRunner:
    """Model execution and sampling; on a GPU, overlapped with scheduling."""

    def __init__(self, model_set: ModelSet, pool: KVPool, backend: Backend) -> None:
        self.overlaps = pool.keys[0].device.type == "cuda"
        self._model_set, self._pool = model_set, pool
        self.backend = backend
        self._overlap_scheduler = OverlapScheduler(model_set, self._make_forward_context, self.overlaps)

    def launched_requests(self) -> list[Request]:
        """Return the requests whose next token the device already computes.

        A batch of only these requests needs no further computation.
        """
        return self._overlap_scheduler.launched()

    def reset(self) -> None:
        """Discard planned and launched steps; called when no request runs."""
        self._overlap_scheduler.reset()

    def forward(self, batch: Batch) -> Tensor | None:
        """Run the model on a batch.

        Returns the logits of the sampled rows, (len(batch.sampled), V) float32; None for a batch
        that is computed in some layers only.
        """
        if self.overlaps:
            logits = self._overlap_scheduler.take_logits(batch)
            if logits is not None:
                self._overlap_scheduler.plan_next(batch)
                return logits
        forward_context = self._overlap_scheduler.take_plan(batch) or self._make_forward_context(batch)
        hf_model = self._model_set.by_group[batch.chunks[0].request.weights_group]
        if batch.computed_layers is not None:
            for first, end in LayerPattern.from_layers(batch.computed_layers).ranges:
                forward_context.injected_hidden = {first: _hidden_inputs(batch, self._pool, first)} if first else {}
                hf_model.forward_layers(first, end, batch.tokens, batch.positions, forward_context, batch.models)
            return None
        if batch.num_layers is not None and hf_model.can_run_layers:
            hf_model.forward_layers(0, batch.num_layers, batch.tokens, batch.positions, forward_context, batch.models)
            return None
        rows = batch.logits_rows
        if hf_model.tp_group is None:
            logits = hf_model.forward(batch.tokens, batch.positions, forward_context, rows, batch.models)
        else:
            with _synchronized(batch, hf_model.tp_group):
                logits = hf_model.forward(batch.tokens, batch.positions, forward_context, rows, batch.models)
        self._overlap_scheduler.plan_next(batch)
        return record_scores(batch, logits) if batch.scored else logits

    def sample(self, logits: Tensor, batch: Batch, *, launch_next: bool) -> list[int | None]:
        """Sample a token per row of `batch.sampled`; None for NaN logits.

        With tensor parallelism, every rank takes the tokens and log-probabilities of rank 0.

        Args:
            launch_next: launch the next step early; set if no other request could compute now.
        """
        decode_states: list[DecodeState] = []
        for request in batch.sampled:
            assert request.decode_state is not None
            decode_states.append(request.decode_state)
        for index, decode_state in batch.draft_states.items():
            decode_states[index] = decode_state
        sample_output = sample(logits, decode_states)
        if launch_next:
            self._overlap_scheduler.launch_next(sample_output)
        sampled, tp_group = sample_output.read(), self._model_set.base.tp_group
        if tp_group is None:
            return sampled
        logprobs = [
            g.next_logprob and [g.next_logprob.logprob, list(g.next_logprob.top.items())] for g in decode_states
        ]
        synced = tp_group.broadcast("tokens", [sampled, logprobs])
        for decode_state, token, logprob in zip(decode_states, *synced, strict=True):
            decode_state.next_logprob = logprob and TokenLogprob(token, logprob[0], dict(map(tuple, logprob[1])))
        tokens: list[int | None] = synced[0]
        return tokens

    def _make_forward_context(self, batch: Batch) -> ForwardContext:
        pool, model_info = self._pool, self._model_set.get(batch.models[0]).model_info
        metadata, layer_metadata = _build_metadata(batch, len(pool.keys))
        hidden = {}
        if batch.computed_layers is None and pool.hidden:
            hidden = {
                layer: pool.hidden[layer] for layer in self._model_set.captured_layers(batch.models[0], pool.hidden)
            }
        return ForwardContext(
            metadata,
            pool.keys,
            pool.values,
            model_info.attention_specs,
            self.backend,
            batch.layer_waiters,
            layer_metadata,
            hidden,
            hooked=batch.hooked,
        )


@contextmanager
def _synchronized(batch: Batch, tp_group: TPGroup) -> Iterator[None]:
    """Compute only if the batch is the same on every rank."""
    # wait for all loads first: a failed one must raise before any rank computes
    for wait_for_layer in batch.layer_waiters:
        wait_for_layer(0)
    with tp_group.synchronized_step(
        (batch.tokens, batch.positions, batch.slots, batch.logits_rows, list(batch.reads()))
    ):
        yield


def _build_metadata(batch: Batch, num_layers: int) -> tuple[AttentionMetadata, dict[int, AttentionMetadata]]:
    """Return attention metadata of layer 0 and of layers that differ.

    A layer differs if its context does. For most steps the second mapping is empty.
    """
    main_group, *other_groups = group_layers_by_context(batch.context_slices, num_layers)
    layer_metadata: dict[int, AttentionMetadata] = {}
    for layers in other_groups:
        metadata = build_metadata(batch.slots, batch.reads(layers[0]), batch.positions)
        layer_metadata |= dict.fromkeys(layers, metadata)
    return build_metadata(batch.slots, batch.reads(main_group[0]), batch.positions), layer_metadata


def _hidden_inputs(batch: Batch, pool: KVPool, layer: int) -> Tensor:
    """Return the cached input hidden states of `layer`, (1, N, E)."""
    slots = []
    for chunk in batch.chunks:
        source = chunk.request.entry.layers.hidden_source
        assert source is not None and layer in source.layers.hidden
        batch.wait_for_inputs(source, layer)
        slots += [source.slot(token) for token in range(chunk.token_start, chunk.token_end)]
    return pool.hidden[layer][slots][None]
