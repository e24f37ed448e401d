"""RDT measured: what its parts cost, `bench` over one, and what an engine refuses."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import blockcache as bc
from blockcache.engines.build import build
from blockcache.engines.loop import Loop
from blockcache.errors import EngineError
from blockcache.models.registry import port_of
from blockcache.schedule import generation_flops
from blockcache_lab.studies.savings_programs import without_savings
from rdt_policies import rdt_observation, rdt_policy

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


def test_a_policy_that_an_engine_cannot_run_says_why():
    half = rdt_policy().to(torch.bfloat16)
    bc.accelerate(half, None, engine="patched").disable()
    for engine, why in {
        "loop": "weights in torch.bfloat16 (only float32 and float64)",
        "onnx": 'the onnx engine runs float32 on the CPU, got torch.bfloat16 on cpu; use engine="loop"',
    }.items():
        with pytest.raises(EngineError) as refused:
            bc.accelerate(half, None, engine=engine)
        assert str(refused.value.__cause__ or refused.value) == why
