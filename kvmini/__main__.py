"""The command line: `python -m kvmini [COMMAND]`. Exit status 0, or 2 with one line for a user's mistake.

`laws` alone has a third one: 1 where a law is broken.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvmini import experiments, plots, policies, tables
from kvmini.errors import KvminiError
from kvmini.files import FIGURES, check_writable, read_text, write_figure, write_json
from kvmini.model import generate
from kvmini.tokenizer import Tokenizer
from kvmini.weights import FILE_NAME, default_model, load_model

UNDER_TEST = {"quantizer": "factory(n_bits, axis, group_size)", "cache": "factory(n_layers, rope, policy)",
              "kernel": "kernel(q, keys, values)", "rope": "factory(head_dim, base)",
              "packer": "module with pack, unpack and packed_size"}
PROMPT = "The lighthouse keeper opened the door and"


def whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in a range, for argparse."""
    span = f"from {lowest} to {highest}" if highest else f"of at least {lowest}"

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and lowest <= int(text) <= (highest or int(text)):
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number {span}, not {text!r}")
    return parse


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text!r}")
    return value


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str):
        raise KvminiError(f"{message} (see {self.prog} --help)")


def arguments(argv: list[str]) -> argparse.Namespace:
    common = Parser(add_help=False)
    add = common.add_argument
    add("--model", type=Path, metavar="PATH", help=f"a GGUF file (default: {FILE_NAME}, fetched when needed)")
    add("--text", type=Path, metavar="FILE", help="UTF-8 text to work on (default: the project's own prose)")
    add("--tokens", type=whole(2), metavar="N", help="how many tokens of the text (default: 1024; generate: all)")
    add("--n-bits", type=whole(1, 8), metavar="B", help="bits of a code, 1 to 8 (default: 2, or the policy's own)")
    add("--group-size", type=whole(1), metavar="G", help="elements of one scale (default: 32, or the policy's own)")
    add("--policy", nargs="+", default=[], metavar="NAME", help=f"policies to run. {policies.GRAMMAR}")
    add("--seed", type=whole(0, 2**63 - 1), default=0, metavar="N", help="seed of what is drawn by chance (default: 0)")
    add("--threads", type=whole(1, 1024), metavar="N", help="CPU threads (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    add("--quiet", action="store_true", help="no progress bars, nothing but the result")

    parser = Parser(prog="python -m kvmini", description="KV-cache quantization, measured on a real model.",
                    epilog="Without a command: ablate.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser("ablate", parents=[common], help="the headline table: four ways to spend two bits")
    command.add_argument("--figure", type=Path, metavar="FILE", help="draw the figure to FILE (.png, .svg or .pdf)")
    command.set_defaults(run=ablate)
    command = commands.add_parser("generate", parents=[common], help="continue a text through any cache policy")
    command.add_argument("--prompt", metavar="TEXT", help=f"continue this, not --text (default: {PROMPT!r})")
    command.add_argument("--max-new-tokens", type=whole(1), default=64, metavar="N", help="(default: 64)")
    command.add_argument("--temperature", type=temperature, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    command.set_defaults(run=generate_text)
    command = commands.add_parser("laws", help="the law-book, on anybody's quantizer, cache, kernel, RoPE or packer")
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
    command.set_defaults(run=laws)
    command = commands.add_parser("fetch", help="fetch the default model and check its SHA-256")
    command.add_argument("--quiet", action="store_true", help="print the path only")
    command.set_defaults(run=fetch)

    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["ablate", *argv]
    return parser.parse_args(argv)


def ablate(args: argparse.Namespace) -> None:
    n_bits, group_size, tokens = args.n_bits or 2, args.group_size or 32, args.tokens or 1024
    chosen = experiments.ablation_policies(n_bits, group_size)
    chosen |= {name: policies.get(name, args.n_bits, args.group_size) for name in args.policy if name != "exact"}
    text = read_text(args.text) if args.text else experiments.prose("report")
    check_writable(args.json)
    check_writable(args.figure, FIGURES)
    started = time.perf_counter()
    model, tokenizer = load_model(args.model, progress=not args.quiet)
    ids = experiments.text_ids(tokenizer, text, tokens, model)
    rows = experiments.ablation(model, tokenizer, ids, chosen, args.seed, progress=not args.quiet)

    source = {"model": _name(args.model, FILE_NAME), "text": _name(args.text, "report.txt"), "tokens": tokens,
              "n_bits": n_bits, "group_size": group_size, "seed": args.seed}
    title = f"{source['model']}, {source['text']}, {tokens} tokens, {n_bits} bits, groups of {group_size}"
    print(f"{title}\n\n{tables.ablation(rows)}\n")
    for sentence in tables.ablation_findings(rows):
        print(f"- {sentence}")
    if not args.quiet:
        print(f"\n{time.perf_counter() - started:.0f} s on {torch.get_num_threads()} threads")
    if args.json:
        write_json(args.json, {"command": "ablate", **source, "rows": rows})
    if args.figure:
        title += "; axis choices: prefill all, light bars: streamed"
        write_figure(args.figure, plots.ablation(rows, title))


def generate_text(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.text:
        raise KvminiError("give --prompt or --text, not both")
    chosen = {name: policies.get(name, args.n_bits, args.group_size) for name in args.policy or ["exact"]}
    prompt = read_text(args.text) if args.text else PROMPT if args.prompt is None else args.prompt
    if not prompt:
        raise KvminiError("the prompt is empty: give at least one character")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise KvminiError("the prompt is not UTF-8 text")
    check_writable(args.json)
    model, tokenizer = load_model(args.model, progress=not args.quiet)
    ids = experiments.text_ids(tokenizer, prompt, args.tokens or len(tokenizer.encode(prompt)), model)
    if ids.shape[1] + args.max_new_tokens > model.config.context_length:
        raise KvminiError(f"{ids.shape[1]} prompt tokens and {args.max_new_tokens} new ones are past the model's "
                          f"context of {model.config.context_length}")
    rows = []
    for name, policy in chosen.items():
        if len(chosen) > 1:
            print(f"--- {name}")
        before = ids[0].tolist()
        print(tokenizer.decode(before), end="", flush=True)
        cache, stream, started = model.new_cache(policy), Stream(tokenizer, before), time.perf_counter()
        new = generate(model, ids, cache, args.max_new_tokens, args.temperature, args.seed, tokenizer.stop_ids, stream)
        speed = new.shape[1] / (time.perf_counter() - started)
        rows.append({"policy": name, "prompt_tokens": ids.shape[1], "new_tokens": new.shape[1],
                     "text": stream.shown, "tokens_per_s": speed,
                     "cache_bytes": cache.nbytes, "bits_per_element": cache.bits_per_element})
        print("" if args.quiet else
              f"\n[{name}: {ids.shape[1]} + {new.shape[1]} tokens, {speed:.1f} new tokens/s, "
              f"cache {cache.nbytes:,} bytes, {cache.bits_per_element:.2f} bits per element]")
    if args.json:
        write_json(args.json, {"command": "generate", "model": _name(args.model, FILE_NAME), "seed": args.seed,
                               "rows": rows})


class Stream:
    """Prints tokens as they come; holds back a character that needs more tokens until it is whole."""

    def __init__(self, tokenizer: Tokenizer, before: list[int]):
        self.tokenizer, self.before, self.ids, self.shown = tokenizer, before, [], ""

    def __call__(self, token: torch.Tensor) -> None:
        if int(token[0]) in self.tokenizer.stop_ids:
            return
        self.ids.append(int(token[0]))
        text = self.tokenizer.decode(self.ids, self.before).rstrip("\ufffd")
        print(text[len(self.shown):], end="", flush=True)
        self.shown = text


def fetch(args: argparse.Namespace) -> None:
    path = default_model(progress=not args.quiet)
    print(path if args.quiet else f"{path} ({path.stat().st_size:,} bytes, SHA-256 right)")


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


def _name(path: Path | None, default: str) -> str:
    return path.name if path else default


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
