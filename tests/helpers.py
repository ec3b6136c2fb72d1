"""What several test files share: an oracle for the law, and a driver for caches.

The oracle is written from the law's sentence, in float64 and without page tables. It
borrows only `kvq.quantize`, whose own tests hold it to exact arithmetic.
"""

import functools
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch

import kvq_lib as kvq
from kvq_lib.attention import forward, on_cache

SCHEMES = list(kvq.SCHEMES)
SEALING = [name for name in SCHEMES if kvq.SCHEMES[name].seals]

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
    q, k, v, scheme: kvq.Scheme, page_size: int, hot_dtype=torch.float64
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

    out = torch.empty(tokens, heads, dim, dtype=torch.float64)
    for head in range(heads):
        group = head * k.shape[1] // heads
        k_hot, v_hot = (x[:, group].to(hot_dtype) for x in (k, v))
        k_cold = cold_form(k_hot, scheme.keys, page_size)
        v_cold = cold_form(v_hot, scheme.values, page_size)
        k_hot, v_hot, query = k_hot.double(), v_hot.double(), q[:, head].double()
        scores = torch.where(hot, query @ k_hot.T, query @ k_cold.T) / dim**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[:, head] = (weights * hot) @ v_hot + (weights * ~hot) @ v_cold
    return out


def cold_form(x: torch.Tensor, spec, page_size: int) -> torch.Tensor:
    """x [tokens, dim] of one head with every full page quantized by itself, float64."""
    cold = x.double().clone()
    if spec is None:
        return cold
    for start in range(0, len(x) - page_size + 1, page_size):
        page = x[start : start + page_size]
        stored = kvq.quantize(page, spec.format, spec.granularity, spec.symmetric)
        cold[start : start + page_size] = stored.dequantize(torch.float64)
    return cold


def expected(s: Stream, scheme, page_size: int, hot_dtype=torch.float64):
    """The oracle's output for every layer of a stream: [layers, tokens, heads, dim]."""
    layers = zip(s.q, s.k, s.v, strict=True)
    return torch.stack(
        [law_attention(q, k, v, scheme, page_size, hot_dtype) for q, k, v in layers]
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
    return cache._tensors[:2]


def cold_pools(cache) -> list[torch.Tensor]:
    """Codes, scales and zero points of the cold pages; the third dim counts pages."""
    return cache._tensors[2:]


def table(cache, seq):
    """The pages of a sequence, each with the ids of its hot and cold copy."""
    return cache._pages.sequences[seq].pages


def cold_bytes(cache, page) -> list[torch.Tensor]:
    """A copy of everything that the cold pools hold for a page."""
    return [pool[:, :, page.cold].clone() for pool in cold_pools(cache)]


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
        assert same_bits(a[:, :, held], b[:, :, held])


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
        pool[:, :, pages.cold.free] = garbage


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
