"""Prompt Cache schemas as resources of the server."""

from collections.abc import Sequence
from typing import NamedTuple

from ...api.engine import Engine
from ...api.message import Message
from ...errors import InvalidRequestError, SchemaError
from ...namespace import UNSALTED, Client
from ...prompt_cache.cache import PromptCache, layout_schema
from ...prompt_cache.layout import Layout
from ...prompt_cache.parser import load_schema
from ...prompt_cache.resolve import ResolvedPrompt
from ..api_errors import ApiError
from ..openai.chat_prompt import ChatPrompt
from .answer_plan import Answer, Plan, SourceCounts, decode_all

MAX_PML_CHARS = 64  # of a schema, for each position of the model: members of a union have the same ones


class SchemaPrompt(NamedTuple):
    """Prompt that was resolved with a schema."""

    key: tuple[str, str]  # tenant and name
    cache: PromptCache
    resolved: ResolvedPrompt


class SchemaStore:
    """Schemas by tenant and name; changed in the engine's thread only.

    Args:
        max_schemas: of one tenant.
    """

    def __init__(self, engine: Engine, max_schemas: int) -> None:
        self._engine, self._max_schemas = engine, max_schemas
        self._caches: dict[tuple[str, str], PromptCache] = {}
        self.sources: dict[tuple[str, str], str] = {}  # PML of each schema

    def prepare(self, name: str, pml: str) -> Layout:
        """Parse and tokenize a schema; runs in a worker thread.

        Raises:
            PMLError: if the text is not a valid schema, or has another name.
        """
        limit = MAX_PML_CHARS * self._engine.model_info.max_positions
        if len(pml) > limit:
            raise SchemaError(f"pml: {len(pml):,} characters: the model reads schemas of at most {limit:,}")
        schema = load_schema(pml)
        if schema.name != name:
            raise SchemaError(f"the schema has the name {schema.name!r}: use it in the path, not {name!r}")
        return layout_schema(self._engine, schema)

    def put(self, tenant: str, name: str, pml: str, layout: Layout) -> PromptCache:
        """Create or replace a schema; runs in the engine's thread.

        Args:
            layout: of the text, from `prepare`.

        Raises:
            ApiError: if the tenant has its share of schemas.
        """
        names = self.names(tenant)
        if len(names) >= self._max_schemas and name not in names:
            raise ApiError(
                429, f"{self._max_schemas} schemas are kept for this key: delete one", code="too_many_schemas"
            )
        cache = PromptCache(self._engine, layout, client_id=Client(tenant, UNSALTED))
        self.remove(tenant, name)
        self._caches[tenant, name], self.sources[tenant, name] = cache, pml
        return cache

    def get(self, tenant: str, name: str) -> PromptCache:
        """Return a schema's cache, or raise ApiError."""
        cache = self._caches.get((tenant, name))
        if cache is None:
            raise ApiError(404, f"The schema '{name}' does not exist: PUT it first.", code="schema_not_found")
        return cache

    def names(self, tenant: str) -> list[str]:
        """Return the names of a tenant's schemas."""
        return [name for owner, name in list(self._caches) if owner == tenant]

    def remove(self, tenant: str, name: str) -> bool:
        """Release a schema's modules; return whether it existed."""
        cache = self._caches.pop((tenant, name), None)
        self.sources.pop((tenant, name), None)
        if cache is not None:
            cache.close()
        return cache is not None

    def clear(self) -> None:
        """Release all schemas."""
        for tenant, name in list(self._caches):
            self.remove(tenant, name)

    def tokenize(self, tenant: str, name: str, pml: str) -> ChatPrompt:
        """Return a prompt as plain text, for limits and counts."""
        cache = self.get(tenant, name)
        return ChatPrompt(cache.resolve(pml).flatten(cache.layout))

    def resolve(self, tenant: str, name: str, pml: str) -> SchemaPrompt:
        """Resolve a prompt; runs in a worker thread."""
        cache = self.get(tenant, name)
        return SchemaPrompt((tenant, name), cache, cache.resolve(pml))

    def cache_of(self, prompt: SchemaPrompt) -> PromptCache:
        """Return the cache of a resolved prompt.

        Raises:
            ApiError: of status 409, if the schema was replaced or deleted meanwhile.
        """
        if self._caches.get(prompt.key) is not prompt.cache:
            raise ApiError(
                409,
                f"the schema {prompt.key[1]!r} was replaced meanwhile: send the request again",
                code="schema_replaced",
            )
        return prompt.cache

    def plan(self, schema_prompt: SchemaPrompt, prompt: ChatPrompt, answers: Sequence[Answer]) -> Plan:
        """Submit a prompt whose modules come from the cache.

        Raises:
            InvalidRequestError: if the answers have a repair, which moves modules.
        """
        for answer in answers:
            if answer.repair:
                raise InvalidRequestError(f"repair={answer.repair}: modules have fixed positions; leave it out")
        cache, counts = self.cache_of(schema_prompt), SourceCounts()
        session = self._engine.session(seed=0, client_id=cache.client_id)

        def decode(answer: Answer) -> Message:
            return cache.generate(session, schema_prompt.resolved, sampling=answer.sampling)

        try:
            messages = decode_all(decode, answers)
        except BaseException:
            session.close()
            raise

        def close(is_complete: bool) -> None:
            if is_complete:
                counts.message = min(messages[0].usage.cached_tokens, len(prompt.tokens))
                counts.computed = len(prompt.tokens) - counts.message
            session.close()

        return Plan(messages, counts, close)
