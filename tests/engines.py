"""What the tests of the engine share: a small model, engines on a tight budget, and the
tokens that each request would get alone."""

import functools

import torch
from helpers import recipe, tiny_model

import kvq_lib as kvq
from kvq_lib.admission import divide


class Letters:
    """A tokenizer for models that have none: a letter is its code, less 90."""

    eos_token_id = None

    def __call__(self, text):
        return type("Ids", (), {"input_ids": [ord(c) - 90 for c in text]})

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


@functools.cache
def model():
    """Two layers, two kv heads of 16 channels; an end token that does come up."""
    found = tiny_model(head_dim=16)
    found.generation_config.eos_token_id = 11
    return found


SHAPE = kvq.KVShape(2, 2, 16)


@functools.cache
def scheme_of(name, recent, sinks, page):
    return recipe(name, SHAPE, page, recent=recent, sinks=sinks)


@functools.cache
def alone(scheme, page, prompt, new, temperature=0.0, seed=0):
    """What `generate` makes of a prompt by itself."""
    (found,) = kvq.generate(
        model(),
        Letters(),
        [list(prompt)],
        scheme_of(*scheme, page),
        max_new_tokens=new,
        page_size=page,
        temperature=temperature,
        seed=seed,
    )
    return found.tokens


def budget_for(scheme, page, tokens, context, chunk, times):
    """Bytes: some times about the least that serve a sequence of so many tokens."""
    law, pages = scheme.law(page), -(-tokens // page)
    hot = SHAPE.elements_per_token * page * 8
    cold = 2 * sum(scheme.page_nbytes(page, 16, layer) for layer in range(2))
    need = min(pages, law.sinks + law.window + 1), len(law.sealed(tokens))
    budget = need[0] * hot + need[1] * cold
    while True:
        bought = divide(int(times * budget), (hot, cold), law, chunk, context)
        if bought[0] >= need[0] and bought[1] >= max(need[1], scheme.seals):
            return int(times * budget)
        budget += hot


def new_engine(
    scheme=("int8", 0, 0),
    page=4,
    tokens=32,
    times=1.0,
    context=None,
    chunk=64,
    **options,
):
    """An engine with some times the budget that serves one sequence of `tokens`."""
    scheme, context = scheme_of(*scheme, page), context or tokens
    return kvq.Engine(
        model(),
        Letters(),
        scheme,
        memory_bytes=budget_for(scheme, page, tokens, context, chunk, times),
        page_size=page,
        context=context,
        chunk=chunk,
        **{"clock": kvq.VirtualClock(), **options},
    )


def assert_no_page_lost(engine):
    stats, tables = engine.cache.stats(), engine.cache._pages
    assert (stats.sequences, stats.hot, stats.cold) == (0, 0, 0)
    assert stats.free_hot + stats.cached_hot == tables.hot.count
    assert stats.free_cold + stats.cached_cold == tables.cold.count


def row(seed, count):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 97, (count,), generator=draw).tolist())
