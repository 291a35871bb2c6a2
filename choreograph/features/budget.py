"""Budget of divergence: reuse, repair or compute, by what was measured.

The divergence of every option is learned for each stage from shadow measurements of a share of the
calls. An option is used once the upper end of the interval of its mean is within the budget; until
then the context is computed as in prefix mode.
"""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from ..context.feature import ContextFeature, Parser, RequestDraft
from ..errors import ChoreographError, ConfigError, DataError
from ..messages.handle import MessageHandle
from ..request.request import Request
from ..utils import atomic_write_text
from .agent_tags import agent_key_of
from .explain import measure_repairs
from .repair.options import Repair

SHARES = (0.1, 0.2, 0.4, 0.6)  # of repair, the cheapest first; the alternatives are 0 and 1
MIN_SAMPLES = 8  # measurements before an option may be used
MAX_SAMPLES = 256  # weight of the past: older measurements fade
MAX_STAGES = 1024  # stages to keep; the one measured longest ago is dropped
QUANTILE = 2.326  # of the normal distribution, one-sided 99%: an option is looked at again and again
VERSION = 2


class StageDivergence:
    """Running mean and variance of one option's divergence, in nats."""

    def __init__(self, count: int = 0, mean: float = 0.0, variance: float = 0.0) -> None:
        self.count, self.mean, self.variance = count, mean, variance

    def add(self, kl: float) -> None:
        self.count = min(self.count + 1, MAX_SAMPLES)
        change = kl - self.mean
        self.mean += change / self.count
        self.variance += (change * (kl - self.mean) - self.variance) / self.count

    @property
    def upper(self) -> float:
        """Upper end of the mean's interval, by Student's distribution."""
        if self.count < MIN_SAMPLES:
            return math.inf
        z, freedom = QUANTILE, self.count - 1
        student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        return self.mean + student * math.sqrt(self.variance / freedom)


