"""Methods that say how chunks are executed, in rollouts on a toy task: what is asked for, with what noise, at what cost."""

import numpy as np
import pytest
import torch

from blockcache.compare.candidates import Calibrations, running
from blockcache.compare.methods import parse_method
from blockcache.compare.paired import rollout_noise
from blockcache.compare.parts import MethodError
from blockcache.errors import EngineError
from blockcache.models.registry import port_of
from blockcache.results.rollouts import Results
from blockcache.samplers import table
from blockcache.tasks import Clock
from foreign_policy import Policy
from toy_evaluation import ready
from toy_task import Toy, observations
from tuned_directory import write_tuned


def by_hand(policy, seed, executed, temperature=1.0):
    """One rollout without anything of the package's own rollouts but its noise."""
    toy = Toy()
    seen, chunk, sampler = [toy.reset(seed)] * 2, 0, table(policy.sampler)
    while not toy.done:
        noise = torch.from_numpy(rollout_noise((seed,), chunk, sampler, (6, 3))) * temperature
        actions = policy.predict_action(np.stack(seen)[None], noise=noise)["action_pred"][0, 1:]
        for action in actions[:executed].numpy():
            if not toy.done:
                toy.step(action)
                seen = [seen[1], toy.observe()]
        chunk += 1
    return toy.score


def test_rollouts_replan_and_scale_the_noise_as_the_method_says(make_policy, tmp_path):
    methods = ("replan=2", "replan=5", "temperature=0.5", "ddim-3+replan=2,temperature=0.5")
    results = ready(make_policy(), tmp_path, methods=methods).run(progress=False)
    policy = make_policy()
    for name, executed, temperature in (("replan=2", 2, 1), ("replan=5", 5, 1), ("temperature=0.5", 4, 0.5)):
        for seed in range(6):
            assert results.of(name)[seed].score == pytest.approx(by_hand(policy, seed, executed, temperature), abs=1e-5)
    assert len({sum(record.score for record in results.of(name).values()) for name in ("full", *methods)}) == 5
    full, often, seldom, cold, few = results.methods
    assert (often.flops, cold.flops, few.flops) == (2 * full.flops, full.flops, full.flops)  # half the steps, twice
    assert seldom.flops == round(full.flops * 4 / 5)
    assert [method.execution for method in (full, often, cold)] == [None, {"replan": 2}, {"temperature": 0.5}]
    assert [method.shares_all_noise for method in results.methods] == [True, False, False, False, False]
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results


def test_the_medoid_of_the_candidates_is_executed(make_policy):
    policy, seen = make_policy(), observations(3)
    port = port_of(policy)
    candidate = Calibrations(port, observations()).candidate(parse_method("candidates=5"), "loop")
    sampler = table(policy.sampler)
    noise = np.concatenate(
        [rollout_noise([seed], 0, sampler, (6, 3), n) for seed in range(3) for n in range(5)], axis=1
    )
    with running(port, candidate) as fast:
        found = fast.act(seen, noise=torch.from_numpy(noise))
        assert fast.act(seen, 3).shape == found.shape == (3, 4, 3)
    assert np.array_equal(rollout_noise([1], 0, sampler, (6, 3)), noise[:, 5:6])  # the first is the chunk drawn alone
    assert len(np.unique(noise)) == noise.size
    for place in range(3):
        own = torch.from_numpy(noise[:, 5 * place : 5 * place + 5])
        chunks = policy.predict_action(seen[place : place + 1].repeat(5, 1, 1), noise=own)["action"].numpy()
        flat = (chunks * port.action_scale).reshape(5, -1)
        nearest = np.linalg.norm(flat[:, None] - flat[None], axis=-1).sum(axis=1).argmin()
        assert np.allclose(found[place], chunks[nearest], atol=1e-5)
    assert candidate.flops(port, 0.0) == 5 * Calibrations(port, observations()).candidate(parse_method("full")).flops(
        port, 0
    )


def test_what_was_tuned_to_replan_does_so_under_every_execution(make_policy, tmp_path):
    policy, tuned = make_policy(), tmp_path / "tuned"
    write_tuned(policy, tuned, replan=2)
    calibrations = Calibrations(port_of(policy), observations())
    for behind, executed in (("", (2, 1)), ("+temperature=0.5", (2, 0.5)), ("+replan=3", (3, 1))):
        found = calibrations.candidate(parse_method(f"tuned:{tuned}{behind}"), "loop").execution
        assert (found.replan, found.temperature) == executed
    for name in ("sampler.json", "schedule.json"):
        (tuned / name).unlink()
    results = ready(policy, tmp_path / "state", methods=("replan=2", f"tuned:{tuned}")).run(progress=False)
    half, same = (list(results.of(method.name).values()) for method in results.methods[1:])
    assert [one.score for one in half] == [one.score for one in same]
    assert results.methods[2].flops == 2 * results.methods[0].flops


def test_a_method_that_replans_does_so_on_the_clock(make_policy, tmp_path):
    evaluation = ready(make_policy(), tmp_path, methods=("replan=2",), clock=lambda name: Clock(10, 3, (0.0,)))
    assert [clock.replan for clock in evaluation.clocks.values()] == [3, 2]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("replan=6", "replan=6 executes so many actions of each chunk, and the horizon leaves 5"),
        ("ddim-3+replan=100,temperature=0.5", "the horizon leaves 5"),
    ],
)
def test_replanning_beyond_the_horizon_is_refused_before_any_work(make_policy, tmp_path, method, said):
    with pytest.raises(EngineError, match=said):
        ready(make_policy(), tmp_path, methods=(method,))


def test_a_policy_that_draws_its_own_noise_can_replan_and_nothing_else():
    calibrations = Calibrations(port_of(Policy().eval()), observations())
    assert calibrations.candidate(parse_method("replan=2")).execution.replan == 2
    for method in ("temperature=0.5", "candidates=4"):
        with pytest.raises(MethodError, match="draws its noise itself"):
            calibrations.candidate(parse_method(method))
