"""The exception tree. Every message says what was got and how to mend it; knows nothing else.

ChoreographError
├── ConfigError (ValueError)         an option that does not exist or is out of range
│   └── SamplingError                the same for a sampling option
├── DataError (ValueError)           a dataset, record or result file that cannot be read
│   └── CacheFileError               saved encodings that are stale, cut off or changed
├── PMLError (ValueError)            a schema or prompt in PML that cannot mean anything
│   ├── PMLSyntaxError               text that is not PML; carries `line` and `column`
│   ├── SchemaError                  a schema that contradicts itself or does not fit the model
│   └── PromptError                  a prompt that does not follow its schema
├── GraphError (ValueError)          a step graph of agents that cannot be read
├── ModelError (OSError)             a model that cannot be found, read or served
├── CallError (ValueError)           a `prefill` or `decode` that cannot mean anything
│   ├── UnknownMessage               a parent that is not a message
│   ├── ForeignMessage               a parent that belongs to another engine or session
│   ├── ReleasedMessage              a parent (or a read) of a message that was released
│   ├── RepeatedParent               one parent twice in the same call
│   ├── BadTokens                    empty, or ids outside the vocabulary
│   └── BadPosition                  a negative offset, or a position past the model's limit
├── CacheFull (MemoryError)          a call that can never fit, with the numbers
│   ├── NeverFits                    one that no empty cache of this size could hold
│   └── RoomLater                    one that fits when a copy under way has arrived
├── CallFailed (RuntimeError)        a message whose parent failed, or a process that computes it too
└── SessionClosed (RuntimeError)     a call on a session or engine that was closed
"""


class ChoreographError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(ChoreographError, ValueError):
    """An option that does not exist or is out of range."""


class SamplingError(ConfigError):
    """A sampling option that does not exist or is out of range."""


class DataError(ChoreographError, ValueError):
    """A dataset, a record or a file of results that cannot be read."""


class CacheFileError(DataError):
    """Saved encodings that do not belong to this model, tokenizer and schema, or are not whole."""


class PMLError(ChoreographError, ValueError):
    """A schema or prompt in the Prompt Markup Language that cannot mean anything."""


class PMLSyntaxError(PMLError):
    """Text that is not PML."""

    def __init__(self, problem: str, source: str, line: int, column: int) -> None:
        super().__init__(f"{source}, line {line}, column {column}: {problem}")
        self.line, self.column = line, column


class SchemaError(PMLError):
    """A schema that contradicts itself, or does not fit the model."""


class PromptError(PMLError):
    """A prompt that does not follow its schema."""


class GraphError(ChoreographError, ValueError):
    """A step graph whose agents, joins or file cannot be read."""


class ModelError(ChoreographError, OSError):
    """A model that cannot be found, read or served."""


class CallError(ChoreographError, ValueError):
    """A `prefill` or `decode` that cannot mean anything. Nothing was changed."""


class UnknownMessage(CallError):
    """A parent that is not a message."""


class ForeignMessage(CallError):
    """A parent that belongs to another engine or session."""


class ReleasedMessage(CallError):
    """A released message used as a parent, or read before it was known."""


class RepeatedParent(CallError):
    """One parent twice in the same call."""


class BadTokens(CallError):
    """No tokens, or ids outside the vocabulary."""


class BadPosition(CallError):
    """A negative offset, or a position past the model's limit."""


class CacheFull(ChoreographError, MemoryError):
    """A call that can never fit into the cache as it stands."""


class NeverFits(CacheFull):
    """A call that sees and makes more than the whole cache holds."""


class RoomLater(CacheFull):
    """There is no room yet: encodings are on their way out of the device, or in."""


class CallFailed(ChoreographError, RuntimeError):
    """A message that cannot be known: one of its parents failed, or a process that computes it with this one."""


class SessionClosed(ChoreographError, RuntimeError):
    """A call on a session or engine that was closed."""
