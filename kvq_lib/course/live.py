"""Try a scheme on a text of your own, in a running notebook.

    look(model, tokenizer, "At least a page of text …", "int4")  # a table, anywhere
    live(model, tokenizer)  # controls, where a kernel runs

A static page has no kernel that could answer, and the script behind its controls weighs
megabytes. So `live` shows a note instead where the environment variable KVQ_STATIC_PAGE
is set. The build of the site sets it.
"""

import os

import torch

from ..errors import InvalidArgument, KVQError
from ..model import generate, logits
from ..schemes import Scheme
from ..schemes import scheme as find_scheme
from .explorer import HEADS, LABELS, PAGE_SIZE, TEXT
from .figures import Table
from .heads import moved, pattern, read_heads, sealed

STATIC = "KVQ_STATIC_PAGE"

NOTE = (
    "Controls for a text of your own need a running kernel: open this chapter in "
    "Jupyter or Colab and run it."
)


def look(
    model, tokenizer, text: str, scheme: "str | Scheme", head=HEADS[0], new_tokens=16
) -> Table:
    """What a scheme does to the cache of a text, and to what the model says next.

    Args:
        model, tokenizer: from `load_model`.
        text: what the model reads.
        scheme: a name of `SCHEMES`, or a Scheme that seals.
        head: layer and query head to look at.
        new_tokens: tokens of the continuation.

    Raises:
        InvalidArgument: fewer tokens than a page and one, so that nothing is read cold;
            no such head.
        UnsupportedScheme: an unknown scheme, or one that needs calibration.
    """
    recipe, tokens = find_scheme(scheme), tokenizer(text).input_ids
    if len(tokens) <= PAGE_SIZE:
        raise InvalidArgument(
            f"the text has {len(tokens)} tokens; a page has {PAGE_SIZE}, and only full "
            "pages are quantized: write a little more"
        )
    (found,) = read_heads(model, tokens, [head])
    z = sealed(found, recipe, PAGE_SIZE)
    kept = found.keys[: len(z.codes) * PAGE_SIZE].float()
    error = (z.dequantize().flatten(0, 1) - kept).norm() / kept.norm()
    p, q = (
        logits(model, tokens, s, PAGE_SIZE).double().log_softmax(-1)
        for s in ("native", recipe)
    )
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    said = [
        generate(model, tokenizer, [tokens], s, new_tokens, progress=False)[0].text
        for s in ("native", recipe)
    ]
    changed = moved(pattern(found, page_size=PAGE_SIZE), pattern(found, recipe))
    rows = [
        ("tokens, and full pages", f"{len(tokens)}, {len(z.codes)}"),
        (
            "bytes of this head's sealed keys",
            f"{z.nbytes} (16 bits: {2 * kept.numel()})",
        ),
        ("error of these keys", f"{error:.1%}"),
        ("attention of this head that moved", f"{changed:.1%}"),
        ("KL divergence of the predictions", f"{kl.mean():.4f} nats"),
        ("the model goes on, 16 bits", repr(said[0])),
        (f"the model goes on, {recipe.name}", repr(said[1])),
    ]
    return Table(["", "found"], rows)


def live(model, tokenizer):
    """Controls to type a text and choose a scheme and a head; or a note without them.

    Works with ipywidgets 7 and 8.

    Returns:
        The widget; None where a note was printed instead.
    """
    if os.environ.get(STATIC):
        print(NOTE)
        return None
    try:
        import ipywidgets as widgets
        from IPython.display import display
    except ModuleNotFoundError as error:
        print(f"{NOTE} It also needs {error.name}.")
        return None
    wide = widgets.Layout(width="100%")
    text = widgets.Textarea(TEXT, description="Text", layout=wide, rows=6)
    scheme = widgets.Dropdown(options=list(LABELS), value="int4", description="Scheme")
    names = [(f"layer {layer}, head {head}", (layer, head)) for layer, head in HEADS]
    head = widgets.Dropdown(options=names, description="Head")
    button = widgets.Button(description="Read it")
    out = widgets.Output()

    def read(_):
        button.disabled = True
        out.clear_output(wait=True)
        with out:
            try:
                display(look(model, tokenizer, text.value, scheme.value, head.value))
            except KVQError as error:
                print(error)
            finally:
                button.disabled = False

    button.on_click(read)
    return widgets.VBox([text, scheme, head, button, out])
