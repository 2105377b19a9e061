"""Named policies and their spelling."""

import pytest
import torch

from kvmini import CachePolicy, KvminiError, Side, UniformQuantizer, policies
from kvmini.quantizers.base import Quantizer
from kvmini.remat import RematPolicy


def uniform(axis, n_bits, **more):
    return UniformQuantizer(n_bits, axis, 32, **more)


def test_kivi_waits_for_128_keys_and_keeps_128_values():
    for n_bits in (2, 4):
        assert policies.get(f"kivi-{n_bits}") == CachePolicy(
            key=Side(uniform("per_channel", n_bits), residual_length=0, flush_length=128),
            value=Side(uniform("per_token", n_bits), residual_length=128, flush_length=None))


@pytest.mark.parametrize(("name", "key", "value"), [
    ("t-t-2", "per_token", "per_token"), ("t-c-2", "per_token", "per_channel"),
    ("c-t-2", "per_channel", "per_token"), ("c-c-2", "per_channel", "per_channel")])
def test_the_four_axis_choices_name_the_key_axis_first(name, key, value):
    assert policies.get(name) == CachePolicy(Side(uniform(key, 2)), Side(uniform(value, 2)))


def test_exact_is_no_policy_and_every_name_is_known():
    assert policies.get("exact") is None
    for name in policies.NAMES[1:]:
        if policies.needs_calibration(name):
            with pytest.raises(KvminiError, match="needs a calibration"):
                policies.get(name)
        else:
            assert isinstance(policies.get(name), RematPolicy if name.startswith("xquant") else CachePolicy)


def test_every_field_can_be_spelled():
    spelled = policies.get("k=per_channel:3:64, v=per_token:4:16,residual=8,v-residual=128,k-flush=192,sinks=4,"
                           "pre-rope,symmetric,prefill=all")
    assert spelled == CachePolicy(Side(UniformQuantizer(3, "per_channel", 64, True), 8, 192),
                                  Side(UniformQuantizer(4, "per_token", 16, True), 128), 4, True, "all")


def test_bits_and_group_given_beside_replace_the_policys_own():
    changed = policies.get("kivi-2", n_bits=4, group_size=64)
    assert changed.key == Side(UniformQuantizer(4, "per_channel", 64), 0, 128)
    assert changed.value == Side(UniformQuantizer(4, "per_token", 64), 128)


def test_a_side_may_name_anybodys_class(tmp_path, monkeypatch):
    (tmp_path / "their_module.py").write_text(
        "from kvmini import UniformQuantizer\n"
        "def factory(n_bits, axis, group_size):\n"
        "    return UniformQuantizer(n_bits, axis, group_size, symmetric=True)\n")
    monkeypatch.chdir(tmp_path)  # modules are found from the current folder
    natural = policies.get("k=their_module:factory:3:16,v=their_module:factory:3:16")
    assert natural.key.quantizer == UniformQuantizer(3, "per_channel", 16, symmetric=True)
    assert natural.value.quantizer == UniformQuantizer(3, "per_token", 16, symmetric=True)
    named = policies.get("k=their_module:factory:per_token:3:16,v=per_token:2:16")
    assert named.key.quantizer == UniformQuantizer(3, "per_token", 16, symmetric=True)


@pytest.mark.parametrize("policy", ["", "kivi", "kivi-3", "k=per_channel:2:32", "v=per_token:2:32", "k=2,v=3",
                                    "residual=4", "k=per_channel:2:32,v=per_token:2:32,windows=3"])
def test_an_unknown_policy_lists_what_is_allowed(policy):
    with pytest.raises(KvminiError) as error:
        policies.get(policy)
    message = str(error.value)
    assert "\n" not in message
    if "k=2" not in policy:
        assert all(word in message for word in (*policies.NAMES, "per_channel", "k-flush", "pre-rope", "streamed"))


@pytest.mark.parametrize(("policy", "says"), [
    ("k=per_channel:0:32,v=per_token:2:32", "1 to 8"), ("k=per_channel:9:32,v=per_token:2:32", "1 to 8"),
    ("k=per_channel:two:32,v=per_token:2:32", "two"), ("k=per_channel:2:0,v=per_token:2:32", "group_size"),
    ("k=per_channel:2:-8,v=per_token:2:32", "-8"), ("k=channel:2:32,v=per_token:2:32", "per_channel"),
    ("k=per_tensor:2:32,v=per_token:2:32", "per_tensor"), ("k=per_channel:2:32,v=per_token:2:32,k-flush=48", "48"),
    ("k=per_channel:2:32,v=per_token:2:32,residual=x", "residual"), ("k=per_channel:2:32,k=per_token:2:32", "twice"),
    ("k=per_channel:1:32,v=per_token:2:32,symmetric", "symmetric"), ("c-t-2,sinks=4", "unknown"),
    ("k=per_channel:2:32,v=per_token:2:32,prefill=none", "streamed"), ("k=per_channel:2:32,v=a:b:c:d:2:32", "FACTORY"),
    ("k=no_such_module:f:2:32,v=per_token:2:32", "no_such_module"), ("k=math:no_such:2:32,v=per_token:2:32", "no_such"),
    ("k=math:pi:2:32,v=per_token:2:32", "math:pi"), ("k=math:sqrt:2:32,v=per_token:2:32", "math:sqrt"),
    ("k=builtins:dict:2:32,v=per_token:2:32", "Quantizer.*dict")])
def test_a_bad_field_is_named(policy, says):
    with pytest.raises(KvminiError, match=says):
        policies.get(policy)


def test_third_parties_need_two_methods_only():
    class Half(Quantizer):
        """Keeps float16: one part, no codes."""

        def quantize(self, x):
            from kvmini import Stored
            return Stored({"half": x.half()}, tuple(x.shape), x.dtype, 16)

        def dequantize(self, stored):
            return stored.parts["half"].to(stored.dtype)

    from kvmini import QuantizedKVCache, Rope
    side = Side(Half(), residual_length=2)
    cache = QuantizedKVCache(1, Rope(8), CachePolicy(side, side, sinks=1))
    k, v = torch.randn(2, 1, 2, 10, 8)
    cache.append(0, k, v)
    assert torch.equal(cache.read(0)[1][..., 1:8, :], v[..., 1:8, :].half().float())
    cache.crop(5)
    cache.reorder([0])
    assert cache.length == 5 and cache.body_bits_per_element == 16.0 and Half().affine(None) is None
