"""The explorer of chapter 1: a cache to play with, on any page that shows HTML.

    data = explorer_data(model, tokenizer, quality_rows)
    explorer(data)

Python computes the data: what schemes store, the shapes of models, and the packed codes
of a real head's keys. The files `explorer.html`, `.css`, `_math.js` and `.js` beside
this one show them. The output of `explorer` holds everything and loads nothing, so it
works on a static page, in a notebook and on Colab. Tests hold what the script computes
to what the library computes.
"""

import base64
import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ..errors import InvalidArgument, UnsupportedScheme
from ..gpus import gpu_memory
from ..layers import load_config
from ..memory import KVShape
from ..plan import count_parameters
from ..schemes import SCHEMES, Scheme
from ..schemes import scheme as find_scheme
from .heads import Head, read_heads, sealed

PAGE_SIZE = 16

#: What a reader can choose, and how it is called.
LABELS = {
    "fp16": "FP16, no scales",
    "fp8": "FP8, one scale a page",
    "int8": "INT8, one scale a token",
    "int4": "INT4, one scale a token",
    "int4-kivi": "INT4-KIVI, keys by channel",
    "int2-kivi": "INT2-KIVI, keys by channel",
}

#: Published configurations: Llama 2 (Touvron and others, 2023), Llama 3.1 (Grattafiori
#: and others, 2024), Qwen2.5 (Qwen Team, 2024), as their config.json files state them.
MODELS: Mapping[str, dict] = {
    "Llama-2-7B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "Qwen2.5-7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "Llama-3.1-8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "Llama-3.1-70B": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}

#: Memory bandwidth in bytes/s, from NVIDIA's data sheets of the T4 (2019), L4 (2023),
#: A100 (2021), H100 (2023) and H200 (2024).
BANDWIDTH = {
    "T4": 320e9,
    "L4": 300e9,
    "A100-80GB-SXM": 2039e9,
    "H100-SXM": 3350e9,
    "H200": 4800e9,
}

#: The part of a GPU's memory that is used, as in `kvq.plan`.
UTILIZATION = (9, 10)

#: Its tokens fill whole pages with the tokenizer of SmolLM2. Names and sentences come
#: back, so that heads which look for an earlier occurrence find one.
TEXT = (
    "The library closes at nine. The night guard of Kestrel Wing walks past the "
    "shelves and counts the lamps. On Monday Kestrel Wing had forty lamps; on "
    "Tuesday one lamp was missing. The guard wrote a note: the lamp by the window "
    "is gone. The library opens at eight. The day guard read the note and looked "
    "for the lamp by the window. On Friday it stood there again, and the night "
    "guard of Kestrel Wing counted all forty lamps."
)

#: Layer and query head: one that looks for what came after an earlier occurrence, one
#: whose pattern four bits change much, one that rests on the first token.
HEADS = ((18, 6), (16, 6), (12, 8))

_FILES = Path(__file__).parent
_numbers = itertools.count(1)


def explorer_data(
    model,
    tokenizer,
    quality: Mapping[str, Mapping],
    text: str = TEXT,
    heads: Iterable[tuple[int, int]] = HEADS,
) -> dict:
    """Everything that the explorer shows, as JSON holds it.

    Args:
        model, tokenizer: the model whose keys are shown, from `load_model`.
        quality: for each scheme of `LABELS` the row of the record "quality": bits an
            element, KL divergence from the unquantized cache in nats, and change of the
            perplexity.
        text: what the model reads; at least one page of tokens.
        heads: layers and query heads to show.

    Raises:
        InvalidArgument: no such head, a text that fills no page, or a missing row.
    """
    tokens = tokenizer(text).input_ids
    missing = set(LABELS) - set(quality)
    if missing:
        raise InvalidArgument(f"quality has no row for {', '.join(sorted(missing))}")
    configs = {"SmolLM2-135M": model.config, **MODELS}
    return {
        "page_size": PAGE_SIZE,
        "hot_bytes": torch.float16.itemsize,
        "schemes": [_scheme(find_scheme(name), quality[name]) for name in LABELS],
        "models": [_model(name, config) for name, config in configs.items()],
        "gpus": [_gpu(name, speed) for name, speed in BANDWIDTH.items()],
        "tokens": [tokenizer.decode([token]) for token in tokens],
        "heads": [_head(h, tokens) for h in read_heads(model, tokens, heads)],
    }


def usable_bytes(gpu: str) -> int:
    """Bytes of a GPU's memory that the explorer uses."""
    part, whole = UTILIZATION
    return gpu_memory(gpu) * part // whole


def _scheme(recipe: Scheme, row: Mapping) -> dict:
    measured = {key: row[key] for key in ("bits", "kl", "delta")}
    return {
        "name": recipe.name,
        "label": LABELS[recipe.name],
        "keys": _side(recipe.keys),
        "values": _side(recipe.values),
        "measured": measured,
    }


def _side(spec) -> dict:
    """What decides the bytes and the meaning of codes."""
    if getattr(spec, "aids", True) or spec.granularity in ("static", "block"):
        raise UnsupportedScheme(f"the explorer does not show {spec!r}")
    return {
        "format": spec.format,
        "bits": spec.fmt.bits,
        "scales": spec.granularity,
        "zeros": not spec.symmetric,
        "offset": spec.offset,
    }


def _model(name: str, config) -> dict:
    config = load_config(config)
    shape = KVShape.of(config)
    return {
        "name": name,
        "layers": shape.num_layers,
        "kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "parameters": count_parameters(config),
    }


def _gpu(name: str, bandwidth: float) -> dict:
    return {"name": name, "usable": usable_bytes(name), "bandwidth": bandwidth}


def _head(head: Head, tokens: list[int]) -> dict:
    return {
        "layer": head.layer,
        "head": head.head,
        "dim": head.keys.shape[1],
        "queries": _packed(head.queries),
        "keys": _packed(head.keys),
        "sealed": {name: _sealed(head, name) for name in LABELS},
    }


def _sealed(head: Head, name: str) -> dict | None:
    """The bytes that the cold pages hold; None where they are those of the hot ones."""
    if SCHEMES[name].keys.format == "fp16":
        return None
    z = sealed(head, name, PAGE_SIZE)
    return {
        "codes": _packed(z.codes),
        "scales": _packed(z.scale),
        "zeros": None if z.zero is None else _packed(z.zero),
    }


def _packed(x: torch.Tensor) -> str:
    """The bytes of a tensor, in base64."""
    content = x.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return base64.b64encode(content).decode("ascii")


class Explorer:
    """What a cell shows: HTML with its own style, script and data.

    Attributes:
        html: the whole output.
    """

    def __init__(self, data: Mapping):
        # A page may hold several, and every label must belong to its own.
        name = f"kvqx-{next(_numbers)}"
        content = json.dumps(data, ensure_ascii=False, allow_nan=False)
        # Neither may end the script that holds it.
        content = content.replace("</", "<\\/").replace("<!--", "<\\!--")
        page, style, math, script = (
            (_FILES / f"explorer{end}").read_text(encoding="utf-8")
            for end in (".html", ".css", "_math.js", ".js")
        )
        self.html = (
            f"<style>{style}</style>{page.replace('@ID@', name)}<script>"
            f"(() => {{{math}{script}"
            f"kvqExplorer(document.getElementById('{name}'), {content});"
            "})();</script>"
        )

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return "The explorer is a page of HTML: open this notebook where it can show."


def explorer(data: Mapping) -> Explorer:
    """The explorer, for the end of a cell.

    Args:
        data: from `explorer_data`.
    """
    return Explorer(data)
