"""Exception hierarchy of the package.

Every message names the invalid value and the fix.

ChoreographError
├── ConfigError (ValueError)               unknown or out-of-range option
│   └── SamplingError                      the same for a sampling option
├── DataError (ValueError)                 unreadable dataset, record or result file
│   └── CacheFileError                     saved KV cache that is stale, truncated or changed
├── PMLError (ValueError)                  invalid schema or prompt in PML
│   ├── PMLSyntaxError                     text that is not PML; has `line` and `column`
│   ├── SchemaError                        schema that is inconsistent or does not fit the model
│   └── PromptError                        prompt that does not follow its schema
├── GraphError (ValueError)                unreadable step graph of agents
├── ModelError (OSError)                   model that cannot be found, loaded or served
├── MissingDependencyError (ImportError)   optional dependency that is not installed
├── InvalidRequestError (ValueError)       invalid `prefill` or `decode` arguments
│   ├── NotAMessageError                   parent that is not a message
│   ├── WrongSessionError                  parent of another engine or session
│   ├── MessageReleasedError               released message used as a parent or read
│   ├── DuplicateParentError               one parent twice in the same request
│   ├── InvalidTokensError                 no tokens, or ids outside the vocabulary
│   ├── InvalidPositionError               negative offset, or position beyond the model limit
│   └── LeakError                          parent with labels that the clearance excludes
├── CacheFullError (MemoryError)           no space for the request, with the numbers
│   ├── RequestTooLargeError               request larger than the whole KV cache
│   └── CacheBusyError                     space is available after a running transfer
├── RequestFailedError (RuntimeError)      failed parent, or a failed process of the engine
│   └── LostContextError                   context that could not be received from another process
└── SessionClosedError (RuntimeError)      request on a closed session or engine
"""


class ChoreographError(Exception):
    """Base class of all errors of this package."""


class ConfigError(ChoreographError, ValueError):
    """Unknown or out-of-range option."""


class SamplingError(ConfigError):
    """Unknown or out-of-range sampling option."""


class DataError(ChoreographError, ValueError):
    """Unreadable dataset, record or result file."""


class CacheFileError(DataError):
    """Incomplete saved KV cache, or one of another model, tokenizer or schema."""


class PMLError(ChoreographError, ValueError):
    """Invalid schema or prompt in the Prompt Markup Language."""


class PMLSyntaxError(PMLError):
    """Text that is not well-formed PML."""

    def __init__(self, message: str, source: str, line: int, column: int) -> None:
        super().__init__(f"{source}, line {line}, column {column}: {message}")
        self.line, self.column = line, column


class SchemaError(PMLError):
    """Schema that is inconsistent or does not fit the model."""


class PromptError(PMLError):
    """Prompt that does not follow its schema."""


class GraphError(ChoreographError, ValueError):
    """Step graph whose agents, dependencies or file cannot be read."""


class ModelError(ChoreographError, OSError):
    """Model that cannot be found, loaded or served."""


class MissingDependencyError(ChoreographError, ImportError):
    """Missing optional dependency; the message names the extra to install."""


class InvalidRequestError(ChoreographError, ValueError):
    """Invalid `prefill` or `decode` arguments; no state was changed."""


class NotAMessageError(InvalidRequestError):
    """Parent that is not a message."""


class WrongSessionError(InvalidRequestError):
    """Parent that belongs to another engine or session."""


class MessageReleasedError(InvalidRequestError):
    """Released message used as a parent, or read before completion."""


class DuplicateParentError(InvalidRequestError):
    """Same parent given twice in one request."""


class InvalidTokensError(InvalidRequestError):
    """Empty token list, or token ids outside the vocabulary."""


class InvalidPositionError(InvalidRequestError):
    """Negative offset, or a position beyond the limit of the model."""


class LeakError(InvalidRequestError):
    """Parent with labels that the reader's clearance does not contain."""


class CacheFullError(ChoreographError, MemoryError):
    """Request that does not fit into the KV cache."""


class RequestTooLargeError(CacheFullError):
    """Request whose context and output exceed the whole KV cache."""


class CacheBusyError(CacheFullError):
    """Space that becomes available only when a running transfer completes."""


class RequestFailedError(ChoreographError, RuntimeError):
    """Failed request, failed parent, or failed process of the engine."""


class LostContextError(RequestFailedError):
    """Context that could not be received from another process."""


class SessionClosedError(ChoreographError, RuntimeError):
    """Request on a closed session or engine."""
