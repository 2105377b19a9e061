"""The command line: `python -m kvmini [COMMAND]`. Exit status 0, or 2 with one line for a user's mistake.

`laws` alone has a third one: 1 where a law is broken.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from kvmini import policies
from kvmini.catalogue import EXPERIMENTS
from kvmini.claims import CLAIMS
from kvmini.commands import (
    PROMPT,
    calibration,
    claims,
    errors,
    experiment,
    fetch,
    frontier,
    generate_text,
    memory,
)
from kvmini.errors import KvminiError
from kvmini.files import check_writable, write_json
from kvmini.shapes import SHAPES
from kvmini.weights import FILE_NAME

UNDER_TEST = {"quantizer": "factory(n_bits, axis, group_size)", "cache": "factory(n_layers, rope, policy)",
              "kernel": "kernel(q, keys, values)", "rope": "factory(head_dim, base)",
              "packer": "module with pack, unpack and packed_size"}


def whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in a range, for argparse."""
    span = f"from {lowest} to {highest}" if highest else f"of at least {lowest}"

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and lowest <= int(text) <= (highest or int(text)):
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number {span}, not {text!r}")
    return parse


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text!r}")
    return value


def between(lowest: float, highest: float) -> Callable[[str], float]:
    """A parser of numbers above the lowest, up to the highest."""
    def parse(text: str) -> float:
        if lowest < number(text) <= highest:
            return number(text)
        raise argparse.ArgumentTypeError(f"must be a number above {lowest:g}, up to {highest:g}, not {text!r}")
    return parse


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str):
        raise KvminiError(f"{message} (see {self.prog} --help)")


