"""Laws of one group: what its grid must do to the numbers in it.

A quantizer that clips, rotates or chooses its levels from data breaks some of these on purpose: it says so in
`does_not_promise`. Next file: `memory.py`.
"""

import torch
from hypothesis import strategies as st

from kvmini import axes
from kvmini.laws.cases import Case, Limits, cases, inputs, ulp
from kvmini.laws.law import Broken, demand, law, within


@law("L02", "quantizer", cases(largest=float("inf")))
def finite_in_finite_out(case: Case) -> None:
    """Finite numbers of any size come back finite, and a group whose numbers differ does not collapse to one number (to
    zero, on a symmetric grid); or a ValueError or OverflowError says what the scale or the minimum cannot hold."""
    limits = case.kept
    try:
        case.stored  # noqa: B018 - quantizes
    except Broken as broken:
        refusal, needed = broken.__cause__, torch.maximum(case.largest, case.ideal_scale).max()
        if not isinstance(refusal, ValueError | OverflowError):
            raise
        if needed <= limits.max * (1 - limits.eps):
            raise Broken(f"{broken}; but scale and minimum are at most {needed:.6g}") from refusal
        if not any(word in str(refusal) for word in ("scale", "minimum", "fit")):
            raise Broken(f"{broken}; the refusal does not name what cannot hold the numbers") from refusal
        return
    demand(case, case.x_hat.isfinite(), lambda i: f"{case.x[i].item():.9g} came back as {case.x_hat[i].item()}")
    wide = case.high - case.low >= (2 * ulp(case.largest, limits)).clamp(case.levels * limits.smallest_normal)
    groups = case.groups(case.x_hat)
    same = groups.amin(-1) == groups.amax(-1)
    if case.symmetric:  # neighbours of one sign may share a code far from zero
        same &= groups[..., 0] == 0
    demand(case, ~case.spread(wide & same), lambda i: f"the whole group came back as {case.x_hat[i].item():.9g}")


@law("L03", "quantizer", cases())
def half_a_step(case: Case) -> None:
    """No element is off by more than half a step: |x - x_hat| <= scale / 2 + the slack of float32 arithmetic, by the
    stored scale where it is shown, else by that of the group rounded to nearest."""
    within(case, "x_hat", case.x_hat, case.x, case.spread(torch.where(_subnormal(case), torch.inf, case.bound)))


@law("L03", "quantizer", cases(kinds=["subnormal", "huge and tiny", "any"]))
def half_a_tiny_step(case: Case) -> None:
    """The same where the scale is subnormal in its type: it is not lost."""
    within(case, "x_hat", case.x_hat, case.x, case.spread(torch.where(_subnormal(case), case.bound, torch.inf)))


def _subnormal(case: Case) -> torch.Tensor:
    return (case.ideal_scale > 0) & (case.ideal_scale < case.kept.smallest_normal)


@law("L04", "quantizer", cases(kinds=["constant"]), needs=("asymmetric",))
def constants_come_back(case: Case) -> None:
    """A group of equal values comes back as that value rounded once to the type of the stored minimum; zeros come back
    exactly zero."""
    kept = case.kept
    held = torch.stack([case.x.to(dtype).double() == case.x.double() for dtype in case.kept_in]).all(0)  # not rounded
    rounded = torch.where(held, 0, ulp(case.x, kept) / 2 + ulp(case.x, case.x.dtype) / 2)
    constant = case.spread(case.low == case.high)
    within(case, "x_hat", case.x_hat, case.x, torch.where(constant, rounded, torch.inf))


@law("L05", "quantizer", cases())
def monotone(case: Case) -> None:
    """Inside a group, x <= y gives x_hat <= y_hat, and equal numbers stay equal."""
    x, order = case.groups(case.x).sort(-1)
    x_hat = case.groups(case.x_hat).gather(-1, order)
    rise, rise_hat = x.diff(dim=-1), x_hat.diff(dim=-1)
    demand(case, (rise_hat == 0) | (rise_hat > 0) & (rise > 0), lambda i: (
        f"(group, place in order) {x[i].item():.9g} <= {x[(*i[:-1], i[-1] + 1)].item():.9g} came back as "
        f"{x_hat[i].item():.9g} and {x_hat[(*i[:-1], i[-1] + 1)].item():.9g}"))


@law("L06", "quantizer", cases(), needs=("codes",))
def idempotent(case: Case) -> None:
    """Quantizing what was dequantized gives the same codes, where the scale is normal and a step is at least 8 ulps of
    the group's largest magnitude in the coarser of the types of input and scale."""
    # x_hat is off its grid point by 1/2 ulp (1/16 step), the new minimum by at most 5/8 ulp more (1/12 step); the new
    # scale may be one value higher, which moves code c by c * eps <= 1/4 step for L * eps <= 1/4: under half in all.
    kept, step, coarser = case.kept, case.ideal_scale, Limits.of(*case.kept_in, case.x.dtype)
    clear = (step >= kept.smallest_normal) & (step >= 8 * ulp(case.largest, coarser))
    clear &= case.levels * kept.eps <= 0.25
    again = case.codes(case.quantize(case.x_hat))
    codes = case.codes()
    demand(case, (codes == again) | ~case.spread(clear), lambda i: (
        f"{case.x[i].item():.9g} has code {codes[i]}, its x_hat {case.x_hat[i].item():.9g} has code {again[i]}"))


