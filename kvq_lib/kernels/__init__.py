"""What runs on tensors. A backend is a module with `plan`, `attend`, `new_flags` and
`check`; `reference` says in PyTorch what each must do, `backend` does it in Triton.
"""

from ..errors import UnsupportedBackend
from . import reference


def choose(backend: str, device, dtype, specs):
    """The backend module for a cache.

    Args:
        backend: "torch", "triton", or "auto": Triton on a CUDA device where it can
            serve the cache, and PyTorch elsewhere.
        device, dtype: of the hot pages.
        specs: storage of keys and values; empty for a cache that seals nothing.

    Raises:
        UnsupportedBackend: there is no such backend, or it cannot run here.
    """
    if backend not in ("auto", "torch", "triton"):
        raise UnsupportedBackend(
            f"backend {backend!r} is not available; choose 'torch', 'triton' or 'auto'"
        )
    if backend == "torch" or (backend == "auto" and device.type != "cuda"):
        return reference
    try:
        # Late, and not at the top: there is no Triton on macOS.
        from . import backend as kernels

        kernels.require_support(device, dtype, specs)
    except ImportError as error:
        if backend == "triton":
            raise UnsupportedBackend(f"Triton cannot be imported: {error}") from None
        return reference
    except UnsupportedBackend:
        if backend == "triton":
            raise
        return reference
    return kernels
