"""The page of suite rdt: its sentences and figures follow from the records, which are made by hand here."""

import json
import re

import numpy as np
import pytest

from blockcache.compare.methods import parse_method
from blockcache.compare.reuse_parts import Solved
from blockcache.errors import FileError
from blockcache.measure.action_error import ActionError
from blockcache.report.markdown import render
from blockcache.results.rollouts import MethodRun, Record, Results
from blockcache_lab.pages.pictures import points
from blockcache_lab.pages.rdt import as_printed, page
from blockcache_lab.pages.rdt_findings import RdtSuite, summary
from blockcache_lab.studies.suites import RDT, TIMINGS, suite_by_name, with_tuned
from made_suites import rows
from repository import ROOT

PUBLISHED = ROOT / "docs/generated/rdt.md"
STEPS, OUTSIDE, UNIT = 20, 0.1, 10**9
OWN = {"type": "dpmsolver++", "num_train_timesteps": 1000, "num_inference_steps": STEPS, "beta_schedule": "linear"}
FOUND = {"largest_difference": 2e-6}


def cost(name):
    """In steps' worth; a tenth of a step is outside the blocks."""
    method = parse_method(name)
    if isinstance(method.reuse, Solved):
        return OUTSIDE * STEPS + method.reuse.updates
    if method.reuse is not None:
        return method.reuse.budget * 100
    return STEPS * (1 + OUTSIDE) if method.sampler is None else getattr(method.sampler, "steps", 2) * (1 + OUTSIDE)


def equal(kind, method):
    worth = cost(method.name)
    return parse_method(f"action:budget={worth / 100:g}" if kind == "action" else f"{kind}-{round(worth)}")


def make(directory, task, lost, succeeded=100, rollouts=100, timed=True, exact=FOUND, tuned=None):
    """Full precision succeeds in the first `succeeded` episodes; a method fails in `lost(name)` of these, the first ones."""
    suite = suite_by_name(RDT, equal)
    suite = suite if tuned is None else with_tuned(suite, tuned)
    names = list(dict.fromkeys(("full", *suite.methods)))
    records = []
    for name in names:
        failing = 0 if name == "full" else lost(name)
        for place in range(rollouts):
            success = failing <= place < succeeded
            records.append(Record(name, 150_000 + place, float(success), success, 50, None, 0.1, 0.1))
    blocks, widths = ["layers.0.SA", "layers.0.CA", "layers.0.FFN"], {"width": 64, "img_tokens": 12}
    policy = {"family": "rdt", "blocks": blocks, "widths": widths, "steps": STEPS, "sampler": OWN, "weights": task * 8}
    setting = {
        "first_seed": 150_000,
        "rollouts": rollouts,
        "group": 10,
        "open_loop_observations": 32,
        "calibration": {"generations": 16, "seed": 0, "observations": "x"},
        "suite": suite.describe(),
    }
    if exact is not None:  # in the engine everything outside the blocks is free, so that BAC is cheaper there
        left = {name: round((cost(name) - OUTSIDE * steps(name)) * UNIT / 2) for name in names}
        setting["exact"] = {**exact, "flops": left}
    Results(
        task={"name": task, "success": "the simulator's flag", "max_steps": 200},
        policy={"source": f"maniskill-{task}", "fingerprint": policy},
        setting=setting,
        noise_floor=ActionError(0.09, 0.2),
        methods=tuple(method_run(name) for name in names),
        records=tuple(records),
    ).save(directory / "rdt.json")
    if timed:
        seconds = {name: [cost(name) * 1e-3] * 3 for name in names} | {"plain policy": [0.088] * 3}
        header = {"format": "blockcache.timings", "version": 1, "made_by": "blockcache", "setting": "seconds per chunk"}
        methods = {name: {"seconds": values} for name, values in seconds.items()}
        machine = {"processor": "abacus", "cores": 2}
        text = json.dumps({**header, "policy": policy, "machine": machine, "methods": methods})
        (directory / TIMINGS).write_text(text)
    return RdtSuite.load(str(directory))


def steps(name):
    sampler = parse_method(name).sampler
    return STEPS if sampler is None else getattr(sampler, "steps", 2)


