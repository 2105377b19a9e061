"""Why the KV cache hurts: shares, what fits, and the papers' figures computed. Next file: `experiments/groups.py`."""

from kvmini.experiments.run import Result, Row
from kvmini.memory import (
    BANDWIDTH,
    GIB,
    Footprint,
    Policy,
    cache_nbytes,
    decode_step_seconds,
    gain_ceiling,
    largest_batch,
    longest_context,
)
from kvmini.policies import get
from kvmini.shapes import SHAPES, Shape

CARD = 80 * GIB  # what a card sold as "80 GB" holds (81,920 MiB)
USUAL = ("exact", "kivi-2", "kivi-4")
CONTEXTS = (512, 2048, 8192, 32768, 131072, 2**20)


def memory(shape: Shape = SHAPES["LLaMA-7B"], chosen: dict[str, Policy] | None = None,
           budget: int = CARD, batch: int = 1, weight_bits: float = 16, group_size: int = 32) -> Result:
    """Shares against context ("rows"), what fits `budget` bytes ("fits"), and the papers' figures ("article")."""
    rows, fits, weights = [], [], shape.weight_nbytes(weight_bits)
    fit = weights <= budget or None  # what does not fit has no largest batch
    for name, policy in ({name: get(name, group_size=group_size) for name in USUAL} | (chosen or {})).items():
        batches = {f"largest_batch_{n}": fit and largest_batch(shape, policy, budget, n, weight_bits) for n in CONTEXTS}
        longest = fit and longest_context(shape, policy, budget, batch, weight_bits)
        fits.append({"model": shape.name, "name": name, "budget_bytes": budget, "batch": batch,
                     "weight_bits": weight_bits, "longest_context": longest, **batches,
                     "outgrows_weights_at": 1 + longest_context(shape, policy, 2 * weights, batch, weight_bits)})
        for n in CONTEXTS:
            cache, step = cache_nbytes(shape, policy, n, batch), range(n, n + 1)
            exact, own = (fitting[f"largest_batch_{n}"] for fitting in (fits[0], fits[-1]))
            rows.append({
                "model": shape.name, "name": name, "context": n, "batch": batch,
                "weight_bytes": weights, "weight_share": 100 * weights / (weights + cache),
                "cache_bytes": cache, "cache_share": 100 * cache / (weights + cache),
                "step_ms_at_least": 1000 * decode_step_seconds(shape, policy, n, batch, BANDWIDTH, weight_bits),
                "gain_at_most": gain_ceiling(shape, policy, step, batch, batch, weight_bits),
                "gain_at_most_own_batch": None if not exact or not own
                else gain_ceiling(shape, policy, step, exact, own, weight_bits)})
    return {"rows": sorted(rows, key=lambda row: row["context"]), "fits": fits, "article": article()}


