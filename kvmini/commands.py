"""What the commands do, once their arguments are parsed. Next file: `laws/law.py`."""

import argparse
import json
import time
from dataclasses import replace
from math import gcd
from pathlib import Path

import torch
from tqdm import tqdm

from kvmini import policies
from kvmini.catalogue import EXPERIMENTS
from kvmini.claims import CLAIMS
from kvmini.claims import text as claims_text
from kvmini.errors import KvminiError
from kvmini.experiments import heads
from kvmini.experiments.memory import memory as of_memory
from kvmini.experiments.run import Run
from kvmini.experiments.sweep import sweep
from kvmini.files import (
    check_writable,
    read_json,
    read_tensors,
    read_text,
    write_calibration,
    write_json,
)
from kvmini.memory import GIB
from kvmini.model import generate
from kvmini.prepare import (
    check_outputs,
    check_policies,
    chosen,
    fingerprint,
    load,
    name_of,
    prepare,
    show,
    title_of,
    write_figures,
)
from kvmini.rope import Rope
from kvmini.shapes import SHAPES, shape_of_config
from kvmini.texts import text_ids
from kvmini.tokenizer import Tokenizer
from kvmini.weights import FILE_NAME, default_model

PROMPT = "The lighthouse keeper opened the door and"


def experiment(args: argparse.Namespace) -> None:
    """Any experiment of the catalogue: measure, print, write."""
    check_outputs(args)
    started = time.perf_counter()
    run, source = prepare(args, EXPERIMENTS[args.command].tokens)
    show(args, source, title_of(source), EXPERIMENTS[args.command].measure(run))
    if not args.quiet:
        print(f"\n{time.perf_counter() - started:.0f} s on {torch.get_num_threads()} threads")


def frontier(args: argparse.Namespace) -> None:
    """All methods; or with --sweep every combination of the uniform quantizer."""
    if not args.sweep:
        return experiment(args)
    if args.json is None or args.figure or args.policy or args.n_bits or args.group_size:
        raise KvminiError("--sweep writes JSON lines to the file of --json, which it needs; it takes no --figure, "
                          "--policy, --n-bits or --group-size")
    check_writable(args.json)
    run, source = prepare(args, EXPERIMENTS["frontier"].tokens)
    del source["n_bits"], source["group_size"]
    print(f"{sweep(run, source, args.json)} combinations in {args.json}")


def calibration(args: argparse.Namespace) -> None:
    """What a calibration says, and with --save the calibration itself."""
    if args.save:
        check_writable(args.save, (".safetensors",))
    check_outputs(args)
    run, source = prepare(args, EXPERIMENTS["calibration"].tokens)
    show(args, source, title_of(source), EXPERIMENTS["calibration"].measure(run))
    if args.save:
        write_calibration(args.save, run.calibration)


def memory(args: argparse.Namespace) -> None:
    """Bytes from a config alone; no model is loaded."""
    shape = SHAPES.get(args.config) or shape_of_config(args.config)
    group_size = args.group_size or gcd(32, shape.head_dim)
    for name in args.policy:
        if policies.needs_calibration(name):
            raise KvminiError(f"memory needs no model, but {name!r} is calibrated on one: give one that is not")
    found = {name: policies.get(name, group_size=args.group_size) for name in args.policy}
    check_outputs(args)
    source = {"config": shape.name, "budget_gib": args.budget, "weight_bits": args.weight_bits, "batch": args.batch,
              "group_size": group_size}
    result = of_memory(shape, found, int(args.budget * GIB), args.batch, args.weight_bits, group_size)
    title = (f"{shape.name}, {args.weight_bits:g}-bit weights, batch {args.batch}, {args.budget:g} GiB, "
             f"groups of {group_size}")
    show(args, source, title, result)


