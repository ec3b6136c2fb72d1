"""What several test files share: an oracle for the law, and a driver for caches.

The oracle is written from the law's sentence, in float64 and without page tables. It
borrows only `quantize_as`, whose own tests hold it to exact arithmetic.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch

import kvq_lib as kvq
from kvq_lib.attention import forward, on_cache
from kvq_lib.quantize import quantize_as

_INT4 = {"format": "int4", "symmetric": False}
_EVERY = ("center", "smooth", "rotate", "clip", "feedback")

#: Recipes beyond the named ones: every aid, alone among channels and tokens.
MORE = {
    "fed": kvq.Scheme(
        "fed",
        kvq.Spec(granularity="channel", aids=("feedback",), **_INT4),
        kvq.Spec(granularity="token", aids=("feedback",), **_INT4),
    ),
    "every-aid": kvq.Scheme(
        "every-aid",
        kvq.Spec(granularity="token", aids=_EVERY, **_INT4),
        kvq.Spec("int8", "page", aids=("center", "clip")),
    ),
    "mixed-aids": kvq.Scheme(
        "mixed-aids",
        kvq.Mixed(7.0, aids=("smooth", "clip", "feedback")),
        kvq.Spec("fp4", "block", aids=("center", "rotate", "feedback")),
    ),
    "by-layer": kvq.Scheme(
        "by-layer",
        *[kvq.Spec("fp16")] * 2,
        layers=(
            (kvq.Spec("int2", "channel", False, ("feedback",)), kvq.Spec("fp16")),
            (kvq.Mixed(8.0), kvq.Spec("int8", "static", aids=("rotate",))),
        ),
    ),
}

SCHEMES = [*kvq.SCHEMES, *MORE]
SEALING = [name for name in SCHEMES if name != "native"]
#: What is stored in the model's own coordinates.
UNTURNED = [
    name
    for name in SCHEMES
    if name
    not in (
        *("every-aid", "mixed-aids", "by-layer"),
        *("int4-rotated", "mixed", "int4-feedback", "int2-feedback"),
    )
]


@functools.cache
def random_calibration(shape: kvq.KVShape, tokens: int = 128) -> kvq.Calibration:
    """A calibration of random numbers: every layer, head and channel differs."""
    draw = torch.Generator().manual_seed(17)
    lead = (shape.num_layers, shape.num_kv_heads, shape.head_dim)

    def normal(*more):
        return torch.randn(*lead[:2], *more, generator=draw)

    def matrix():
        x = normal(lead[-1], 2 * lead[-1])
        return x @ x.mT / lead[-1]

    found = {}
    for side in ("key", "value"):
        bias = 3 * normal(1, lead[-1])
        x = (normal(tokens, lead[-1]) + bias).half()
        found |= {f"{side}s": x, f"{side}_mean": bias.squeeze(2)}
        found |= {f"{side}_low": x.amin(2).float(), f"{side}_high": x.amax(2).float()}
        found |= {f"{side}_square": x.float().square().mean(2)}
        found |= {f"{side}_cost": matrix()}
    found |= {"query_moment": matrix(), "output_gram": matrix()}
    return kvq.Calibration(**found, model="random", text="none", tokens=tokens)


def recipe(
    name: "str | kvq.Scheme",
    shape: kvq.KVShape,
    page_size: int = 16,
    calibration: kvq.Calibration | None = None,
    **changes,
) -> kvq.Scheme:
    """A scheme by name, made for `shape` where it must be; without a calibration from
    random numbers."""
    scheme = kvq.scheme(MORE.get(name, name), **changes)
    if scheme.layers and len(scheme.layers) != shape.num_layers:
        layers = (scheme.layers * shape.num_layers)[: shape.num_layers]
        scheme = dataclasses.replace(scheme, layers=layers)
    return kvq.fit(scheme, calibration or random_calibration(shape), page_size)


def fits(name: str, head_dim: int) -> bool:
    """Whether a scheme can store heads of this size: blocks have 16 channels."""
    blocks = name in ("nvfp4", "mixed", "mixed-aids", "by-layer")
    return not blocks or head_dim % 16 == 0


#: (recent, sinks), in tokens: none, each alone, both, and both not whole pages.
WINDOWS = [(0, 0), (32, 0), (0, 16), (32, 16), (9, 3)]


@dataclass(frozen=True)
class Stream:
    """Random queries, keys and values of one sequence: [layers, tokens, heads, dim].

    Attributes:
        tokens: ids that stand for them in the prefix index.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tokens: list[int]

    def then(self, start: int, other: "Stream") -> "Stream":
        """This stream up to `start`, the other one from there."""
        q, k, v = (
            torch.cat([a[:, :start], b[:, start:]], dim=1)
            for a, b in ((self.q, other.q), (self.k, other.k), (self.v, other.v))
        )
        return Stream(q, k, v, self.tokens[:start] + other.tokens[start:])


