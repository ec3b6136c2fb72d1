"""The library's own errors, one class for each thing that can go wrong.

Every message says what was given and what is allowed.
"""


class KVQError(Exception):
    """Base of every error that kvq_lib raises on purpose."""


class InvalidArgument(KVQError, ValueError):
    """An argument has the wrong shape, dtype, type or range."""


class UnsupportedScheme(KVQError, ValueError):
    """An unknown scheme or number format, or a combination that does not exist."""


class UnsupportedModel(KVQError):
    """The model asks attention for something that the cache does not implement."""


class UnsupportedBackend(KVQError):
    """The backend does not exist, or cannot run here; the message says why."""


class NonFiniteValue(KVQError, ValueError):
    """A key, value or query holds NaN or infinity."""


class ValueOutOfRange(KVQError, ValueError):
    """A finite value, or the range of a group, does not fit the storage format."""


class OutOfPages(KVQError):
    """The pool has too few free pages; nothing was reserved."""


class UnknownSequence(KVQError, KeyError):
    """The handle was never issued, was freed, or belongs to another cache."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class SequenceBusy(KVQError):
    """The sequence takes part in a step that is neither committed nor aborted."""


class StepError(KVQError):
    """Parts of a step were called out of order, or a step inside another."""


class WindowTooShort(KVQError, ValueError):
    """No token of the window would read a sealed page: nothing would be measured."""
