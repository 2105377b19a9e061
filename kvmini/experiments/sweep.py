"""Every combination of axis, bits, group, windows and RoPE for the uniform quantizer: the raw material of a course.

Results are JSON lines, written one by one, so a sweep can be stopped and goes on where it was. Next file:
`experiments/principle.py`.
"""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from kvmini.errors import KvminiError
from kvmini.experiments.run import AXIS_CHOICES, Run, as_streamed, perplexity_and_bits, settings
from kvmini.policies import get

BITS, GROUPS, RESIDUALS, SINKS = (2, 3, 4), (16, 32, 64, 128), (0, 32, 128), (0, 4)


def combinations(head_dim: int) -> Iterator[str]:
    """All of them, spelled; a group within a token must divide its head.

    Example:
        >>> spelled = list(combinations(head_dim=64))
        >>> len(spelled), spelled[0]
        (468, 'k=per_token:2:16,v=per_token:2:16,residual=0,sinks=0')
    """
    for (key, value), bits, group, residual, sinks, rope in product(
            AXIS_CHOICES, BITS, GROUPS, RESIDUALS, SINKS, ("", ",pre-rope")):
        if head_dim % group == 0 or key == value == "per_channel":
            yield (f"k={key}:{bits}:{group},v={value}:{bits}:{group},residual={residual},sinks={sinks}{rope}")


def sweep(run: Run, source: dict, path: Path) -> int:
    """Measure what the file does not hold yet, a line for each combination; how many there are.

    Raises:
        KvminiError where the file holds another run's lines, or is damaged anywhere but in its last line.
    """
    wanted = list(combinations(run.model.config.head_dim))
    done = finished(path, source)
    with run.bar(len(wanted)) as bar, path.open("a", encoding="utf-8") as file:
        for spelled in wanted:
            bar.set_description(spelled)
            if spelled not in done:
                policy = as_streamed(get(spelled))
                row = settings(spelled, policy) | {"n_bits": policy.key.quantizer.n_bits,
                                                   "group_size": policy.key.quantizer.group_size}
                file.write(json.dumps({**source, **row, **perplexity_and_bits(run, policy)}) + "\n")
                file.flush()
            bar.update()
    return len(wanted)


def finished(path: Path, source: dict) -> set[str]:
    """The names of the combinations in a file of this run; a last line that was cut off is taken away."""
    if not path.exists():
        return set()
    *lines, rest = path.read_text(encoding="utf-8").split("\n")
    try:
        rows = [json.loads(line) for line in lines]
        names = {row["name"] for row in rows if {key: row[key] for key in source} == source}
    except (ValueError, KeyError, TypeError):
        raise KvminiError(f"{path} holds no lines of a sweep: give another file") from None
    if len(names) < len(rows):
        raise KvminiError(f"{path} holds another run: give the same model, text and settings, or another file")
    if rest:
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return names
