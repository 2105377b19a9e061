"""Keys and values in the basis of their projections. (Whole models in it: `test_remat.py`.)"""

import numpy as np
import pytest
import torch
from test_remat import close, inputs

from kvmini import KvminiError, UniformQuantizer
from kvmini.quantizers.basis import BasisQuantizer
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.quantizers.transformed import merge


@pytest.mark.parametrize("hidden", [48, 20])
def test_latents_are_the_input_in_the_left_singular_vectors(hidden):
    """Of W = U S B^T, but for their signs; 32 channels of 20 inputs have 20 latents, and nothing in the others."""
    linear, x = torch.nn.Linear(hidden, 32).double().requires_grad_(False), inputs(9, hidden=hidden)[-1]
    linear.weight[7], rank = linear.weight[3], min(hidden, 31)  # not of full rank
    k = linear(x).unflatten(-1, (2, 16)).transpose(1, 2)
    q = BasisQuantizer.of(linear.weight, linear.bias, ExactQuantizer())
    left = np.linalg.svd(linear.weight.numpy().T, full_matrices=False)[0][:, :rank]
    latents = merge(q.forward(k))
    close(latents[..., :rank].abs(), torch.from_numpy(x.numpy() @ left).abs())
    assert (latents[..., rank:] == 0).all()
    close(q.dequantize(q.quantize(k)), k)


def test_the_grid_is_laid_on_latents():
    """Keys of one direction are one latent and zeros: at one bit they come back whole, and as channels they do not."""
    weight = torch.arange(32.0)[:, None] @ torch.ones(1, 48)
    k = (torch.randn(9, 48) @ weight.T).unflatten(-1, (2, 16)).transpose(0, 1)[None]
    grid = UniformQuantizer(1, "per_token", 16, scale_dtype=torch.float32)
    q = BasisQuantizer.of(weight, None, grid)
    close(q.dequantize(q.quantize(k)), k, 1e-4)
    assert (grid.dequantize(grid.quantize(k)) - k).abs().max() > 1
    with pytest.raises(KvminiError, match="basis of 32 channels"):
        q.quantize(k[:, :1])
    for axis in ("per_token", "per_channel"):  # latents take the bits of their grid
        wide = BasisQuantizer.of(torch.randn(256, 512), None, UniformQuantizer(2, axis, 128))
        assert wide.quantize(torch.randn(1, 2, 256, 128)).bits_per_element == 2.25