def stream(
    shape: kvq.KVShape, tokens: int, groups: int = 2, seed=0, dtype=torch.float64
) -> Stream:
    """A stream that differs with the seed in its numbers and in its token ids."""
    draw = torch.Generator().manual_seed(seed)

    def normal(heads):
        size = (shape.num_layers, tokens, heads, shape.head_dim)
        return torch.randn(size, generator=draw, dtype=torch.float64)

    q = normal(shape.num_kv_heads * groups)
    # Keys carry a bias per channel, as those of real models do: a group that spans
    # the wrong axis then shows.
    k = normal(shape.num_kv_heads) + 3 * normal(shape.num_kv_heads)[:, :1]
    v = normal(shape.num_kv_heads)
    ids = torch.randint(2**31, (tokens,), generator=draw).tolist()
    return Stream(q.to(dtype), k.to(dtype), v.to(dtype), ids)


# -- the oracle ----------------------------------------------------------------------


def law_attention(
    q, k, v, scheme: kvq.Scheme, page_size: int, hot_dtype=torch.float64, layer=0
) -> torch.Tensor:
    """What a sequence's queries must get, for one layer.

    A query at position i, on page i // P, sees hot its own page up to i, the
    `recent / P` pages before it and the first `sinks / P` pages, both rounded up; cold
    it sees every other page before its own.

    Args:
        q: [tokens, heads, dim], a query at every position.
        k, v: [tokens, kv_heads, dim].

    Returns:
        [tokens, heads, dim], float64.
    """
    tokens, heads, dim = q.shape
    position = torch.arange(tokens)
    query_page, key_page = position[:, None] // page_size, position[None] // page_size
    hot = key_page == query_page
    if scheme.keys is None:
        hot |= True
    recent = (scheme.recent + page_size - 1) // page_size
    sinks = (scheme.sinks + page_size - 1) // page_size
    hot |= query_page - key_page <= recent
    hot |= key_page < sinks
    visible = position[None] <= position[:, None]
    specs = scheme.sides(layer)
    found = scheme.fit[layer] if scheme.fit else (None, None)

    # Turned as the definitions say, by matrices, and back again at once: attention
    # then needs to know nothing of it.
    sides = []
    for x, spec, what in zip((k, v), specs, found, strict=True):
        away, back, center = coordinates(spec, what, x.shape[1:])
        stored = torch.einsum("thd,hde->the", x.double() - center, away).to(hot_dtype)
        cold = cold_form(stored, spec, page_size, what)
        sides.append(
            [torch.einsum("thd,hde->the", y.double(), back) for y in (stored, cold)]
        )
        if len(sides) == 2:  # values get back what they lost; keys need not
            sides[1] = [y + center for y in sides[1]]
    out = torch.empty(tokens, heads, dim, dtype=torch.float64)
    for head in range(heads):
        group = head * k.shape[1] // heads
        (k_hot, k_cold), (v_hot, v_cold) = ([y[:, group] for y in x] for x in sides)
        query = q[:, head].double()
        scores = torch.where(hot, query @ k_hot.T, query @ k_cold.T) / dim**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[:, head] = (weights * hot) @ v_hot + (weights * ~hot) @ v_cold
    return out


def coordinates(spec, found, shape) -> tuple[torch.Tensor, ...]:
    """Matrices into the coordinates of a side and out of them, float64 [kv_heads, dim,
    dim], and the center, [kv_heads, dim]."""
    kv_heads, dim = shape
    away = torch.eye(dim, dtype=torch.float64).expand(kv_heads, dim, dim)
    center = torch.zeros(kv_heads, dim, dtype=torch.float64)
    aids = getattr(spec, "aids", ())
    if "center" in aids:
        center = found.center.double()
    if "smooth" in aids:
        away = away / found.factor.double().unsqueeze(1)
    if "rotate" in aids:
        away = away @ dense_hadamard(dim)
    if isinstance(spec, kvq.Mixed):
        away = torch.stack([m[:, o] for m, o in zip(away, found.order, strict=True)])
    return away, torch.linalg.inv(away), center


