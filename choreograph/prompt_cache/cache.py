"""Prompt Cache on an engine: cached modules and prompts that import them.

Implements Prompt Cache §3.3 and §3.4. Every token run of a module is one message. It is computed on first
use and reused by content, so all prompts and sessions of a client share it. A prompt imports the runs it
uses, prefills its new text and decodes: all new tokens are computed in one batch, and cached ones are not
copied.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path as File
from typing import NamedTuple

from ..api.engine import Engine
from ..api.message import Message
from ..api.session import Session
from ..errors import ConfigError, PromptError, WrongSessionError
from ..messages.handle import MessageSlice
from ..messages.kv_export import KVSnapshot
from ..namespace import Client
from ..outputs import BASE_MODEL
from ..request.request import Purpose
from ..sampling_params import SamplingParams
from ..utils import close_after
from . import storage
from .layout import ChatTokenizer, Layout, ModulePath, TokenRun, compute_layout, enclosing_union, tokenizer_fingerprint
from .parser import load_prompt, load_schema
from .resolve import CachedRange, ResolvedPrompt, resolve_prompt
from .schema import Prompt, Schema

LOCATIONS = ("device", "host")

MAX_LOADS = 4  # concurrent loads of a prefetch

DEFAULT_SAMPLING = SamplingParams()


class RunKey(NamedTuple):
    """Key of a module's token run and the context it attends to."""

    path: ModulePath
    run_index: int  # in ModuleLayout.runs
    scaffold: tuple[ModulePath, ...]  # modules that it is computed with; (): its own module only


def layout_schema(engine: Engine, schema: Schema | str | File) -> Layout:
    """Parse and tokenize a schema for an engine.

    The state of the engine does not change.

    Raises:
        PMLError: if the schema is invalid, or too long for the model.
    """
    schema = schema if isinstance(schema, Schema) else load_schema(schema)
    tokenizer = ChatTokenizer(engine.chat, engine.tokenizer)
    return compute_layout(schema, tokenizer, engine.model_info.max_positions)


