"""Calibration of `Repair(0, "align")`: the alignment that is closest to prefix mode.

Each example reads documents that were encoded apart, behind a shared system turn, and answers a question about them. The
answer of prefix mode is forced; the divergence from prefix mode is what the two numbers minimize. No reference answers
are needed, and a trial computes questions and answers alone, since the documents stay encoded.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ...api.engine import Engine
from ...api.message import Message
from ...api.session import Session
from ...attention.metadata import Alignment
from ...errors import ConfigError, DataError
from ...features.repair.align import Calibration
from ...features.repair.options import Repair

SYSTEM = "Answer the question from the documents, in a few words."
MAX_TOKENS = 24  # of an answer
MAX_DOCUMENTS = 5  # of an example
TEMPERATURES = (0.8, 0.9, 1.0, 1.1)
SCALES = (0.35, 0.5, 0.7, 1.0, 1.4)
NUM_REFINEMENTS = 2  # each halves the distance between trials


class RetrievalExample(NamedTuple):
    """Question, and documents in the order in which it reads them."""

    question: str
    documents: tuple[str, ...]


def load_examples(file: Path | None = None, limit: int | None = None, seed: int = 0) -> list[RetrievalExample]:
    """Read a JSON Lines file of records with `question` and `documents` (`title`, `text`).

    A record reads its own documents and, up to `MAX_DOCUMENTS`, first ones of other records, in random order.

    Args:
        file: None for the calibration set of the package.

    Raises:
        DataError: if the file is not such a file.
    """
    source: Any = files(__package__) / "calibration.jsonl" if file is None else file
    try:
        records = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()][:limit]
        documents = [[f"{d['title']}\n{d['text']}" for d in record["documents"]] for record in records]
        questions = [str(record["question"]) for record in records]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise DataError(
            f"{source}: not JSON Lines of question and documents ({exc!r:.80}): correct or remove the line"
        ) from None
    if not records:
        raise DataError(f"{source}: no record")
    examples = []
    for index, (question, own) in enumerate(zip(questions, documents, strict=True)):
        choice = random.Random(f"{seed} {index}")
        others = [texts[0] for other, texts in enumerate(documents) if other != index and texts]
        read = [*own, *choice.sample(others, max(0, min(MAX_DOCUMENTS - len(own), len(others))))]
        choice.shuffle(read)
        examples.append(RetrievalExample(question, tuple(read)))
    return examples


class _Trials:
    """Divergence of alignments from prefix mode, over examples whose documents are encoded."""

    def __init__(self, engine: Engine, session: Session, examples: Sequence[RetrievalExample]) -> None:
        with engine.session(mode="prefix", seed=0) as baseline:
            answers = [self._ask(baseline, *self._encode(baseline, example)) for example in examples]
            self._expected = [(list(m.result().output_token_ids), rows) for m, rows in answers]
        self._session = session
        self._encoded = [self._encode(session, example) for example in examples]

    @staticmethod
    def _encode(session: Session, example: RetrievalExample) -> tuple[str, list[Message]]:
        system = session.prefill(session.system(SYSTEM))
        return example.question, [system, *(session.prefill(session.user(d), [system]) for d in example.documents)]

    @staticmethod
    def _ask(
        session: Session, question: str, context: list[Message], **options: Any
    ) -> tuple[Message, list[Float[Tensor, "V"]]]:
        header = [session.user(question), session.assistant()]
        options = options or {"temperature": 0, "max_tokens": MAX_TOKENS}
        message, rows = session.decode(header, context, **options), list[Tensor]()
        message.on_logprobs(lambda row: rows.append(row.clone()))
        return message, rows

    def divergence(self, alignment: Alignment) -> float:
        """Return KL(prefix mode || aligned) in nats a token."""
        repair = Repair(0, "align", alignment)
        asked = [
            self._ask(self._session, *encoded, forced_tokens=tokens, repair=repair)
            for encoded, (tokens, _) in zip(self._encoded, self._expected, strict=True)
        ]
        result = []
        for (message, rows), (tokens, expected) in zip(asked, self._expected, strict=True):
            message.wait_encoded()
            before, after = torch.stack(expected[: len(tokens)]), torch.stack(rows[: len(tokens)])
            result.append((before.exp() * (before - after)).sum(-1).clamp_min(0).mean().item())
            message.release()
        return fmean(result)


def calibrate(
    engine: Engine,
    examples: Sequence[RetrievalExample],
    progress: Callable[[Alignment, float], None] = lambda alignment, kl: None,
) -> Calibration:
    """Return the alignment with the least divergence from prefix mode; a grid, then smaller steps around its best.

    Args:
        progress: called with every alignment that was tried and its divergence.

    Raises:
        ConfigError: if the model has no tokenizer.
    """
    if engine.chat is None:
        raise ConfigError(
            f"{engine.model_info.name} has no tokenizer: add tokenizer.json to its folder to calibrate it"
        )
    tried: dict[Alignment, float] = {}
    with engine.session(seed=0) as session:
        trials = _Trials(engine, session, examples)

        def best_of(alignments: Iterable[Alignment]) -> Alignment:
            for alignment in alignments:
                if alignment not in tried:
                    tried[alignment] = trials.divergence(alignment)
                    progress(alignment, tried[alignment])
            return min(tried, key=lambda alignment: tried[alignment])

        best = best_of(Alignment(t, s) for t in TEMPERATURES for s in SCALES)
        step, factor = 0.05, 1.2
        for _ in range(NUM_REFINEMENTS):
            temperatures = [round(best.temperature + sign * step, 4) for sign in (-1, 0, 1)]
            scales = [round(best.scale * factor**sign, 4) for sign in (-1, 0, 1)]
            best = best_of(Alignment(t, s) for t in temperatures for s in scales)
            step, factor = step / 2, factor**0.5
    return Calibration(engine.model_info.name, best, tried[best], tried[Alignment(1.0, 1.0)])