def dense_hadamard(dim: int) -> torch.Tensor:
    """The block-diagonal Hadamard matrix over its root, by its definition: (-1) to the
    number of ones that row and column have in common, in binary."""
    block = 1
    while dim % (2 * block) == 0:
        block *= 2
    one = [[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]
    one = torch.tensor(one, dtype=torch.float64) / block**0.5
    return torch.block_diag(*[one] * (dim // block))


def cold_form(x: torch.Tensor, spec, page_size: int, found=None) -> torch.Tensor:
    """x [tokens, kv_heads, dim] with every full page quantized by itself, float64."""
    cold = x.double().clone()
    if spec is None:
        return cold
    aids = found.aids if found else ()
    for start in range(0, len(x) - page_size + 1, page_size):
        page = x[start : start + page_size].transpose(0, 1).unsqueeze(1)
        stored = quantize_as(page, spec, aids).dequantize(torch.float64)
        cold[start : start + page_size] = stored.squeeze(1).transpose(0, 1)
    return cold


def expected(s: Stream, scheme, page_size: int, hot_dtype=torch.float64):
    """The oracle's output for every layer of a stream: [layers, tokens, heads, dim]."""
    layers = enumerate(zip(s.q, s.k, s.v, strict=True))
    return torch.stack(
        [
            law_attention(q, k, v, scheme, page_size, hot_dtype, layer)
            for layer, (q, k, v) in layers
        ]
    )


# -- driving a cache -----------------------------------------------------------------


def attend(cache, batch, parts, starts) -> list[torch.Tensor]:
    """Every layer of a step; outputs of each sequence, [layers, new, heads, dim]."""
    lengths = [count for _, _, count in parts]
    layers = []
    for layer in range(cache.shape.num_layers):
        q, k, v = (
            torch.cat(
                [
                    getattr(s, name)[layer, start : start + count]
                    for (_, s, count), start in zip(parts, starts, strict=True)
                ]
            )
            for name in "qkv"
        )
        layers.append(cache.attend(layer, batch, q, k, v))
    return list(torch.stack(layers).split(lengths, dim=1))


def begin(cache, parts, named: bool = False):
    """Begin a step; returns the batch and where each sequence starts."""
    starts = [cache.length(seq) for seq, _, _ in parts]
    ids = None
    if named:
        ids = [
            s.tokens[start : start + count]
            for (_, s, count), start in zip(parts, starts, strict=True)
        ]
    seqs, lengths = [seq for seq, _, _ in parts], [count for _, _, count in parts]
    return cache.begin(seqs, lengths, token_ids=ids), starts


def advance(cache, *parts, named: bool = False) -> list[torch.Tensor]:
    """A whole step: each part is (sequence, its stream, new tokens).

    With `named`, token ids are given, so that pages can be found again.
    """
    batch, starts = begin(cache, parts, named)
    out = attend(cache, batch, parts, starts)
    cache.commit(batch)
    return out


def read_through(cache, seq, s: Stream, chunks, named: bool = False) -> torch.Tensor:
    """Feed a stream in chunks; the outputs of all of them, joined."""
    outs = [advance(cache, (seq, s, n), named=named)[0] for n in chunks]
    return torch.cat(outs, dim=1)


def scatter_free_pages(cache, s: Stream) -> None:
    """Leave the free lists with holes, so that no later sequence lies in one piece."""
    page = cache.page_size
    junk = [cache.add() for _ in range(5)]
    for seq in junk:
        advance(cache, (seq, s, 2 * page + 1))
    for seq in junk[::2]:
        cache.free(seq)


# -- looking inside: the only place where tests know the cache's private names ---------


def hot_pools(cache) -> list[torch.Tensor]:
    """Hot keys and values, [layers, kv_heads, pages, page_size, dim]."""
    return cache._hot_tensors


def cold_pools(cache) -> list[torch.Tensor]:
    """Codes, scales and zero points of the cold pages, layer by layer; the second dim
    counts pages."""
    return cache._cold_tensors


def table(cache, seq):
    """The pages of a sequence, each with the ids of its hot and cold copy."""
    return cache._pages.sequences[seq].pages


def cold_bytes(cache, page) -> list[torch.Tensor]:
    """A copy of everything that the cold pools hold for a page."""
    return [pool[:, page.cold].clone() for pool in cold_pools(cache)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(
            a.flatten().clone().view(torch.uint8), b.flatten().clone().view(torch.uint8)
        )
    )


def snapshot(tables):
    """Everything that `Pages` knows, comparable, pages by identity."""
    seqs = tables.sequences
    known = {id(p): p for s in seqs.values() for p in s.pages}
    steps = [s.step for s in seqs.values() if s.step]
    known |= {id(p): p for step in steps for pages in step.tables for p in pages}
    known |= {id(p): p for p in tables.index.values()}
    known |= {id(p): p for p in [*tables.idle_hot, *tables.idle_cold]}
    return (
        sorted(tables.hot.free),
        sorted(tables.cold.free),
        {key: id(page) for key, page in tables.index.items()},
        [id(p) for p in tables.idle_hot],
        [id(p) for p in tables.idle_cold],
        {
            handle: (
                [id(p) for p in s.pages],
                s.length,
                s.key,
                list(s.tail),
                id(s.step) if s.step else None,
            )
            for handle, s in seqs.items()
        },
        {i: (p.hot, p.cold, p.refs, p.hot_refs, p.key) for i, p in known.items()},
    )


def frozen(cache):
    """All that must not change when something is refused."""
    cold = [pool.clone() for pool in cold_pools(cache)]
    hot = [
        pool[:, :, page.hot, :tokens].clone()
        for page, tokens in cache._pages.live().items()
        if page.hot_refs
        for pool in hot_pools(cache)
    ]
    return snapshot(cache._pages), cache.stats(), [*cold, *hot]


def assert_unchanged(cache, before):
    now = frozen(cache)
    assert now[:2] == before[:2]
    assert all(same_bits(a, b) for a, b in zip(now[2], before[2], strict=True))


def assert_unchanged_but_free_cold(cache, before):
    """As before; but a cold page that nobody holds may hold anything."""
    assert frozen(cache)[:2] == before[:2]
    held = [p.cold for p in cache._pages.live() if p.cold is not None]
    for a, b in zip(cold_pools(cache), before[2], strict=False):
        assert same_bits(a[:, held], b[:, held])


def poison(cache) -> None:
    """Fill all memory that holds nothing with NaN, and codes with all ones."""
    pages = cache._pages
    empty = [
        (page.hot, tokens) for page, tokens in pages.live().items() if page.hot_refs > 0
    ]
    for pool in hot_pools(cache):
        pool[:, :, pages.hot.free] = float("nan")
        for page, tokens in empty:
            pool[:, :, page, tokens:] = float("nan")
    for pool in cold_pools(cache):
        garbage = float("nan") if pool.is_floating_point() else 0xFF
        pool[:, pages.cold.free] = garbage


# -- models --------------------------------------------------------------------------


@functools.cache
def real_model(dtype=torch.float32):
    """The packaged model and its tokenizer, loaded once in a process."""
    return kvq.load_model("smollm2-135m", dtype=dtype)


@functools.cache
def real_text() -> list[int]:
    """Tokens of the standard library's own documentation."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return real_model()[1](text[:40_000]).input_ids


@functools.cache
def real_calibration() -> kvq.Calibration:
    """The packaged model's, on a text that no test measures on."""
    return kvq.calibrate(real_model()[0], torch.tensor([real_text()[5000:5512]]))


def tiny_model(kind: str = "Llama", dtype=torch.float64, **options):
    """A model of random weights, with attention that is far from uniform."""
    import transformers

    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.3)
    return model


def norm_in_full_precision(monkeypatch) -> None:
    """Let Llama's norm compute in the dtype of its input.

    It rounds to float32 even in a float64 model. A difference in the 16th digit may
    then become one in the 7th, and that one may flip a code: the model, not the cache,
    would make results depend on the chunk.
    """
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def norm(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(variance + self.variance_epsilon)

    monkeypatch.setattr(LlamaRMSNorm, "forward", norm)


def model_step(model, cache, seqs, tokens) -> torch.Tensor:
    """Logits of one step of a model for new tokens of some sequences, row by row."""
    with on_cache(model):
        return forward(model, cache, seqs, tokens)
