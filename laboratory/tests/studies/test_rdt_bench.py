"""RDT measured: what its parts cost, `bench` over one, the study of its real size (at a small one), what is accepted."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import blockcache as bc
from blockcache.engines.build import build
from blockcache.engines.loop import Loop
from blockcache.models.registry import port_of
from blockcache.report.document import Document
from blockcache.report.markdown import render
from blockcache.schedule import generation_flops
from blockcache_lab.pages.families import families_table
from blockcache_lab.pages.rdt_size import FORMAT, page
from blockcache_lab.studies.families import accepted
from blockcache_lab.studies.savings_programs import without_savings
from rdt_policies import rdt_observation, rdt_policy
from repository import GENERATED

pytestmark = pytest.mark.usefixtures("in_an_empty_directory")


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_flops_are_those_that_torch_counts():
    policy, obs = rdt_policy(), rdt_observation(1)
    port = port_of(policy)
    plain = port.encoder_flops + generation_flops(port.adapter.blocks, port.adapter.every_step, 6)
    whole = build(port, bc.Schedule.every_step(6, [block.name for block in port.adapter.blocks]), "loop")
    with torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):  # products of the fused one are not counted
        assert counted(lambda: policy.predict_action(obs)) == plain
        for program in without_savings(port, whole.program).values():
            loop = Loop(program, whole.plan, whole.sampler)
            said = program.once + generation_flops(program.blocks, program.every_step, 6)
            assert counted(lambda loop=loop: loop(policy.check(obs), policy.draw_noise(1))) == said


def test_bench_takes_an_rdt(blockcache, monkeypatch):
    def compile_nothing(model):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch.compile", compile_nothing)
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.05))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    bc.save_policy(rdt_policy(), "rdt")
    blockcache("bench", "rdt", "--repeats", 2, "--threads", 1, "--json", "b.json")
    result = json.loads(Path("b.json").read_text())
    assert result["shape"]["family"] == "rdt"
    assert list(result["unavailable"]) == ["eager + torch.compile"]
    gaps = {row["name"]: row["max_difference"] for row in result["rows"]}
    savings = [name for name in gaps if name.startswith("savings: ")]
    assert savings[:2] == [
        "savings: keys and values projected at every use",
        "savings: + keys and values projected once",
    ]
    exact = [name for name in gaps if name.startswith("full precision")]
    assert len(exact) == 3
    assert max(gaps[name] for name in (*savings, *exact)) < 1e-5


SMALL = ["--blocks", 2, "--width", 16, "--heads", 2, "--language-tokens", 3, "--image-tokens", 40]


def test_the_study_of_its_size(blockcache):
    out = blockcache("paper", "rdt-size", *SMALL, "--steps", 2, "--steps", 3, "--repeats", 2, "-o", ".")
    found = FORMAT.load("rdt-size.json")
    assert found["rows"][0]["command"].endswith("--image-tokens 40 --steps 2 --steps 3 --repeats 2")
    assert [(row["steps"], row["engine"]) for row in found["rows"]] == [
        (steps, engine) for steps in (2, 3) for engine in ("plain", "patched", "loop")
    ]
    differences = {row["engine"]: row["max_difference"] for row in found["rows"]}
    assert differences["patched"] == 0.0  # to the bit
    assert differences["loop"] < 1e-5
    assert found["rows"][0]["gflop"] > found["rows"][1]["gflop"] == found["rows"][2]["gflop"]
    assert found["peak_mb"] > found["weights_mb"] > 0
    shown = Path("rdt-size.md").read_text()
    assert "| 3 | loop |" in shown
    assert "x plain" in out
    Path("rdt-size.md").unlink()
    blockcache("paper", "rdt-size", "--render-only", "-o", ".")
    assert Path("rdt-size.md").read_text() == shown
    blockcache("paper", "rdt-size", *SMALL, "--steps", 1, "--engine", "loop", "--repeats", 1, "-o", ".")
    more = FORMAT.load("rdt-size.json")
    assert [row["steps"] for row in more["rows"]] == [1, 1, 2, 2, 2, 3, 3, 3]  # of the same sizes, so the others stay
    assert more["rows"][2:] == found["rows"]
    assert [row["repeats"] for row in more["rows"]] == [1] * 2 + [2] * 6
    assert Path("rdt-size.md").read_text().count("`blockcache paper rdt-size") == 2


def test_the_page_in_the_docs_is_of_its_figures():
    assert render(page(FORMAT.load(GENERATED / "rdt-size.json"))) == (GENERATED / "rdt-size.md").read_text()


def test_the_table_of_families_is_the_one_in_the_docs(blockcache):
    blockcache("paper", "families", "-o", "table.md")
    made = Path("table.md").read_text()
    assert made.count("\n") > 6
    assert made == (GENERATED / "families.md").read_text()


def test_a_policy_that_an_engine_cannot_run_says_why():
    from blockcache.models.rdt.policy import RDTPolicy

    def half():
        policy = rdt_policy()
        assert isinstance(policy, RDTPolicy)
        return policy.to(torch.bfloat16)

    (row,) = accepted({"half": half})
    assert row.engines == {
        "patched": "yes",
        "loop": "no: weights in torch.bfloat16 (only float32 and float64)",
        "onnx": 'no: the onnx engine runs float32 on the CPU, got torch.bfloat16 on cpu; use engine="loop"',
    }
    shown = render(Document("x", (families_table([vars(row)]),)))
    assert "| half | rdt | SA, CA, FFN | yes |" in shown