def eighths(offer, axis: str):
    """Multiples of 1/8 below 16 in magnitude: exact in every type, and so are small shifts and scalings."""
    def snap(case: Case) -> Case:
        return case.on((case.x.double() * 8).round().clamp(-127, 127).div(8).to(case.x.dtype))
    return cases(kinds=["normal", "ties", "large mean", "any"])(offer, axis).map(snap)


@law("L09", "quantizer", lambda offer, axis: st.tuples(eighths(offer, axis), st.integers(-2, 6)))
def scaling(drawn: tuple[Case, int]) -> None:
    """Multiplying by a power of two multiplies x_hat by it, and changes no code, while everything stays normal."""
    case, power = drawn
    scaled = case.on(case.x * 2.0**power)
    limits = torch.finfo(case.x.dtype)  # what cancels to next to nothing may be rounded as a subnormal number
    within(scaled, f"x_hat of 2^{power} x", scaled.x_hat, case.x_hat.double() * 2.0**power,
           limits.smallest_normal * limits.eps * (1 + 2.0**power) / 2)
    if "codes" in case.offer.shows:
        within(scaled, f"the code of 2^{power} x", scaled.codes(), case.codes())


@law("L09", "quantizer", lambda offer, axis: st.tuples(eighths(offer, axis), st.integers(-16, 16)),
     needs=("codes", "asymmetric"))
def shifting(drawn: tuple[Case, int]) -> None:
    """Adding c changes no code where x + c, the minimum and the minimum + c are exact."""
    case, c = drawn
    shifted = case.on(case.x + c)
    within(shifted, f"the code of x + {c}", shifted.codes(), case.codes())


@law("L11", "quantizer", lambda offer, axis: nested(offer, axis), needs=("asymmetric",))
def nested_grids(drawn: tuple[Case, Case]) -> None:
    """More bits never make an element worse where the grids are nested: n bits divide m bits (1-2-4-8, 3-6). (2 and 3
    bits are not nested, nor are symmetric grids.)"""
    # Point c of the coarse grid is off its ideal place by at most c ulp(s0) for each of the two scales, and both
    # grids start at the same stored minimum, which widens each by at most an ulp of it.
    few, many = drawn
    kept = few.kept
    moved = sum(c.levels * ulp(c.ideal_scale + ulp(c.low, kept) / c.levels, kept) for c in drawn)
    error = (few.x_hat.double() - few.x.double()).abs()
    worse = (many.x_hat.double() - few.x.double()).abs()
    allowed = error + few.spread(moved + few.slack + many.slack)
    demand(many, worse <= allowed, lambda i: (
        f"{few.x[i].item():.9g} is off by {worse[i].item():.6g}, with {few.n_bits} bits only by {error[i].item():.6g}"),
        worst=worse - allowed)


@st.composite
def nested(draw, offer, axis: str) -> tuple[Case, Case]:
    """The same input at two bit widths, the smaller of which divides the larger."""
    pairs = [(n, m, group) for n, group in offer.configs[axis] for m, other in offer.configs[axis]
             if n < m and m % n == 0 and group == other]
    n, m, group = draw(st.sampled_from(pairs) if pairs else st.nothing())
    x = draw(inputs(offer, axis, group))
    return Case(offer, n, axis, group, x), Case(offer, m, axis, group, x)


@law("L23", "quantizer", cases(), needs=("scale",))
def tight(case: Case) -> None:
    """The grid is no wider than its group: scale <= (max - min) / L, but for the rounding of minimum and scale. No
    floor, no epsilon, no margin."""
    kept = case.kept
    widened = 0 if case.symmetric else ulp(case.low, kept) / case.levels
    ideal = torch.where(case.ideal_scale > 0, case.ideal_scale + widened, 0)
    demand(case, case.spread(case.scale <= ideal + ulp(ideal, kept)), lambda i: (
        f"the stored scale is {case.spread(case.scale)[i].item():.6g}, {case.spread(ideal)[i].item():.6g} would do"))


@law("L24", "quantizer", lambda offer, axis: halves(offer, axis))
def half_to_even(drawn: tuple[Case, torch.Tensor]) -> None:
    """An element exactly half way between two grid points goes to the even code."""
    case, expected = drawn
    within(case, "x_hat", case.x_hat, expected)


@st.composite
def halves(draw, offer, axis: str):
    """Groups of multiples of half a step, whose ends are grid points: (case, the x_hat that it must give)."""
    case = draw(cases(kinds=["ties"], n_bits=lambda n: n <= 6)(offer, axis))
    top = case.levels if not case.symmetric else case.levels // 2
    low = -top if case.symmetric else 0
    groups = case.groups(case.x)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    steps = torch.randint(2 * low, 2 * top + 1, groups.shape, generator=random) / 2
    steps[..., 0], steps[..., -1] = low, top
    size = 2.0 ** draw(st.integers(-8, 4))
    start = 0 if case.symmetric else draw(st.integers(-2, 2)) * size
    x, expected = (axes.join(start + size * n.double(), axis, case.x.shape).to(case.x.dtype)
                   for n in (steps, steps.round()))
    return case.on(x), expected