class PromptCache:
    """Cached modules of one schema on one engine, for one client.

    Args:
        schema: also as its layout, which `layout_schema` returned for the same engine.
        location: where modules are stored between prompts. "host" frees device memory for other requests; a
            module is loaded when a prompt imports it.
    """

    def __init__(
        self,
        engine: Engine,
        schema: Schema | Layout | str | File,
        *,
        client_id: str | Client = "default",
        location: str = "device",
    ) -> None:
        if location not in LOCATIONS:
            raise ConfigError(f"location={location!r}: use one of {LOCATIONS}")
        self.engine = engine
        self.location = location
        self._tokenizer = ChatTokenizer(engine.chat, engine.tokenizer)
        self.layout: Layout = schema if isinstance(schema, Layout) else layout_schema(engine, schema)
        self.schema = self.layout.schema
        self.client_id = client_id
        self._session = engine.session(client_id=client_id)
        self._messages: dict[RunKey, Message] = {}
        self._host_snapshots: dict[RunKey, KVSnapshot] = {}
        self._lock = threading.RLock()  # guards the two dicts

    def __enter__(self) -> "PromptCache":
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, *_: object) -> None:
        close_after(self.close, exc)

    def close(self) -> None:
        """Release all modules; entries that other sessions reference stay cached."""
        with self._lock:
            self._session.close()
            self._messages.clear()
            self._host_snapshots.clear()

    # -- modules ------------------------------------------------------------------------------------------

    def warmup(self, paths: Iterable[ModulePath | str] | None = None) -> int:
        """Compute modules in advance and return the number of computed tokens.

        Args:
            paths: modules, as in "plan/alps"; None: all.
        """
        paths = self.layout.modules if paths is None else [paths] if isinstance(paths, str) else paths
        selected = {tuple(path.split("/")) if isinstance(path, str) and path else tuple(path) for path in paths}
        for path in selected:
            if path not in self.layout.modules:
                raise PromptError(
                    f"the schema has no module {'/'.join(path)!r}: it has {['/'.join(known) for known in self.layout.modules]}"
                )
        with self._lock:
            available = self._available()
            keys = [key for key in self._run_keys() if key.path in selected and key not in available]
            if self.location == "device":
                messages = [self._message(key) for key in keys]
            else:
                messages = []
                for key in keys:  # one at a time: the device may not have capacity for all of them
                    with self._exclusive():
                        messages.append(self._message(key).result())
        return sum(message.wait_encoded().usage.computed_tokens for message in messages)

    def prefetch_unions(self, prompt: Prompt | str | File) -> int:
        """Prepare the other members of the unions that a prompt uses (§3.2.3).

        They are encoded with the next requests of the engine if they never were, loaded in the background
        if they were offloaded, and copied to the device from a cache in host memory. None of it is kept
        there: what other requests need evicts it. Call this after the answer was read, since it takes part
        in the next steps.

        Returns:
            Number of tokens that were not on the device.
        """
        used = {item.path for item in self.resolve(prompt).cached}
        members = (
            (*path[:-1], member.name)
            for path in used
            if path and (union := enclosing_union(self.layout, path)) is not None
            for member in union.members
        )
        siblings = set(members) - used
        num_tokens = 0
        with self._exclusive():
            for key in self._run_keys():
                if key.path in siblings and not self._is_on_device(key):
                    num_tokens += len(self._run(key).tokens)
                    self._load(self._message(key))
        return num_tokens

    def _is_on_device(self, key: RunKey) -> bool:
        message = self._messages.get(key)
        return message is not None and message.error is None and message.kv_location in ("device", "loading")

    def _load(self, message: Message) -> None:
        """Start loading a message that was offloaded; do nothing for others."""
        core, entry = self.engine.core, message._request.entry
        with core.lock:
            if entry is not None and entry.content_hash is not None:
                core.prefetcher.update(("union", entry.id), [entry.content_hash], MAX_LOADS)
                core.prefetcher.run()

    def _run_keys(self) -> list[RunKey]:
        """Return the keys of all cached runs, outside of scaffolds."""
        modules = [module for module in self.layout.modules.values() if module.cache]
        return [RunKey(module.path, index, ()) for module in modules for index in range(len(module.runs))]

    def _available(self) -> set[RunKey]:
        """Return the runs that need not be computed."""
        return {key for key, message in self._messages.items() if message.error is None} | set(self._host_snapshots)

    def _run(self, key: RunKey | CachedRange) -> TokenRun:
        return self.layout.modules[key.path].runs[key.run_index]

    def _message(self, key: RunKey) -> Message:
        """Return the message of a run, imported or prefilled if needed."""
        message = self._messages.get(key)
        if message is not None:
            if message.error is None:
                return message
            message.release()
        run = self._run(key)
        context = self._preceding_runs(key)
        parents = [self._message(preceding) for preceding in context]
        offsets = [self._run(preceding).start for preceding in context]
        if key in self._host_snapshots:  # exported here, or of a file whose digest was verified
            snapshot = self._host_snapshots[key]
            message = self._session.import_kv(run.tokens, snapshot, parents, offsets, run.start, check=False)
        else:
            message = self._session.prefill(run.tokens, parents, offsets, run.start)
        self._messages[key] = message
        return message

    def _preceding_runs(self, key: RunKey) -> list[RunKey]:
        """Return the earlier runs of the run's scaffold or module."""
        keys = [
            RunKey(path, index, key.scaffold)
            for path in key.scaffold or (key.path,)
            for index in range(len(self.layout.modules[path].runs))
        ]
        keys.sort(key=lambda other: self._run(other).start)
        return keys[: keys.index(key)]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock; with location "host", offload all messages at exit.

        New messages are exported to host memory, unless an exception is raised. All messages are released.
        """
        with self._lock:
            try:
                yield
                if self.location == "host":
                    new = {key: message for key, message in self._messages.items() if key not in self._host_snapshots}
                    self._host_snapshots |= {key: message.export_kv() for key, message in new.items()}
            finally:
                if self.location == "host":
                    for message in self._messages.values():
                        message.release()
                    self._messages.clear()

    # -- prompts ------------------------------------------------------------------------------------------

    def resolve(self, prompt: ResolvedPrompt | Prompt | str | File) -> ResolvedPrompt:
        """Return a prompt's content with positions; raise PMLError if invalid."""
        if isinstance(prompt, ResolvedPrompt):
            return prompt
        prompt = prompt if isinstance(prompt, Prompt) else load_prompt(prompt)
        return resolve_prompt(prompt, self.layout, self._tokenizer)

    def count_cached_tokens(self, prompt: Prompt | str | File) -> int:
        """Count the tokens of a prompt that `generate` would not compute.

        The last token of a prompt is not counted if it would be recomputed as the header of the answer.
        """
        resolved = self.resolve(prompt)
        cached, *_ = self._answer_context(resolved)
        with self._lock:
            available = self._available()
        return sum(item.num_tokens for item in cached if _run_key(item, resolved) in available)

    def generate(
        self,
        session: Session,
        prompt: ResolvedPrompt | Prompt | str | File,
        *,
        sampling: SamplingParams = DEFAULT_SAMPLING,
        forced_tokens: Sequence[int] | None = None,
    ) -> Message:
        """Return the answer to a prompt as a message of `session`.

        Reading the message runs the engine. Its usage counts as cached what existed before this call. In a
        session of mode "prefix" or "naive", the prompt is the same text without modules, for comparison.

        Args:
            prompt: also as `resolve` returned it.
        """
        resolved = self.resolve(prompt)
        if session.engine is not self.engine or session._client != self._session._client:
            raise WrongSessionError("the session belongs to another engine or client than the cache: open one there")
        header, footer = self._answer_template(resolved)
        max_positions = self.engine.model_info.max_positions
        if resolved.end + len(header) >= max_positions:
            raise PromptError(
                f"the prompt ends at position {resolved.end} of {max_positions}: no room for an answer, shorten it"
            )
        with ExitStack() as stack:  # the answer keeps its context until it ends; the session keeps the answer only
            start: int | None = None
            if session.mode == "choreographed":
                parents, offsets, header, start = self._place_context(session, resolved, stack)
            else:
                tokens = resolved.flatten(self.layout)
                split = len(tokens) - (0 if header else 1)
                parents = [_release_on_exit(stack, session.prefill(tokens[:split]))] if split else []
                header, offsets = header or tokens[split:], [0] * len(parents)
            return session.decode(
                header, parents, offsets, start, sampling=sampling, footer=footer, forced_tokens=forced_tokens
            )

    def _answer_template(self, resolved: ResolvedPrompt) -> tuple[list[int], list[int]]:
        """Return the answer's header and footer tokens; empty unless a chat."""
        return self._tokenizer.encode_answer(after_system=resolved.after_system) if resolved.is_chat else ([], [])

    def _answer_context(self, resolved: ResolvedPrompt) -> tuple[list[CachedRange], list[TokenRun], list[int], int]:
        """Return the context, header and start position of the answer.

        If the template has no header, the last text of the prompt becomes the header. A new text becomes the
        header as a whole. Of a cached text, only the last token does; it is recomputed with the complete prompt
        as context.
        """
        cached, new, end = list(resolved.cached), list(resolved.new_texts), resolved.end
        header, _ = self._answer_template(resolved)
        if header:
            return cached, new, header, end
        last_text = next((text for text in new if text.end == end), None)
        if last_text is not None:
            new.remove(last_text)
            return cached, new, list(last_text.tokens), last_text.start
        last = next(item for item in cached if item.position + item.num_tokens == end)
        cached.remove(last)
        if last.num_tokens > 1:
            cached.append(last._replace(num_tokens=last.num_tokens - 1))
        return cached, new, [self._run(last).tokens[last.token_start + last.num_tokens - 1]], end - 1

    def _place_context(
        self, session: Session, resolved: ResolvedPrompt, stack: ExitStack
    ) -> tuple[list[Message | MessageSlice], list[int], list[int], int]:
        """Return the answer's parents, their offsets, its header and its start.

        `stack` releases the parents at exit.
        """
        cached, new, header, start = self._answer_context(resolved)
        keys = [_run_key(item, resolved) for item in cached]
        with self._exclusive():
            available = self._available()
            messages = {key: self._message(key) for key in keys}  # all of them first: one batch computes missing runs
            imported = {
                key: _release_on_exit(stack, session.import_message(message)) for key, message in messages.items()
            }
            for key in imported.keys() - available:
                imported[key]._request.usage = messages[key].usage
                imported[key]._request.purpose = Purpose.ANSWER_CONTEXT
        parents: list[Message | MessageSlice] = []
        offsets = [item.position for item in cached]
        for key, item in zip(keys, cached, strict=True):
            is_whole = item.num_tokens == len(self._run(key).tokens)
            end = item.token_start + item.num_tokens
            parents.append(imported[key] if is_whole else imported[key][item.token_start : end])
        for text in new:
            message = session.prefill(list(text.tokens), tuple(parents), tuple(offsets), text.start)
            message._request.purpose = Purpose.ANSWER_CONTEXT
            parents.append(_release_on_exit(stack, message))
            offsets.append(text.start)
        return parents, offsets, header, start

    def check(self) -> None:
        """Assert that all entries belong to the schema and match the location."""
        for key in (*self._messages, *self._host_snapshots):
            module = self.layout.modules[key.path]
            assert module.cache and key.run_index < len(module.runs), f"{key} is no cached run of the schema"
        assert self.location == "device" or not self._messages, "a cache in host memory references device memory"
        for key, snapshot in self._host_snapshots.items():
            assert len(snapshot.layers[0][0]) == len(self._run(key).tokens)

    # -- files --------------------------------------------------------------------------------------------

    def save(self, file: str | File) -> int:
        """Write modules to a safetensors file; return its bytes.

        Raises:
            CacheFileError: if the file cannot be written.
        """
        self.engine.core.hf_model.ensure_single_process("a saved cache")
        storage.check_writable(File(file))  # before anything is computed
        snapshots = {}
        with self._lock:
            for key in self._run_keys():
                with self._exclusive():
                    snapshots[_run_name(key)] = self._host_snapshots.get(key) or self._message(key).export_kv()
        return storage.save(File(file), self._fingerprints(), snapshots)

    def load(self, file: str | File) -> int:
        """Read modules that `save` wrote and return the number of their tokens.

        Raises:
            CacheFileError: if the file is damaged or of another model, tokenizer or schema; the cache is unchanged.
        """
        keys = self._run_keys()
        pool = self.engine.core.cache_manager.pool
        shapes = {_run_name(k): (len(pool.keys), len(self._run(k).tokens), *pool.keys[0].shape[1:]) for k in keys}
        snapshots = storage.load(File(file), self._fingerprints(), shapes, pool.keys[0].dtype)
        with self._lock:
            self._host_snapshots |= dict(zip(keys, snapshots, strict=True))
            if self.location == "device":
                try:
                    for key in keys:
                        self._message(key)
                finally:
                    self._host_snapshots.clear()
        return sum(len(self._run(key).tokens) for key in keys)

    def _fingerprints(self) -> dict[str, str]:
        return {  # in the order of comparison: another dtype also changes the hash of the model
            "dtype": str(self.engine.core.cache_manager.pool.keys[0].dtype).removeprefix("torch."),
            "model": self.engine.core.model_set.weights_hash(BASE_MODEL),
            "tokenizer": tokenizer_fingerprint(self.engine.tokenizer),
            "schema": self.schema.fingerprint,
            "layout": self.layout.fingerprint,
        }


def _run_key(item: CachedRange, resolved: ResolvedPrompt) -> RunKey:
    return RunKey(item.path, item.run_index, resolved.scaffolds.get(item.path, ()))


def _run_name(key: RunKey) -> str:
    return f"{'/'.join(key.path)}#{key.run_index}"


def _release_on_exit(stack: ExitStack, message: Message) -> Message:
    """Release a message when the stack exits."""
    stack.callback(message.release)
    return message
