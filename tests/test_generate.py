"""Generation: the model's own tokens, whatever the batch; seeds; ends."""

import pytest
import torch
from helpers import SCHEMES, SEALING, real_model, recipe, tiny_model

import kvq_lib as kvq

#: Eight prompts of different length, in two forms: text, and questions in the model's
#: own chat form, some of which it answers shortly.
TEXTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "To make bread, first",
    "Water boils at",
]
QUESTIONS = [
    "Say hello.",
    "What is 2 + 2? Answer with one number.",
    "Name three colours of the rainbow, and say why the sky is blue.",
]


class Letters:
    """A tokenizer for models that have none."""

    eos_token_id = None

    def decode(self, tokens, skip_special_tokens):
        return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def prompts():
    _, tokenizer = real_model()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    # Some versions return a dictionary of the ids.
    ids = [list(getattr(chat, "input_ids", chat)) for chat in chats]
    return [*TEXTS, *ids]


def own_tokens(model, tokenizer, prompt, new):
    """What `model.generate` adds to a prompt, greedily."""
    ids = tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
    ids = torch.tensor([ids])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
    )
    return out[0, ids.shape[1] :].tolist()


def test_greedy_generation_gives_the_models_own_tokens(prompts):
    model, tokenizer = real_model()
    wanted = [own_tokens(model, tokenizer, p, 64) for p in prompts]
    lengths = [len(w) for w in wanted]
    assert max(lengths) == 64 and min(lengths) < 64, "some should stop, some not"

    batched = kvq.generate(model, tokenizer, prompts, "native", max_new_tokens=64)
    assert [c.tokens for c in batched] == wanted
    for completion in batched:
        assert completion.stopped == (len(completion.tokens) < 64)
        text = tokenizer.decode(completion.tokens, skip_special_tokens=True)
        assert completion.text == text
    for prompt, tokens in zip(prompts, wanted, strict=True):
        (alone,) = kvq.generate(model, tokenizer, [prompt], "native", max_new_tokens=64)
        assert alone.tokens == tokens


@pytest.mark.parametrize("name", ["int8", "k8v4"])
def test_the_real_model_still_answers_from_sealed_pages(name):
    model, tokenizer = real_model()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, tokenize=False
    )
    (found,) = kvq.generate(
        model, tokenizer, [text], name, max_new_tokens=12, page_size=4
    )
    assert "Paris" in found.text


def random_prompts():
    draw = torch.Generator().manual_seed(3)
    longest = torch.randint(3, 97, (60,), generator=draw).tolist()
    others = [torch.randint(3, 97, (n,), generator=draw).tolist() for n in (1, 8, 17)]
    return [longest, longest[:33], *others]  # the second one finds the first's pages


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_continuation_does_not_depend_on_its_company(name, temperature):
    model = tiny_model(head_dim=32)
    model.generation_config.eos_token_id = 5
    options = {
        "scheme": recipe(name, kvq.KVShape.of(model.config), 8, recent=8),
        "max_new_tokens": 20,
        "temperature": temperature,
        "page_size": 8,
    }
    prompts = random_prompts()
    batched = kvq.generate(model, Letters(), prompts, **options)
    reversed_ = kvq.generate(model, Letters(), prompts[::-1], **options)[::-1]
    assert batched == reversed_
    for prompt, wanted in zip(prompts, batched, strict=True):
        assert kvq.generate(model, Letters(), [prompt], **options) == [wanted]


def test_a_seed_makes_sampling_reproducible_and_another_changes_it():
    model = tiny_model()
    options = {"temperature": 1.0, "max_new_tokens": 16, "page_size": 8}

    def sample(seed, prompts=None):
        prompts = prompts or random_prompts()
        return kvq.generate(model, Letters(), prompts, seed=seed, **options)

    assert sample(1) == sample(1)
    torch.manual_seed(123)  # the global generator has no part in it
    state = torch.get_rng_state()
    assert sample(1) == sample(1)
    assert torch.equal(torch.get_rng_state(), state)
    texts = {tuple(sample(seed)[0].tokens) for seed in range(6)}
    assert len(texts) == 6
    greedy = kvq.generate(model, Letters(), random_prompts(), seed=1, page_size=8)
    assert greedy == kvq.generate(
        model, Letters(), random_prompts(), seed=2, page_size=8
    )


def test_sampling_follows_the_models_probabilities():
    model, prompt = tiny_model(), [3, 4, 5]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    for temperature in (0.3, 3.0):
        wanted = (logits / temperature).softmax(-1)
        drawn = [
            kvq.generate(
                model,
                Letters(),
                [prompt],
                seed=seed,
                temperature=temperature,
                max_new_tokens=1,
            )[0].tokens[0]
            for seed in range(150)
        ]
        top = wanted.argmax()
        share = sum(t == top for t in drawn) / len(drawn)
        # Within four standard errors of a share of 150 draws.
        error = (wanted[top] * (1 - wanted[top]) / len(drawn)).sqrt()
        assert abs(share - wanted[top]) < 4 * error + 1e-9


@pytest.mark.parametrize("ends", ["one", "list", "tuple", "tensor", "tokenizer"])
def test_generation_stops_at_the_end_token(ends):
    model, tokenizer = tiny_model(), Letters()
    prompts = random_prompts()
    model.generation_config.eos_token_id = None
    free = kvq.generate(model, tokenizer, prompts, max_new_tokens=12)
    assert all(len(c.tokens) == 12 and not c.stopped for c in free)
    end = next(t for t in free[0].tokens[3:] if t not in free[0].tokens[:3])
    if ends == "tokenizer":
        tokenizer.eos_token_id = end
    else:
        listed = {
            "list": [96, end],
            "tuple": (96, end),
            "tensor": torch.tensor([96, end]),
        }
        model.generation_config.eos_token_id = listed.get(ends, end)
    stopped = kvq.generate(model, tokenizer, prompts, max_new_tokens=12)
    closing = {96, end} if ends in ("list", "tuple", "tensor") else {end}
    for before, after in zip(free, stopped, strict=True):
        tokens = before.tokens
        cut = next((i + 1 for i, t in enumerate(tokens) if t in closing), len(tokens))
        assert after.tokens == tokens[:cut]
        assert after.stopped == (tokens[cut - 1] in closing)
    assert stopped[0].stopped


@pytest.mark.parametrize("name", SEALING)
def test_a_long_prompt_and_a_long_answer_fit_the_cache_made_for_them(name):
    # Longer than a chunk of the prefill, with pages that do not divide it.
    model = tiny_model(max_position_embeddings=1024, head_dim=32)
    model.generation_config.eos_token_id = None
    prompts = [[i % 97 for i in range(n)] for n in (700, 3, 513)]
    shape = kvq.KVShape.of(model.config)
    scheme = recipe(name, shape, 7, recent=20, sinks=10)
    out = kvq.generate(
        model, Letters(), prompts, scheme, max_new_tokens=20, page_size=7
    )
    assert [len(c.tokens) for c in out] == [20] * 3
    # The tokens are those that the logits of the whole text name.
    text = prompts[0] + out[0].tokens
    rows = kvq.logits(model, text, scheme, page_size=7)
    assert rows[699:-1].argmax(-1).tolist() == out[0].tokens


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        ([], {}),
        ("text", {}),
        ([[]], {}),
        ([[1], []], {}),
        ([[1]], {"max_new_tokens": 0}),
        ([[1]], {"temperature": -0.5}),
    ],
)
def test_nothing_to_generate_is_refused(prompts, options):
    with pytest.raises(kvq.InvalidArgument):
        kvq.generate(tiny_model(), Letters(), prompts, **options)
