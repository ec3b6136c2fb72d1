"""A model whose keys carry a planted bias, as those of Qwen2.5 do.

Public reports on Qwen2.5-7B give its key biases a norm of about 605 in the first layer
and 921 in the last one, where the median layer has 22 (llama.cpp, issue 21385), and
4-bit caches with scales per token broke on it (transformers, issue 35185). That model
is not here; this plants the same kind of spike in a model that is.
"""

import copy

import torch

from ..calibrate import Calibration
from ..checks import real, whole
from ..errors import InvalidArgument, UnsupportedModel
from ..memory import KVShape


def plant_key_bias(
    model,
    calibration: Calibration,
    times: float = 300.0,
    channels: int = 2,
    layers: tuple[int, ...] = (0, -1),
):
    """A copy of a model with large biases on a few key channels.

    The channels are those that the rotary embedding turns most slowly, where a bias is
    nearly the same vector in every key. All scores of a query then move alike, and
    softmax does not see it: the model's predictions hardly change, but its keys do.

    Args:
        model: of the Llama family in transformers, with rotary embeddings over all
            channels of a head.
        calibration: of that model.
        times: the bias, in units of the median root mean square of the model's key
            channels.
        channels: how many channels of each kv head get it.
        layers: which layers; negative numbers count from the last one.

    Raises:
        UnsupportedModel: a layer has no `k_proj`.
        InvalidArgument: a number out of range, or the calibration of another shape.
    """
    size = real("times", times) * calibration.key_square.sqrt().median().item()
    shape = KVShape.of(model.config)
    if calibration.shape != shape:
        raise InvalidArgument(f"a calibration of {calibration.shape}, not of {shape}")
    half = shape.head_dim // 2
    channels = whole("channels", channels, at_least=1)
    if channels > half:
        raise InvalidArgument(f"at most {half} channels, got {channels}")
    planted = copy.deepcopy(model)
    found = {
        module.layer_idx: module
        for module in planted.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(module, "k_proj")
    }
    for layer in layers:
        if not -shape.num_layers <= layer < shape.num_layers:
            raise InvalidArgument(f"layer {layer} of {shape.num_layers}")
        module = found.get(layer % shape.num_layers)
        if module is None:
            raise UnsupportedModel(f"layer {layer} has no k_proj")
        old = module.k_proj
        new = torch.nn.Linear(old.in_features, old.out_features, bias=True)
        new = new.to(old.weight.device, old.weight.dtype)
        with torch.no_grad():
            new.weight.copy_(old.weight)
            bias = torch.zeros(shape.num_kv_heads, shape.head_dim)
            # The last channels of the first half turn slowest; their partners in the
            # second half get the sine of a small angle.
            signs = torch.ones(channels)
            signs[1::2] = -1.0
            bias[:, half - channels : half] = size * signs
            new.bias.copy_(bias.flatten())
            if old.bias is not None:
                new.bias += old.bias
        module.k_proj = new
    return planted.eval()
