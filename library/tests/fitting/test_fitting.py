"""Samplers that are placed and fitted for a policy: on one whose answer is known, and on tiny ones."""

from contextlib import nullcontext
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blockcache as bc
from blockcache.errors import FitError, SamplerError, ScheduleError
from blockcache.fitting import Clouds, Effort, fit, place
from blockcache.fitting.clouds import closeness, executed, objective
from blockcache.fitting.denoising import COLUMNS, FewSteps, constants_of
from blockcache.fitting.descent import starts_of
from blockcache.fitting.placement import search, spaced
from blockcache.models.registry import port_of
from blockcache.models.sampling import draw_all, generate
from blockcache.observations import pick
from blockcache.observations.tensors import as_one_batch
from blockcache.samplers import DDIM, DDPM, ChosenSampler, Fitted, SDEDPMSolver, table
from blockcache.schedule import compile_plan
from foreign_policy import OBS, SEEN, Policy
from toy_denoiser import SPREAD, Gaussian, LinearPolicy, LinearPort, NoGradient, WholeTimes, means, own_cloud

QUICK = Effort(iterations=4, observations=2, samples=4)
PLACED = DDPM(timesteps=[70, 40, 8])


def linear_clouds(net=Gaussian, count=12, samples=64, seed=0):
    clouds = Clouds(LinearPort(LinearPolicy(net)), means(count), samples=samples, seed=seed, progress=False)
    vars(clouds)["own"] = own_cloud(clouds.observations, samples)
    return clouds


# ---------------------------------------------------------------------------------------------------------- objective


def test_the_objective_is_the_documented_sum():
    found, reference = torch.tensor([[[0.0], [2.0]]]), torch.tensor([[[1.0], [5.0]]])
    # |0-1|, |0-5|, |2-1|, |2-5| have the mean 2.5; inside they are 2 and 4 apart
    assert float(objective(found, reference, 0.7)) == pytest.approx(2 * 2.5 - 0.7 * 2)
    told = closeness(found.double(), reference.double(), 0.7)
    assert told.objective == pytest.approx((2 * 2.5 - 0.7 * 2 - 4) / 4)
    assert told.energy == pytest.approx((2 * 2.5 - 2 - 4) / 4)
    assert told.spread == pytest.approx(2 / 4)
    # the means are 2 apart; what they scatter by is 2/2 and 8/2
    assert told.centre_shift == 0.0
    assert closeness(found.double() - 10, reference.double(), 1).centre_shift == pytest.approx((12**2 - 5) ** 0.5)


def test_its_gradient_is_that_of_finite_differences():
    clouds = linear_clouds(samples=5)
    port = clouds.port.with_sampler(Fitted.of(replace(PLACED, clip_sample=False)))
    few = FewSteps(port, pick(clouds.observations, [0] * 4 + [1] * 4))
    noise = torch.randn(3, 8, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start = constants_of(port.sampler)
    start[1:, COLUMNS.index("c")] = torch.tensor([0.2, -0.1])

    def value(constants):
        return objective(few.run(constants, 0.9, noise).reshape(2, 4, -1), clouds.own[:2], 0.7)

    constants = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(constants), [constants])
    small = 1e-6
    for step in range(3):
        for column, name in enumerate(COLUMNS):
            moved = torch.zeros_like(start)
            moved[step, column] = small
            by_hand = float(value(start + moved) - value(start - moved)) / (2 * small)
            assert float(gradient[step, column]) == pytest.approx(by_hand, rel=1e-4, abs=1e-7), (step, name)
    fixed = [gradient[0, COLUMNS.index("c")], gradient[-1, COLUMNS.index("s")]]  # no x0 before it, no noise behind it
    assert [float(value) for value in fixed] == [0, 0]
    assert (gradient != 0).sum() == gradient.numel() - 2


