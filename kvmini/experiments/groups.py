"""What quantization error is made of: half a step at most, and a step set by the group's extremes.

First one group with an outlier put into it, then the keys of the model, where the outlier channel is.
Next file: `experiments/heads.py`.
"""

import torch
from torch import Tensor

from kvmini import axes
from kvmini.errors import KvminiError
from kvmini.experiments.run import AXES, Result, Row, Run
from kvmini.phenomena import exact_layers, largest_channels
from kvmini.quantizers.uniform import UniformQuantizer

OUTLIERS = (0, 3, 10, 30, 100)


def groups(run: Run) -> Result:
    """An outlier coarsens its whole group: "rows" for one group, "model" for the keys of every layer and head.

    Returns:
        rows: size of the outlier (in standard deviations of the others), the stored step, the worst error in
        steps, and the relative error of the *other* elements in percent; model: the same for key groups with
        and without the head's largest channel, on both axes, rotated as they are cached.
    """
    if run.group_size < 2:
        raise KvminiError("a group of 1 has no neighbours to coarsen: give --group-size 2 or more")
    random = torch.Generator().manual_seed(run.seed)
    group = torch.randn(run.group_size, generator=random)
    others = torch.arange(run.group_size) > 0
    rows = []
    for outlier in OUTLIERS:
        x = torch.where(others, group, outlier or group[0])[None]
        rows.append({"name": f"outlier of {outlier}" if outlier else "no outlier", "outlier": outlier,
                     **_figures(UniformQuantizer(run.n_bits, "per_token", run.group_size), x, others[None])})

    found: dict[str, list[Row]] = {}

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        rotated = run.model.config.rope.apply(k, range(k.shape[-2]))
        whole = rotated[..., :k.shape[-2] // run.group_size * run.group_size, :]  # per_channel takes whole groups
        for head in whole.unbind(1):
            large = largest_channels(head, 1)[..., None, :].expand_as(head)  # [B, T, D]
            for axis in AXES:
                touched = axes.split(large, axis, run.group_size).any(-1, keepdim=True)
                touched = axes.join(touched.expand(*touched.shape[:-1], run.group_size), axis, head.shape)
                quantizer = UniformQuantizer(run.n_bits, axis, run.group_size)
                for name, where in (("with", touched & ~large), ("without", ~touched)):
                    if where.any():  # the outlier channel's own groups have nothing else in them per_channel
                        found.setdefault(f"{axis}, {name} the largest channel", []).append(
                            _figures(quantizer, head, where))
    exact_layers(run.model, run.ids, look)
    model = [{"name": name} | {key: max(row[key] for row in rows_) if key == "worst_steps" else
                               sum(row[key] for row in rows_) / len(rows_) for key in rows_[0]}
             for name, rows_ in found.items()]
    return {"rows": rows, "model": model}


def _figures(quantizer: UniformQuantizer, x: Tensor, where: Tensor) -> Row:
    """The step, the worst error of all in steps, and the relative error of the elements in the mask."""
    stored = quantizer.quantize(x)
    off = (quantizer.dequantize(stored).double() - x.double()).abs()
    step = stored.scale.double()[..., None]
    steps = axes.join(step.expand(*step.shape[:-1], quantizer.group_size), quantizer.axis, x.shape)
    return {"step": steps[where].mean().item(), "worst_steps": torch.where(off == 0, 0, off / steps).max().item(),
            "error": 100 * (off[where].norm() / x[where].double().norm()).item()}


def findings(result: Result) -> list[str]:
    plain, *_, largest = result["rows"]
    worst = max(row["worst_steps"] for row in (*result["rows"], *result["model"]))
    found = [f"Worst error {worst:.3f} steps; an outlier {largest['outlier']} times its neighbours takes their error "
             f"from {plain['error']:.0f}% to {largest['error']:.0f}%."]
    by_name = {row["name"]: row for row in result["model"]}
    near, far = (by_name.get(f"per_token, {name} the largest channel") for name in ("with", "without"))
    if near and far:
        found.append("In the model's keys, per_token, the channels that share a scale with their head's largest one "
                     f"have an error of {near['error']:.0f}%, those that do not {far['error']:.0f}%.")
    return found
