"""Paged, quantized key-value caches for language models, and what a book needs to
measure them.

    import kvq_lib as kvq

The modules build on each other in this order: errors, checks, formats, specs, storage,
quantize, turns, schemes, memory, pages, kernels, cache, attention, weights, model,
calibrate, allocate, fit, search, swap, serving, admission, engine, gpus, layers, sizes,
plan, cli. Read them in that order, too.
"""

from .allocate import allocate
from .cache import Batch, CacheStats, PagedKVCache
from .calibrate import Calibration, calibrate
from .engine import Engine
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
from .fit import fit
from .formats import FORMATS, Format
from .gpus import MEMORY_GB
from .memory import KVShape, kv_bytes, max_batch
from .model import Completion, generate, load_model, logits, perplexity
from .plan import Plan, SchemePlan, plan
from .quantize import quantize
from .schemes import SCHEMES, Scheme, scheme
from .search import Point, search
from .serving import (
    Clock,
    EngineMetrics,
    Event,
    Request,
    RequestMetrics,
    Result,
    Usage,
    VirtualClock,
)
from .specs import AIDS, Mixed, Spec
from .storage import Quantized