def method_run(name):
    own = steps(name) == STEPS
    sampler = OWN if own else {**OWN, "num_inference_steps": steps(name)}
    reuse = None if name == "full" else {"updates": {"layers.0.SA": [0, len(name)]}}
    return MethodRun(name, "onnx", sampler, reuse, own, round(cost(name) * UNIT), 0.5, ActionError(0.1, 0.2))


def push(name):
    """Nothing is lost, but by one and two updates."""
    return {"bac:S=1,n=3": 30, "bac:S=2,n=3": 2}.get(name, 0)


def pick(name):
    """Reuse loses much, and fewer steps nothing."""
    return 0 if name.startswith("dpmsolver") else 40


@pytest.fixture
def two(tmp_path):
    for name in ("push", "pick"):
        (tmp_path / name).mkdir()
    return [make(tmp_path / "push", "push", push), make(tmp_path / "pick", "pick", pick, succeeded=60)]


def test_the_sentences_follow_from_the_records(two):
    said = summary(two)
    assert said[0].startswith("**The paper**: lossless at S = 1, negligible drop at S = 2, as printed")
    assert "up to 3.55x" in said[0]
    assert said[1:5] == [
        "**BAC S = 1**: worse on push (by 0.30), pick (by 0.40).",
        "**BAC S = 2**: worse on pick (by 0.40); not shown either way on push (-0.02).",
        "**BAC S = 3**: lossless on push; worse on pick (by 0.40).",
        "**BAC S = 5**: lossless on push; worse on pick (by 0.40).",
    ]
    everywhere = said[5].removeprefix("**Lossless on every task**, of the methods that all of them met: ")
    assert everywhere == ", ".join(f"DPM-Solver++-{n}" for n in (10, 5, 3, 2, 1, 4, 7)) + "."
    assert said[6] == (
        "**The cheapest lossless method**: on push DPM-Solver++-1 (1/20.0 of the FLOPs, 20.0x over full precision in the "
        "same engine); on pick DPM-Solver++-1 (1/20.0 of the FLOPs, 20.0x over full precision in the same engine)."
    )
    # S = 1 and all of pick lose against the solver, S = 2, 3 and 5 of push are not told apart from it
    assert said[7:10] == [
        "**At equal FLOPs** BAC against DPM-Solver++-N: wins 0, loses 5, not told apart 3.",
        "**At equal FLOPs** BAC against Action costs: wins 0, loses 0, not told apart 6.",
        "**At no more FLOPs in the engine** BAC against DPM-Solver++-N: wins 0, loses 5, not told apart 3.",
    ]
    assert said[10] == (
        "**The engine alone**, every block computed and nothing approximated: on push 4.0x the speed of the plain policy "
        "with 45% of its FLOPs, actions the same within 1e-05; on pick 4.0x the speed of the plain policy with 45% of its "
        "FLOPs, actions the same within 1e-05. Speed beyond the FLOPs that are saved is the engine's own: it runs no Python."
    )
    assert len(said) == 11


def test_the_rival_in_the_engine_costs_no_more_there(two):
    flops = two[0].exact.flops
    assert two[0].cheaper_pairs == [(f"bac:S={n},n=3", f"dpmsolver++-{n}") for n in (1, 2, 3, 5)]
    assert all(flops[rival] <= flops[bac] for bac, rival in two[0].cheaper_pairs)
    assert [rival for _, rival in two[0].equal_pairs[:4]] == [f"dpmsolver++-{n}" for n in (3, 4, 5, 7)]


def test_other_data_say_other_things(tmp_path):
    found = make(
        tmp_path,
        "peg",
        lambda name: 0,
        succeeded=5,
        timed=False,
        exact={"largest_difference": 2e-3},
        tuned="there",
    )
    said = summary([found])
    assert said[1] == "**BAC S = 1**: lossless on peg."
    assert "tuned" in said[5]
    assert said[6] == "**The cheapest lossless method**: on peg DPM-Solver++-1 (1/20.0 of the FLOPs)."
    assert "on peg 45% of its FLOPs, actions **not the same** within 1e-05" in said[-2]
    assert said[-1] == "Full precision itself seldom succeeds on peg: little can be lost there."
    text = render(page([found]))
    assert "-o " + str(tmp_path) + " --rollouts 100 --tuned there`" in text
    assert "paper timing" not in text


