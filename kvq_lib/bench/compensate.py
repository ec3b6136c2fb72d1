"""What each way of winning back bits gives, and what it costs; for chapter 5.

Recorded by `make measure`. Every scheme reads the same windows and is compared with the
same model on an unquantized cache. The calibration has read another part of the text.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat

import torch
from tqdm import tqdm

import kvq_lib as kvq
from kvq_lib.bench.provenance import RESULTS, record, save
from kvq_lib.bench.quality import (
    describe_text,
    offline_text,
    per_token,
    standard_error,
    summary,
    windows,
)
from kvq_lib.course.planted import plant_key_bias
from kvq_lib.specs import Side

#: Windows of the text: the first ones are measured, later ones are calibrated on.
TOKENS, MEASURED, SEARCHED, CALIBRATED = 1024, range(8), range(8, 10), range(32, 36)

#: Tokens of a sequence for which effective bits are counted, and of the long windows,
#: whose damage is averaged over stretches of so many tokens.
LENGTH, LONG, BUCKET = 4096, 3, 512


@dataclass(frozen=True)
class Row:
    """One scheme of the table.

    Attributes:
        group: the part of the table that it stands in.
        scheme: what is measured; its name is the row's.
        page_size: tokens in a page.
        options: for `kvq.fit`.
        chunk: tokens of a forward pass; None for the library's choice.
    """

    group: str
    scheme: kvq.Scheme
    page_size: int = 16
    options: dict = field(default_factory=dict)
    chunk: int | None = None


def _int(bits: int, axis: str, *aids: str) -> kvq.Spec:
    return kvq.Spec(f"int{bits}", axis, symmetric=bits == 8, aids=aids)


def _row(group, name, keys: Side, values: kvq.Spec, page_size=16, **more) -> Row:
    kept = {key: more.pop(key) for key in ("recent", "sinks") if key in more}
    return Row(group, kvq.Scheme(name, keys, values, **kept), page_size, **more)


def _both(group, name, spec: kvq.Spec, **more) -> Row:
    return _row(group, name, spec, spec, **more)


def rows() -> Iterator[Row]:
    """Every row but those that a search finds."""
    token4, token8 = _int(4, "token"), _int(8, "token")
    channel4, channel8 = _int(4, "channel"), _int(8, "channel")
    for name in ("fp8", "int8", "k8v4", "int4", "nvfp4", "int4-kivi", "int2-kivi"):
        yield Row("plain", kvq.SCHEMES[name])
    for name in ("int8-static", "fp8-static"):
        yield Row("static", kvq.SCHEMES[name])
    yield Row(
        "static",
        kvq.Scheme("int8-static 99.9 %", *[kvq.Spec("int8", "static")] * 2),
        options={"percentile": 99.9},
    )
    # Where scales lie, and which side gets the bits.
    yield _row("axes", "K token, V channel", token4, channel4)
    yield _row("axes", "K channel, V channel", channel4, channel4)
    yield _row("axes", "K8 V4, keys by channel", channel8, token4)
    yield _row("axes", "K4 V8, keys by channel", channel4, token8)
    yield _row("axes", "K4 V8, keys by token", token4, token8)
    for page in (32, 64):
        for bits in (4, 2):
            keys, values = _int(bits, "channel"), _int(bits, "token")
            yield _row("axes", f"int{bits}-kivi, page {page}", keys, values, page)
    yield from _alone_and_together()
    yield from _few_bits()


def _alone_and_together() -> Iterator[Row]:
    """Aids on 4 bits: by token on pages of 16, then keys by channel on pages of 64."""
    combinations = [
        ("center",),
        ("smooth",),
        ("rotate",),
        ("clip",),
        ("feedback",),
        ("center", "smooth"),
        ("center", "rotate"),
        ("center", "feedback"),
        ("rotate", "feedback"),
        ("center", "rotate", "feedback"),
        ("center", "smooth", "rotate", "feedback"),
        ("center", "smooth", "rotate", "clip", "feedback"),
    ]
    for aids in combinations:
        mine = tuple(aid for aid in aids if aid != "smooth")
        keys, values = _int(4, "token", *aids), _int(4, "token", *mine)
        yield _row("int4", "int4 + " + " + ".join(aids), keys, values)
    clip = _int(4, "token", "clip")
    yield _both("int4", "int4 + clip 95 %", clip, options={"percentile": 95.0})
    best = _int(4, "token", "center", "rotate", "feedback")
    name = "int4 + center + rotate + feedback"
    yield _both("int4", "int4 + sinks", _int(4, "token"), sinks=16)
    yield _both("int4", "int4 + recent 128", _int(4, "token"), recent=128)
    yield _both("int4", f"{name} + sinks", best, sinks=16)
    kept = {"page_size": 64, "sinks": 64}
    plain, fed = _int(4, "channel"), _int(4, "channel", "feedback")
    token, token_fed = _int(4, "token"), _int(4, "token", "feedback")
    axes = "channel", "token"
    turned = [_int(4, axis, "rotate") for axis in axes]
    both_fed = [_int(4, axis, "rotate", "feedback") for axis in axes]
    clipped = [_int(4, axis, "rotate", "clip", "feedback") for axis in axes]
    name = "int4-kivi, page 64"
    yield _row("kivi", f"{name} + feedback", fed, token_fed, 64)
    yield _row("kivi", f"{name} + sinks", plain, token, **kept)
    yield _row("kivi", f"{name} + rotate", *turned, 64)
    yield _row("kivi", f"{name} + rotate + feedback", *both_fed, 64)
    yield Row("kivi", kvq.SCHEMES["int4-feedback"], 64)
    name = "int4-feedback"
    yield _row("kivi", f"{name}, nothing turned", fed, token_fed, **kept)
    yield _row("kivi", f"{name}, values not turned", both_fed[0], token_fed, **kept)
    yield _row("kivi", f"{name}, keys not turned", fed, both_fed[1], **kept)
    yield _row("kivi", f"{name} + clip", *clipped, **kept)


def _few_bits() -> Iterator[Row]:
    """Two bits, FP4, and widths that differ."""
    channel, token = _int(2, "channel"), _int(2, "token")
    near, first = {"recent": 128}, {"sinks": 16}
    yield _row("int2", "int2-kivi + recent 128", channel, token, **near)
    yield _row("int2", "int2-kivi + sinks", channel, token, **first)
    kept, name = near | first, "int2-kivi + recent 128 + sinks"
    yield _row("int2", name, channel, token, **kept)
    axes = "channel", "token"
    turned = [_int(2, axis, "rotate") for axis in axes]
    yield _row("int2", f"{name} + rotate", *turned, **kept)
    fed = [_int(2, axis, "feedback") for axis in axes]
    yield _row("int2", f"{name} + feedback", *fed, **kept)
    both = [_int(2, axis, "rotate", "feedback") for axis in axes]
    yield _row("int2", f"{name} + rotate + feedback", *both, **kept)
    preset = kvq.SCHEMES["int2-feedback"]
    name = preset.name
    yield _row("int2", f"{name}, keys not turned", fed[0], preset.values, **kept)
    clipped = _int(2, "channel", "rotate", "clip", "feedback")
    yield _row("int2", f"{name} + clipped keys", clipped, preset.values, **kept)
    yield Row("int2", preset)
    yield _both("int2", "int2 by token + rotate", _int(2, "token", "rotate"))

    for aids in (("rotate",), ("center",), ("feedback",)):
        spec = kvq.Spec("fp4", "block", aids=aids)
        yield _both("fp4", "nvfp4 + " + " + ".join(aids), spec)
    spec = kvq.Spec("fp4", "block", aids=("center", "rotate", "feedback"))
    yield _both("fp4", "nvfp4 + center + rotate + feedback + sinks", spec, sinks=16)

    token4, token4_fed = _int(4, "token"), _int(4, "token", "feedback")
    for bits in (5.0, 5.5, 6.0, 7.0):
        yield _row("mixed", f"mixed, keys of {bits:g}", kvq.Mixed(bits), token4)
    wide = kvq.Mixed(6.0, aids=("feedback",))
    yield _row("mixed", "mixed + feedback + sinks", wide, token4_fed, sinks=16)
    wide = kvq.Mixed(6.0, aids=("rotate",))
    yield _row("mixed", "mixed + rotate", wide, token4)


#: What is tried on the model with a planted bias.
PLANTED = (
    "fp8",
    "int8",
    "int8-static",
    "fp8-static",
    "int4",
    "nvfp4",
    "mixed, keys of 6",
    "int4 + center",
    "int4 + smooth",
    "int4 + rotate",
    "int4 + clip",
    "int4 + feedback",
    "int4 + center + rotate",
    "int4 + center + rotate + feedback",
    "int4 + center + rotate + feedback + sinks",
    "int4 + sinks",
    "int4 + recent 128",
    "k8v4",
    "K8 V4, keys by channel",
    "nvfp4 + center + rotate + feedback + sinks",
    "int4-kivi",
    "int4-feedback",
    "int2-kivi",
    "int2-feedback",
)


def found_by_search(model, calibration, text) -> list[Row]:
    """Pairs of widths for each layer, as `kvq.search` finds them."""
    front = kvq.search(model, calibration, text, points=9)
    return [Row("layers", point.scheme) for point in front]


#: What is measured over long windows.
LASTING = ("int4", "int4 + recent 128", "int4-feedback", "int2-feedback")


def by_position(model, calibration, table: list[Row], text) -> dict[str, list[float]]:
    """Mean KL divergence of the tokens in each stretch of `BUCKET`.

    Args:
        text: int [windows, tokens].
    """
    found = {row.scheme.name: torch.zeros(text.shape[1] // BUCKET) for row in table}
    for window in tqdm(text.tolist(), desc="long windows"):
        reference = kvq.logits(model, window, "native")[:-1].float().log_softmax(-1)
        for row in table:
            scheme = kvq.fit(row.scheme, calibration, row.page_size)
            read = kvq.logits(model, window, scheme, row.page_size)[:-1]
            kl = per_token(reference, read.float().log_softmax(-1), window)["kl"]
            means = torch.stack([part.mean() for part in kl.split(BUCKET)])
            found[scheme.name] += means / len(text)
    return {name: kl.tolist() for name, kl in found.items()}


def measure_rows(model, calibration, table: list[Row], text) -> list[dict]:
    """What each row does to the model's predictions on windows of text.

    Args:
        text: int [windows, tokens].

    Returns:
        For each row a dict: name, group, bits of cold storage and effective bits at
        4,096 tokens, perplexity and its change, divergence, and standard errors.
    """
    shape = kvq.KVShape.of(model.config)
    schemes = [
        kvq.fit(row.scheme, calibration, row.page_size, **row.options) for row in table
    ]
    found: list[list[dict]] = [[] for _ in table]
    with tqdm(total=len(text) * (len(table) + 1), unit="window") as bar:
        for window in text.tolist():
            reference = kvq.logits(model, window, "native")[:-1].float().log_softmax(-1)
            bar.update()
            for row, scheme, tokens in zip(table, schemes, found, strict=True):
                bar.set_description(scheme.name)
                out = kvq.logits(model, window, scheme, row.page_size, row.chunk)
                read = out[:-1].float().log_softmax(-1)
                tokens.append(per_token(reference, read, window))
                bar.update()
    made = []
    for row, scheme, tokens in zip(table, schemes, found, strict=True):
        joined = {key: torch.stack([t[key] for t in tokens]) for key in tokens[0]}
        change = (joined["nll"] - joined["nll_reference"]).double().mean(1)
        live = kvq.kv_bytes(shape, scheme, LENGTH, page_size=row.page_size)
        made.append(
            {
                "scheme": scheme.name,
                "group": row.group,
                "page_size": row.page_size,
                "chunk": row.chunk,
                "bits": scheme.bits_per_element(row.page_size, shape.head_dim),
                "effective_bits": 8 * live / (LENGTH * shape.elements_per_token),
                "recent": scheme.recent,
                "sinks": scheme.sinks,
                **summary(joined),
                "nll_change": change.mean().item(),
                "nll_change_error": standard_error(change),
                "kl_error": standard_error(joined["kl"].double().mean(1)),
            }
        )
    return made


def _part(number: int, parts: int) -> dict:
    """A share of all rows, in a process of its own."""
    torch.set_num_threads(1)
    model, tokenizer = kvq.load_model("smollm2-135m")
    ids = windows(tokenizer, CALIBRATED.stop, TOKENS)
    calibration = kvq.calibrate(model, ids[list(CALIBRATED)], "SmolLM2-135M-Instruct")
    text = ids[list(MEASURED)]
    # Steps of one page, for the schemes whose numbers are a promise.
    named = [row for row in rows() if row.scheme.name in PROMISED]
    promised = [
        Row("promise", row.scheme, row.page_size, chunk=row.page_size) for row in named
    ]
    table = [*rows(), *promised][number::parts]
    made = measure_rows(model, calibration, table, text)
    if number == 0:
        searched = ids[list(SEARCHED)]
        layers = found_by_search(model, calibration, searched)
        made += measure_rows(model, calibration, layers, text)
    planted: list[dict] = []
    lasting: dict[str, list[float]] = {}
    if number == parts - 1:
        long = windows(tokenizer, LONG, LENGTH)
        some = [row for row in rows() if row.scheme.name in LASTING]
        lasting = by_position(model, calibration, some, long)
        biased = plant_key_bias(model, calibration)
        known = kvq.calibrate(biased, ids[list(CALIBRATED)], "the same, planted")
        some = [row for row in rows() if row.scheme.name in PLANTED]
        planted = measure_rows(biased, known, some, text[:2])
    told = {"text": calibration.text, "tokens": calibration.tokens}
    return {
        "schemes": made,
        "planted": planted,
        "by_position": lasting,
        "calibration": told,
    }


#: Schemes that are measured once more with chunks of one page.
PROMISED = ("int4", "int4-feedback", "int2-feedback")


def measure(workers: int | None = None) -> dict:
    """All that chapter 5 takes from a record.

    Args:
        workers: processes; default: one for each core.
    """
    parts = workers or os.cpu_count()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parts, mp_context=spawn) as pool:
        found = list(pool.map(_part, range(parts), repeat(parts)))
    return {
        "windows": [len(MEASURED), TOKENS],
        "length": LENGTH,
        "calibration": found[0]["calibration"],
        "schemes": [row for part in found for row in part["schemes"]],
        "planted": [row for part in found for row in part["planted"]],
        "long_windows": [LONG, LENGTH],
        "bucket": BUCKET,
        "by_position": found[-1]["by_position"],
    }


def main() -> None:
    """Measure everything that chapter 5 draws, and record it."""
    made = record(
        "compensation",
        measure(),
        model="SmolLM2-135M-Instruct, float32, weights from 4-bit GGUF",
        text=describe_text(),
        content=offline_text(),
    )
    print(f"Recorded in {save(RESULTS / 'compensation.json', made)}")


if __name__ == "__main__":
    main()