class Budget:
    """Divergence from prefix mode to stay within, and the learned stages.

    Give one budget to the sessions of a workflow (`Engine.session(max_kl=budget)`). Selected calls, at most
    one of each stage, are measured when their session closes.

    Args:
        max_kl: nats a token, the mean over the calls of a stage.
        shadow_calls: share of calls to measure, 0 to 1; 0 learns nothing.
        shadow_tokens: limit of the tokens computed for measurements, as a share of the tokens of all
            calls with their contexts.
        strategy: of repair, key of `REPAIR_STRATEGIES`; or several, in order of preference among those that are
            within the budget with the same share.
        workflow: name that separates the stages of workflows in saved files.
        seed: of the selection of calls.
    """

    def __init__(
        self,
        max_kl: float,
        *,
        shadow_calls: float = 0.0,
        shadow_tokens: float = 0.1,
        strategy: str | Sequence[str] = "first",
        workflow: str = "",
        seed: int = 0,
    ) -> None:
        for name, value in (("max_kl", max_kl), ("shadow_calls", shadow_calls), ("shadow_tokens", shadow_tokens)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value!r}: use a number, 0 or more")
        if shadow_calls > 1:
            raise ConfigError(f"shadow_calls={shadow_calls!r}: use a share, 0 to 1")
        self.max_kl, self.shadow_calls, self.shadow_tokens, self.workflow = (
            max_kl,
            shadow_calls,
            shadow_tokens,
            workflow,
        )
        self.strategies = (strategy,) if isinstance(strategy, str) else tuple(strategy)
        if not self.strategies or not all(isinstance(name, str) for name in self.strategies):
            raise ConfigError(f"strategy={strategy!r}: use one or more names of strategies")
        repairs = [Repair(share, name) for share in SHARES for name in self.strategies]
        self.options = (Repair(0.0, self.strategies[0]), *repairs)  # the cheapest first
        self.stage: str | None = None  # of the next calls; None: named by their structure
        self.num_tokens = 0  # tokens of the measured sessions' calls with their contexts
        self.num_shadow_tokens = 0  # tokens computed for measurements
        self._random = random.Random(seed)
        self._stages: dict[str, dict[Repair, StageDivergence]] = {}  # by option, in order of the last measurement
        self._selected: dict[int, dict[int, str]] = {}  # by session and message: stage of a call to measure

    @classmethod
    def parse(cls, value: "float | Budget") -> "Budget":
        """Convert the `max_kl` argument of a session."""
        return value if isinstance(value, Budget) else cls(value)

    def attach(self, session: Any) -> None:
        """Choose the repair of a session's calls from now on."""
        session.budget = self
        session.on_close.append(lambda: self._measure_selected(session))

    # -- policy -------------------------------------------------------------------------------------------

    def choose(self, request: Request) -> Repair:
        """Return the cheapest option that is expected to stay within the budget."""
        stage = self._stage_of(request)
        if self.shadow_calls and self._random.random() < self.shadow_calls:
            self._selected.setdefault(request.session_id, {})[request.id] = stage
        return self.repair_for(stage)

    def repair_for(self, stage: str) -> Repair:
        """Return a stage's repair: share 0 reuses, 1 computes."""
        known = self._stages.get(stage, {})
        within = (option for option in self.options if option in known and known[option].upper <= self.max_kl)
        return next(within, Repair(1.0, self.strategies[0]))

    def share_for(self, stage: str) -> float:
        """Return a stage's share of repair: 0 reuses, 1 computes."""
        return self.repair_for(stage).share

    def observe(self, stage: str, divergences: Mapping[float | Repair, float]) -> None:
        """Add measurements of one call: divergence in nats a token by repair, or by share of the first strategy."""
        known = self._stages.pop(stage, {})
        for option, kl in divergences.items():
            repair = option if isinstance(option, Repair) else Repair(option, self.strategies[0])
            known.setdefault(repair, StageDivergence()).add(kl)
        self._stages[stage] = known
        if len(self._stages) > MAX_STAGES:
            del self._stages[next(iter(self._stages))]

    def _stage_of(self, request: Request) -> str:
        name = self.stage
        agent_key = agent_key_of(request)
        if name is None and isinstance(agent_key, tuple):
            name = agent_key[-1]  # (client, agent)
        if not isinstance(name, str):  # runs of prefills (p) and decodes (d) among the parents
            kinds = "".join("d" if parent.is_decode else "p" for parent in request.parents)
            name = f"{'decode' if request.is_decode else 'prefill'} {len(kinds)} {kinds[:16]}"
        return f"{self.workflow}/{name}"

    # -- measurements -------------------------------------------------------------------------------------

    def _measure_selected(self, session: Any) -> None:
        by_stage: dict[str, list[int]] = {}
        for message_id, stage in self._selected.pop(session.id, {}).items():
            by_stage.setdefault(stage, []).append(message_id)
        # calls of a session share their context: several of a stage would count as independent measurements
        self._selected[session.id] = {self._random.choice(ids): stage for stage, ids in by_stage.items()}
        self.measure(session.messages)
        del self._selected[session.id]

    def measure(self, messages: Iterable[MessageHandle]) -> None:
        """Measure the selected ones of complete messages, each passed once."""
        for message in messages:
            if message.error is not None or not message.done:
                continue
            num_own, num_context = message.length, sum(parent.length for parent in message.parents)
            self.num_tokens += num_own + num_context
            stage = self._selected.get(message._request.session_id, {}).pop(message.id, None)
            cost = num_context + num_own  # at most: of prefix mode, then of every option
            for option in self.options:
                cost += math.ceil(option.share * num_context) + num_own + 1
                if option.selection.reads_prompt:  # for its scores, and over the repaired context
                    cost += 2 * num_own
            if stage is None or self.num_shadow_tokens + cost > self.shadow_tokens * self.num_tokens:
                continue
            self.num_shadow_tokens += cost
            with suppress(ChoreographError):  # a call that cannot be measured teaches nothing
                trials = measure_repairs(message, self.options)
                self.observe(stage, {Repair(trial.share, trial.strategy): trial.kl for trial in trials})

    # -- files --------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write what was learned as JSON."""
        stages = {
            stage: [[option.share, option.strategy, d.count, d.mean, d.variance] for option, d in known.items()]
            for stage, known in self._stages.items()
        }
        record = {"version": VERSION, "strategies": self.strategies, "stages": stages}
        atomic_write_text(Path(path), json.dumps(record, indent=1) + "\n")

    def load(self, path: str | Path) -> None:
        """Replace what was learned by a file of `save`."""
        try:
            record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            if record["version"] != VERSION:
                raise ValueError(f"version {record['version']} instead of {VERSION}")
            if (strategies := tuple(record["strategies"])) != self.strategies:
                raise ValueError(f"strategies {strategies} instead of {self.strategies}")
            stages = {
                stage: {Repair(s, name): StageDivergence(int(n), float(m), float(v)) for s, name, n, m, v in rows}
                for stage, rows in record["stages"].items()
            }
        except OSError as exc:
            raise DataError(f"{path}: cannot be read ({exc.strerror}): check the path") from None
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, ConfigError) as exc:
            raise DataError(f"{path}: not a saved budget ({exc}): remove it and learn again") from None
        self._stages = dict(list(stages.items())[-MAX_STAGES:])


class BudgetedRepair(ContextFeature):
    """Repair of calls that give none, chosen by their session's budget."""

    keeps_options = False
    session_options: ClassVar[Mapping[str, Parser]] = {"max_kl": Budget.parse}

    def opened(self, session: Any) -> None:
        """Attach the budget of a session."""
        budget: Budget | None = session.defaults.get("max_kl")
        if budget is not None:
            budget.attach(session)

    def prepare(self, draft: RequestDraft) -> None:
        """Choose the repair of a call; called before `ContextRepair`."""
        budget: Budget | None = draft.session.budget
        request = draft.request
        if budget is not None and "repair" not in draft.given and request.parents and request.mode == "choreographed":
            draft.options["repair"] = budget.choose(request)
