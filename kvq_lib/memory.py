"""How many bytes a cache takes, and how many sequences fit: the two formulas."""

from dataclasses import astuple, dataclass
from fractions import Fraction

import torch

from .checks import float_dtype, real, whole
from .errors import InvalidArgument, UnsupportedModel
from .schemes import Scheme
from .schemes import scheme as find_scheme


@dataclass(frozen=True)
class KVShape:
    """What decides the size of a model's cache.

    Attributes:
        num_layers: layers that have a cache.
        num_kv_heads: heads of keys and values. With grouped queries this is smaller
            than the number of query heads, and it is the one that counts.
        head_dim: channels of one head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self):
        for field in ("num_layers", "num_kv_heads", "head_dim"):
            number = whole(field, getattr(self, field), at_least=1)
            object.__setattr__(self, field, number)  # the class is frozen

    @classmethod
    def of(cls, config) -> "KVShape":
        """The shape of a Hugging Face model config.

        Raises:
            UnsupportedModel: the config does not describe plain keys and values: an
                encoder-decoder, latent attention, layers without attention, or layers
                that share a cache.
        """
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        name = getattr(config, "model_type", type(config).__name__)
        if getattr(config, "is_encoder_decoder", False):
            raise UnsupportedModel(f"{name} is an encoder-decoder model")
        if getattr(config, "kv_lora_rank", None):
            raise UnsupportedModel(f"{name} caches a latent, not keys and values")
        if getattr(config, "num_kv_shared_layers", 0):
            raise UnsupportedModel(f"{name} shares a cache between layers")
        try:
            kinds = set(getattr(config, "layer_types", None) or ())
            others = kinds - {"full_attention", "sliding_attention"}
            if others:
                raise UnsupportedModel(
                    f"{name} has layers without a cache of keys and values: "
                    f"{', '.join(sorted(map(str, others)))}"
                )
            layers, heads = config.num_hidden_layers, config.num_attention_heads
            head_dim, rest = getattr(config, "head_dim", None), 0
            if not head_dim:
                head_dim, rest = divmod(config.hidden_size, heads)
            if rest:
                raise UnsupportedModel(
                    f"{name}: {config.hidden_size} channels for {heads} heads"
                )
            kv_heads = getattr(config, "num_key_value_heads", None)
            kv_heads = kv_heads or getattr(config, "num_kv_heads", None) or heads
        except (
            AttributeError,
            RuntimeError,  # layers differ
            TypeError,
            ZeroDivisionError,
        ) as error:
            raise UnsupportedModel(f"{name}: {error}") from None
        # Older names for one kv head; num_kv_heads then counts something else.
        newer = getattr(config, "new_decoder_architecture", False)
        if getattr(config, "multi_query", False) and not newer:
            kv_heads = 1
        return cls(layers, kv_heads, head_dim)

    @property
    def elements_per_token(self) -> int:
        """Numbers cached for one token: keys and values of every layer and head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def kv_bytes(
    shape: KVShape,
    scheme: "str | Scheme",
    seq_len: int,
    batch: int = 1,
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
) -> int:
    """Bytes that the pools hold for `batch` sequences of `seq_len` tokens, committed.

    Codes, scales, zero points and hot pages count; the integer page tables do not.
    The last page counts whole. For "native" with full pages this is the textbook's
    2 · layers · kv heads · head dim · tokens · batch · bytes.

    Args:
        shape: the model.
        scheme: a name of `SCHEMES`, or a Scheme.
        seq_len: tokens in each sequence.
        batch: sequences; none shares a page with another.
        page_size: tokens in a page.
        dtype: of the hot pages.

    Raises:
        InvalidArgument: a number that is not whole or is negative, a shape that is no
            KVShape, a dtype that hot pages cannot have.
        UnsupportedScheme: an unknown scheme, one with mixed widths that are not yet
            allocated, or one that is made for another number of layers.
    """
    recipe = find_scheme(scheme)
    if not isinstance(shape, KVShape):
        raise InvalidArgument(f"shape is a kvq.KVShape, got {shape!r}")
    seq_len = whole("seq_len", seq_len, at_least=0)
    batch = whole("batch", batch, at_least=0)
    page_size = whole("page_size", page_size, at_least=1)
    law = recipe.law(page_size)
    hot_page = 2 * page_size * shape.head_dim * float_dtype("dtype", dtype).itemsize
    recipe.require_shape(*astuple(shape))
    cold_pages = [
        recipe.page_nbytes(page_size, shape.head_dim, layer)
        for layer in range(len(recipe.layers) or 1)
    ]
    # Layers that do not differ are counted, not listed: there may be any number.
    cold_page = sum(cold_pages) * (1 if recipe.layers else shape.num_layers)
    kept_hot = shape.num_layers * sum(map(len, law.kept_hot(seq_len)))
    per_head = kept_hot * hot_page + len(law.sealed(seq_len)) * cold_page
    return batch * shape.num_kv_heads * per_head


def max_batch(
    available: float, model: float, activations: float, per_sequence: float
) -> int:
    """How many sequences fit: ⌊(available - model - activations) / per_sequence⌋.

    All four are bytes, or all four any other unit. 0 when the model alone is too big.
    Amounts are taken as floats, and divided exactly as the decimals that they print
    as: 64 / 0.64 is 100, though the float nearest to 0.64 is a little larger.

    Raises:
        InvalidArgument: an amount that is negative or not finite, or `per_sequence` of
            zero.
    """
    total, fixed, work, each = (
        Fraction(repr(real(name, amount, at_least=0)))
        for name, amount in (
            ("available", available),
            ("model", model),
            ("activations", activations),
            ("per_sequence", per_sequence),
        )
    )
    if each == 0:
        raise InvalidArgument("per_sequence must be more than 0")
    return max(0, (total - fixed - work) // each)