# ------------------------------------------------------------------------------------------------------------- placing


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True).map(lambda values: sorted(values, reverse=True)),
)
def test_a_search_looks_at_nothing_twice_and_ends_at_the_best_that_it_saw(target):
    usual, seen = tuple(int(t) for t in DDPM(num_inference_steps=len(target)).times()), {}

    def score(timesteps):
        assert timesteps not in seen
        assert len(timesteps) == len(target)
        DDPM(timesteps=timesteps)  # refuses what is no list of timesteps
        seen[timesteps] = sum(abs(found - wanted) for found, wanted in zip(timesteps, target, strict=True))
        return seen[timesteps]

    found, tried = search(score, usual, 100)
    assert seen[found] == min(seen.values()) <= seen[usual]
    assert tried == len(seen) <= 12 + 2 * len(target)


def test_a_search_finds_start_end_and_spacing_and_then_moves_steps():
    def nearest(target):
        found, _ = search(lambda tried: np.abs(np.subtract(tried, target)).sum(), (80, 64, 48, 32, 16, 0), 100)
        return found

    even = spaced(6, 0.8 * 99, 0.04 * 99)
    assert even == (79, 64, 49, 34, 19, 4)
    assert nearest(even) == even
    assert nearest((79, 64, 49, 42, 19, 4)) == (79, 64, 49, 42, 19, 4)  # one step half way to its neighbour
    assert nearest((73, 64, 49, 34, 19, 10)) == (73, 64, 49, 34, 19, 10)  # the ends by a sixteenth of the range
    curved = spaced(6, 0.7 * 99, 0.08 * 99, 1.5)
    assert curved == (69, 52, 36, 23, 13, 8)
    assert np.abs(np.subtract(nearest(curved), curved)).max() <= 3


def test_timesteps_that_a_sampler_refuses_are_passed_over():
    def score(timesteps):
        if timesteps != (50, 0):
            raise SamplerError("too close")
        return 1.0

    assert search(score, (50, 0), 100) == ((50, 0), 1)


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "sde-dpmsolver++"])
def test_steps_are_placed_for_a_policy_and_it_says_what_that_took(make_policy, observe, kind):
    policy = make_policy(sampler=DDPM(num_inference_steps=20))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    placed = bc.place_steps(policy, observe(4), 3, kind, samples=4, progress=False)
    assert placed.sampler.type == kind
    assert placed.sampler.num_inference_steps == len(placed.sampler.timesteps) == 3
    assert all(isinstance(time, int) for time in placed.sampler.timesteps)
    assert placed.policy == port_of(policy).fingerprint
    told = placed.evidence
    assert (told["chosen_on"], told["held_back"]) == (3, 1)
    assert told["generations"] == {"own": 4 * 4, "other": told["candidates"] * 3 * 4 + 2 * 1 * 4}
    again = bc.place_steps(policy, observe(4).split(1), 3, kind, samples=4, progress=False)
    assert again == placed  # from a list of batches, and by its seed
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert "forward" not in vars(policy.model)
    assert "predict_action" not in vars(policy)


def test_placed_steps_are_closer_than_the_usual_ones_where_that_is_known():
    """Leading steps start at t = 66 of 100, where a third of the mean is known already: too late."""
    clouds = linear_clouds()
    told = place(clouds, 3, "ddpm").evidence
    assert told["after"]["energy"] < 0.8 * told["before"]["energy"]


# ------------------------------------------------------------------------------------------------------------- fitting


def test_one_fitted_step_reproduces_a_normal_distribution_exactly():
    """One step makes `(a + b*x0_x + b*x0_out*k) x - b*x0_out*k*root(p) * mean` of its noise x: to be SPREAD and 1."""
    clouds = linear_clouds(samples=96)
    start = DDPM(timesteps=[60], clip_sample=False)
    found = fit(clouds, 1, 1.0, start, Effort(iterations=100, observations=6, samples=32, rate=0.1))
    told = found.evidence
    assert told["before"]["energy"] > 0.1
    assert told["after"]["energy"] < 0.01
    assert told["after"]["spread"] == pytest.approx(1, abs=0.05)
    (row,) = constants_of(found.sampler).tolist()
    time, x0_x, x0_out, a, b, _, _ = row
    net = clouds.port.policy.net
    power = float(net.power(torch.tensor(time)))
    gain = (1 - power) ** 0.5 / (power * SPREAD**2 + 1 - power)
    assert abs(a + b * x0_x + b * x0_out * gain) == pytest.approx(SPREAD, rel=0.1)
    assert -b * x0_out * gain * power**0.5 == pytest.approx(1, abs=0.03)