def test_what_was_tuned_for_each_policy_is_one_row(tmp_path):
    lost, found = {"tuned:there": 40}, []
    for task, where in (("push", "here"), ("pick", "there")):
        (tmp_path / task).mkdir()
        found.append(make(tmp_path / task, task, lambda name: lost.get(name, 0), tuned=where))
    (row,) = [line for line in render(page(found)).splitlines() if line.startswith("| tuned |")]
    assert re.match(r"\| tuned \| \*\*\+0\.00 .*\| -0\.40 ", row)
    assert "tuned" not in summary(found)[5]  # not lossless on every task


def test_nothing_lossless_and_nothing_known_of_the_engine(tmp_path):
    found = make(tmp_path, "peg", lambda name: 50, exact=None)
    said = summary([found])
    assert said[5].endswith("met: none.")
    assert said[6] == "**The cheapest lossless method**: on peg none."
    assert not any("engine" in line or "Exact" in line for line in said)
    assert "The engine alone" not in render(page([found]))


def test_the_tables_have_the_figures_of_the_records(two):
    text = render(page(two))
    push_table = text.split("## push\n")[1].split("## pick\n")[0]
    (row,) = [row for row in rows(push_table, "BAC S=1 n=3 |") if len(row) == 11]
    assert row[1] == "100"
    assert row[2].startswith("0.70 [0.6")
    assert row[3] == "0.60 ± 0.53"  # of the first 75 the first 30 fail: 0, 20 and 25 of 25
    assert row[4].startswith("-0.300 [")
    assert row[5:] == ["no", "3.000", "1/7.3", "0.500", "3.0", "7.3x"]
    exact = push_table.split("### The engine alone")[1].split("###")[0]
    assert rows(exact, "plain policy")[0][1:3] == ["22.000", "88.0"]
    assert rows(exact, "full precision")[0][1:] == ["10.000", "22.0", "4.0x", "2.0e-06"]
    assert "The score is success." in push_table
    first, *_ = rows(text, "BAC S=3 n=3 |")
    assert first[1].startswith("**+0.00 [")  # lossless on push, in the table of all tasks
    assert first[2].startswith("-0.40 [")
    assert "a method that loses 1 pair and wins none is not shown to be" in text
    assert "3 blocks of width 64, 12 image tokens. What" in text


def test_three_trials_of_the_first_75():
    def records(successes, failed=()):
        return {
            seed: Record(
                "full", seed, None if seed in failed else 1.0, None if seed in failed else success, 5,
                "broke" if seed in failed else None, None, None,
            )
            for seed, success in enumerate(successes)
        }  # fmt: skip

    trials = [True] * 25 + [False] * 25 + [True] * 10 + [False] * 15
    assert as_printed(records([*trials, *[True] * 25])) == pytest.approx((1.4 / 3, np.std([1, 0, 0.4], ddof=1)))
    assert as_printed(records(trials[:-1])) is None
    assert as_printed(records(trials, failed={3})) is None


def test_the_picture_has_every_kind_of_method(tmp_path):
    shown = {
        (point.method.family, point.method.facts.setting)
        for point in points(make(tmp_path, "push", push, tuned="there"))
    }
    assert {("BAC", "S=1"), ("Uniform", "S=5"), ("DPM-Solver++-N", "N=1"), ("Action costs", "0.05")} <= shown
    assert ("tuned", "") in shown


def test_a_page_needs_a_suite(tmp_path):
    with pytest.raises(FileError, match="run 'blockcache paper suite rdt POLICY"):
        RdtSuite.load(tmp_path)


def test_the_published_page_is_what_the_code_makes_of_the_published_records(monkeypatch):
    text = PUBLISHED.read_text()
    (directories,) = re.findall(r"`blockcache paper rdt (.*) -o docs/generated`", text)
    monkeypatch.chdir(ROOT)  # the page names its directories as they were given
    assert render(page([RdtSuite.load(directory) for directory in directories.split()])) == text
