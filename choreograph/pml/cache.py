"""A schema at work on an engine (Prompt Cache, sections 3.3 and 3.4). Owns the messages that hold its modules.

Every run of a piece is one message, encoded on first need and found again by content, so that all prompts and
sessions of a client share it. A prompt borrows the runs that it imports, prefills its own text, and decodes: all
that is new goes through the model in one pass, and nothing that is cached is copied.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path as File

from ..core import Engine
from ..engine.copies import Copy
from ..errors import ConfigError, ForeignMessage, PromptError
from ..message import Message, Part
from ..session import Session
from ..spite import close_behind
from ..types import BASE, SamplingParams
from . import storage
from .layout import Layout, Path, Piece, lay_out
from .objects import Prompt, Schema
from .read import read_prompt, read_schema
from .serving import New, Seen, Serving, serve
from .tokens import ChatTokens, fingerprint

Key = tuple[Path, int, tuple[Path, ...]]  # piece, run, and the scaffold that it is encoded in (or nothing)
KEEP = ("device", "host")
DEFAULTS = SamplingParams()


class PromptCache:
    """One schema on one engine, for one client. keep: where encoded modules stay between prompts; "host" leaves
    device memory to others and copies a module in when a prompt imports it.
    """

    def __init__(
        self, engine: Engine, schema: Schema | str | File, *, client_id: str = "default", keep: str = "device"
    ) -> None:
        if keep not in KEEP:
            raise ConfigError(f"keep={keep!r}: use one of {KEEP}")
        self.engine = engine
        self.schema = schema if isinstance(schema, Schema) else read_schema(schema)
        self.keep = keep
        self._tokens = ChatTokens(engine.chat, engine.tokenizer)
        self.layout: Layout = lay_out(self.schema, self._tokens, engine.facts.max_positions)
        self.client_id = client_id
        self._session = engine.session(client_id=client_id)
        self._held: dict[Key, Message] = {}
        self._host: dict[Key, Copy] = {}
        self._turn = threading.RLock()  # of whoever encodes modules or lets go of them

    def __enter__(self) -> "PromptCache":
        return self

    def __exit__(self, kind: object, problem: BaseException | None, *_: object) -> None:
        close_behind(self.close, problem)

    def close(self) -> None:
        """Lets go of every module; other caches and sessions keep what they hold."""
        with self._turn:
            self._session.close()
            self._held.clear()
            self._host.clear()

    # -- modules ------------------------------------------------------------------------------------------

    def warm(self, paths: Iterable[Path | str] | None = None) -> int:
        """Encodes modules ahead, all or some ("plan/alps", or several); returns how many tokens had to be computed."""
        paths = [paths] if isinstance(paths, str) else paths
        wanted = set(self.layout.pieces if paths is None else map(_path, paths))
        for path in wanted:
            if path not in self.layout.pieces:
                raise PromptError(f"the schema has no module {'/'.join(path)!r}")
        with self._turn:
            there = self._there()
            keys = [key for key in self._single_keys() if key[0] in wanted and key not in there]
            if self.keep == "host":  # one at a time: the device never has to hold them all
                return sum(self._warm_on_host(key) for key in keys)
            messages = [self._message(key) for key in keys]
        return sum(message.encode().usage.encoded_tokens for message in messages)

    def _warm_on_host(self, key: Key) -> int:
        with self._at_work():
            return self._message(key).result().usage.encoded_tokens

    def _single_keys(self) -> list[Key]:
        """Every run of every cached piece, encoded apart."""
        pieces = [piece for piece in self.layout.pieces.values() if piece.cache]
        return [(piece.path, run, ()) for piece in pieces for run in range(len(piece.runs))]

    def _there(self) -> set[Key]:
        """What does not have to be computed."""
        return {key for key, message in self._held.items() if message.error is None} | set(self._host)

    def _piece(self, key: Key) -> Piece:
        return self.layout.pieces[key[0]]

    def _message(self, key: Key) -> Message:
        """The message of one run: held, copied in from host memory, found by content, or encoded now."""
        held = self._held.get(key)
        if held is not None:
            if held.error is None:
                return held
            held.release()
        run = self._piece(key).runs[key[1]]
        before = self._before(key)
        parents = [self._message(one) for one in before]
        offsets = [self._piece(one).runs[one[1]].start for one in before]
        if key in self._host:  # made here, or of a file whose digest was right
            copy = self._host[key]
            message = self._session.restore(run.tokens, copy, parents, offsets, run.start, check=False)
        else:
            message = self._session.prefill(run.tokens, parents, offsets, run.start)
        self._held[key] = message
        return message

    def _before(self, key: Key) -> list[Key]:
        """The runs that a run was encoded in sight of: those of its own piece and of its scaffold before it."""
        path, index, together = key
        pieces = [self.layout.pieces[p] for p in together] or [self.layout.pieces[path]]
        runs = [(piece.path, run) for piece in pieces for run in range(len(piece.runs))]
        runs.sort(key=lambda one: self.layout.pieces[one[0]].runs[one[1]].start)
        return [(*one, together) for one in runs[: runs.index((path, index))]]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """One thread at a time. Behind it a cache in host memory has copies of what was encoded, and holds nothing."""
        with self._turn:
            try:
                yield
                if self.keep == "host":
                    self._host |= {key: one.copy_out() for key, one in self._held.items() if key not in self._host}
            finally:
                if self.keep == "host":
                    for message in self._held.values():
                        message.release()
                    self._held.clear()

    # -- prompts ------------------------------------------------------------------------------------------

    def plan(self, prompt: Prompt | str | File) -> Serving:
        """What a prompt shows the model and where. Raises PMLError."""
        prompt = prompt if isinstance(prompt, Prompt) else read_prompt(prompt)
        return serve(prompt, self.layout, self._tokens)

    def reused(self, prompt: Prompt | str | File) -> int:
        """How many tokens of modules a prompt would find here if it were served now, and not compute again: the last
        token of a prompt is not among them where the answer starts with it."""
        serving = self.plan(prompt)
        seen = serving.seen
        if not self._answer(serving)[0]:
            seen, *_ = self._last(list(seen), list(serving.new), serving.end)
        with self._turn:
            there = self._there()
        return sum(one.count for key, one in zip(_keys(serving, seen), seen, strict=True) if key in there)

    def serve(
        self,
        session: Session,
        prompt: Prompt | str | File,
        *,
        sampling: SamplingParams = DEFAULTS,
        forced_tokens: Sequence[int] | None = None,
    ) -> Message:
        """The answer to a prompt, as a message of `session`: reading it runs the engine.

        In a session of mode "prefix" or "naive" the prompt is the same text without modules, for comparison.
        """
        serving = self.plan(prompt)
        if session.engine is not self.engine or session.client_id != self.client_id:
            raise ForeignMessage("the session belongs to another engine or client than the cache: open one there")
        header, footer = self._answer(serving)
        most = self.engine.facts.max_positions
        if serving.end + len(header) >= most:
            raise PromptError(f"the prompt ends at position {serving.end} of {most}: no room for an answer")
        with ExitStack() as passing:  # the answer holds what it sees until it ends, the session nothing but the answer
            if session.mode == "choreographed":
                parents, header, start = self._parents(session, serving, header, passing)
            else:
                linear = serving.linear(self.layout)
                cut = len(linear) - (0 if header else 1)
                parents = [(_passed(passing, session.prefill(linear[:cut])), 0)] if cut else []
                header, start = header or linear[cut:], None
            messages, offsets = [p for p, _ in parents], [o for _, o in parents]
            return session.decode(
                header, messages, offsets, start, sampling=sampling, footer=footer, forced_tokens=forced_tokens
            )

    def _answer(self, serving: Serving) -> tuple[list[int], list[int]]:
        """Header and footer of the answer: the assistant's turn where the prompt is a conversation."""
        if not serving.talks:
            return [], []
        return self._tokens.turn("assistant", "", opening=False, whole=False)

    def _parents(
        self, session: Session, serving: Serving, header: list[int], passing: ExitStack
    ) -> tuple[list[tuple[Message | Part, int]], list[int], int]:
        """What the answer sees, each at its place; the answer's header and start.

        An answer without a header of its own starts with the last token of the prompt, computed again (or with
        the last new text, where that stands last), now in sight of everything.
        """
        seen, new, start = list(serving.seen), list(serving.new), serving.end
        if not header:
            seen, new, header, start = self._last(seen, new, serving.end)
        keys = _keys(serving, seen)
        mine = self._borrowed(session, keys, passing)
        parents: list[tuple[Message | Part, int]] = []
        for key, one in zip(keys, seen, strict=True):
            whole, count = mine[key], len(self._piece(key).runs[one.run].tokens)
            parents.append((whole if one.count == count else whole.part(one.first, one.first + one.count), one.start))
        for text in new:
            message = session.prefill(list(text.tokens), [p for p, _ in parents], [o for _, o in parents], text.start)
            parents.append((_passed(passing, message), text.start))
        return parents, header, start

    def _borrowed(self, session: Session, keys: list[Key], passing: ExitStack) -> dict[Key, Message]:
        """Runs as messages of the session, until the stack is left."""
        with self._at_work():
            held = {key: self._message(key) for key in keys}  # all of them first, so that new ones are encoded together
            return {key: _passed(passing, session.borrow(one)) for key, one in held.items()}

    def _last(self, seen: list[Seen], new: list[New], end: int) -> tuple[list[Seen], list[New], list[int], int]:
        final = max(new, key=lambda one: one.end, default=None)
        if final is not None and final.end == end:
            return seen, [one for one in new if one is not final], list(final.tokens), final.start
        last = next(one for one in seen if one.start + one.count == end)
        token = self.layout.pieces[last.path].runs[last.run].tokens[last.first + last.count - 1]
        rest = [one for one in seen if one is not last]
        if last.count > 1:
            rest.append(last._replace(count=last.count - 1))
        return rest, new, [token], end - 1

    def check(self) -> None:
        """What is held or copied belongs to the schema; host caches hold nothing between prompts."""
        for key in (*self._held, *self._host):
            assert self._piece(key).cache and key[1] < len(self._piece(key).runs), f"{key} is no run of the schema"
        assert self.keep == "device" or not self._held, "a cache in host memory holds device memory"
        for key, copy in self._host.items():
            assert len(copy.layers[0][0]) == len(self._piece(key).runs[key[1]].tokens)

    # -- files --------------------------------------------------------------------------------------------

    def save(self, file: str | File) -> int:
        """Writes every module's encoding to a safetensors file with a JSON manifest beside it; returns the bytes.
        Raises CacheFileError where that cannot be."""
        self.engine.runner.adapter.refuse_ranks("a saved cache")
        storage.check_place(File(file))  # before anything is computed
        keys = self._single_keys()
        with self._turn:
            runs = [self._copied(key) for key in keys]
        return storage.save(File(file), self._facts(), [self._name(key) for key in keys], runs)

    def _copied(self, key: Key) -> Copy:
        with self._at_work():
            return self._host.get(key) or self._message(key).copy_out()

    def load(self, file: str | File) -> int:
        """Takes encodings from a file that `save` wrote, for this model, tokenizer and schema; returns how many
        tokens. Raises CacheFileError, with nothing changed, where the file is stale, cut off or tampered with."""
        keys = self._single_keys()
        facts = self.engine.facts
        shapes = [(len(self._piece(k).runs[k[1]].tokens), facts.kv_heads, facts.head_dim) for k in keys]
        names = [self._name(key) for key in keys]
        runs = storage.load(File(file), self._facts(), names, shapes, facts.layers, facts.dtype)
        with self._turn:
            self._host |= dict(zip(keys, runs, strict=True))
            if self.keep == "device":
                try:
                    for key in keys:
                        self._message(key)
                finally:
                    self._host.clear()
        return sum(shape[0] for shape in shapes)

    def _facts(self) -> dict[str, str]:
        facts = self.engine.facts
        return {  # in the order in which they are told: in another dtype a model has another identity too
            "dtype": str(facts.dtype).removeprefix("torch."),
            "model": self.engine.runner.family.identity(BASE),
            "tokenizer": fingerprint(self.engine.tokenizer),
            "schema": self.schema.fingerprint,
            "layout": self.layout.fingerprint,
        }

    @staticmethod
    def _name(key: Key) -> str:
        return f"{'/'.join(key[0])}#{key[1]}"


def _keys(serving: Serving, seen: Sequence[Seen]) -> list[Key]:
    return [(one.path, one.run, serving.together.get(one.path, ())) for one in seen]


def _passed(passing: ExitStack, message: Message) -> Message:
    """A message that is let go of when the stack is left."""
    passing.callback(message.release)
    return message


def _path(given: Path | str) -> Path:
    return tuple(given.split("/")) if isinstance(given, str) and given else tuple(given)