def errors(args: argparse.Namespace) -> None:
    """The model's tensors, or with --tensors anybody's: queries, keys and values of one layer."""
    if args.tensors is None:
        if args.rope_base is not None:
            raise KvminiError("--rope-base belongs to --tensors: the model has its own")
        return experiment(args)
    if args.model or args.text or args.tokens:
        raise KvminiError("--tensors brings its own data: give no --model, --text or --tokens with it")
    check_outputs(args)
    q, k, v = read_tensors(args.tensors)
    n_bits, group_size = args.n_bits or 2, args.group_size or 32
    rope = None if args.rope_base is None else Rope(q.shape[-1], args.rope_base)
    run = Run(None, None, None, n_bits, group_size, args.seed)
    source = {"tensors": args.tensors.name, "tokens": q.shape[-2], "n_bits": n_bits, "group_size": group_size}
    title = f"{args.tensors.name}, {q.shape[-2]} tokens, {n_bits} bits, groups of {group_size}"
    show(args, source, title, heads.tensors(run, q, k, v, rope))


def claims(args: argparse.Namespace) -> None:
    """Every claim, or those asked for; with --resume, from where the JSON file stopped."""
    asked = [claim for claim in CLAIMS if not args.only or claim.number in args.only]
    if args.resume and not args.json:
        raise KvminiError("--resume goes on from the file that --json names: give one")
    check_outputs(args)
    run, source = prepare(args, 1024)
    content = {"command": "claims", **source, "fingerprint": fingerprint(run), "rows": [], "results": {}}
    if args.resume and args.json.exists():
        content["results"] = kept(read_json(args.json), content, args.json)
    results = content["results"]
    names = list(dict.fromkeys(claim.experiment for claim in asked if claim.experiment))
    tokens = {name: args.tokens or EXPERIMENTS[name].tokens for name in names}  # by default each takes its own
    with tqdm(names, disable=True if args.quiet else None, leave=False) as bar:
        for name in bar:
            bar.set_description(name)
            if name not in results:
                shorter = replace(run, ids=run.ids[:, :tokens[name]])
                results[name] = json.loads(json.dumps(EXPERIMENTS[name].measure(shorter)))
                if args.json:
                    write_json(args.json, content)  # row by row, so that --resume can go on
            if args.figure:
                title = title_of(source | {"tokens": tokens[name]})
                write_figures(args.figure, EXPERIMENTS[name], results[name], title, f"-{name}")
    for claim in asked:
        fewer = tokens.get(claim.experiment) if tokens.get(claim.experiment) != source["tokens"] else None
        content["rows"].append(claim.row(results.get(claim.experiment)) | {"tokens": fewer})
    print(f"{title_of(source)}\n\n{claims_text(content['rows'])}")
    if args.json:
        write_json(args.json, content)


def kept(before: dict, content: dict, path: Path) -> dict:
    """The results of an earlier run; KvminiError if it was another one, or if the file is damaged."""
    if {**before, "rows": 0, "results": 0} != {**content, "rows": 0, "results": 0}:
        raise KvminiError(f"{path} holds another run: give the same model, text and settings, or another file")
    try:
        for name, result in before["results"].items():
            EXPERIMENTS[name].text(result)
        return before["results"]
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        raise KvminiError(f"{path} is damaged: its results cannot be read; delete it, or give another file") from None


def generate_text(args: argparse.Namespace) -> None:
    if args.prompt is not None and args.text:
        raise KvminiError("give --prompt or --text, not both")
    names = args.policy or ["exact"]
    check_policies(args, names)
    prompt = read_text(args.text) if args.text else PROMPT if args.prompt is None else args.prompt
    if not prompt:
        raise KvminiError("the prompt is empty: give at least one character")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise KvminiError("the prompt is not UTF-8 text")
    check_writable(args.json)
    model, tokenizer, given = load(args)
    ids = text_ids(tokenizer, prompt, args.tokens or len(tokenizer.encode(prompt)), model)
    if ids.shape[1] + args.max_new_tokens > model.config.context_length:
        raise KvminiError(f"{ids.shape[1]} prompt tokens and {args.max_new_tokens} new ones are past the model's "
                          f"context of {model.config.context_length}")
    rows, run = [], Run(model, tokenizer, ids, given_calibration=given)
    for name, policy in {name: chosen(args, name, run) for name in names}.items():
        if len(names) > 1:
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
        write_json(args.json, {"command": "generate", "model": name_of(args.model, FILE_NAME), "seed": args.seed,
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
