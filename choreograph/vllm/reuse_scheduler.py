"""Scheduler's half of the connector: plans requests, owns the index."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logger import init_logger

from .entry_index import EntryIndex, EntryScope, KVRecord
from .reuse_params import FIELD, VERSION, RefusedRequestError, ReuseKind, ReuseParams, parse_params
from .reuse_plan import PlanBuilder, PlannedSave, ReusePlan, plan_messages, plan_spans
from .step_metadata import LoadOrder, LoadPiece, SaveOrder, StepOrders
from .turn_boundaries import TurnBoundaries

logger = init_logger(f"vllm.{__name__}")  # vLLM configures the loggers below its own


@dataclass
class _TrackedRequest:
    """A live request and its plan."""

    request: Any  # vllm.v1.request.Request
    scope: EntryScope
    params: ReuseParams
    mode: ReuseKind
    salt: str | None  # `cache_salt` that the client sent
    plan: ReusePlan = field(default_factory=ReusePlan)
    version: int = 0  # of the index at planning; -1: it is not planned again
    refusal: str | None = None
    num_local: int = 0  # tokens found in the prefix cache at admission
    num_external: int = 0  # tokens that its admission loads
    reused_end: int = 0  # of the prompt tokens that are read from entries
    is_admitted: bool = False
    reload: int | None = None  # token that was computed in place of a reused one, to load again
    block_ids: list[int] = field(default_factory=list)
    pending: list[PlannedSave] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)


class ReuseScheduler:
    """Plans and tracks requests in vLLM's scheduler.

    Args:
        capacity: tokens that workers may store.
        default_mode: mode of requests that name none.
        boundaries: of turns; None: mode `messages` reuses nothing.
        can_compute_holes: whether the model runner takes the number of computed tokens from the scheduler.
        min_tokens: shorter turns of chats are computed.
        min_moved: shorter turns of chats are moved only before longer ones.
    """

    def __init__(
        self,
        *,
        capacity: int,
        block_size: int,
        default_mode: ReuseKind,
        boundaries: TurnBoundaries | None,
        can_compute_holes: bool,
        min_tokens: int,
        min_moved: int,
    ) -> None:
        self.index = EntryIndex(capacity)
        self._block_size, self._default_mode = block_size, default_mode
        self._boundaries, self._min_tokens, self._min_moved = boundaries, min_tokens, min_moved
        self._can_compute_holes = can_compute_holes
        self._tracked: dict[str, _TrackedRequest] = {}
        self._admitted: list[_TrackedRequest] = []  # since the last step, with tokens to load
        self._orders = StepOrders()

    # -- arrival --------------------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """Plan a request and give its blocks their identity."""
        try:
            params, refusal = parse_params(request.kv_transfer_params), None
        except RefusedRequestError as exc:
            params, refusal = ReuseParams(), str(exc)
            request.kv_transfer_params = None
        mode = params.mode or ("spans" if params.is_explicit else self._default_mode)
        lora = request.lora_request
        adapter = () if lora is None else (lora.lora_name, lora.lora_int_id, lora.lora_path)
        scope = EntryScope(request.cache_salt, adapter, tuple(sorted(set(params.labels))), params.workflow)
        tracked = _TrackedRequest(request, scope, params, mode, request.cache_salt, refusal=refusal)
        self._tracked[request.request_id] = tracked
        is_text = request.prompt_token_ids is not None and request.prompt_embeds is None and not request.mm_features
        if not is_text or request.sampling_params is None or request.resumable:
            reason = "only for prompts of text that is sent at once"
        elif request.skip_reading_prefix_cache:  # vLLM then reads no connector
            reason = "vLLM computes a prompt with prompt_logprobs or skip_reading_prefix_cache anew"
        else:
            reason = None
        if reason is not None:
            tracked.mode = "exact"
            if params.is_explicit:
                tracked.refusal = f"kv_transfer_params.{FIELD}: spans and store: {reason}"
        elif refusal is None:
            self._plan(tracked)
        if tracked.refusal is not None or tracked.plan.missing:
            request.skip_reading_prefix_cache = False  # the scheduler would not ask the connector
            logger.warning(
                "request %s: %s",
                request.request_id,
                tracked.refusal or f"not stored, or of other tokens: {tracked.plan.missing}",
            )
        if isinstance(params.steps, dict):
            for name, steps in params.steps.items():
                if (record := self.index.find_name(scope, name)) is not None:
                    self.index.hint(record, steps)
        elif params.steps is not None:
            for run in tracked.plan.runs:
                self.index.hint(run.record, params.steps)

    def _plan(self, tracked: _TrackedRequest) -> None:
        request, tokens = tracked.request, tracked.request.prompt_token_ids
        builder = PlanBuilder(
            tokens, tracked.scope, repair=tracked.params.repair, can_compute_holes=self._can_compute_holes
        )
        if tracked.mode == "spans":
            try:
                plan_spans(tokens, tracked.params, tracked.scope, self.index, builder)
            except RefusedRequestError as exc:
                tracked.refusal = f"kv_transfer_params.{FIELD}: {exc}"
                return
        elif tracked.mode == "messages" and self._boundaries is not None:
            bounds = self._boundaries.split(tokens)
            if len(bounds) > 1:
                plan_messages(tokens, bounds, tracked.scope, self.index, builder, self._min_tokens, self._min_moved)
        plan = builder.finish()
        for run in plan.runs:
            self.index.pin(run.record)
            self.index.use(run.record)
        self._unpin(tracked)
        tracked.plan, tracked.version = plan, self.index.version
        tracked.pending = list(plan.saves)
        if plan.places is not None or request.cache_salt != tracked.salt:
            _set_salt(request, plan.salt(tracked.salt))

    def _unpin(self, tracked: _TrackedRequest) -> None:
        for run in tracked.plan.runs:
            self.index.unpin(run.record)

    # -- admission ------------------------------------------------------------------------------------------

    def count_reused(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """Return how many tokens follow `num_local` cached ones, and whether later."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        tracked.num_local = num_local
        if tracked.refusal is not None or tracked.plan.missing:
            return 1, True  # a load that fails ends the request with an error
        if tracked.is_admitted and tracked.plan.has_holes and num_local:
            # Preempted: blocks of its own may be registered, but not filled.
            _set_salt(request, tracked.plan.salt(tracked.salt))
            return None, False
        if tracked.mode == "messages" and tracked.version not in (self.index.version, -1):
            before = request.cache_salt
            self._plan(tracked)  # messages have been stored since it arrived
            tracked.version = -1
            if request.cache_salt != before:
                return None, False  # the prefix cache was asked for blocks of another identity
        return max(0, tracked.plan.covered(num_local) - num_local), False

    def admit(self, request: Any, block_ids: Sequence[int], num_external: int) -> None:
        """Note the pages of a request that is admitted."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = list(block_ids)
        if tracked.refusal is not None or tracked.plan.missing:
            if num_external:
                self._orders.refused.append(request.request_id)
                self._orders.refused_blocks.append(block_ids[tracked.num_local // self._block_size])
            return
        tracked.is_admitted, tracked.reload, tracked.version = True, None, -1
        tracked.num_external = num_external
        tracked.reused_end = request.num_tokens if tracked.plan.has_holes else tracked.num_local + num_external
        if num_external:
            self._admitted.append(tracked)

    # -- steps ----------------------------------------------------------------------------------------------

    def order_step(self, output: Any) -> StepOrders:
        """Return the orders of a step; compute holes between reused runs first.

        Args:
            output: the `SchedulerOutput`. A request with a hole before a reused run computes the hole alone, and
                continues behind the run.
        """
        for admitted in self._admitted:
            self._load(admitted, admitted.num_local, admitted.num_local + admitted.num_external)
        self._admitted = []
        for request_id in output.preempted_req_ids or ():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.plan.has_holes:
                _set_salt(tracked.request, tracked.plan.salt(tracked.salt))  # its old blocks may not be filled
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if (tracked := self._tracked.get(request_id)) is not None:
                new_blocks = cached.new_block_ids[i]
                if request_id in cached.resumed_req_ids:
                    tracked.block_ids = list(new_blocks[0])
                elif new_blocks is not None:
                    tracked.block_ids += new_blocks[0]
                cached.num_computed_tokens[i] = self._advance(tracked, output, cached.num_computed_tokens[i])
        for new in output.scheduled_new_reqs:
            if (tracked := self._tracked.get(new.req_id)) is not None:
                tracked.block_ids = list(new.block_ids[0])
                new.num_computed_tokens = self._advance(tracked, output, new.num_computed_tokens)
        self._orders.drops = self.index.take_released({order.uid for order in self._orders.saves})
        orders, self._orders = self._orders, StepOrders()
        return orders

    def _advance(self, tracked: _TrackedRequest, output: Any, start: int) -> int:
        """Skip reused tokens; end the step before the next ones.

        Returns the first token that the step computes.
        """
        request_id, plan = tracked.request.request_id, tracked.plan
        scheduled = output.num_scheduled_tokens[request_id]
        limit, first = start + scheduled, start
        if plan.has_holes and start < tracked.request.num_prompt_tokens:
            reload, tracked.reload = tracked.reload, None
            first = plan.covered(start)
            if (
                first >= limit
            ):  # all of it is reused: a step computes something, so the last token, which is loaded later
                tracked.reload = first = limit - 1
            if (begin := start if reload is None else reload) < first:
                self._load(tracked, begin, first)
            end = min(limit, plan.next_run(first) or limit) if tracked.reload is None else limit
            if first != start:
                tracked.request.num_computed_tokens += first - start
            output.num_scheduled_tokens[request_id] = end - first
            output.total_num_scheduled_tokens -= scheduled - (end - first)
            limit = first if tracked.reload is not None else end
        self._save_until(tracked, limit)
        return first

    def _load(self, tracked: _TrackedRequest, start: int, stop: int) -> None:
        """Order the reused tokens of [start, stop) into a request's pages."""
        pieces = []
        for run in tracked.plan.runs:
            first, end = max(run.at, start), min(run.stop, stop)
            if first < end:
                source = run.source + first - run.at
                pieces.append(LoadPiece(run.record.uid, source, first, end - first, run.shift))
        if pieces:
            self._orders.loads.append(LoadOrder(tracked.block_ids, pieces))

    def _save_until(self, tracked: _TrackedRequest, stop: int) -> None:
        """Order entries whose tokens the step completes."""
        for save in list(tracked.pending):
            if save.stop is not None and save.stop <= min(stop, tracked.request.num_tokens):  # some are placeholders
                tracked.pending.remove(save)
                if (order := self._save(tracked, save, save.stop)) is not None:
                    self._orders.saves.append(order)

    def _save(self, tracked: _TrackedRequest, save: PlannedSave, stop: int) -> SaveOrder | None:
        tokens = tuple(tracked.request.all_token_ids[save.start : stop])
        known = self.index.find_name(tracked.scope, save.name) if save.name is not None else None
        if known is not None and known.tokens == tokens and known.context.digest() == save.context.digest():
            tracked.stored.append(save.name or "")
            return None
        record = KVRecord(tracked.scope, tokens, save.start, save.context, save.name)
        if not tokens or (save.name is None and self.index.has_content(record)) or not self.index.reserve(record):
            return None
        self.index.mark_stored(record)
        if isinstance(tracked.params.steps, int):
            self.index.hint(record, tracked.params.steps)
        if save.replaces is not None:
            self.index.remove(save.replaces)
        if save.name is not None:
            tracked.stored.append(save.name)
        return SaveOrder(record.uid, tracked.block_ids, save.start, stop, tokens)

    # -- the end --------------------------------------------------------------------------------------------

    def finish(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether pages are still read, and the answer's report.

        A request that a stop string ends is aborted by vLLM's front end, so aborted ones are stored too.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        self._admitted = [other for other in self._admitted if other is not tracked]
        self._unpin(tracked)
        if tracked.refusal is None and not tracked.plan.missing:
            for name in tracked.params.release:
                if (record := self.index.find_name(tracked.scope, name)) is not None:
                    self.index.remove(record)
        orders = []
        if tracked.is_admitted and block_ids:
            num_stored = min(request.num_tokens - 1, request.num_computed_tokens)
            if tracked.reload is not None:
                num_stored = min(num_stored, tracked.reload)
            tracked.block_ids = list(block_ids)
            for save in tracked.pending:
                stop = num_stored if save.stop is None else save.stop
                if save.start < stop <= num_stored and (order := self._save(tracked, save, stop)) is not None:
                    orders.append(order)
        if orders:
            self._orders.final_saves[request.request_id] = orders
        return bool(orders), {FIELD: self._report(tracked)}

    def _report(self, tracked: _TrackedRequest) -> dict[str, Any]:
        num_reused, reused = 0, dict[str, int]()
        for run in tracked.plan.runs:
            count = max(0, min(run.stop, tracked.reused_end) - run.at)
            num_reused += count
            if run.record.name is not None and count:
                reused[run.record.name] = reused.get(run.record.name, 0) + count
        report: dict[str, Any] = {
            "version": VERSION,
            "mode": tracked.mode,
            "holes": self._can_compute_holes,
            "reused_tokens": num_reused,
            "computed_tokens": tracked.request.num_prompt_tokens - num_reused,
            "reused": reused,
            "stored": tracked.stored,
        }
        queried = [name for name in tracked.params.query if self.index.find_name(tracked.scope, name) is None]
        if missing := [*tracked.plan.missing, *queried]:
            report["missing"] = missing
        if tracked.refusal is not None:
            report["refused"] = tracked.refusal
        return report

    def reset(self) -> None:
        """Forget all entries, also those of live requests."""
        for tracked in self._tracked.values():
            if tracked.request.num_computed_tokens == 0 and tracked.refusal is None:
                continue
            self._unpin(tracked)  # it computes the rest of its prompt
            tracked.plan, tracked.pending, tracked.reload = ReusePlan(), [], None
        self.index.clear()
        for tracked in self._tracked.values():
            if tracked.request.num_computed_tokens == 0 and tracked.refusal is None and tracked.mode != "exact":
                self._plan(tracked)

    def check(self) -> None:
        """Raise AssertionError if index and live requests contradict each other."""
        self.index.check()
        pins: dict[int, int] = {}
        for tracked in self._tracked.values():
            for run in tracked.plan.runs:
                pins[run.record.uid] = pins.get(run.record.uid, 0) + 1
        held = [*self.index._records.values(), *self.index._orphans.values()]
        assert {record.uid: record.pins for record in held if record.pins} == pins


def _set_salt(request: Any, salt: str | None) -> None:
    """Give the blocks of a request another identity in the prefix cache."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()
