"""From arguments to a run, and from a result to the screen and to files: what all commands share.

Next file: `commands.py`.
"""

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

from kvmini import policies
from kvmini.calibration import Calibration
from kvmini.catalogue import EXPERIMENTS, Experiment
from kvmini.errors import KvminiError
from kvmini.experiments.run import Result, Run
from kvmini.files import (
    FIGURES,
    check_writable,
    read_calibration,
    read_text,
    write_figure,
    write_json,
)
from kvmini.model import Llama
from kvmini.texts import prose, text_ids
from kvmini.tokenizer import Tokenizer
from kvmini.weights import FILE_NAME, load_model


def check_outputs(args: argparse.Namespace) -> None:
    """Before the long run, not after it."""
    check_writable(args.json)
    check_writable(args.figure, FIGURES)


def show(args: argparse.Namespace, source: dict, title: str, result: Result) -> None:
    """Print a result, and write it where asked."""
    chosen = EXPERIMENTS[args.command]
    print(f"{title}\n\n{chosen.text(result)}")
    if args.json:
        write_json(args.json, {"command": args.command, **source, **result})
    if args.figure:
        write_figures(args.figure, chosen, result, title)


def write_figures(path: Path, chosen: Experiment, result: Result, title: str, more: str = "") -> None:
    """The experiment's figures: the main one to `path`, others beside it, by name."""
    for name, draw in chosen.draw.items():
        write_figure(path.with_stem(f"{path.stem}{more}{name}"), draw(result, title))


def fingerprint(run: Run) -> str:
    """Of the text's tokens and of the model's weights: names of files can stay while what is in them changes."""
    digest = hashlib.sha256(run.ids.numpy().tobytes())
    for parameter in run.model.parameters():
        digest.update(parameter.detach().flatten()[:4096].float().numpy().tobytes())
    return digest.hexdigest()[:16]


def prepare(args: argparse.Namespace, tokens: int) -> tuple[Run, dict]:
    """The run that the arguments ask for, and what a result says of it."""
    n_bits, group_size, tokens = args.n_bits or 2, args.group_size or 32, args.tokens or tokens
    names = getattr(args, "policy", [])
    check_policies(args, names)
    text = read_text(args.text) if args.text else prose("report")
    model, tokenizer, given = load(args)
    ids = text_ids(tokenizer, text, tokens, model)
    source = {"model": name_of(args.model, FILE_NAME), "text": name_of(args.text, "report.txt"), "tokens": tokens,
              "n_bits": n_bits, "group_size": group_size, "seed": args.seed}
    run = Run(model, tokenizer, ids, n_bits, group_size, args.seed, {}, not args.quiet, given)
    return replace(run, policies={name: chosen(args, name, run) for name in names}), source


def load(args: argparse.Namespace) -> tuple[Llama, Tokenizer, Calibration | None]:
    """The model, its tokenizer, and the calibration of it that the arguments name."""
    given = read_calibration(args.calibration) if args.calibration else None
    model, tokenizer = load_model(args.model, progress=not args.quiet)
    if given and not given.is_of(model):
        name = name_of(args.model, FILE_NAME)
        raise KvminiError(f"{args.calibration} is a calibration of another model than {name}: make one of this model")
    return model, tokenizer, given


def check_policies(args: argparse.Namespace, names: list[str]) -> None:
    """What can be said of them before a model is loaded."""
    for name in names:
        if not policies.needs_calibration(name):
            policies.get(name, args.n_bits, args.group_size)


def chosen(args: argparse.Namespace, name: str, run: Run) -> policies.Policy | None:
    """The policy of that name; the model is calibrated only where a policy needs it."""
    calibration = run.calibration if policies.needs_calibration(name) else None
    return policies.get(name, args.n_bits, args.group_size, calibration)


def title_of(source: dict) -> str:
    return (f"{source['model']}, {source['text']}, {source['tokens']} tokens, {source['n_bits']} bits, "
            f"groups of {source['group_size']}")


def name_of(path: Path | None, default: str) -> str:
    return path.name if path else default
