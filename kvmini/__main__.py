"""The command line: `python -m kvmini [COMMAND]`. Exit status 0, or 2 with one line for a user's mistake."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvmini import experiments, plots, policies
from kvmini.errors import KvminiError
from kvmini.model import generate
from kvmini.weights import FILE_NAME, default_model, load_model

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
    add("--group-size", type=whole(1), metavar="G", help="elements that share a scale (default: 32, or the policy's own)")
    add("--policy", nargs="+", default=[], metavar="NAME", help=f"policies to run. {policies.GRAMMAR}")
    add("--seed", type=whole(0), default=0, metavar="N", help="seed of whatever is drawn by chance (default: 0)")
    add("--threads", type=whole(1), metavar="N", help="CPU threads (default: torch's choice)")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    add("--quiet", action="store_true", help="no progress bars, nothing but the result")

    parser = Parser(prog="kvmini", description="KV-cache quantization, measured on a real model.",
                    epilog="Without a command: ablate.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    command = commands.add_parser("ablate", parents=[common], help="the headline table: four ways to spend two bits")
    command.add_argument("--figure", type=Path, metavar="FILE", help="draw the figure to FILE (.png, .svg or .pdf)")
    command.set_defaults(run=ablate)
    command = commands.add_parser("generate", parents=[common], help="continue a text through any cache policy")
    command.add_argument("--prompt", metavar="TEXT", help=f"the text to continue, instead of --text (default: {PROMPT!r})")
    command.add_argument("--max-new-tokens", type=whole(1), default=64, metavar="N", help="(default: 64)")
    command.add_argument("--temperature", type=temperature, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    command.set_defaults(run=generate_text)
    command = commands.add_parser("fetch", help="fetch the default model and check its SHA-256")
    command.add_argument("--quiet", action="store_true", help="print the path only")
    command.set_defaults(run=fetch)

    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv = ["ablate", *argv]
    return parser.parse_args(argv)


def ablate(args: argparse.Namespace) -> None:
    n_bits, group_size, tokens = args.n_bits or 2, args.group_size or 32, args.tokens or 1024
    rows_of = experiments.ablation_policies(n_bits, group_size)
    rows_of |= {name: policies.get(name, args.n_bits, args.group_size) for name in args.policy if name != "exact"}
    text = read_text(args.text) if args.text else experiments.prose("report")
    for path in (args.json, args.figure):
        check_writable(path)
    started = time.perf_counter()
    model, tokenizer = load_model(args.model, progress=not args.quiet)
    ids = experiments.text_ids(tokenizer, text, tokens, model)
    rows = experiments.ablation(model, tokenizer, ids, rows_of, args.seed, progress=not args.quiet)

    source = {"model": args.model.name if args.model else FILE_NAME, "text": args.text.name if args.text else "report.txt",
              "tokens": tokens, "n_bits": n_bits, "group_size": group_size, "seed": args.seed}
    title = (f"{source['model']}, {source['text']}, {tokens} tokens, {n_bits} bits, groups of {group_size}")
    print(f"{title}\n\n{table(rows)}\n")
    for sentence in experiments.ablation_findings(rows):
        print(f"- {sentence}")
    if not args.quiet:
        print(f"\n{time.perf_counter() - started:.0f} s, {torch.get_num_threads()} threads")
    write_json(args.json, {"command": "ablate", **source, "rows": rows})
    if args.figure:
        figure = plots.ablation(rows, f"{title}; axis choices: prefill all, below them: streamed")
        write_whole(args.figure, lambda path: figure.savefig(path, dpi=150, metadata=undated(path)))


def table(rows: list[dict]) -> str:
    """The rows of `ablate` as aligned text."""
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    names = max(len(row["name"]) for row in rows)
    lines = [f"{'':{names}}  {'prefill':8}  bits per element      perplex-  recall     keys, % error    values, % error",
             f"{'':{names}}  {'':8}   body   held  (w16)       ity  %         stored  scores    stored  output"]
    for row in rows:
        errors = [show(row[name], ".1f") for name in experiments.ERRORS]
        lines.append(f"{row['name']:{names}}  {row['prefill'] or '-':8}  {show(row['body_bits_per_element'], '.2f'):>5}  "
                     f"{row['bits_per_element']:5.2f}  {row['bits_per_element_16bit_windows']:5.2f}  {row['perplexity']:8.1f}  "
                     f"{100 * row['recall']:3.0f} ±{100 * row['recall_standard_error']:2.0f}  "
                     f"{errors[0]:>9}  {errors[1]:>6}  {errors[2]:>8}  {errors[3]:>6}")
    lines.append("body: the packed part alone; held: with the exact windows, float32 here; (w16): had they 16 bits.")
    return "\n".join(lines)


def generate_text(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.text:
        raise KvminiError("give --prompt or --text, not both")
    chosen = {name: policies.get(name, args.n_bits, args.group_size) for name in args.policy or ["exact"]}
    text = read_text(args.text) if args.text else args.prompt if args.prompt is not None else PROMPT
    if not text:
        raise KvminiError("the prompt is empty: give at least one character")
    check_writable(args.json)
    model, tokenizer = load_model(args.model, progress=not args.quiet)
    ids = experiments.text_ids(tokenizer, text, args.tokens or len(tokenizer.encode(text)), model)
    longest = model.config.context_length - ids.shape[1]
    if args.max_new_tokens > longest + 1:
        raise KvminiError(f"{ids.shape[1]} prompt tokens and {args.max_new_tokens} new ones are past the model's context of "
                          f"{model.config.context_length}")
    runs = []
    for name, policy in chosen.items():
        if len(chosen) > 1:
            print(f"--- {name}")
        cache, written = model.new_cache(policy), []

        def show(token: torch.Tensor, written: list[int] = written) -> None:
            before = tokenizer.decode(written)
            written.append(int(token[0]))
            if int(token[0]) not in tokenizer.stop_ids:
                now = tokenizer.decode(written)  # a character may need several tokens: hold it back until it is whole
                print(now[len(before.rstrip("\ufffd")):].rstrip("\ufffd"), end="", flush=True)

        print(tokenizer.decode(ids[0].tolist()), end="", flush=True)
        started = time.perf_counter()
        generate(model, ids, cache, args.max_new_tokens, args.temperature, args.seed, tokenizer.stop_ids, show)
        seconds = time.perf_counter() - started
        run = {"policy": name, "prompt_tokens": ids.shape[1], "new_tokens": len(written),
               "text": tokenizer.decode(written), "tokens_per_s": len(written) / seconds, "cache_bytes": cache.nbytes,
               "bits_per_element": cache.bits_per_element()}
        runs.append(run)
        print("" if args.quiet else f"\n[{name}: {ids.shape[1]} + {len(written)} tokens, {run['tokens_per_s']:.1f} tokens/s "
              f"with the prompt, cache {cache.nbytes:,} bytes, {run['bits_per_element']:.2f} bits per element]")
    write_json(args.json, {"command": "generate", "model": args.model.name if args.model else FILE_NAME, "seed": args.seed,
                           "rows": runs})


def fetch(args: argparse.Namespace) -> None:
    path = default_model(progress=not args.quiet)
    print(path if args.quiet else f"{path} ({path.stat().st_size:,} bytes, SHA-256 right)")


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KvminiError(f"cannot read text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise KvminiError(f"{path} is not UTF-8 text (byte {error.start} is 0x{error.object[error.start]:02x})") from None
    if not text.strip():
        raise KvminiError(f"{path} is empty: it must hold text")
    return text


def check_writable(path: Path | None) -> None:
    """Fail before the long run, not after it."""
    if path is None:
        return
    if path.is_dir():
        raise KvminiError(f"cannot write {path}: it is a folder, name a file")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise KvminiError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path | None, content: dict) -> None:
    if path:
        write_whole(path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a neighbour, then rename it: a reader never meets half a file."""
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(part)
        os.replace(part, path)
    except OSError as error:
        raise KvminiError(f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)


def undated(path: Path) -> dict:
    """Metadata that leaves out the date, so that the same rows give the same file."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(sys.argv[1:] if argv is None else argv)
        if getattr(args, "threads", None):
            torch.set_num_threads(args.threads)
        args.run(args)
    except KvminiError as error:
        print(f"kvmini: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
