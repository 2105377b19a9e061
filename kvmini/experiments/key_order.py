"""RoPE complicates keys: store them before the rotation, or after? Next file: `experiments/windows.py`."""

from kvmini.experiments.run import AXES, Result, Run, errors_and_perplexity


def rope(run: Run) -> Result:
    """Both key axes, stored before RoPE and after, streamed; values per token; errors in the tensor and in the scores.

    Returns:
        rows: one per axis and order; added: what RoPE adds to each error of each axis, in percent.
    """
    policies = {f"K {axis}, {'pre' if pre else 'post'}-RoPE": run.policy(
        axis, "per_token", "prefill=streamed" + (",pre-rope" if pre else "")) for axis in AXES for pre in (True, False)}
    rows = errors_and_perplexity(run, policies)
    added = []
    for axis, (pre, post) in zip(AXES, (rows[:2], rows[2:]), strict=True):
        added.append({"name": f"K {axis}", **{name: 100 * (post[name] / pre[name] - 1) if pre[name] else None
                                              for name in ("key_error", "score_error", "perplexity")}})
    return {"rows": rows, "added": added}


def findings(result: Result) -> list[str]:
    token, channel = result["added"]
    if None in channel.values():
        return ["On so short a text 0 queries see a key that was quantized per channel."]
    return [f"RoPE changes the stored key error by {channel['key_error']:+.0f}% and the score error by "
            f"{channel['score_error']:+.0f}% per channel, {token['key_error']:+.0f}% and "
            f"{token['score_error']:+.0f}% per token.",
            f"Perplexity with keys stored after RoPE instead of before: {channel['perplexity']:+.0f}% per channel, "
            f"{token['perplexity']:+.0f}% per token."]
