"""A schema at work on an engine (Prompt Cache, sections 3.3 and 3.4). Owns the messages that hold its modules.

Every run of a piece is one message, encoded on first need and found again by content, so that all prompts and
sessions of a client share it. A prompt borrows the runs that it imports, prefills its own text, and decodes: all
that is new goes through the model in one pass, and nothing that is cached is copied.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path as File

from ..engine.engine import Engine
from ..engine.kv_export import KVSnapshot
from ..engine.message import Message, MessageSlice
from ..engine.session import Session
from ..errors import ConfigError, PromptError, WrongSessionError
from ..outputs import BASE_MODEL
from ..sampling_params import SamplingParams
from ..utils import close_after
from . import storage
from .layout import ChatTokenizer, Layout, ModuleLayout, ModulePath, compute_layout, tokenizer_fingerprint
from .parser import load_prompt, load_schema
from .resolve import CachedRange, NewText, ResolvedPrompt, resolve_prompt
from .schema import Prompt, Schema

RunKey = tuple[
    ModulePath, int, tuple[ModulePath, ...]
]  # piece, run, and the scaffold that it is encoded in (or nothing)

LOCATIONS = ("device", "host")

DEFAULT_SAMPLING = SamplingParams()


class PromptCache:
    """One schema on one engine, for one client. keep: where encoded modules stay between prompts; "host" leaves
    device memory to others and copies a module in when a prompt imports it.
    """

    def __init__(
        self, engine: Engine, schema: Schema | str | File, *, client_id: str = "default", location: str = "device"
    ) -> None:
        if location not in LOCATIONS:
            raise ConfigError(f"keep={location!r}: use one of {LOCATIONS}")
        self.engine = engine
        self.schema = schema if isinstance(schema, Schema) else load_schema(schema)
        self.location = location
        self._tokenizer = ChatTokenizer(engine.chat, engine.tokenizer)
        self.layout: Layout = compute_layout(self.schema, self._tokenizer, engine.model_info.max_positions)
        self.client_id = client_id
        self._session = engine.session(client_id=client_id)
        self._messages: dict[RunKey, Message] = {}
        self._host_snapshots: dict[RunKey, KVSnapshot] = {}
        self._lock = threading.RLock()  # of the caller that encodes modules or lets go of them

    def __enter__(self) -> "PromptCache":
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, *_: object) -> None:
        close_after(self.close, exc)

    def close(self) -> None:
        """Lets go of every module; other caches and sessions keep what they hold."""
        with self._lock:
            self._session.close()
            self._messages.clear()
            self._host_snapshots.clear()

    # -- modules ------------------------------------------------------------------------------------------

    def warmup(self, paths: Iterable[ModulePath | str] | None = None) -> int:
        """Encodes modules ahead, all or some ("plan/alps", or several); returns how many tokens had to be computed."""
        paths = [paths] if isinstance(paths, str) else paths
        expected = set(self.layout.modules if paths is None else map(_as_module_path, paths))
        for path in expected:
            if path not in self.layout.modules:
                raise PromptError(f"the schema has no module {'/'.join(path)!r}")
        with self._lock:
            there = self._available()
            keys = [key for key in self._module_keys() if key[0] in expected and key not in there]
            if self.location == "host":  # one at a time: the device never has to hold them all
                return sum(self._warmup_on_host(key) for key in keys)
            messages = [self._message(key) for key in keys]
        return sum(message.wait_encoded().usage.computed_tokens for message in messages)

    def _warmup_on_host(self, key: RunKey) -> int:
        with self._exclusive():
            return self._message(key).result().usage.computed_tokens

    def _module_keys(self) -> list[RunKey]:
        """Every run of every cached piece, encoded apart."""
        pieces = [piece for piece in self.layout.modules.values() if piece.cache]
        return [(piece.path, run, ()) for piece in pieces for run in range(len(piece.runs))]

    def _available(self) -> set[RunKey]:
        """What does not have to be computed."""
        return {key for key, message in self._messages.items() if message.error is None} | set(self._host_snapshots)

    def _module_layout(self, key: RunKey) -> ModuleLayout:
        return self.layout.modules[key[0]]

    def _message(self, key: RunKey) -> Message:
        """The message of one run: held, copied in from host memory, found by content, or encoded now."""
        held = self._messages.get(key)
        if held is not None:
            if held.error is None:
                return held
            held.release()
        run = self._module_layout(key).runs[key[1]]
        before = self._preceding_runs(key)
        parents = [self._message(one) for one in before]
        offsets = [self._module_layout(one).runs[one[1]].start for one in before]
        if key in self._host_snapshots:  # made here, or of a file whose digest was right
            copy = self._host_snapshots[key]
            message = self._session.import_kv(run.tokens, copy, parents, offsets, run.start, check=False)
        else:
            message = self._session.prefill(run.tokens, parents, offsets, run.start)
        self._messages[key] = message
        return message

    def _preceding_runs(self, key: RunKey) -> list[RunKey]:
        """The runs that a run was encoded in sight of: those of its own piece and of its scaffold before it."""
        path, index, together = key
        pieces = [self.layout.modules[p] for p in together] or [self.layout.modules[path]]
        runs = [(piece.path, run) for piece in pieces for run in range(len(piece.runs))]
        runs.sort(key=lambda one: self.layout.modules[one[0]].runs[one[1]].start)
        return [(*one, together) for one in runs[: runs.index((path, index))]]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One thread at a time. Behind it a cache in host memory has copies of what was encoded, and holds nothing."""
        with self._lock:
            try:
                yield
                if self.location == "host":
                    self._host_snapshots |= {
                        key: one.export_kv() for key, one in self._messages.items() if key not in self._host_snapshots
                    }
            finally:
                if self.location == "host":
                    for message in self._messages.values():
                        message.release()
                    self._messages.clear()

    # -- prompts ------------------------------------------------------------------------------------------

    def resolve(self, prompt: Prompt | str | File) -> ResolvedPrompt:
        """What a prompt shows the model and where. Raises PMLError."""
        prompt = prompt if isinstance(prompt, Prompt) else load_prompt(prompt)
        return resolve_prompt(prompt, self.layout, self._tokenizer)

    def count_cached_tokens(self, prompt: Prompt | str | File) -> int:
        """How many tokens of modules a prompt would find here if it were served now, and not compute again: the last
        token of a prompt is not among them where the answer starts with it."""
        serving = self.resolve(prompt)
        seen = serving.cached
        if not self._answer_template(serving)[0]:
            seen, *_ = self._reopen_last_token(list(seen), list(serving.new_texts), serving.end)
        with self._lock:
            there = self._available()
        return sum(one.num_tokens for key, one in zip(_run_keys(serving, seen), seen, strict=True) if key in there)

    def generate(
        self,
        session: Session,
        prompt: Prompt | str | File,
        *,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        forced_tokens: Sequence[int] | None = None,
    ) -> Message:
        """The answer to a prompt, as a message of `session`: reading it runs the engine.

        In a session of mode "prefix" or "naive" the prompt is the same text without modules, for comparison.
        """
        serving = self.resolve(prompt)
        if session.engine is not self.engine or session.client_id != self.client_id:
            raise WrongSessionError("the session belongs to another engine or client than the cache: open one there")
        header, footer = self._answer_template(serving)
        most = self.engine.model_info.max_positions
        if serving.end + len(header) >= most:
            raise PromptError(f"the prompt ends at position {serving.end} of {most}: no room for an answer")
        with ExitStack() as passing:  # the answer holds what it sees until it ends, the session nothing but the answer
            if session.mode == "choreographed":
                parents, header, start = self._place_parents(session, serving, header, passing)
            else:
                linear = serving.flatten(self.layout)
                cut = len(linear) - (0 if header else 1)
                parents = [(_release_on_exit(passing, session.prefill(linear[:cut])), 0)] if cut else []
                header, start = header or linear[cut:], None
            messages, offsets = [p for p, _ in parents], [o for _, o in parents]
            return session.decode(
                header, messages, offsets, start, sampling=sampling, footer=footer, forced_tokens=forced_tokens
            )

    def _answer_template(self, resolved: ResolvedPrompt) -> tuple[list[int], list[int]]:
        """Header and footer of the answer: the assistant's turn where the prompt is a conversation."""
        if not resolved.is_chat:
            return [], []
        return self._tokenizer.encode_turn("assistant", "", opening=False, is_complete=False)

    def _place_parents(
        self, session: Session, resolved: ResolvedPrompt, header: list[int], stack: ExitStack
    ) -> tuple[list[tuple[Message | MessageSlice, int]], list[int], int]:
        """What the answer sees, each at its place; the answer's header and start.

        An answer without a header of its own starts with the last token of the prompt, computed again (or with
        the last new text, where that stands last), now in sight of everything.
        """
        seen, new, start = list(resolved.cached), list(resolved.new_texts), resolved.end
        if not header:
            seen, new, header, start = self._reopen_last_token(seen, new, resolved.end)
        keys = _run_keys(resolved, seen)
        mine = self._import_runs(session, keys, stack)
        parents: list[tuple[Message | MessageSlice, int]] = []
        for key, one in zip(keys, seen, strict=True):
            whole, count = mine[key], len(self._module_layout(key).runs[one.run_index].tokens)
            parents.append(
                (
                    whole if one.num_tokens == count else whole[one.token_start : one.token_start + one.num_tokens],
                    one.position,
                )
            )
        for text in new:
            message = session.prefill(list(text.tokens), [p for p, _ in parents], [o for _, o in parents], text.start)
            parents.append((_release_on_exit(stack, message), text.start))
        return parents, header, start

    def _import_runs(self, session: Session, keys: list[RunKey], stack: ExitStack) -> dict[RunKey, Message]:
        """Runs as messages of the session, until the stack is left."""
        with self._exclusive():
            held = {key: self._message(key) for key in keys}  # all of them first, so that new ones are encoded together
            return {key: _release_on_exit(stack, session.import_message(one)) for key, one in held.items()}

    def _reopen_last_token(
        self, cached: list[CachedRange], new_texts: list[NewText], end: int
    ) -> tuple[list[CachedRange], list[NewText], list[int], int]:
        final = max(new_texts, key=lambda one: one.end, default=None)
        if final is not None and final.end == end:
            return cached, [one for one in new_texts if one is not final], list(final.tokens), final.start
        last = next(one for one in cached if one.position + one.num_tokens == end)
        token = self.layout.modules[last.path].runs[last.run_index].tokens[last.token_start + last.num_tokens - 1]
        rest = [one for one in cached if one is not last]
        if last.num_tokens > 1:
            rest.append(last._replace(num_tokens=last.num_tokens - 1))
        return rest, new_texts, [token], end - 1

    def check(self) -> None:
        """What is held or copied belongs to the schema; host caches hold nothing between prompts."""
        for key in (*self._messages, *self._host_snapshots):
            assert self._module_layout(key).cache and key[1] < len(self._module_layout(key).runs), (
                f"{key} is no run of the schema"
            )
        assert self.location == "device" or not self._messages, "a cache in host memory holds device memory"
        for key, copy in self._host_snapshots.items():
            assert len(copy.layers[0][0]) == len(self._module_layout(key).runs[key[1]].tokens)

    # -- files --------------------------------------------------------------------------------------------

    def save(self, file: str | File) -> int:
        """Writes every module's encoding to a safetensors file with a JSON manifest beside it; returns the bytes.
        Raises CacheFileError where that cannot be."""
        self.engine.core.hf_model.ensure_single_process("a saved cache")
        storage.check_writable(File(file))  # before anything is computed
        keys = self._module_keys()
        with self._lock:
            runs = [self._export_run(key) for key in keys]
        return storage.save(File(file), self._compatibility_info(), [self._run_name(key) for key in keys], runs)

    def _export_run(self, key: RunKey) -> KVSnapshot:
        with self._exclusive():
            return self._host_snapshots.get(key) or self._message(key).export_kv()

    def load(self, file: str | File) -> int:
        """Takes encodings from a file that `save` wrote, for this model, tokenizer and schema; returns how many
        tokens. Raises CacheFileError, with nothing changed, where the file is stale, cut off or tampered with."""
        keys = self._module_keys()
        facts = self.engine.model_info
        shapes = [(len(self._module_layout(k).runs[k[1]].tokens), facts.kv_heads, facts.head_dim) for k in keys]
        names = [self._run_name(key) for key in keys]
        runs = storage.load(File(file), self._compatibility_info(), names, shapes, facts.layers, facts.dtype)
        with self._lock:
            self._host_snapshots |= dict(zip(keys, runs, strict=True))
            if self.location == "device":
                try:
                    for key in keys:
                        self._message(key)
                finally:
                    self._host_snapshots.clear()
        return sum(shape[0] for shape in shapes)

    def _compatibility_info(self) -> dict[str, str]:
        facts = self.engine.model_info
        return {  # in the order in which they are told: in another dtype a model has another identity too
            "dtype": str(facts.dtype).removeprefix("torch."),
            "model": self.engine.core.model_set.weights_hash(BASE_MODEL),
            "tokenizer": tokenizer_fingerprint(self.engine.tokenizer),
            "schema": self.schema.fingerprint,
            "layout": self.layout.fingerprint,
        }

    @staticmethod
    def _run_name(key: RunKey) -> str:
        return f"{'/'.join(key[0])}#{key[1]}"


def _run_keys(resolved: ResolvedPrompt, cached: Sequence[CachedRange]) -> list[RunKey]:
    return [(one.path, one.run_index, resolved.scaffolds.get(one.path, ())) for one in cached]


def _release_on_exit(stack: ExitStack, message: Message) -> Message:
    """A message that is let go of when the stack is left."""
    stack.callback(message.release)
    return message


def _as_module_path(path: ModulePath | str) -> ModulePath:
    return tuple(path.split("/")) if isinstance(path, str) and path else tuple(path)
