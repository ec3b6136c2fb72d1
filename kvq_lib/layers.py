"""What each layer of a model keeps of a token, read from its config.

`KVShape.of` describes models that `PagedKVCache` runs. This module reads more, for
planning: sliding windows, latents, layers without a cache, layers that share one. What
it does not know, it refuses by name.
"""

import contextlib
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .checks import _shown, reason, whole
from .errors import InvalidArgument, UnsupportedModel
from .weights import find_weights

#: Models whose layers all keep keys and values, of the whole context or of a window.
PLAIN = frozenset(
    """apertus arcee bitnet bloom codegen cohere cohere2 cwm ernie4_5 ernie4_5_moe
    exaone exaone4 falcon flex_olmo gemma gemma2 gemma3_text gemma3n_text glm glm4
    glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe
    granitemoeshared helium internlm3 llama llama4_text minimax_m2 ministral3 mistral
    mixtral mpt olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe
    qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma xglm""".split()
)
#: Models that keep one latent a token: `kv_lora_rank` + `qk_rope_head_dim` channels.
LATENT = frozenset("deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3".split())
#: Models in which only some layers attend.
HYBRID = frozenset(
    """bamba falcon_h1 granitemoehybrid jamba lfm2 nemotron_h olmo_hybrid
    qwen3_5_moe_text qwen3_5_text qwen3_next zamba zamba2""".split()
)

#: Kinds of layers by what they keep; "attention" and "mamba" are older names.
_FULL = ("full_attention", "attention", "hybrid")
_WINDOWS = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
_STATES = ("linear_attention", "mamba", "conv", "hybrid")
_NOTHING = ("moe", "mlp")

#: Far more than any model has; each layer is looked at.
MOST_LAYERS = 4096


@dataclass(frozen=True)
class CacheLayer:
    """What one layer keeps of each token.

    Attributes:
        kv_heads: heads of keys and values; 1 for a latent.
        head_dim: channels of one head, or of the latent.
        window: the latest tokens that it keeps; None for all.
        latent: one tensor instead of keys and values.
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    latent: bool = False

    @property
    def tensors(self) -> int:
        """Keys and values, or the latent alone."""
        return 1 if self.latent else 2


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model, as far as its cache goes.

    Attributes:
        name: the model type.
        layers: what each layer keeps; None for a layer that keeps no tokens.
        longest: tokens that the model was made for; None where the config is silent.
        notes: what was assumed or left out, in sentences.
    """

    name: str
    layers: tuple[CacheLayer | None, ...]
    longest: int | None
    notes: tuple[str, ...]

    @property
    def cached(self) -> tuple[CacheLayer, ...]:
        """The layers that keep something."""
        return tuple(layer for layer in self.layers if layer)

    def describe(self) -> list[str]:
        """One line for each kind of layer, the most frequent first."""
        lines = []
        for layer, count in Counter(self.layers).most_common():
            if layer is None:
                lines.append(f"{count} layers without a cache of their own")
                continue
            heads = "kv head" if layer.kv_heads == 1 else "kv heads"
            what = f"{layer.kv_heads} {heads} of {layer.head_dim} channels"
            if layer.latent:
                what = f"a latent of {layer.head_dim} channels"
            window = f", the latest {layer.window} tokens" if layer.window else ""
            lines.append(f"{count} layers with {what}{window}")
        return lines


# -- configs -------------------------------------------------------------------------


def load_config(model):
    """The Hugging Face config of a model. Never runs code that a model brings along.

    Args:
        model: a config.json, a folder that holds one, "smollm2-135m", a Hugging Face
            id, the content of a config.json as a dict, or a config object.

    Raises:
        InvalidArgument: nothing of that name can be read, or it is no config.
        UnsupportedModel: a model type that the installed transformers does not know.
    """
    if isinstance(model, str | os.PathLike):
        with quiet():
            return _from_dict(_read(model))
    if isinstance(model, dict):
        with quiet():
            return _from_dict(dict(model))
    if not hasattr(model, "get_text_config"):
        raise InvalidArgument(
            "model is a config.json, a folder, a Hugging Face id, a dict or a config; "
            f"got {_shown(model)}"
        )
    return model


