"""What the first cell of a notebook says once kvq_lib is there; see `bootstrap`.

from kvq_lib.course import colab

colab.say_gpu("section 2.7 measures longer contexts on it")
"""

import sys

import torch


def say_gpu(difference: str = "") -> None:
    """Print which GPU there is, and what this changes.

    Args:
        difference: what the notebook does otherwise where there is a GPU; "" for
            nothing.
    """
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        found = f"GPU: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
        print(f"{found}; {difference or 'this notebook does not use it'}.")
    elif difference:
        print(f"No GPU, and none is needed; where there is one, {difference}.")
        if "google.colab" in sys.modules:
            print("Colab lends one: Runtime › Change runtime type.")
    else:
        print("No GPU, and this notebook would not use one.")