def test_a_spread_of_one_keeps_it_and_a_lower_one_gives_sharper_actions():
    """In three steps DDPM's posterior has too little spread, with "fixed_large" it has all of it."""
    effort, told = Effort(iterations=30, observations=4, samples=16, rate=0.05), {}
    for spread, variance_type in ((1.0, "fixed_small"), (0.6, "fixed_large")):
        start = DDPM(timesteps=[80, 50, 20], clip_sample=False, variance_type=variance_type)
        evidence = fit(linear_clouds(samples=32), 3, spread, start, effort).evidence
        told[spread] = evidence["before"]["spread"], evidence["after"]["spread"]
    assert told[1.0][0] < told[1.0][1] < 1.1
    assert told[0.6][1] < 0.9 * told[0.6][0]


def test_a_seed_gives_the_same_constants_and_another_one_others(make_policy, observe):
    policy = make_policy(sampler=DDPM(num_inference_steps=20))
    clouds = Clouds(port_of(policy), observe(6), samples=6, progress=False)
    first = fit(clouds, 3, 0.7, PLACED, QUICK)
    assert (
        first.sampler
        == bc.fit_sampler(policy, observe(6), 3, start=PLACED, effort=QUICK, samples=6, progress=False).sampler
    )
    other = Clouds(port_of(policy), observe(6), samples=6, seed=1, progress=False)
    assert fit(other, 3, 0.7, PLACED, QUICK).sampler != first.sampler
    told = first.evidence
    assert told["start"] == PLACED.to_dict()
    assert told["after"]["objective"] < told["before"]["objective"]
    assert told["kept_iteration"] in (1, 2, 3, 4)
    assert (told["times"], told["spread"], told["effort"]) == ("fitted", 0.7, asdict(QUICK))
    assert 0 <= told["seconds"] < 60
    assert first.policy == port_of(policy).fingerprint
    # four iterations, the held-back observation before each of four judgements and twice more at the end
    assert told["generations"] == {"own": 6 * 6, "other": 4 * 2 * 4 + (1 + 4 + 2) * 1 * 6}


def test_without_a_start_steps_are_placed_first():
    found = fit(linear_clouds(samples=8), 2, 1.0, None, Effort(iterations=20, observations=4, samples=8))
    assert found.evidence["start"]["type"] == "ddpm"
    assert len(found.evidence["start"]["timesteps"]) == 2


def test_of_several_starts_the_best_on_the_held_back_observations_is_kept():
    effort = Effort(iterations=3, observations=2, samples=8, starts=4)
    start = DDPM(timesteps=[80, 50, 20], clip_sample=False)
    found = fit(linear_clouds(samples=16), 3, 1.0, start, effort)
    told, times = found.evidence, [one.timesteps for one in starts_of(start, 4, linear_clouds())]
    assert len(told["objectives"]) == len(set(times)) == 4
    assert times[0] == start.timesteps
    assert all(high <= 89 and 65 >= middle >= 35 and low >= 10 for high, middle, low in times)  # half way at most
    crowded = starts_of(DDPM(timesteps=[99, 98, 3, 2, 1, 0]), 20, linear_clouds())
    assert {one.timesteps[2:] for one in crowded} <= {(high, 2, 1, 0) for high in range(3, 51)}
    alone = fit(linear_clouds(samples=16), 3, 1.0, start, replace(effort, starts=1))
    best = told["objectives"].index(min(told["objectives"]))
    assert (found.sampler == alone.sampler) == (best == 0)
    assert told["generations"]["other"] > 3 * alone.evidence["generations"]["other"]


