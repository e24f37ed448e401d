"""The one step, explicit timesteps, and samplers checked without diffusers."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockcache.errors import SamplerError
from blockcache.samplers import (
    DDIM,
    DDPM,
    SAMPLERS,
    Coefficients,
    DPMSolver,
    Euler,
    Fitted,
    Guide,
    SamplerTable,
    SDEDPMSolver,
    step,
    table,
)
from sampler_runs import EXACT, SHAPE, NumpyArithmetic, assert_same_trajectory, denoiser, initial_noise, run_table

COLUMNS = ("timesteps", "a", "b", "e", "c", "s", "x0_x", "x0_out", "eps_x", "eps_out")
DIFFUSION = ["ddpm", "ddim", "dpmsolver++", "sde-dpmsolver++"]
UPDATE = {"a": 2.0, "b": 3.0, "e": 5.0, "c": 7.0, "s": 11.0}
PREDICTION = {"x0_x": 0.5, "x0_out": 0.25, "eps_x": 1.0, "eps_out": -1.0}


class Words:
    """Writes the sum down instead of computing it, with coefficients that may be names too."""

    def mix(self, *terms):
        assert terms
        return "(" + " + ".join(f"{coefficient}*{value}" for value, coefficient in terms) + ")"

    def clip(self, value, limit):
        return f"clip{limit}{value}"


def test_one_step_is_the_documented_sum():
    columns = {name: np.array([value]) for name, value in {**UPDATE, **PREDICTION}.items()}
    made = SamplerTable(timesteps=np.array([4.0]), **columns, clip=1.0, draws=(True,))
    assert made.at(0) == Coefficients(**UPDATE, **PREDICTION, clip=1.0)
    assert {type(value) for value in vars(made.at(0)).values()} == {float}
    # x0 = 0.5*6 + 0.25*4 = 4, clipped to 1; eps = 6 - 4 = 2, from what was predicted before clipping
    given = [np.array([value]) for value in (6.0, 4.0, 10.0, 100.0)]
    x, x0 = step(NumpyArithmetic(), made.at(0), *given)
    assert x0.tolist() == [1.0]
    assert x.tolist() == [2 * 6 + 3 * 1 + 5 * 2 + 7 * 10 + 11 * 100]


def test_the_step_in_words():
    at = Coefficients(**UPDATE, **PREDICTION, clip=1.0)
    x, x0 = step(Words(), at, "x", "out", "before", "noise")
    assert x0 == "clip1.0(0.5*x + 0.25*out)"
    assert x == f"(2.0*x + 3.0*{x0} + 5.0*(1.0*x + -1.0*out) + 7.0*before + 11.0*noise)"
    at = Coefficients(a=0.0, b=1.0, e=0.0, c=0.0, s=0.0, x0_x=0.0, x0_out=1.0, eps_x=0.0, eps_out=0.0, clip=None)
    assert step(Words(), at, "x", "out", None, None) == ("(1.0*(1.0*out))", "(1.0*out)")  # zeros are left out
    assert step(Words(), at, "x", "out", "before", "noise")[0] == "(1.0*(1.0*out))"
    assert step(Words(), replace(at, s=1.0), "x", "out", None, "scaled")[0] == "(1.0*(1.0*out) + 1.0*scaled)"
    assert step(Words(), replace(at, a="row"), "x", "out", None, None)[0] == "(row*x + 1.0*(1.0*out))"


def test_a_step_asks_for_what_it_needs():
    x = np.zeros(SHAPE)
    with pytest.raises(SamplerError, match="expected noise; got None"):
        step(NumpyArithmetic(), table(DDPM()).at(3), x, x, None, None)
    with pytest.raises(SamplerError, match="expected x0_prev; got None"):
        step(NumpyArithmetic(), table(DPMSolver(num_inference_steps=8)).at(1), x, x, None, None)


@pytest.mark.parametrize(
    ("config", "drawn", "last_s"),
    [
        (DDPM(), [True] * 99 + [False], 0.0),
        (DDPM(num_inference_steps=1), [False], 0.0),
        # The last step stands at t = 9: diffusers draws, and scales by the root of its smallest variance.
        (DDPM(num_inference_steps=10, timestep_spacing="trailing"), [True] * 10, 1e-10),
        (DDPM(timesteps=[70, 5]), [True] * 2, 1e-10),
        (DDPM(timesteps=[70, 0]), [True, False], 0.0),
        (DDIM(num_inference_steps=10), [False] * 10, 0.0),
        (DDIM(num_inference_steps=10, eta=0.5), [True] * 10, 0.0),
        (DPMSolver(num_inference_steps=10), [False] * 10, 0.0),
        (SDEDPMSolver(num_inference_steps=10), [True] * 10, 0.0),
        (Euler(num_inference_steps=10), [False] * 10, 0.0),
    ],
)
def test_which_steps_draw(config, drawn, last_s):
    made = table(config)
    assert made.steps == config.num_inference_steps
    assert list(made.draws) == drawn
    assert made.draw_count == sum(drawn)
    assert made.s[-1] == pytest.approx(last_s, rel=1e-6, abs=0)


# --------------------------------------------------------------------------------------------------- explicit timesteps


def assert_same_tables(found, expected):
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    assert (found.clip, found.draws) == (expected.clip, expected.draws)


@pytest.mark.parametrize("kind", DIFFUSION)
@pytest.mark.parametrize("steps", [1, 7, 10, 16, 50])
def test_a_samplers_own_timesteps_given_make_its_own_table(kind, steps):
    own = SAMPLERS[kind](num_inference_steps=steps)
    assert_same_tables(table(replace(own, timesteps=table(own).timesteps)), table(own))


@pytest.mark.parametrize("kind", ["ddpm", "dpmsolver++", "sde-dpmsolver++"])  # DDIM strides past "linspace" steps
@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
def test_so_do_those_of_another_spacing(kind, spacing):
    own = SAMPLERS[kind](num_inference_steps=7, timestep_spacing=spacing)
    assert_same_tables(table(replace(own, timesteps=own.times())), table(own))


def test_a_flows_own_times_given_make_its_own_table():
    own = Euler(num_inference_steps=7)
    assert_same_tables(table(replace(own, timesteps=own.times().tolist())), table(own))


@pytest.mark.parametrize("kind", ["ddpm", "dpmsolver++", "sde-dpmsolver++"])  # diffusers' DDIM takes no list
@pytest.mark.parametrize("listed", [[70, 57, 20, 5], [99, 98, 3, 0], [80], list(range(80, 3, -4))])
@pytest.mark.parametrize("settings", [{}, {"beta_schedule": "linear", "prediction_type": "v_prediction"}])
def test_listed_whole_timesteps_follow_diffusers(kind, listed, settings):
    plain = SAMPLERS[kind](num_inference_steps=5, **settings)
    assert_same_trajectory(plain, placed=SAMPLERS[kind](timesteps=listed, **settings))


def power_by_hand(config, t):
    """Between whole timesteps the logarithm of signal to noise lies on a straight line."""
    low = int(t)
    power = config.signal_power().astype(np.float64)
    if t == low:
        return power[low]
    ratios = power / (1 - power)
    ratio = ratios[low] ** (1 - (t - low)) * ratios[low + 1] ** (t - low)
    return ratio / (1 + ratio)


timestep_lists = st.lists(
    st.integers(0, 4 * 99).map(lambda quarter: quarter / 4), min_size=1, max_size=12, unique=True
).map(lambda values: sorted(values, reverse=True))


@given(timestep_lists, st.sampled_from(["squaredcos_cap_v2", "linear"]))
def test_ddpm_is_the_posterior_between_neighbours(listed, beta_schedule):
    config = DDPM(timesteps=listed, beta_schedule=beta_schedule)
    made, powers = table(config), [*(power_by_hand(config, t) for t in listed), 1.0]
    for k, (now, after) in enumerate(pairwise(powers)):
        # q(x' | x, x0) of a Gaussian chain, from the product of its two densities
        forward, known = now / after, 1 - after
        if known == 0:
            a, b, s = 0.0, 1.0, 0.0
        else:
            precision = forward / (1 - forward) + 1 / known
            a, b = np.sqrt(forward) / (1 - forward) / precision, np.sqrt(after) / known / precision
            s = np.sqrt(1 / precision)
        np.testing.assert_allclose([made.a[k], made.b[k]], [a, b], rtol=0, atol=5e-4)
        np.testing.assert_allclose(made.s[k], s, rtol=0, atol=5e-4)
    assert list(made.draws) == [t > 0 for t in listed]


@given(timestep_lists, st.sampled_from([0.0, 0.7]))
def test_ddim_strides_to_the_next_listed_one(listed, eta):
    config = DDIM(timesteps=listed, eta=eta)
    made, powers = table(config), [*(power_by_hand(config, t) for t in listed), 1.0]
    for k, (now, after) in enumerate(pairwise(powers)):
        variance = eta**2 * (1 - after) / (1 - now) * (1 - now / after)
        found = [made.b[k] ** 2, made.e[k] ** 2, made.s[k] ** 2]
        np.testing.assert_allclose(found, [after, 1 - after - variance, variance], rtol=0, atol=1e-5)


@given(timestep_lists, st.booleans())
def test_the_first_order_of_the_sde_is_ddpms_posterior(listed, clip):
    solver = table(SDEDPMSolver(timesteps=listed, solver_order=1, clip_sample=clip))
    posterior = table(DDPM(timesteps=listed, clip_sample=clip))
    for name in ("a", "b", "s"):
        np.testing.assert_allclose(getattr(solver, name), getattr(posterior, name), rtol=0, atol=5e-4)
    for name in ("x0_x", "x0_out"):
        np.testing.assert_allclose(getattr(solver, name), getattr(posterior, name), rtol=1e-5)
    assert solver.clip == posterior.clip


@pytest.mark.parametrize("kind", DIFFUSION)
def test_every_list_ends_at_its_last_x0(kind):
    """`zero` and `set_alpha_to_one` are the defaults; DDPM's noise at t > 0 is the root of its smallest variance."""
    _, samples, cleans, _ = run_table(SAMPLERS[kind](timesteps=[70, 57.5, 20.25, 5]))
    np.testing.assert_allclose(samples[-1], cleans[-1], rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- Euler


@pytest.mark.parametrize("config", [Euler(num_inference_steps=10), Euler(timesteps=[0, 0.1, 0.15, 0.7])])
def test_euler_is_a_plain_loop(config):
    model, x = denoiser(), initial_noise()
    times = [k / 10 for k in range(10)] if config.timesteps is None else list(config.timesteps)
    found_times, samples, cleans, _ = run_table(config, model)
    assert found_times.tolist() == times
    for k, (t, after) in enumerate(zip(times, [*times[1:], 1.0], strict=True)):
        velocity = model(x, t)
        np.testing.assert_allclose(cleans[k], x + (1 - t) * velocity, rtol=0, atol=EXACT)
        x = x + (after - t) * velocity
        np.testing.assert_allclose(samples[k], x, rtol=0, atol=EXACT)


def test_a_perfect_flow_is_followed_to_its_clean_sample():
    noise, clean = initial_noise(), np.random.default_rng(3).uniform(-1, 1, SHAPE)
    _, samples, cleans, _ = run_table(Euler(num_inference_steps=4), lambda x, t: clean - noise)
    np.testing.assert_allclose(samples[-1], clean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(cleans, np.broadcast_to(clean, (4, *SHAPE)), rtol=0, atol=1e-12)


# -- a chunk that is told of the one before

GUIDED = [
    DDPM(num_inference_steps=7),
    DDIM(num_inference_steps=7),
    DDIM(num_inference_steps=7, eta=0.5, prediction_type="v_prediction"),
    DDIM(num_inference_steps=7, prediction_type="sample", clip_sample=False),
    DPMSolver(num_inference_steps=7, beta_schedule="linear"),
    SDEDPMSolver(num_inference_steps=7, beta_schedule="linear"),
    Fitted.of(DDPM(timesteps=(90, 50, 20, 3))),
    Euler(num_inference_steps=7),
]


def run_guided(config, weights, old, model):
    made, rng = table(config), np.random.default_rng(4)
    x, x0 = initial_noise(), None
    guide = None if weights is None else Guide(weights, 1 - weights, weights * old)
    for k in range(made.steps):
        noise = rng.normal(size=SHAPE) if made.draws[k] else None
        x, x0 = step(NumpyArithmetic(), made.at(k), x, model(x, made.timesteps[k]), x0, noise, guide)
    return x


@pytest.mark.parametrize("config", GUIDED, ids=lambda config: config.type)
def test_where_the_pull_is_one_a_generation_ends_at_the_old_chunk_and_elsewhere_it_is_free(config):
    """Row by row: the made-up network mixes the numbers of a row, not the rows."""
    old = np.random.default_rng(5).uniform(-0.9, 0.9, SHAPE)
    weights = np.zeros((*SHAPE[:-1], 1))
    weights[..., :2, :] = 1.0
    found, free = run_guided(config, weights, old, denoiser()), run_guided(config, None, old, denoiser())
    np.testing.assert_allclose(found[..., :2, :], old[..., :2, :], atol=1e-9)
    np.testing.assert_allclose(found[..., 2:, :], free[..., 2:, :], atol=1e-12)
    np.testing.assert_array_equal(run_guided(config, 0 * weights, old, denoiser()), free)


@pytest.mark.parametrize("config", GUIDED, ids=lambda config: config.type)
def test_a_network_that_knows_the_old_chunk_is_not_disturbed_by_being_told(config):
    """It gives the output that makes x0 the old chunk; then eps is the one that leads there, and every pull is the same."""
    old, made = np.random.default_rng(6).uniform(-0.9, 0.9, SHAPE), table(config)
    rows = {time: made.at(k) for k, time in enumerate(made.timesteps)}

    def knowing(x, t):
        return (old - rows[t].x0_x * x) / rows[t].x0_out

    for weight in (0.3, 1.0):
        weights = np.full((*SHAPE[:-1], 1), weight)
        found = run_guided(config, weights, old, knowing)
        np.testing.assert_allclose(found, run_guided(config, None, old, knowing), atol=1e-9)


def test_a_guided_step_in_numbers():
    at = Coefficients(a=2.0, b=3.0, e=5.0, x0_x=0.5, x0_out=0.25, eps_x=1.0, eps_out=-1.0, clip=1.0)
    x, out, old, pull = np.array([2.0]), np.array([8.0]), np.array([-1.0]), np.array([0.25])
    # x0 = clip(0.5 * 2 + 0.25 * 8) = 1, blended 0.75 * 1 - 0.25; eps = 2 - 8 = -6; the eps that leads to x0 = -1 needs
    # the output (-1 - 0.5 * 2) / 0.25 = -8, so it is 2 + 8 = 10, blended 0.75 * -6 + 0.25 * 10
    found, x0 = step(NumpyArithmetic(), at, x, out, None, None, Guide(pull, 1 - pull, pull * old))
    assert x0.tolist() == [0.5]
    assert found.tolist() == [2 * 2 + 3 * 0.5 + 5 * -2.0]
