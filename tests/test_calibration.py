"""Calibration: what it measures, what it leaves out, its file; and factors folded into the weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_model import small, text
from test_remat import BIASED, close, ids_of, logits

from kvmini import KvminiError, Rope
from kvmini.calibration import Calibration, calibrate, folded, massive_tokens, pair_factors
from kvmini.files import read_calibration, write_calibration
from kvmini.metrics import Tap
from kvmini.phenomena import exact_layers

PASSAGE = 20
HALF, BFLOAT = 2.0**-11, 2.0**-9  # half an ulp of float16 and of bfloat16, relative


def taken(model, ids, nudge=lambda layer, k, v: None):
    """k and v of every layer, and the summed loss."""
    found = []

    def keep(layer, q, k, v):
        nudge(layer, k, v)
        found.append((k.detach().clone(), v.detach().clone()))
    with torch.no_grad():
        logits = model(ids, Tap(model.config.n_layers, model.config.rope, keep))
    return found, F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item()


@pytest.fixture(scope="module")
def made():
    model = small(**BIASED)
    return model, ids_of(50), calibrate(model, ids_of(50), PASSAGE)


def test_keys_and_values_are_those_of_each_passage_alone(made):
    """50 tokens are two passages of 20; each starts at position 0 and sees nothing of the other."""
    model, ids, calibration = made
    assert calibration.sinks == 0 and calibration.keys.shape == (2, 2, 40, 16) and calibration.n_layers == 2
    for n, start in enumerate((0, PASSAGE)):
        found, _ = taken(model, ids[:, start:start + PASSAGE])
        for layer, (k, v) in enumerate(found):
            for side, x in (("k", k), ("v", v)):
                numbers = calibration.of(side, layer)[0][:, n * PASSAGE:(n + 1) * PASSAGE]
                assert numbers.dtype == torch.float32
                torch.testing.assert_close(numbers.double(), x[0], rtol=HALF, atol=2.0**-25)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("place", [(0, 3, 7), (1, 11, 2)])  # head, token, channel
def test_gradients_are_what_a_finite_difference_says(made, layer, side, place):
    model, ids, calibration = made

    def loss(nudge):
        def add(at, k, v):
            if at == layer:
                (k if side == "k" else v)[0][place] += nudge
        return taken(model, ids[:, :PASSAGE], add)[1]
    slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert slope**2 > 1e-8
    assert calibration.of(side, layer)[1][place].item() == pytest.approx(slope**2, rel=2 * BFLOAT + 1e-4)


def test_nothing_of_the_model_is_changed():
    model = small(**BIASED)
    model.embedding.weight.requires_grad_(False)
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    calibrate(model, ids_of(20), PASSAGE)
    assert all(p.grad is None and p.requires_grad == before[name][1] and torch.equal(p, before[name][0])
               for name, p in model.named_parameters())
    assert not model.embedding._forward_hooks


@pytest.mark.parametrize("biases", [(), ("k",)])
def test_projections_are_the_models(biases):
    model = small(biases=biases)
    calibration = calibrate(model, ids_of(20), PASSAGE)
    for layer, block in enumerate(model.layers):
        for side in "kv":
            linear, (weight, bias) = getattr(block.attention, side), calibration.projection(side, layer)
            assert torch.equal(weight, linear.weight.detach().float())
            assert torch.equal(bias, torch.zeros(32) if linear.bias is None else linear.bias.detach().float())


@pytest.mark.parametrize("places", [[], [0], [0, 2], [7], [8, 12]])
def test_massive_tokens_are_counted_to_the_last_of_the_first_eight(places):
    """Planted: a token whose embedding has one huge number, which the residual stream carries on."""
    model, ids = small(), torch.arange(20)[None] % 40
    with torch.no_grad():
        for place in places:
            ids[0, place] = 49
        model.embedding.weight[49, 7] = 1e4
    wanted = max((place + 1 for place in places if place < 8), default=0)
    assert massive_tokens(model, ids) == wanted
    calibration = calibrate(model, ids, PASSAGE)
    assert calibration.sinks == wanted and calibration.keys.shape[-2] == 20 - wanted
    found, _ = taken(model, ids)
    torch.testing.assert_close(calibration.keys[1].double(), found[1][0][0, :, wanted:], rtol=HALF, atol=2.0**-25)


@pytest.mark.slow
def test_the_default_models_massive_token_is_its_first(loaded):
    model, tokenizer = loaded
    for start in (0, 300):
        assert massive_tokens(model, text(tokenizer, 64, start)) == 1


# --- factors

def test_factors_are_the_root_of_the_longest_pair_before_rope_and_after():
    k = torch.randn(3, 40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k[0, :, 1] = k[0, :, 5] = 0.0
    pairs = k[..., :4].numpy() + 1j * k[..., 4:].numpy()
    wanted = np.sqrt(np.abs(pairs).max(1, keepdims=True))
    wanted[0, 0, 1] = 1.0
    for keys in (k, Rope(8).apply(k[None], range(40))[0]):
        np.testing.assert_allclose(pair_factors(keys).numpy(), np.concatenate([wanted, wanted], -1), rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, BIASED, {"n_kv_heads": 1}, {"n_kv_heads": 4}])
def test_folded_factors_divide_keys_and_leave_the_logits(changes):
    model, ids, keys = small(**changes), ids_of(30), []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = logits(model, ids, None, [30])
    exact_layers(model, ids, lambda layer, q, k, v: keys.append(k[0]))
    factors, scaled = [pair_factors(k) for k in keys], []
    with folded(model, factors):
        close(logits(model, ids, model.new_cache(), [20, 9, 1]), expected, 1e-9)
        exact_layers(model, ids, lambda layer, q, k, v: scaled.append(k[0]))
    for k, small_k, factor in zip(keys, scaled, factors, strict=True):
        close(small_k * factor, k, 1e-9)
        assert torch.hypot(*small_k.chunk(2, dim=-1)).max() <= k.abs().max().sqrt() * 2**0.25 + 1e-6
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_weights_come_back_after_an_error_too():
    model = small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    factor = torch.full((2, 1, 16), 3.0)
    with pytest.raises(RuntimeError, match="inside"), folded(model, [factor, factor]):
        raise RuntimeError("inside")
    with pytest.raises(KvminiError, match="tie them"), folded(model, [factor, torch.arange(32.0).view(2, 1, 16)]):
        pass
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# --- its file

def test_a_calibration_is_read_as_it_was_written(made, tmp_path):
    _, _, calibration = made
    calibration = replace(calibration, sinks=3)
    write_calibration(tmp_path / "c.safetensors", calibration)
    found = read_calibration(tmp_path / "c.safetensors")
    assert isinstance(found, Calibration) and found.sinks == 3
    for name, x in vars(calibration).items():
        assert name == "sinks" or (torch.equal(getattr(found, name), x) and getattr(found, name).dtype == x.dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]


def test_what_is_no_calibration_is_refused(made, tmp_path):
    write_calibration(tmp_path / "c.safetensors", made[2])
    tensors = load_file(tmp_path / "c.safetensors")
    save_file({name: x for name, x in tensors.items() if name != "values"}, tmp_path / "less.safetensors")
    save_file(tensors | {"more": torch.ones(1)}, tmp_path / "more.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "c.safetensors").read_bytes()[:-100])
    for name in ("less", "more", "text", "cut"):
        with pytest.raises(KvminiError, match="is no calibration that kvmini wrote") as error:
            read_calibration(tmp_path / f"{name}.safetensors")
        assert "\n" not in str(error.value)
    with pytest.raises(KvminiError, match="cannot read calibration"):
        read_calibration(tmp_path / "none.safetensors")
    with pytest.raises(KvminiError, match="must end in one of"):
        write_calibration(tmp_path / "c.bin", made[2])


@pytest.mark.parametrize(("length", "passage"), [(19, 20), (100, 8), (0, 20)])
def test_too_little_text_is_one_line(length, passage):
    with pytest.raises(KvminiError, match=f"{length} tokens make no passage of {passage}"):
        calibrate(small(), ids_of(length), passage)