def test_a_generation_is_fitted_through_as_a_schedule_runs_it(make_policy, observe):
    policy = make_policy(sampler=Fitted.of(DDPM(timesteps=[70, 40, 8])))
    port = port_of(policy)
    schedule = bc.Schedule(3, {block.name: [0, 2] for block in port.adapter.blocks}, port.fingerprint)
    few = FewSteps(port, observe(2), plan=compile_plan(schedule))
    noise = draw_all(
        table(port.sampler), (2, port.horizon, port.sample_dim), few.like, torch.Generator().manual_seed(0)
    )
    found = few.run(constants_of(port.sampler), port.sampler.clip, noise)
    assert not torch.allclose(
        found, FewSteps(port, observe(2)).run(constants_of(port.sampler), port.sampler.clip, noise)
    )
    with bc.accelerate(port, schedule, engine="patched") as fast:
        expected = executed(port, fast.predict_action(observe(2), noise=noise)["action"])
    np.testing.assert_allclose(found.detach().numpy(), expected.numpy(), atol=1e-5)
    start = Clouds(port_of(make_policy(sampler=DDPM(num_inference_steps=20))), observe(6), samples=6, progress=False)
    fitted = fit(start, 3, 0.7, port.sampler, QUICK, schedule)
    assert fitted.evidence["schedule"] == schedule.describe()
    other = replace(schedule, fingerprint=replace(schedule.fingerprint, weights="0" * 64))
    with pytest.raises(ScheduleError, match="this schedule does not fit the policy, which has weights"):
        fit(start, 3, 0.7, port.sampler, QUICK, other)


def test_a_foreign_policy_is_fitted_and_every_engine_runs_the_result():
    policy, obs = Policy(), torch.randn(5, SEEN, OBS, generator=torch.Generator().manual_seed(0))
    found = bc.fit_sampler(
        policy, {"obs": obs}, 2, start=DDPM(timesteps=[14, 3]), effort=QUICK, samples=4, progress=False
    )
    assert found.evidence["times"] == "fitted"
    assert any(not float(time).is_integer() for time in found.sampler.timesteps)
    port, actions = port_of(policy).with_sampler(found.sampler), {}
    for engine in ("plain", "patched", "loop", "onnx"):
        with nullcontext() if engine == "plain" else bc.accelerate(port, engine=engine):
            actions[engine] = generate(port.policy.predict_action, {"obs": obs}, seed=3)["action"]
    assert torch.equal(actions["plain"], actions["patched"])
    for engine in ("loop", "onnx"):
        np.testing.assert_allclose(actions[engine].numpy(), actions["plain"].numpy(), atol=1e-5)


def test_times_stay_where_they_are_if_the_denoiser_takes_whole_ones_only():
    start = DDPM(timesteps=[80, 50, 20], clip_sample=False)
    found = fit(linear_clouds(WholeTimes), 3, 1.0, start, Effort(iterations=10, observations=4, samples=16))
    assert found.sampler.timesteps == (80, 50, 20)
    assert "fixed" in found.evidence["times"]
    assert found.evidence["after"]["energy"] < found.evidence["before"]["energy"]


def test_a_policy_is_as_it_was_after_a_fit(make_policy, observe, run):
    policy = make_policy()
    before = run(policy, observe(2))
    bc.fit_sampler(policy, observe(4), 3, start=PLACED, effort=QUICK, samples=4, progress=False)
    assert torch.equal(run(policy, observe(2)), before)
    assert all(parameter.requires_grad for parameter in policy.parameters())
    assert "forward" not in vars(policy.model)


# ------------------------------------------------------------------------------------------------------------- refused


def test_a_fit_that_does_not_beat_its_start_is_not_returned():
    with pytest.raises(FitError, match=r"did not beat its start on 3 held-back .* use ddpm with timesteps"):
        fit(
            linear_clouds(),
            3,
            1.0,
            DDPM(timesteps=[80, 50, 20], clip_sample=False),
            Effort(iterations=1, observations=1, samples=2, rate=1.0),
        )


