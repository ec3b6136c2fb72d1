"""What a smaller cache gains on a GPU: predictions from data sheets, nothing measured.

A server with as many requests as its memory holds does two kinds of work. It reads
prompts, which costs arithmetic. And it decodes: each step reads all weights and every
running request's cache, and computes one token for each. Each kind takes the longer of
its arithmetic and its bytes (the roofline model), and nothing else is counted: no
launches, no scheduler, no unpacking of codes, all at the peak of the data sheet.
"""

import functools
from dataclasses import dataclass

from ..checks import whole
from ..errors import InvalidArgument
from ..kernels.budget import BANDWIDTH
from ..layers import load_config
from ..plan import count_parameters, plan

#: Peak of 16-bit matrix arithmetic without sparsity, in TFLOPS, from the data sheets
#: that `kernels.budget.BANDWIDTH` names; where a sheet gives the peak with sparsity
#: (L4, H100, H200), half of it.
TFLOPS = {
    "T4": 65,
    "L4": 121,
    "A100-80GB-SXM": 312,
    "H100-SXM": 989.5,
    "H200": 989.5,
}


@dataclass(frozen=True, eq=False)
class Model:
    """A model as the prediction sees it.

    Attributes:
        config: a config of transformers.
        parameters: all of them; 16 bits each.
        width: query heads times their channels, over all layers.
    """

    config: object
    parameters: int
    width: int

    @classmethod
    def of(cls, config) -> "Model":
        """From anything that `kvq.plan` takes; no weights are made.

        Raises:
            InvalidArgument, UnsupportedModel: as in `kvq.plan`.
        """
        config = load_config(config)
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = config.num_hidden_layers * heads * dim
        return cls(config, count_parameters(config), width)


@dataclass(frozen=True)
class Prediction:
    """A full server in a steady state.

    Attributes:
        batch: requests at a time: what memory holds, or what is offered.
        step_seconds: one decode step of all of them.
        prefill_seconds: one prompt.
        tokens_per_second: new tokens of all requests.
        decode_bound: "memory" or "compute", whichever takes a decode step longer.
        prefill_share: of the time.
    """

    batch: int
    step_seconds: float
    prefill_seconds: float
    tokens_per_second: float
    decode_bound: str
    prefill_share: float


@functools.cache
def predict(
    model: Model,
    gpu: str,
    scheme: str,
    prompt: int,
    answer: int,
    offered: int | None = None,
) -> Prediction:
    """Tokens per second of a model on a GPU.

    Args:
        model: from `Model.of`.
        gpu: a name of `TFLOPS`.
        scheme: a name of `SCHEMES`.
        prompt, answer: tokens of each request.
        offered: requests that there are at a time; None for as many as fit.

    Raises:
        InvalidArgument: an unknown GPU, or not even one request fits.
    """
    if gpu not in TFLOPS:
        raise InvalidArgument(f"no peak is known for {gpu!r}, only {', '.join(TFLOPS)}")
    prompt = whole("prompt", prompt, at_least=1)
    answer = whole("answer", answer, at_least=1)
    weights, peak = 2 * model.parameters, TFLOPS[gpu] * 1e12
    bandwidth = BANDWIDTH[gpu] * 1e9
    (row,) = plan(
        model.config, gpu, prompt + answer, scheme, weights=weights, reserve="1GiB"
    ).schemes
    batch = row.max_batch if offered is None else min(row.max_batch, offered)
    if batch < 1:
        raise InvalidArgument(f"no request of {prompt + answer} tokens fits {gpu}")
    length = prompt + answer / 2  # on average, while it decodes
    moving = (weights + batch * length * row.bytes_per_token) / bandwidth
    each = 2 * model.parameters + 4 * model.width * length
    computing = batch * each / peak
    step = max(moving, computing)
    reading = prompt * (2 * model.parameters + 2 * model.width * prompt) / peak
    prefill = max(reading, weights / bandwidth)
    request = prefill + answer * step / batch
    return Prediction(
        batch,
        step,
        prefill,
        answer / request,
        "memory" if moving >= computing else "compute",
        prefill / request,
    )


def gain(
    model: Model,
    gpu: str,
    scheme: str,
    prompt: int,
    answer: int,
    offered: int | None = None,
    base: str = "fp16",
) -> float:
    """Tokens per second under a scheme over those under `base`."""
    ours, theirs = (
        predict(model, gpu, name, prompt, answer, offered) for name in (scheme, base)
    )
    return ours.tokens_per_second / theirs.tokens_per_second