@contextlib.contextmanager
def quiet():
    """transformers warns of much that does not matter here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _read(model: "str | os.PathLike") -> dict:
    """The content of a config.json from the disk, or else from the hub."""
    path = Path(model)
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise InvalidArgument(f"no config.json in the folder {_shown(model)}")
        if path.is_file():
            return _parsed(path)
    except (OSError, ValueError) as error:  # a name too long, or with a zero byte
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"cannot read {_shown(model)}: {reason(error)}") from None
    if path.suffix == ".json" or path.is_absolute() or str(model).startswith("."):
        raise InvalidArgument(f"no such file or folder: {_shown(model)}")
    return _downloaded(model)


def _parsed(path: Path) -> dict:
    def refuse(word):
        raise ValueError(f"{word} is no number")

    try:
        content = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"cannot read {str(path)!r}: {reason(error)}") from None
    if not isinstance(content, dict):
        raise InvalidArgument(f"{str(path)!r} holds no config: {_shown(content)}")
    return content


def _downloaded(name: "str | os.PathLike") -> dict:
    """From the hub, or from the folder of a packaged model."""
    from transformers import PreTrainedConfig

    source, _ = find_weights(name)
    try:
        return PreTrainedConfig.get_config_dict(source)[0]
    except Exception as error:  # no network, no such model, no such revision
        raise InvalidArgument(
            f"no file or folder is called {_shown(str(name))}, and the hub gives no "
            f"config of that name: {reason(error)}"
        ) from None


def _from_dict(content: dict):
    """The config object, with the defaults of its class filled in."""
    from transformers import CONFIG_MAPPING

    name = content.get("model_type")
    if not isinstance(name, str):
        raise InvalidArgument(f"a config has a model_type; got {_shown(content)}")
    if name not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"the installed transformers knows no model type {_shown(name)}"
        )
    for part in (content, *(v for v in content.values() if isinstance(v, dict))):
        for key in ("num_hidden_layers", "n_layers", "n_layer", "num_layers"):
            if isinstance(part.get(key), int) and part[key] > MOST_LAYERS:
                raise UnsupportedModel(f"{name} with {_shown(part[key])} layers")
    try:
        return CONFIG_MAPPING[name].from_dict(content)
    except Exception as error:  # each class checks its fields in its own way
        raise InvalidArgument(
            f"a {name} config that is wrong: {reason(error)}"
        ) from None


# -- layers --------------------------------------------------------------------------


def read_layers(config) -> ModelLayers:
    """What each layer of a model keeps.

    Raises:
        UnsupportedModel: an encoder-decoder, a model without a cache that grows, or
            one whose cache is not known.
    """
    outer = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{outer} is an encoder-decoder model")
    try:
        text = config.get_text_config(decoder=True)
        name = text.model_type
        kinds = _kinds(name, text)
        layers = _layers(name, text, kinds)
        longest = getattr(text, "max_position_embeddings", None)
    except (
        AttributeError,
        InvalidArgument,
        RuntimeError,  # layers differ
        TypeError,
        ValueError,
        ZeroDivisionError,
    ) as error:
        raise UnsupportedModel(f"{outer}: {reason(error)}") from None
    if not any(layers):
        raise UnsupportedModel(f"{name} has no layer with a cache of keys and values")
    if name not in PLAIN | LATENT | HYBRID:
        raise UnsupportedModel(
            f"what {name} caches is not known here; known are "
            f"{', '.join(sorted(PLAIN | LATENT | HYBRID))}"
        )
    notes = _notes(text, layers, kinds)
    return ModelLayers(name, layers, longest if longest else None, notes)


def _kinds(name: str, text) -> list[str]:
    """The kind of each layer, checked to be a known one."""
    count = whole("num_hidden_layers", text.num_hidden_layers, at_least=1)
    kinds = getattr(text, "layer_types", None)
    kinds = kinds or getattr(text, "layers_block_type", None)
    if not kinds:
        if name in HYBRID:
            raise UnsupportedModel(f"{name} does not say which layers attend")
        windows = [k for k, field in _WINDOWS.items() if getattr(text, field, None)]
        kinds = [windows[0] if windows else "full_attention"] * count
    known = (*_FULL, *_WINDOWS, *_STATES, *_NOTHING)
    others = sorted({str(kind) for kind in kinds} - set(known))
    if others:
        raise UnsupportedModel(f"{name} has layers of kind {', '.join(others)}")
    if len(kinds) != count:
        raise UnsupportedModel(f"{name}: {len(kinds)} kinds for {count} layers")
    return list(kinds)


def _layers(name: str, text, kinds: list[str]) -> tuple[CacheLayer | None, ...]:
    attends = [kind in _FULL or kind in _WINDOWS for kind in kinds]
    if not any(attends):
        return (None,) * len(kinds)
    heads, dim, latent = _heads(name, text)
    # The last layers read the caches of earlier ones.
    shared = getattr(text, "num_kv_shared_layers", None) or 0
    own = len(kinds) - whole("num_kv_shared_layers", shared, at_least=0)
    return tuple(
        CacheLayer(heads, dim, _window(text, kind), latent) if a and i < own else None
        for i, (kind, a) in enumerate(zip(kinds, attends, strict=True))
    )


def _window(text, kind: str) -> int | None:
    """Tokens that a layer of this kind keeps; None for all."""
    field = _WINDOWS.get(kind)
    return whole(field, getattr(text, field), at_least=1) if field else None


def _heads(name: str, text) -> tuple[int, int, bool]:
    """Heads of keys and values, channels of each, and whether that is a latent."""
    if rank := getattr(text, "kv_lora_rank", None):
        rank = whole("kv_lora_rank", rank, at_least=1)
        rope = whole("qk_rope_head_dim", text.qk_rope_head_dim, at_least=0)
        return 1, rank + rope, True
    heads = whole("num_attention_heads", text.num_attention_heads, at_least=1)
    dim, rest = getattr(text, "head_dim", None), 0
    if not dim:
        dim, rest = divmod(text.hidden_size, heads)
    if rest:
        raise UnsupportedModel(f"{name}: {text.hidden_size} channels, {heads} heads")
    named = [getattr(text, f, None) for f in ("num_key_value_heads", "num_kv_heads")]
    kv_heads = next((n for n in (*named, heads) if n is not None), None)
    # Older names for one kv head; num_kv_heads then counts something else.
    newer = getattr(text, "new_decoder_architecture", False)
    if getattr(text, "multi_query", False) and not newer:
        kv_heads = 1
    kv_heads = whole("kv heads", kv_heads, at_least=1)
    return kv_heads, whole("head_dim", dim, at_least=1), False


def _notes(text, layers, kinds: list[str]) -> tuple[str, ...]:
    notes = []
    if any(layer and layer.latent for layer in layers):
        notes.append(
            "A latent counts as one tensor without heads, stored like keys; kvq_lib's "
            "own cache does not hold latents."
        )
    if any(layer and layer.window for layer in layers):
        notes.append(
            "A layer with a window keeps the pages that its window touches; kvq_lib's "
            "own cache keeps every page."
        )
    states = sum(kind in _STATES for kind in kinds)
    if states:
        notes.append(
            f"{states} layers keep a state of constant size for each sequence, which "
            "is not counted: leave room for it in the reserve."
        )
    if shared := getattr(text, "num_kv_shared_layers", None):
        notes.append(f"The last {shared} layers read the caches of earlier layers.")
    return tuple(notes)
