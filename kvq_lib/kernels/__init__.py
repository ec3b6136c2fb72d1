"""What runs on tensors. A backend is a module with `plan`, `attend`, `new_flags` and
`check`; `reference` says in PyTorch what each must do.
"""

from ..errors import UnsupportedBackend
from . import reference


def choose(backend: str, device, dtype, specs):
    """The backend module for a cache.

    Args:
        backend: "torch", or "auto" for the best that runs here.
        device, dtype: of the hot pages.
        specs: storage of keys and values; empty for a cache that seals nothing.

    Raises:
        UnsupportedBackend: there is no such backend, or it cannot run here.
    """
    if backend not in ("auto", "torch"):
        raise UnsupportedBackend(
            f"backend {backend!r} is not available; choose 'torch' or 'auto'"
        )
    return reference
