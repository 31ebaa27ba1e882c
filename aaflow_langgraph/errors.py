"""The error tree. It knows names and ways out; it imports nothing.

```
AAFlowError                         .recovery
|- UsageError(ValueError)           fail       the caller's input; the message says what to change
|  |- ConfigError                   fail       an option, a prompt, a template, a state key
|  |- MalformedHandle               fail       a value that is not a handle (forged, truncated, foreign type)
|  |- IncompatibleHandle            fail       a handle of another model, dtype, tokenizer or tenant
|  |- ContextTooLong                fail       more tokens than the model's window
|  |- UnsupportedModel              fail       this model's state cannot be carried; says which layer and why
|  `- NotComposable                 fail       segments that cannot be joined
|- KVMissing(LookupError)           recompute  KV is not where it was
|  |- Evicted
|  |- LeaseExpired
|  `- Fenced                                   an owner's lease in the index ran out
|- RecipeMissing(LookupError)       fail       nothing is left to rebuild from
|- CapacityError(MemoryError)       retry
|  `- PoolExhausted                            asked, free, pinned, evictable: all in the message
|- IndexUnavailable(ConnectionError) retry    the index does not answer
|  `- IndexFull                                its server is out of memory: it reads and forgets, but takes nothing new
|- PersistenceError(OSError)        fail       a checkpoint's recipes cannot be written: it would promise what it cannot keep
|- Cancelled(RuntimeError)          fail       the caller cancelled a generation
`- IntegrityError(RuntimeError)     fail       bytes or records that contradict each other: quarantine, never serve
```

LangGraph's default retry policy retries plain ``Exception`` and ``ConnectionError`` subclasses and does not retry
``ValueError``, ``LookupError``, ``RuntimeError``, ``OSError``; the base classes are chosen for that.
"""

from __future__ import annotations

from typing import Literal

Recovery = Literal["retry", "recompute", "fail"]


class AAFlowError(Exception):
    """Base of every error this package raises on purpose.

    ``recovery`` is the caller's way out: ``"retry"``, ``"recompute"`` or ``"fail"``.
    """

    recovery: Recovery = "fail"


class UsageError(AAFlowError, ValueError):
    """The caller's input cannot be right. The message says what to change."""


class ConfigError(UsageError):
    """An option, prompt, template or state key is wrong."""


class MalformedHandle(UsageError):
    """A value that should be a ``KVHandle`` is not one."""


class IncompatibleHandle(UsageError):
    """A handle belongs to another model, dtype, tokenizer or tenant (I6)."""


class ContextTooLong(UsageError):
    """The request needs more tokens than the model's window holds."""


class UnsupportedModel(UsageError):
    """The model keeps state that cannot be carried as keys and values."""


class NotComposable(UsageError):
    """Segments cannot be joined by the allowed means."""


class KVMissing(AAFlowError, LookupError):
    """KV is not where it was. The broker recomputes it from the recipe."""

    recovery: Recovery = "recompute"


class Evicted(KVMissing):
    """The extent was evicted."""


class LeaseExpired(KVMissing):
    """The lease ran out or was fenced: it grants nothing any more (I7)."""


class Fenced(KVMissing):
    """The index does not know this owner under this epoch any more: it joins again and announces what it holds."""


class RecipeMissing(AAFlowError, LookupError):
    """No recipe is known for a handle, so its KV cannot be rebuilt."""


class CapacityError(AAFlowError, MemoryError):
    """Not enough room."""

    recovery: Recovery = "retry"


class PoolExhausted(CapacityError):
    """A pool cannot give the bytes asked for, even after eviction."""


class IndexUnavailable(AAFlowError, ConnectionError):
    """The index does not answer."""

    recovery: Recovery = "retry"


class IndexFull(IndexUnavailable):
    """The index' server is out of memory: it answers and forgets, but takes nothing new."""


class PersistenceError(AAFlowError, OSError):
    """The recipes of a checkpoint cannot be written or read, so the checkpoint was not stored. An ``OSError``, which LangGraph
    does not retry: a full disk is as full a moment later.
    """


class Cancelled(AAFlowError, RuntimeError):
    """A generation was cancelled by its caller."""


class IntegrityError(AAFlowError, RuntimeError):
    """Bytes or records contradict each other. Nothing is served from them."""
