"""The headline on the real model, and the sentences under it."""

import pytest
import torch

from kvmini import policies
from kvmini.catalogue import EXPERIMENTS
from kvmini.evaluate import perplexity, recall, recall_items
from kvmini.experiments.ablation import ablation_policies, findings
from kvmini.experiments.run import AXIS_CHOICES, Run
from kvmini.metrics import errors
from kvmini.plots.ablation import ablation as figure
from kvmini.tables import table
from kvmini.texts import TEXTS, prose, text_ids

RUN = Run(None, None, None)  # only its bits and groups are looked at


def test_the_prose_is_long_plain_and_of_three_different_texts():
    texts = [prose(name) for name in TEXTS]
    assert 11_000 < sum(len(text.split()) for text in texts) < 15_000
    assert all(text.isascii() for text in texts)
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs)


def test_the_rows_build_on_each_other():
    chosen = ablation_policies(RUN)
    assert list(chosen) == ["exact", *(f"K {key} V {value}" for key, value in AXIS_CHOICES),
                            "the right axes, streamed", "+ residual 128",
                            "+ sinks 4", "+ pre-RoPE"]
    right = "k=per_channel:2:32,v=per_token:2:32"
    assert chosen["K per_channel V per_token"] == policies.get(f"{right},prefill=all")
    assert chosen["+ residual 128"] == policies.get(f"{right},prefill=streamed,residual=128")
    assert chosen["+ pre-RoPE"] == policies.get(f"{right},prefill=streamed,residual=128,sinks=4,pre-rope")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["search", "calibration"])
def test_the_axes_order_the_errors_and_the_perplexity(loaded32, text):
    model, tokenizer = loaded32
    ids = text_ids(tokenizer, prose(text), 512, model)
    chosen = ablation_policies(RUN)
    four = [f"K {key} V {value}" for key, value in AXIS_CHOICES]
    tt, _, ct, cc = measured = errors(model, ids, [chosen[name] for name in four])
    assert ct["key_error"] < tt["key_error"] and ct["score_error"] < tt["score_error"]
    assert cc["value_error"] < ct["value_error"]  # the stored tensor prefers per_channel values ...
    assert ct["output_error"] < cc["output_error"]  # ... and attention, which consumes them, does not
    assert measured[0]["value_error"] == measured[2]["value_error"]  # a side is judged alone
    found = {name: perplexity(model, ids, model.new_cache(chosen[name])) for name in ("exact", *four, "+ residual 128")}
    tt, tc, ct, cc = (found[name] for name in four)
    assert found["exact"] < found["+ residual 128"] < ct < cc < tt < tc


@pytest.mark.slow
def test_keeping_one_sink_exact_closes_the_gap_of_the_value_axes(loaded32):
    """On this model the value axis is mostly the first token: much attention, a short value vector."""
    model, tokenizer = loaded32
    ids = text_ids(tokenizer, prose("search"), 512, model)
    gap = {}
    for sinks in (0, 1):
        sides = [policies.get(f"k=per_channel:2:32,v={axis}:2:32,sinks={sinks},prefill=all")
                 for axis in ("per_token", "per_channel")]
        token, channel = (row["output_error"] for row in errors(model, ids, sides))
        gap[sinks] = channel - token
    assert gap[0] > 15 and abs(gap[1]) < gap[0] / 4


@pytest.mark.slow
def test_recall_needs_the_right_axes_and_gains_from_windows(loaded32):
    model, tokenizer = loaded32
    prompts, answers = recall_items(tokenizer, prose("search"), n_items=20)
    names = ["exact", "t-c-2", "c-t-2", "k=per_channel:4:32,v=per_token:4:32,residual=128,sinks=4"]
    exact, wrong, right, windowed = (share.mean() for share in
                                     recall(model, prompts, answers, [policies.get(name) for name in names]))
    assert wrong < right < exact and right < windowed
    assert exact > 0.5


def rows(value_axis_matters=False, right=20.0):
    """Rows as `ablation` returns them, with figures made up for the sentences."""
    made = []
    for name, policy in ablation_policies(RUN).items():
        wrong_key, wrong_value = "K per_token" in name, "V per_channel" in name
        cost = (3.0 if wrong_key else 1.0) * ((5.0 if value_axis_matters else 2.0) if wrong_value else 1.0)
        made.append({"name": name, "prefill": policy and policy.prefill, "body_bits_per_element": policy and 3.0,
                     "bits_per_element": 3.0, "bits_per_element_16bit_windows": 3.0, "recall": 0.5,
                     "recall_standard_error": 0.1, "perplexity": right * cost,
                     "key_error": policy and 10.0, "score_error": policy and 20.0,
                     "value_error": policy and (30.0 if wrong_value else 40.0),
                     "output_error": policy and (60.0 if wrong_value else 25.0)})
    set_to = {"exact": 10.0, "the right axes, streamed": right, "+ residual 128": 200**0.5, "+ sinks 4": 11.0,
              "+ pre-RoPE": 10.0}
    for row in made:
        row["perplexity"] = set_to.get(row["name"], row["perplexity"])
    return made


def test_the_sentences_follow_the_figures():
    said = " ".join(findings({"rows": rows()}))
    assert "20.0 (K per_channel V per_token) to 120.0 (K per_token V per_channel), 6.0 times" in said
    assert "stored error prefers per_channel" in said and "consumer prefers per_token" in said
    assert "wrong way" in said and "+ residual 128 50%" in said and "here the key axis matters more" in said
    assert "here the value axis matters more" in " ".join(findings({"rows": rows(value_axis_matters=True)}))
    assert "nothing to give back" in " ".join(findings({"rows": rows(right=10.0)}))
    agreeing = rows()
    for row in agreeing:
        row["output_error"] = row["value_error"]
    assert "wrong way" not in " ".join(findings({"rows": agreeing}))
    for row in agreeing:
        row["value_error"] = row["output_error"] = 0.0
    assert "so short a text" not in " ".join(findings({"rows": agreeing}))
    agreeing[-1]["body_bits_per_element"] = None
    assert "so short a text" in " ".join(findings({"rows": agreeing}))
    for row in agreeing:  # no verdict where one of the two has none
        row["output_error"] = 50.0 if "V per_channel" in row["name"] else 40.0
    said = " ".join(findings({"rows": agreeing}))
    assert "stored error prefers neither axis" in said and "wrong way" not in said
    for row in agreeing:
        row["output_error"] = 0.0
    assert "prefers neither axis" in " ".join(findings({"rows": agreeing}))


def test_table_and_figure_hold_every_row():
    text = table(rows(), EXPERIMENTS["ablate"].columns["rows"])
    assert all(row["name"] in text for row in rows())
    labels = [label.get_text() for label in figure({"rows": rows()}, "title").axes[0].get_yticklabels()]
    assert len(labels) == 8 and labels[0] == "K per token V per channel"


def test_text_ids_takes_the_first_tokens():
    class Model:
        class config:
            context_length = 100

    class Letters:
        def encode(self, text):
            return [ord(c) for c in text]
    assert text_ids(Letters(), "abcdef", 4, Model).tolist() == [[97, 98, 99, 100]]
    assert text_ids(Letters(), "abcdef", 4, Model).dtype == torch.long