def test_a_denoiser_without_gradient_can_be_placed_for_but_not_fitted_to():
    clouds = linear_clouds(NoGradient)
    assert place(clouds, 2, "ddpm").sampler.num_inference_steps == 2
    with pytest.raises(FitError, match="the denoiser NoGradient gives no gradient; a sampler can be placed"):
        fit(clouds, 2, 1.0, DDPM(timesteps=[60, 10], clip_sample=False), QUICK)


def test_a_policy_that_does_more_than_the_samplers_steps_is_refused(make_policy, observe):
    inpainting = make_policy(time_as_cond=False, obs_as_cond=False)
    with pytest.raises(FitError, match="does more around its denoiser than the sampler's steps"):
        bc.fit_sampler(inpainting, observe(4), 3, start=PLACED, effort=QUICK, samples=4, progress=False)
    placed = bc.place_steps(inpainting, observe(4), 3, samples=4, progress=False)
    assert len(placed.sampler.timesteps) == 3


def test_a_gradient_that_is_not_finite_is_named(monkeypatch):
    clouds = linear_clouds()
    vars(clouds)["own"][:] = torch.nan
    monkeypatch.setattr(
        "blockcache.fitting.descent.closeness", lambda *given: closeness(*[torch.rand(1, 3, 2)] * 2, 1.0)
    )
    with pytest.raises(FitError, match="iteration 1 of the fit gave no finite gradient for timesteps of step 0"):
        fit(clouds, 2, 1.0, DDPM(timesteps=[60, 10], clip_sample=False), QUICK)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"observations": 3}, "at least 4 observations .* got 3, record more"),
        ({"spread": 0}, "spread is above 0 and up to 1, got 0"),
        ({"spread": 1.5}, "spread is above 0 and up to 1, got 1.5"),
        ({"start": DDPM(timesteps=[70, 5])}, "a fit of 3 steps starts from a sampler of as many, got 2"),
        ({"start": Fitted.of(PLACED), "effort": replace(QUICK, starts=2)}, "such as ddpm, got fitted; take one start"),
        ({"start": DDIM(timesteps=[70, 40, 5])}, "without a term in eps, such as ddpm; got ddim"),
    ],
)
def test_what_cannot_be_fitted_is_said_in_one_sentence(policy, observe, settings, said):
    observations = observe(settings.pop("observations", 4))
    with pytest.raises((FitError, SamplerError), match=said) as caught:
        bc.fit_sampler(
            policy, observations, 3, **{"start": PLACED, "effort": QUICK, **settings}, samples=4, progress=False
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings", [{"iterations": 0}, {"observations": 0}, {"samples": 1}, {"rate": 0.0}, {"starts": 0}]
)
def test_an_effort_of_nothing_is_refused(settings):
    with pytest.raises(FitError, match=f"a fit needs .*{next(iter(settings))}"):
        Effort(**settings)


def test_many_batches_are_put_together_and_picked_from():
    one = {"obs": torch.arange(6.0).reshape(3, 2), "gain": 2.0}
    assert as_one_batch(one) is one
    both = as_one_batch([{"obs": torch.zeros(2, 2)}, {"obs": torch.ones(1, 2)}])
    assert both["obs"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert pick(one, [2, 0, 0])["obs"].tolist() == [[4, 5], [0, 1], [0, 1]]
    assert pick(one, [2])["gain"] == 2.0
    with pytest.raises(bc.BlockcacheError, match="a batch of observations or a list of batches"):
        as_one_batch([])


def test_the_first_order_of_sde_dpmsolver_is_a_start_too():
    start = SDEDPMSolver(timesteps=[80, 50, 20], solver_order=1)
    assert table(Fitted.of(start)).draws == (True, True, False)
    assert isinstance(ChosenSampler(Fitted.of(start)).sampler, Fitted)
