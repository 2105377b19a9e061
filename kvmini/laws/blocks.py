"""Laws of many groups: that they are apart, in place, and stored in the bytes that are claimed.

Next file: `consumers.py`, the laws of where keys and values are used.
"""

import torch
from hypothesis import strategies as st

from kvmini import axes
from kvmini.laws.cases import Case, cases
from kvmini.laws.law import Broken, called, demand, law, within
from kvmini.laws.memory import reachable_nbytes


@law("L01", "quantizer", cases())
def shape_and_type_are_kept(case: Case) -> None:
    """x_hat has the shape, dtype and device of x; codes are integers in 0 .. 2^n_bits - 1, one an element."""
    got, wanted = ((list(x.shape), x.dtype, x.device) for x in (case.x_hat, case.x))
    if got != wanted:
        raise Broken(f"{case}: x_hat is {got}, expected {wanted}")
    if "codes" in case.offer.shows:
        codes = case.codes()
        if codes.shape != case.x.shape or codes.is_floating_point():
            raise Broken(f"{case}: codes are {codes.dtype} {list(codes.shape)}, expected integers {list(case.x.shape)}")
        demand(case, (codes >= 0) & (codes <= 2**case.n_bits - 1), lambda i: f"the code is {codes[i].item()}")


@law("L07", "quantizer", lambda offer, axis: st.tuples(cases()(offer, axis), st.integers(0, 999)))
def groups_are_independent(drawn: tuple[Case, int]) -> None:
    """Changing the numbers of one group changes no other group, and no other batch row or head."""
    case, place = drawn
    groups = axes.split(case.x, case.axis, case.group_size).clone()
    edited = torch.arange(case.low.numel()).view(case.low.shape) == place % case.low.numel()
    groups[edited] = groups[edited].flip(-1) / 4 + 1
    x_hat = case.roundtrip(axes.join(groups, case.axis, case.x.shape))
    within(case, f"x_hat, when only group {place % case.low.numel()} is edited,", x_hat, case.x_hat,
           torch.where(case.spread(edited), torch.inf, 0.0))


@law("L08", "quantizer", cases(square=True), needs=("per_token", "per_channel"), variants=("per_channel",))
def axes_are_dual(case: Case) -> None:
    """per_channel of x is per_token of x with T and D swapped."""
    dual = Case(case.offer, case.n_bits, "per_token", case.group_size, case.x.mT.contiguous())
    within(case, "x_hat", case.x_hat, dual.x_hat.mT)
    if "codes" in case.offer.shows:
        within(case, "the code", case.codes(), dual.codes().mT)


@law("L14", "quantizer", lambda offer, axis: cases(kinds=["normal"])(offer, axis).map(many_times), needs=("nbytes",))
def bytes_are_those_held(case: Case) -> None:
    """`nbytes` is the storage that can be reached from what was stored, also when it was read, cut or joined; the
    quantizer itself holds nothing of x."""
    before = reachable_nbytes(case.quantizer)
    _billed(case, "what was stored", case.stored)
    _ = case.x_hat
    _billed(case, "what was stored and read", case.stored)
    if case.axis != "per_tensor" and "take" in case.offer.shows:
        _billed(case, "take(blocks=1)", called(case, "take", lambda: case.quantizer.take(case.stored, blocks=1)))
    if case.axis != "per_tensor" and "cat" in case.offer.shows:
        joined = called(case, "cat", case.quantizer.cat, case.stored, case.stored)
        _billed(case, "cat", joined)
        if joined.nbytes != 2 * case.stored.nbytes:
            raise Broken(f"{case}: joined to itself it takes {joined.nbytes} bytes, not twice {case.stored.nbytes}")
    if (after := reachable_nbytes(case.quantizer)) > before:
        raise Broken(f"{case}: the quantizer holds {after - before} bytes more than before the call")


def _billed(case: Case, what: str, stored) -> None:
    held = reachable_nbytes(stored, but_not=case.quantizer)
    if held != stored.nbytes:
        raise Broken(f"{case}: nbytes says {stored.nbytes}, {held} bytes of arrays can be reached from {what}")