def arguments(argv: list[str]) -> argparse.Namespace:
    data, bits, grid, chosen_policies, output, figure = (Parser(add_help=False) for _ in range(6))
    add = data.add_argument
    add("--model", type=Path, metavar="PATH", help=f"a GGUF file (default: {FILE_NAME}, fetched when needed)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to work on (default: the project's own prose)")
    add("--tokens", type=whole(2), metavar="N", help="how many tokens of it (default: 1024 or 512; generate: all)")
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="seed of what is drawn by chance (default: 0)")
    add("--threads", type=whole(1, 1024), metavar="N", help="CPU threads (default: torch's choice)")
    add("--calibration", type=Path, metavar="FILE",
        help="a calibration that `calibration --save` wrote (default: made when a policy needs one)")
    bits.add_argument("--n-bits", type=whole(1, 8), metavar="B",
                      help="bits of a code, 1 to 8 (default: 2, or the policy's own)")
    add = grid.add_argument
    add("--group-size", type=whole(1), metavar="G", help="elements of one scale (default: 32, or the policy's own)")
    add = chosen_policies.add_argument
    add("--policy", nargs="+", default=[], metavar="NAME", help=f"policies to run, too. {policies.GRAMMAR}")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    output.add_argument("--quiet", action="store_true", help="no progress bars, nothing but the result")
    figure.add_argument("--figure", type=Path, metavar="FILE", help="draw to FILE (.png, .svg or .pdf)")

    parser = Parser(prog="python -m kvmini", description="KV-cache quantization, measured on a real model.",
                    epilog="Without a command: ablate.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add_command(name: str, run: Callable, help: str, *parents: Parser) -> Parser:
        command = commands.add_parser(name, parents=parents, help=help)
        command.set_defaults(run=run)
        return command

    for name, chosen in EXPERIMENTS.items():
        run = {"errors": errors, "memory": memory, "frontier": frontier, "calibration": calibration}.get(
            name, experiment)
        parents = [*([chosen_policies] if chosen.takes_policies else []), grid, output, figure]
        command = add_command(name, run, chosen.help, *([] if name == "memory" else [data, bits]), *parents)
        if name == "errors":
            command.add_argument("--tensors", type=Path, metavar="FILE",
                                 help="judge q, k, v of this .npz or .safetensors file: [B, H, T, D], [B, Hkv, T, D]")
            command.add_argument("--rope-base", type=between(0, 1e30), metavar="X", help="these q and k are unrotated: "
                                 "rotate them with this base (default: they are as attention uses them)")
        if name == "frontier":
            command.add_argument("--sweep", action="store_true", help="instead, every axis, bits 2 to 4, group 16 to "
                                 "128, window and RoPE order of the uniform quantizer: JSON lines, resumable")
        if name == "calibration":
            command.add_argument("--save", type=Path, metavar="FILE", help="write the calibration to FILE "
                                 "(.safetensors)")
        if name == "memory":
            add = command.add_argument
            add("--config", default="LLaMA-7B", metavar="NAME",
                help=f"a config.json, or one of {', '.join(SHAPES)} (default: LLaMA-7B)")
            add("--budget", type=between(0, 1e9), default=80.0, metavar="GIB", help="memory of the card (default: 80)")
            add("--batch", type=whole(1), default=1, metavar="N", help="sequences (default: 1)")
            add("--weight-bits", type=between(0, 64), default=16.0, metavar="B", help="(default: 16)")
    command = add_command("claims", claims, "every claim of the article beside our figure", data, bits, grid, output,
                          figure)
    command.add_argument("--only", type=whole(1, CLAIMS[-1].number), nargs="+", metavar="N", help="these claims only")
    command.add_argument("--resume", action="store_true", help="measure only what the file of --json does not hold yet")
    command = add_command("generate", generate_text, "continue a text through any cache policy", data, chosen_policies,
                          bits, grid, output)
    command.add_argument("--prompt", metavar="TEXT", help=f"continue this, not --text (default: {PROMPT!r})")
    command.add_argument("--max-new-tokens", type=whole(1), default=64, metavar="N", help="(default: 64)")
    command.add_argument("--temperature", type=number, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    command = add_command("laws", laws, "the law-book, on anybody's quantizer, cache, kernel, RoPE or packer")
    for kind, what in UNDER_TEST.items():
        command.add_argument(f"--{kind}", metavar="MODULE:FACTORY", help=f"{what} (default: all of kvmini's own)")
    command.add_argument("--public", action="store_true", help="judge the public quantizers that are installed")
    command.add_argument("--list", action="store_true", help="print the laws, judge nothing")
    command.add_argument("--law", nargs="+", default=[], metavar="NUMBER", help="judge these only, such as L03")
    command.add_argument("--profile", choices=("dev", "ci", "grade", "hunt"), default="ci",
                         help="examples a check: dev 25, ci 60 (default), grade 400, hunt 5000; those of ci and grade "
                              "are the same every time")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts to FILE")
    command.add_argument("--quiet", action="store_true", help="print what is broken and the count only")
    command = add_command("fetch", fetch, "fetch the default model and check its SHA-256")
    command.add_argument("--quiet", action="store_true", help="print the path only")

    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["ablate", *argv]
    return parser.parse_args(argv)


def laws(args: argparse.Namespace) -> int:
    try:
        from kvmini.laws.law import chosen
        from kvmini.laws.report import count, matrix, named, offers_of, public_offers, show
    except ModuleNotFoundError as error:
        raise KvminiError(f"the law-book needs hypothesis (pip install hypothesis): {error}") from None
    book = chosen(args.law)
    check_writable(args.json)
    if args.list:
        print("\n".join(f"{law.number} {law.title} ({law.kind}): {law.statement}" for law in book))
        return 0
    given = {kind: getattr(args, kind) for kind in UNDER_TEST}
    if args.public and any(given.values()):
        raise KvminiError("give --public, or what is to be judged, not both")
    offers, versions = public_offers() if args.public else (offers_of(named(given)), {})
    if not any(law.kind == offer.kind for law in book for offer in offers):
        kinds = " and ".join(sorted({law.kind for law in book}))
        raise KvminiError(f"nothing to judge: {', '.join(args.law)} speaks of a {kinds}, which is not given")
    found = show(offers, book, args.profile, args.quiet)
    rows = [verdict.row() for verdict in found]
    if args.public:
        print(f"\n{matrix(rows)}")
        for name, packages in versions.items():
            print(f"{name}: {packages or 'its published formula'}")
    for verdict in found:
        if verdict.outcome == "broken":
            print(f"\n{verdict}")
    print(count(found) if args.quiet else f"\n{count(found)}")
    if args.json:
        write_json(args.json, {"command": "laws", "profile": args.profile, "versions": versions, "rows": rows})
    return int(any(verdict.outcome == "broken" for verdict in found) and not args.public)


def main(argv: list[str] | None = None) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without a sign still gets the rest
    try:
        args = arguments(sys.argv[1:] if argv is None else argv)
        if getattr(args, "threads", None):
            torch.set_num_threads(args.threads)
        return args.run(args) or 0
    except KvminiError as error:
        print(f"kvmini: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for what Python still flushes at exit
    return 0


if __name__ == "__main__":
    sys.exit(main())
