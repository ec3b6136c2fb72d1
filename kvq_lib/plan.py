"""Before a model is loaded: how many sequences a GPU holds, and where its memory goes.

All amounts are bytes on one GPU. With tensor parallelism every GPU has its share of the
weights and of the kv heads; the batch is that of all of them together.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import torch

from .admission import chunk_reserve
from .attention import CHUNK
from .checks import _shown, float_dtype, real, reason, whole
from .errors import InvalidArgument, KVQError, UnsupportedModel, UnsupportedScheme
from .gpus import amount, gpu_memory
from .layers import ModelLayers, load_config, quiet, read_layers
from .memory import max_batch
from .schemes import SCHEMES, Scheme
from .schemes import scheme as find_scheme
from .sizes import Size, Sizes

#: Bits of one weight, by the name of a format.
WEIGHT_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8": 8,
    "int8": 8,
    "int4": 4,
}


@dataclass(frozen=True)
class SchemePlan:
    """What one scheme makes of the memory; bytes on one GPU.

    Attributes:
        scheme: its name.
        bits_per_element: of a page at rest (sealed, where the scheme seals), scales
            and zero points included.
        bytes_per_token: what a token adds to such pages while every layer keeps it.
        bytes_per_token_at_context: the same at the planned context, where layers with
            a full window add nothing.
        sequence_bytes: one sequence of the planned context, committed; `kv_bytes`.
        step_bytes: what a sequence takes on top while it decodes: a hot page that
            fills, and a cold page that it is sealed into.
        chunk_bytes: what prefill by chunks takes on top, once: hot pages of a chunk,
            but at most a quarter of what is left beside one sequence. The engine
            divides its budget by the same rule.
        max_batch: sequences of the planned context that fit.
        cache_bytes: their pools: max_batch · (sequence + step) + chunk.
        left_bytes: usable, but not used; below zero where even the weights are too big.
    """

    scheme: str
    bits_per_element: float
    bytes_per_token: float
    bytes_per_token_at_context: float
    sequence_bytes: int
    step_bytes: int
    chunk_bytes: int
    max_batch: int
    cache_bytes: int
    left_bytes: int


@dataclass(frozen=True)
class Plan:
    """What fits, and where the memory of one GPU goes.

    Attributes:
        model: the model type.
        layers: the layers in words, one line for each kind.
        context, page_size, chunk: tokens.
        tensor_parallel: GPUs that share the model.
        memory_bytes: of one GPU.
        utilization: the fraction of it that may be used.
        usable_bytes: that fraction.
        parameters: of the whole model; None where the weights were given in bytes.
        weight_bits: bits of each parameter; None likewise.
        weight_bytes: one GPU's share of the weights.
        reserve_bytes: kept for activations and whatever else.
        schemes: a row for each scheme.
        skipped: schemes that do not go with the model, and why.
        notes: what was assumed, in sentences.
    """

    model: str
    layers: tuple[str, ...]
    context: int
    page_size: int
    chunk: int
    tensor_parallel: int
    memory_bytes: int
    utilization: float
    usable_bytes: int
    parameters: int | None
    weight_bits: float | None
    weight_bytes: int
    reserve_bytes: int
    schemes: tuple[SchemePlan, ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict:
        """Plain dicts, lists, texts and numbers, as for JSON."""
        content = dataclasses.asdict(self)
        content["skipped"] = dict(self.skipped)
        return content


def plan(
    model,
    gpu: "int | str",
    context: int,
    schemes: "str | Scheme | Iterable[str | Scheme] | None" = None,
    *,
    tensor_parallel: int = 1,
    page_size: int = 16,
    weights: "int | str | None" = None,
    weight_dtype: "str | float | None" = None,
    dtype: torch.dtype | None = None,
    reserve: "int | str" = 0,
    utilization: float = 0.9,
    chunk: int = CHUNK,
) -> Plan:
    """How many sequences of a model fit on a GPU under each scheme.

    Args:
        model: a config.json, a folder with one, "smollm2-135m", a Hugging Face id, a
            dict or a config object. No weights are loaded.
        gpu: a name of `MEMORY_GB`, or an amount: bytes, "24GiB", "24 GB".
        context: tokens of each sequence, prompt and answer together.
        schemes: one or several; None for all that go with the model.
        tensor_parallel: GPUs that share the model.
        page_size: tokens in a page.
        weights: bytes of all weights, or an amount; None counts the parameters.
        weight_dtype: a name of `WEIGHT_BITS`, or bits per parameter; None for the
            config's own. Not together with `weights`.
        dtype: of hot pages; None for the config's own, but float16 where that is
            float32 and the scheme seals, or where the config is silent.
        reserve: kept on each GPU for activations and whatever else: an amount.
        utilization: the fraction of memory that may be used, above 0, at most 1.
        chunk: tokens of one step of prefill.

    Raises:
        InvalidArgument: a number or an amount that makes no sense, or no config.
        UnsupportedModel: a model whose cache, or whose weights, cannot be counted.
        UnsupportedScheme: an unknown scheme, or a given one that does not go with the
            model.
    """
    context = whole("context", context, at_least=1)
    page_size = whole("page_size", page_size, at_least=1)
    gpus = whole("tensor_parallel", tensor_parallel, at_least=1)
    chunk = whole("chunk", chunk, at_least=1)
    memory = gpu_memory(gpu)
    usable = int(_fraction(utilization) * memory)
    reserved = amount("reserve", reserve)
    config = load_config(model)
    layers = read_layers(config)
    own = _own_dtype(config)
    parameters, bits, weight_bytes, notes = _weights(config, own, weights, weight_dtype)
    share = -(-weight_bytes // gpus)
    given = dtype if dtype is None else float_dtype("dtype", dtype)
    sizes = Sizes(layers, context, page_size, chunk, gpus, given or own)
    sized, skipped = _sized(sizes, schemes, given)
    rows = [_row(name, size, usable, share, reserved) for name, size in sized]
    if not given and not own:
        notes.append("The config names no dtype: hot pages are taken for float16.")
    notes += _notes(layers, context, gpus, reserved, [name for name, _ in sized])
    return Plan(
        layers.name,
        tuple(layers.describe()),
        context,
        page_size,
        chunk,
        gpus,
        memory,
        float(utilization),
        usable,
        parameters,
        bits,
        share,
        reserved,
        tuple(rows),
        tuple(skipped),
        tuple(notes),
    )


def _fraction(utilization: float) -> Fraction:
    """The fraction as it prints: 0.9 of 80 GB are 72 GB to the byte."""
    share = real("utilization", utilization, at_least=0)
    if not 0 < share <= 1:
        raise InvalidArgument(f"utilization is above 0, at most 1; got {share}")
    return Fraction(repr(share))


# -- weights -------------------------------------------------------------------------


def _own_dtype(config) -> torch.dtype | None:
    """The dtype that a config names, or None."""
    for part in (config, config.get_text_config(decoder=True)):
        dtype = getattr(part, "dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, None)
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            return dtype if dtype.itemsize >= 2 else None
    return None


def _weights(config, own, weights, weight_dtype):
    """Parameters, bits of each, bytes of all, and notes on what was assumed."""
    if weights is not None:
        if weight_dtype is not None:
            raise InvalidArgument("give weights or weight_dtype, not both")
        return None, None, amount("weights", weights), []
    notes = []
    if weight_dtype is not None:
        bits = _weight_bits(weight_dtype)
    elif getattr(config, "quantization_config", None):
        raise UnsupportedModel(
            f"{config.model_type}: the config says that the weights are quantized; "
            "give weights (an amount) or weight_dtype (bits per weight)"
        )
    else:
        bits = 8 * own.itemsize if own else 16
        if not own:
            notes.append("The config names no dtype: 16 bits per weight are assumed.")
    parameters = count_parameters(config)
    exact = Fraction(repr(float(bits))) * parameters / 8
    notes.append("Weights: every parameter of the model at the same number of bits.")
    return parameters, float(bits), math.ceil(exact), notes


def _weight_bits(dtype: "str | float") -> float:
    if isinstance(dtype, str) and dtype in WEIGHT_BITS:
        return WEIGHT_BITS[dtype]
    if isinstance(dtype, str):
        raise InvalidArgument(
            f"weight_dtype is one of {', '.join(WEIGHT_BITS)}, or bits per weight; "
            f"got {_shown(dtype)}"
        )
    bits = real("weight_dtype", dtype, at_least=0)
    if not 0 < bits <= 64:
        raise InvalidArgument(f"weight_dtype is above 0 bits, at most 64; got {bits}")
    return bits


def count_parameters(config) -> int:
    """Parameters of a model, tied ones once and all experts included; none is made.

    Raises:
        UnsupportedModel: transformers cannot build the model.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        return sum(p.numel() for p in model.parameters())
    except Exception as error:  # each model builds itself in its own way
        raise UnsupportedModel(
            f"{config.model_type}: cannot count the parameters, give weights (an "
            f"amount): {reason(error)}"
        ) from None