@law("L27", "quantizer", lambda offer, axis: cases(kinds=["normal"])(offer, axis).map(many_times), needs=("nbytes",))
def n_bits_are_n_bits(case: Case) -> None:
    """Codes take n_bits each, padded at most to whole bytes a token row or a group, and a group at most 8 bytes more
    (a float32 scale and minimum); not less than the codes need."""
    n, groups, rows = case.x.numel(), case.low.numel(), case.x[..., 0].numel()
    padded = max(rows * -(-case.x.shape[-1] * case.n_bits // 8), groups * -(-(n // groups) * case.n_bits // 8))
    got = case.stored.nbytes
    if not n * case.n_bits / 8 <= got <= padded + 8 * groups:
        raise Broken(f"{case}: {got} bytes for {n} elements, which is {8 * got / n:.3g} bits an element; codes take "
                     f"{n * case.n_bits / 8:.6g} bytes, all together at most {padded + 8 * groups}")


def many_times(case: Case) -> Case:
    """The same tokens four times: long enough that a copy of x cannot hide in rounding."""
    return case.on(torch.cat([case.x] * 4, dim=-2))


@law("L19", "quantizer", cases(), variants=("per_token", "per_channel"))
def order_does_not_matter(case: Case) -> None:
    """Permuting the tokens of a per_token store, or the channels of a per_channel store, permutes the result."""
    dim = -2 if case.axis == "per_token" else -1
    order = torch.arange(case.x.shape[dim]).flip(0).roll(1)
    within(case, "x_hat of permuted x", case.roundtrip(case.x.index_select(dim, order)),
           case.x_hat.index_select(dim, order))


@st.composite
def cut_at_a_block(draw, offer, axis: str) -> tuple[Case, int]:
    case = draw(cases()(offer, axis))
    return case, case.quantizer.block * draw(st.integers(0, case.x.shape[-2] // case.quantizer.block))


@law("L20", "quantizer", cut_at_a_block, needs=("block",), variants=("per_token", "per_channel"))
def additive(drawn: tuple[Case, int]) -> None:
    """Quantizing two pieces, cut at a block edge, is quantizing the whole; `cat` and `take` join and cut what is
    stored."""
    case, at = drawn
    a, b = case.x[..., :at, :], case.x[..., at:, :]
    parts = [case.quantize(piece) for piece in (a, b) if piece.shape[-2]]
    within(case, f"x_hat in two pieces, cut at token {at},", torch.cat([case.dequantize(part) for part in parts], -2),
           case.x_hat)
    if len(parts) == 2 and "cat" in case.offer.shows:
        joined = called(case, "cat", case.quantizer.cat, *parts)
        within(case, f"x_hat of cat, cut at token {at},", case.dequantize(joined), case.x_hat)
    if "take" in case.offer.shows:
        blocks, rows = at // case.quantizer.block, torch.arange(case.x.shape[0]).flip(0)
        cut = called(case, "take(blocks)", lambda: case.quantizer.take(case.stored, blocks=blocks))
        within(case, f"x_hat of take(blocks={blocks})", case.dequantize(cut), case.x_hat[..., :at, :])
        moved = called(case, "take(rows)", lambda: case.quantizer.take(case.stored, rows=rows))
        within(case, f"x_hat of take(rows={rows.tolist()})", case.dequantize(moved), case.x_hat[rows])


@law("L22", "quantizer", cases(kinds=["normal"]))
def nothing_is_nothing(case: Case) -> None:
    """No tokens are stored in no bytes and come back as no tokens: a cache begins with them."""
    empty = case.on(case.x[..., :0, :])
    within(empty, "x_hat", empty.x_hat, empty.x)
    if "nbytes" in case.offer.shows and empty.stored.nbytes:
        raise Broken(f"{empty}: no tokens take {empty.stored.nbytes} bytes")


@law("L25", "quantizer", cases(kinds=["normal", "ties", "any"]))
def pure(case: Case) -> None:
    """The result depends on the numbers alone: not on what was quantized before, not on the memory order of x; and x
    is neither changed nor kept."""
    fresh = case.on(case.x)  # another quantizer, which has seen nothing
    T, D = case.x.shape[-2:]
    signs = 1 - 2 * ((torch.arange(T)[:, None] + torch.arange(D)) % 2)
    case.quantize((signs * 2.0**12).expand(case.x.shape).to(case.x.dtype).contiguous())
    x = case.x.clone()
    first, second = case.quantize(x), case.quantize(x)
    within(case, "x after quantize", x, case.x)
    for which, stored in (("first", first), ("second", second), ("first, read again,", first)):
        within(case, f"x_hat of the {which} call after another input", case.dequantize(stored), fresh.x_hat)
    turned = case.x.mT.contiguous().mT  # the same numbers, channels outermost in memory
    within(case, "x_hat of a transposed copy", case.roundtrip(turned), fresh.x_hat)
    x.zero_()
    within(case, "x_hat, when x is overwritten after quantize,", case.dequantize(first), fresh.x_hat)


@law("L26", "quantizer", lambda offer, axis: st.tuples(
    cases(kinds=["normal"])(offer, axis), st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.integers(0, 10**6)))
def not_a_number_is_not_hidden(drawn: tuple[Case, float, int]) -> None:
    """NaN or inf in the input is refused, or comes back as not finite; it never becomes a number."""
    case, bad, place = drawn
    x = case.x.clone()
    x.view(-1)[place % x.numel()] = bad
    try:
        x_hat = case.quantizer.dequantize(case.quantizer.quantize(case.given(x)))
    except Exception:
        return
    x_hat = case.tensor("what dequantize returns", x_hat)
    demand(case.on(x), x.isfinite() | ~x_hat.isfinite(), lambda i: f"{bad} came back as {x_hat[i].item():.9g}")


@law("L16", "quantizer", cases(), needs=("codes", "scale", "minimum"))
def what_is_shown_is_what_is_read(case: Case) -> None:
    """code * scale + minimum, as shown, is what dequantize gives."""
    x_hat = case.spread(case.scale) * case.codes().double() + case.spread(case.minimum)
    limit = torch.finfo(case.x.dtype).max
    within(case, "code * scale + minimum", x_hat.clamp(-limit, limit), case.x_hat, case.spread(case.slack))


@law("L16", "quantizer", cases(), needs=("affine",))
def affine_is_dequantize(case: Case) -> None:
    """What `affine` hands to a kernel, code * scale + minimum, is what dequantize computes."""
    _, scale, start = called(case, "affine", case.quantizer.affine, case.stored)
    x_hat = case.spread(scale.double()) * case.codes().double() + case.spread(start.double())
    within(case, "code * scale + minimum", x_hat.to(case.x.dtype), case.x_hat, case.spread(case.slack))
