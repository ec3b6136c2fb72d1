"""Paged, quantized key-value caches for language models, and what a book needs to
measure them.

    import kvq_lib as kvq

The modules build on each other in this order: errors, checks, formats, quantize,
schemes, memory, pages, kernels, cache, attention, weights, model. Read
them in that order, too.
"""

from .cache import Batch, CacheStats, PagedKVCache
from .errors import (
    InvalidArgument,
    KVQError,
    NonFiniteValue,
    OutOfPages,
    SequenceBusy,
    StepError,
    UnknownSequence,
    UnsupportedBackend,
    UnsupportedModel,
    UnsupportedScheme,
    ValueOutOfRange,
    WindowTooShort,
)
from .formats import FORMATS, Format
from .memory import KVShape, kv_bytes, max_batch
from .model import Completion, generate, load_model, logits, perplexity
from .quantize import Quantized, Spec, quantize
from .schemes import SCHEMES, Scheme, scheme