# -- schemes -------------------------------------------------------------------------


def _sized(sizes: Sizes, schemes, given) -> tuple[list, list]:
    """Names and sizes of schemes, and those that do not go with the model."""
    everything = schemes is None
    if isinstance(schemes, str | Scheme):
        schemes = [schemes]
    try:
        recipes = [find_scheme(s) for s in (SCHEMES if everything else schemes)]
    except TypeError:
        raise UnsupportedScheme(
            f"schemes are names or kvq.Schemes, got {_shown(schemes)}"
        ) from None
    if not recipes:
        raise UnsupportedScheme("no scheme was given")
    sized, skipped = [], []
    for recipe in recipes:
        try:
            sized.append((recipe.name, sizes.of(recipe, given is not None)))
        except KVQError as error:
            if not everything:
                raise
            skipped.append((recipe.name, str(error)))
    return sized, skipped


def _row(name: str, size: Size, usable: int, weights: int, reserved: int):
    """A row of the plan: the concurrency formula, and what it leaves."""
    each = size.decoding
    left = max(0, usable - weights - reserved - each)
    chunk = chunk_reserve(left, size.prefilling - each)
    batch = max_batch(usable, weights, reserved + chunk, each)
    cache = batch * each + chunk if batch else 0
    return SchemePlan(
        name,
        size.bits,
        float(size.token),
        float(size.growth),
        size.committed,
        each - size.committed,
        chunk,
        batch,
        cache,
        usable - weights - reserved - cache,
    )


def _notes(layers: ModelLayers, context, gpus, reserved, names) -> list[str]:
    notes = list(layers.notes)
    if layers.longest and context > layers.longest:
        notes.append(
            f"A context of {context} is beyond the {layers.longest} tokens that the "
            "model was made for."
        )
    if gpus > 1:
        notes.append(
            f"Weights, embeddings included, are divided by {gpus}. Of its kv heads a "
            "GPU holds its share rounded up, at least one: with more GPUs than heads "
            "they are replicated, and a latent always is."
        )
    if not reserved:
        notes.append("No reserve is kept for activations beyond the unusable part.")
    if "mixed" in names:
        notes.append("mixed: keys at its budget of bits; calibration allocates them.")
    return notes
