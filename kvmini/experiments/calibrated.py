"""A calibration, shown: what the methods that measure beforehand are told about a model.

Next file: `experiments/sweep.py`.
"""

import torch

from kvmini.experiments.run import Result, Run
from kvmini.phenomena import exact_layers
from kvmini.quantizers.nonuniform import Codebook
from kvmini.quantizers.sparse import SHARE, thresholds
from kvmini.spellings import Spelled


def calibrated(run: Run) -> Result:
    """The model's calibration, layer by layer.

    Returns:
        rows: largest |k| and |v|; the widest channel of K over the median one; the share of the run's keys outside
        of the thresholds that leave 1% outside on calibration text; the loss's squared gradient at K over that at V;
        the fitted levels of K and of V at 2 bits.
    """
    calibration, rows = run.calibration, []
    keys: list[torch.Tensor] = []
    exact_layers(run.model, run.ids, lambda layer, q, k, v: keys.append(k[0, :, calibration.sinks:]))
    with run.bar(calibration.n_layers) as bar:
        for layer in range(calibration.n_layers):
            (k, dk), (v, dv) = (calibration.of(side, layer) for side in ("k", "v"))
            low, high = thresholds(k, SHARE)
            width = k.amax(-2) - k.amin(-2)
            row = {"layer": layer, "largest_key": k.abs().max().item(), "largest_value": v.abs().max().item(),
                   "widest_channel": (width.max() / width.median()).item(),
                   "outside": ((keys[layer] < low) | (keys[layer] > high)).double().mean().item(),
                   "gradient_ratio": (dk.mean() / dv.mean()).item()}
            for side, name in (("k", "key_levels"), ("v", "value_levels")):
                row[name] = shown(Spelled("nonuniform:2", side).quantizer(calibration, layer).codebook)
            rows.append(row)
            bar.update()
    return {"rows": rows, "calibration": [{"tokens": calibration.keys.shape[-2], "sinks": calibration.sinks}]}


def shown(book: Codebook) -> str:
    """A codebook as text.

    Example:
        >>> shown(Codebook(torch.tensor([-1.0, 0.25])))
        '-1.00 +0.25'
    """
    return " ".join(f"{level:+.2f}" for level in book.levels.tolist())


def findings(result: Result) -> list[str]:
    rows, about = result["rows"], result["calibration"][0]
    outside = sum(row["outside"] for row in rows) / len(rows)
    widest = max(rows, key=lambda row: row["widest_channel"])
    return [f"{about['tokens']} tokens; massive activations on the first {about['sinks']} of a passage, which are "
            f"left out. Thresholds that leave {SHARE:.0%} of the keys outside there leave {outside:.1%} here.",
            f"The widest channel of K is {widest['widest_channel']:.0f} times the median one, in layer "
            f"{widest['layer']}."]