def article() -> list[Row]:
    """What the article and its papers say, and the same computed; ours agrees if it rounds to it, or reaches it."""
    rows = []

    def add(claim: str, name: str, says: float | None, measured: float, unit: str, reach: bool = False) -> None:
        agrees = says and (measured >= says if reach else round(measured, len(str(says).partition(".")[2])) == says)
        rows.append({"claim": claim, "name": name, "says": says, "measured": measured, "unit": unit, "agrees": agrees})

    llama, llama2, opt = SHAPES["LLaMA-7B"], SHAPES["Llama-2-7B"], SHAPES["OPT-175B"]
    for n, said in ((512, (98, 2)), (2**17, (16, 84))):
        parts = {"weights": llama.weight_nbytes(), "cache": cache_nbytes(llama, None, n)}
        for (part, nbytes), says in zip(parts.items(), said, strict=True):
            add("LLaMA-7B, shares of memory", f"{part} at {n:,} tokens", says, 100 * nbytes / sum(parts.values()), "%")
    for tokens, which in ((512 + 32, "prompt 512 and output 32"), (512, "prompt 512 alone")):
        cache = cache_nbytes(opt, None, tokens, batch=512)
        for unit, size in (("TiB", 2**40), ("TB", 10**12)):
            claim = f"OPT-175B, batch 512, {which}, in {unit}"
            add(claim, "cache", 1.2, cache / size, unit)
            add(claim, "cache over weights", 3.8, cache / opt.weight_nbytes(), "times")
    last = 161 + 338  # tokens of prompt and of output
    for window in (128, 32):
        kivi = get(f"k=per_channel:2:32,k-flush={window},v=per_token:2:32,v-residual={window}")
        exact, own = (largest_batch(llama2, policy, CARD, last) for policy in (None, kivi))
        before, after = (llama2.weight_nbytes() + exact * Footprint(llama2, policy).peak(last)
                         for policy in (None, kivi))
        claim = f"KIVI-2 with windows of {window}, Llama-2-7B, 161 + 338 tokens, 80 GiB"
        add(claim, f"largest batch, {own:,} against {exact:,}:", 4, own / exact, "times", reach=True)
        add(claim, f"peak memory at batch {exact:,}", 2.6, before / after, "times less", reach=True)
        for size, says, said in ((own, 3.47, ", 2.35 to 3.47 reported"), (exact, None, "")):
            add(claim, f"throughput at batch {size:,} against {exact:,}{said}: at most", says,
                gain_ceiling(llama2, kivi, range(162, last + 1), exact, size), "times", reach=True)
    for n, unit, size in ((2**20, "GiB", GIB), (10**6, "GB", 10**9)):
        add(f"LLaMA-7B, {n:,} tokens at pure 2 bits, in {unit}", "cache", 64, n * llama.token_nbytes(2) / size, unit)
    for name, policy, width in (("2 bits", None, 2), ("KVQuant's 2.33", None, 2.33), ("kivi-2", get("kivi-2"), 16)):
        for bits in (16, 4):
            add(f"LLaMA-7B, a million tokens in 80 GiB, {name}", f"beside weights of {bits} bits", 2**20,
                longest_context(llama, policy, CARD, 1, bits, width), "tokens", reach=True)
    return rows


def _summary(rows: list[Row]) -> str:
    """The figures that the article quotes, computed, in one sentence."""
    by_claim: dict[str, list[Row]] = {}
    for row in rows:
        by_claim.setdefault(row["claim"], []).append(row)
    weights = [row["measured"] for row in rows if row["name"].startswith("weights at")]
    cache = [row["measured"] for row in rows if row["name"] == "cache"]
    kivi = [[row["measured"] for row in of_claim[:3]] for claim, of_claim in by_claim.items() if claim[:4] == "KIVI"]
    million = [row["measured"] for row in rows if row["unit"] == "tokens"]
    windows = []
    for (batch, less, speed), n in zip(kivi, (128, 32), strict=True):
        windows.append(f"{batch:.1f} times the batch, {less:.1f} times less memory and at most {speed:.1f} times the "
                       f"throughput with windows of {n}")
    return (f"LLaMA-7B: weights {weights[0]:.0f}% at 512 tokens, {weights[1]:.0f}% at 128K. OPT-175B: {cache[0]:.1f} "
            f"TiB with 32 tokens of output, {cache[3]:.1f} TB without. KIVI: {'; '.join(windows)}. In 80 GiB beside "
            f"4-bit weights, {million[3]:,} tokens of LLaMA-7B at KVQuant's 2.33 bits, {million[5]:,} at kivi-2's 3.")


def findings(result: Result) -> list[str]:
    """What the rows say, in sentences; every figure and every verdict is computed from them."""
    first, claims = result["fits"][0], {}
    outgrows = ", ".join(f"{row['outgrows_weights_at']:,} tokens ({row['name']})" for row in result["fits"])
    found = [_summary(result["article"]),
             f"{first['model']}, batch {first['batch']}: the cache outgrows the weights at {outgrows}."]
    for row in result["article"]:
        claims.setdefault(row["claim"], []).append(row)
    for claim, rows in claims.items():
        figures = [f"{row['name']} {round(row['measured'], 2):,} {row['unit']}"
                   + (f" (said: {row['says']:,})" if row["says"] else "") for row in rows]
        judged = [row["agrees"] for row in rows if row["agrees"] is not None]
        found.append(f"{claim}: {'; '.join(figures)}. {sum(judged)} of {len(judged)} come out.")
    return found
