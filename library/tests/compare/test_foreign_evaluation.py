"""A foreign policy object through the studies: rolled out, compared and timed like ours, in every engine."""

import json
from functools import partial

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.compare.bench import run_bench
from blockcache.compare.evaluation import prepare
from blockcache.compare.jobs import local_workers
from blockcache.compare.methods import MethodError, parse_method
from blockcache.errors import TaskError
from blockcache.models.registry import port_of
from blockcache.results.rollouts import Results
from blockcache.tasks import TaskSpec
from foreign_policy import BLOCKS, EXECUTED, OBS, SEEN, STEPS, Policy
from toy_family import FlowPolicy, claim
from toy_task import SPEC, Toy

SPEC_OF_FOUR = TaskSpec(**vars(SPEC) | {"obs_dim": OBS})
METHODS = ("uniform:S=2", "ddim-3", "sde-dpmsolver++-3", "ddim-3+bac:S=2,n=1", "teacache:threshold=0.5")


class ToyOfFour(Toy):
    """The toy with as many numbers as the foreign policy sees."""

    def __init__(self, **how):
        super().__init__(SPEC_OF_FOUR, **how)

    def observe(self):
        return super().observe()[:OBS]


@pytest.fixture(scope="module", autouse=True)
def exports_stay_here(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKCACHE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def observations(count=8):
    return torch.randn(count, SEEN, OBS, generator=torch.Generator().manual_seed(0))


def ready(policy, state, engine="loop", make=ToyOfFour, methods=METHODS, observed=None):
    return prepare(
        policy,
        "toy",
        [parse_method(method) for method in methods],
        observations() if observed is None else observed,
        state=state,
        source="theirs",
        rollouts=4,
        first_seed=0,
        group=2,
        engine=engine,
        generations=3,
        make=make,
        progress=False,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """One evaluation for each engine."""
    directory, results = tmp_path_factory.mktemp("foreign"), {}
    for engine in ("patched", "loop", "onnx"):
        results[engine] = ready(Policy(), directory / engine, engine).run(progress=False)
        results[engine].save(directory / f"{engine}.json")
    return directory, results


def test_every_method_runs_on_the_engine_that_was_asked_for(found):
    for engine, results in found[1].items():
        ran = {method.name: method.engine for method in results.methods}
        assert ran == {**dict.fromkeys(["full", *METHODS], engine), "teacache:threshold=0.5": "patched"}
        assert results.failed == 0
        assert results.setting["noise"] == "keyed by group and chunk"


def test_engines_agree_on_every_rollout(found):
    reference = found[1]["patched"]
    for engine in ("loop", "onnx"):
        results = found[1][engine]
        assert len(results.records) == len(reference.records) == 4 * 6
        for one, other in zip(results.records, reference.records, strict=True):
            assert (one.method, one.seed, one.success, one.steps) == (
                other.method,
                other.seed,
                other.success,
                other.steps,
            )
            assert one.score == pytest.approx(other.score, abs=1e-4)
        for one, other in zip(results.methods, reference.methods, strict=True):
            assert one.error.mean == pytest.approx(other.error.mean, abs=1e-4)
            assert (one.flops, one.reused, one.sampler) == (other.flops, other.reused, other.sampler)


def test_methods_differ_and_full_precision_does_not(found):
    full, *others = found[1]["loop"].methods
    assert full.error.mean < 1e-5
    assert all(method.error.mean > 1e-3 for method in others)
    assert all(method.flops < full.flops for method in others)
    shared = {method.name: method.shares_all_noise for method in (full, *others)}
    assert [name for name, all_noise in shared.items() if all_noise] == [
        "full",
        "uniform:S=2",
        "teacache:threshold=0.5",
    ]


def test_a_rollout_is_that_of_the_plain_policy(found):
    """By hand: both rollouts of a group, the policy's own loop, torch's generator seeded by group and chunk."""
    policy, toys = Policy(), [ToyOfFour(), ToyOfFour()]
    seen = [[toy.reset(seed)] * SEEN for seed, toy in zip((2, 3), toys, strict=True)]
    for chunk in range(-(-SPEC.max_steps // EXECUTED)):
        torch.manual_seed(int(np.random.SeedSequence((2, 3, chunk)).generate_state(1)[0]))
        actions = policy.predict_action({"obs": torch.tensor(np.array(seen))})["action"].numpy()
        for moment in range(EXECUTED):
            for place, toy in enumerate(toys):
                if not toy.done:
                    toy.step(actions[place, moment])
                    seen[place] = [*seen[place][1:], toy.observe()]
    records = found[1]["patched"].of("full")
    assert [records[2].score, records[3].score] == pytest.approx([toy.score for toy in toys], abs=1e-6)


def test_it_goes_on_where_it_stopped_and_gives_the_same_file_by_two_workers(found, tmp_path):
    directory, results = found
    with pytest.raises(KeyboardInterrupt):
        ready(Policy(), tmp_path / "state", make=partial(ToyOfFour, interrupt=2)).run(progress=False)
    finished = {path.name for path in (tmp_path / "state").iterdir()}
    assert finished
    ready(Policy(), tmp_path / "state").run(local_workers(2), progress=False).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (directory / "loop.json").read_bytes()
    assert finished < {path.name for path in (tmp_path / "state").iterdir()}
    assert Results.load(tmp_path / "again.json") == results["loop"]


def test_what_does_not_fit_is_refused(tmp_path, policy):
    with pytest.raises(TaskError, match="its observations have 4 numbers, the task's 5; was it trained for another"):
        ready(Policy(), tmp_path, make=Toy)
    with pytest.raises(TaskError, match="it takes state, words, pictures, the task gives one array"):
        ready(claim(FlowPolicy()), tmp_path)
    unknown = Policy()
    unknown.noise_scheduler = type("Theirs", (type(unknown.noise_scheduler),), {})(20)
    with pytest.raises(MethodError, match="the sampler Theirs cannot be exchanged"):
        ready(unknown, tmp_path, engine="auto", methods=("ddim-3",))


# -- other studies


def test_a_bench_times_it(monkeypatch):
    def compile_nothing(model):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch.nn.Module.compile", compile_nothing)
    monkeypatch.setattr("blockcache.measure.machine.peak_gflops.__defaults__", (64, 0.01))
    monkeypatch.setattr("blockcache.measure.latency.REST", 0.0)
    monkeypatch.setattr("blockcache.compare.bench.entry_points", lambda group: [])
    port, schedule = port_of(Policy()), bc.Schedule(STEPS, {name: [0, 2] for name in BLOCKS})
    bench = run_bench(port, schedule, observations(2), {}, threads=1, repeats=1, progress=False)
    said = json.loads(json.dumps(bench.to_dict()))
    rows = {row["name"]: row for row in said["rows"]}
    assert list(said["unavailable"]) == ["eager + torch.compile"]
    for name in (
        "BAC, patched",
        "full precision, loop",
        "BAC, onnx, 1 thread",
        "BAC, onnx, 1 thread, executed actions only",
    ):
        assert name in rows, name
    for name, row in rows.items():
        if "full precision" in name:
            assert row["max_difference"] < 1e-5, name
        elif "BAC" in name:
            assert 1e-3 < row["max_difference"] < 10, name
