"""The coefficient tables against the diffusers schedulers, step by step along whole trajectories."""

import json
import math
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blockcache.errors import SamplerError
from blockcache.samplers import SamplerConfig, SamplerTable, step, table

# diffusers hands a tensor to np.array without the new copy argument.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SHAPE = (2, 5, 3)  # batch, horizon, action
SEED = 7

# DDPM and DDIM run in float64 in diffusers, with float32 coefficients that the table has to the last bit
# (seen: 2e-13 after 1000 steps). That needs correctly rounded square roots on both sides, see `exact_power`.
EXACT = 1e-11
# diffusers takes this standard deviation through a float32 logarithm and back, the table does not.
THROUGH_LOG = 2e-6
# DPM-Solver++ in diffusers rounds x to float32 at every step and takes float32 logarithms, the table neither.
SINGLE = 2e-6

SHARED = (
    "num_train_timesteps",
    "beta_schedule",
    "beta_start",
    "beta_end",
    "prediction_type",
    "timestep_spacing",
    "steps_offset",
)
OWN = {
    "ddpm": (DDPMScheduler, ("clip_sample", "clip_sample_range", "variance_type")),
    "ddim": (DDIMScheduler, ("clip_sample", "clip_sample_range", "set_alpha_to_one")),
    "dpmsolver++": (DPMSolverMultistepScheduler, ("solver_order", "lower_order_final", "final_sigmas_type")),
}


def scheduler_of(config):
    kind, own = OWN[config.type]
    extra = {"algorithm_type": "dpmsolver++"} if config.type == "dpmsolver++" else {}
    made = kind(**{name: getattr(config, name) for name in SHARED + own}, **extra)
    made.set_timesteps(config.num_inference_steps)
    return made


def denoiser():
    """A made-up network: nonlinear in x, different at every timestep, large enough to make x0 clip."""
    weight = np.random.default_rng(SEED).normal(size=(SHAPE[-1], SHAPE[-1]))

    def call(x, t):
        return 1.3 * np.tanh(x @ weight + math.sin(t)) + 0.1 * x

    return call


def initial_noise():
    return np.random.default_rng(SEED + 1).normal(size=SHAPE)


def exact_power(tensor, exponent, original=torch.Tensor.__pow__):
    """torch's float32 square root (MKL) may be an ulp off, depending on the machine; this one never is."""
    if exponent == 0.5 and tensor.dtype == torch.float32:
        return original(tensor.double(), 0.5).float()
    return original(tensor, exponent)


def run_diffusers(config):
    """Timesteps, every x', every x0, and the generator's state after the last step."""
    scheduler, model, generator = scheduler_of(config), denoiser(), torch.Generator().manual_seed(SEED)
    x, samples, cleans = torch.from_numpy(initial_noise()), [], []
    for t in scheduler.timesteps:
        out = torch.from_numpy(model(x.numpy(), int(t)))
        more = {"eta": config.eta} if config.type == "ddim" else {}
        result = scheduler.step(out, t, x, generator=generator, **more)
        solver = config.type == "dpmsolver++"
        cleans.append((scheduler.model_outputs[-1] if solver else result.pred_original_sample).numpy())
        x = result.prev_sample
        assert x.dtype == torch.float64
        samples.append(x.numpy())
    return scheduler.timesteps.numpy(), samples, cleans, generator.get_state()


def run_table(config):
    coefficients, model, generator = table(config), denoiser(), torch.Generator().manual_seed(SEED)
    x, x0, samples, cleans = initial_noise(), None, [], []
    for k in range(coefficients.steps):
        out = model(x, int(coefficients.timesteps[k]))
        noise = None
        if coefficients.draws[k]:
            noise = torch.randn(SHAPE, generator=generator, dtype=torch.float64).numpy()
        x, x0 = step(coefficients, k, x, out, x0, noise)
        samples.append(x)
        cleans.append(x0)
    return coefficients.timesteps, samples, cleans, generator.get_state()


def assert_same_trajectory(config, tolerance, power=exact_power):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__pow__", power)
        timesteps, samples, cleans, state = run_diffusers(config)
    our_timesteps, our_samples, our_cleans, our_state = run_table(config)
    assert our_timesteps.tolist() == timesteps.tolist()
    for theirs, ours in zip(samples + cleans, our_samples + our_cleans, strict=True):
        assert np.all(np.isfinite(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * max(1.0, np.abs(theirs).max()))
    # Equal states mean as many draws of the same shape; equal samples, the same order.
    assert torch.equal(our_state, state)


PREDICTIONS = pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
CLIPS = pytest.mark.parametrize("clip", [{}, {"clip_sample_range": 0.4}, {"clip_sample": False}])


@PREDICTIONS
@CLIPS
@pytest.mark.parametrize("steps", [100, 25, 16, 10, 1])
@pytest.mark.parametrize("variance_type", ["fixed_small", "fixed_small_log", "fixed_large"])
def test_ddpm_follows_diffusers(variance_type, steps, clip, prediction_type):
    config = SamplerConfig(
        "ddpm",
        num_inference_steps=steps,
        variance_type=variance_type,
        prediction_type=prediction_type,
        **clip,
    )
    assert_same_trajectory(config, THROUGH_LOG if variance_type == "fixed_small_log" else EXACT)


@PREDICTIONS
@CLIPS
@pytest.mark.parametrize("set_alpha_to_one", [True, False])
@pytest.mark.parametrize("steps", [100, 40, 16, 10, 1])
@pytest.mark.parametrize("eta", [0.0, 0.3, 0.5, 1.0])
def test_ddim_follows_diffusers(eta, steps, set_alpha_to_one, clip, prediction_type):
    config = SamplerConfig(
        "ddim",
        num_inference_steps=steps,
        eta=eta,
        set_alpha_to_one=set_alpha_to_one,
        prediction_type=prediction_type,
        **clip,
    )
    assert_same_trajectory(config, EXACT)


@PREDICTIONS
@pytest.mark.parametrize("final_sigmas_type", ["zero", "sigma_min"])
@pytest.mark.parametrize("lower_order_final", [True, False])
@pytest.mark.parametrize("steps", [20, 15, 14, 8, 2, 1])
@pytest.mark.parametrize("solver_order", [1, 2])
def test_dpmsolver_follows_diffusers(solver_order, steps, lower_order_final, final_sigmas_type, prediction_type):
    config = SamplerConfig(
        "dpmsolver++",
        num_inference_steps=steps,
        solver_order=solver_order,
        lower_order_final=lower_order_final,
        final_sigmas_type=final_sigmas_type,
        prediction_type=prediction_type,
    )
    assert_same_trajectory(config, SINGLE)


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "dpmsolver++"])
@pytest.mark.parametrize("beta_schedule", ["squaredcos_cap_v2", "linear", "scaled_linear"])
@pytest.mark.parametrize("betas", [{}, {"beta_start": 0.00085, "beta_end": 0.012}])
@pytest.mark.parametrize("train", [50, 101, 1000])
def test_beta_schedules_follow_diffusers(kind, beta_schedule, betas, train):
    config = SamplerConfig(
        kind, num_train_timesteps=train, num_inference_steps=10, beta_schedule=beta_schedule, **betas
    )
    assert_same_trajectory(config, SINGLE if kind == "dpmsolver++" else EXACT)


@pytest.mark.parametrize("kind", ["ddpm", "ddim", "dpmsolver++"])
@pytest.mark.parametrize(("spacing", "offset"), [("linspace", 0), ("trailing", 0), ("leading", 0), ("leading", 1)])
@pytest.mark.parametrize("steps", [98, 15, 7, 3])
def test_spacings_follow_diffusers(kind, spacing, offset, steps):
    config = SamplerConfig(kind, num_inference_steps=steps, timestep_spacing=spacing, steps_offset=offset)
    assert_same_trajectory(config, SINGLE if kind == "dpmsolver++" else EXACT)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (SamplerConfig("ddpm"), 1e-5),
        (SamplerConfig("ddim", num_inference_steps=16), 1e-5),
        # Here diffusers subtracts the square of a square root from a number close to it: an ulp becomes 1e-5.
        (SamplerConfig("ddim", eta=1.0), 2e-4),
        (SamplerConfig("dpmsolver++", num_inference_steps=20), 1e-5),
    ],
)
def test_diffusers_as_installed_differs_by_its_square_root_only(config, tolerance):
    """An ulp per coefficient (1.2e-7), carried through the loop by the denoiser."""
    assert_same_trajectory(config, tolerance, power=torch.Tensor.__pow__)


def test_a_solver_step_of_no_length_follows_diffusers():
    """All 100 of 100 steps, ending at the sigma of t = 0, where the last step already stands."""
    config = SamplerConfig("dpmsolver++", timestep_spacing="trailing", final_sigmas_type="sigma_min")
    assert_same_trajectory(config, 5e-6)  # a hundred float32 roundings of x in diffusers
    assert table(config).a[-1] == 1
    assert table(config).c[-1] == 0


def test_rdt_settings_follow_diffusers():
    config = SamplerConfig("dpmsolver++", num_train_timesteps=1000, num_inference_steps=5, prediction_type="sample")
    assert_same_trajectory(config, SINGLE)


@st.composite
def configs(draw):
    kind = draw(st.sampled_from(["ddpm", "ddim", "dpmsolver++"]))
    train = draw(st.integers(2, 300))
    chosen = {
        "num_train_timesteps": train,
        "num_inference_steps": draw(st.integers(1, min(train, 40))),
        "beta_schedule": draw(st.sampled_from(["squaredcos_cap_v2", "linear", "scaled_linear"])),
        "beta_start": draw(st.floats(1e-4, 0.01)),
        "beta_end": draw(st.floats(0.01, 0.05)),
        "prediction_type": draw(st.sampled_from(["epsilon", "sample", "v_prediction"])),
        "timestep_spacing": draw(st.sampled_from(["leading", "linspace", "trailing"])),
    }
    if chosen["timestep_spacing"] == "leading":
        chosen["steps_offset"] = draw(st.integers(0, 2))
    if kind != "dpmsolver++":
        chosen["clip_sample"] = draw(st.booleans())
        chosen["clip_sample_range"] = draw(st.floats(0.1, 3.0))
    if kind == "ddpm":
        chosen["variance_type"] = draw(st.sampled_from(["fixed_small", "fixed_large"]))
    elif kind == "ddim":
        chosen["eta"] = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
        chosen["set_alpha_to_one"] = draw(st.booleans())
    else:
        chosen["solver_order"] = draw(st.sampled_from([1, 2]))
        chosen["lower_order_final"] = draw(st.booleans())
        chosen["final_sigmas_type"] = draw(st.sampled_from(["zero", "sigma_min"]))
    try:
        return SamplerConfig(kind, **chosen)
    except SamplerError as refusal:
        assume("distinct timesteps" not in str(refusal))
        raise


@settings(deadline=None, max_examples=150)
@given(configs())
def test_any_accepted_config_follows_diffusers(config):
    assert_same_trajectory(config, 5e-6 if config.type == "dpmsolver++" else EXACT)
    assert SamplerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("kind", ["ddim", "dpmsolver++"])
def test_a_perfect_denoiser_is_followed_to_its_clean_sample(kind, prediction_type):
    """Without diffusers: x = signal*x0 + noise*eps stays on that line and ends at x0."""
    shared = {"num_inference_steps": 20, "clip_sample": False}
    levels = table(SamplerConfig(kind, prediction_type="v_prediction", **shared))
    coefficients = table(SamplerConfig(kind, prediction_type=prediction_type, **shared))
    rng = np.random.default_rng(SEED)
    clean, eps = rng.uniform(-1, 1, SHAPE), rng.normal(size=SHAPE)
    x, x0 = levels.x0_x[0] * clean + levels.eps_x[0] * eps, None
    for k in range(20):
        signal, noise = levels.x0_x[k], levels.eps_x[k]
        np.testing.assert_allclose(x, signal * clean + noise * eps, rtol=0, atol=2e-6)
        out = {"epsilon": eps, "sample": clean, "v_prediction": signal * eps - noise * clean}[prediction_type]
        x, x0 = step(coefficients, k, signal * clean + noise * eps, out, x0, None)
        np.testing.assert_allclose(x0, clean, rtol=0, atol=2e-6)
    np.testing.assert_allclose(x, clean, rtol=0, atol=2e-6)


def test_one_step_is_the_documented_sum():
    update = {"a": 2.0, "b": 3.0, "e": 5.0, "c": 7.0, "s": 11.0}
    prediction = {"x0_x": 0.5, "x0_out": 0.25, "eps_x": 1.0, "eps_out": -1.0}
    columns = {name: np.array([value]) for name, value in {**update, **prediction}.items()}
    made = SamplerTable(timesteps=np.array([4]), **columns, clip=1.0, draws=(True,))
    # x0 = 0.5*6 + 0.25*4 = 4, clipped to 1; eps = 6 - 4 = 2, from what was predicted before clipping
    x, x0 = step(made, 0, np.array([6.0]), np.array([4.0]), np.array([10.0]), np.array([100.0]))
    assert x0.tolist() == [1.0]
    assert x.tolist() == [2 * 6 + 3 * 1 + 5 * 2 + 7 * 10 + 11 * 100]


@pytest.mark.parametrize(
    ("config", "drawn", "last_s"),
    [
        (SamplerConfig("ddpm"), [True] * 99 + [False], 0.0),
        (SamplerConfig("ddpm", num_inference_steps=1), [False], 0.0),
        # The last step stands at t = 9: diffusers draws, and scales by the root of its smallest variance.
        (SamplerConfig("ddpm", num_inference_steps=10, timestep_spacing="trailing"), [True] * 10, 1e-10),
        (SamplerConfig("ddim", num_inference_steps=10), [False] * 10, 0.0),
        (SamplerConfig("ddim", num_inference_steps=10, eta=0.5), [True] * 10, 0.0),
        (SamplerConfig("dpmsolver++", num_inference_steps=10), [False] * 10, 0.0),
    ],
)
def test_which_steps_draw(config, drawn, last_s):
    made = table(config)
    assert made.steps == config.num_inference_steps
    assert list(made.draws) == drawn
    assert made.draw_count == sum(drawn)
    assert made.s[-1] == pytest.approx(last_s, rel=1e-6, abs=0)


def test_a_step_asks_for_what_it_needs():
    x = np.zeros(SHAPE)
    with pytest.raises(SamplerError, match="step 3: expected noise; got None"):
        step(table(SamplerConfig("ddpm")), 3, x, x, None, None)
    with pytest.raises(SamplerError, match="step 1: expected x0_prev; got None"):
        step(table(SamplerConfig("dpmsolver++", num_inference_steps=8)), 1, x, x, None, None)


def test_tables_and_configs_are_frozen():
    config = SamplerConfig("ddim")
    made = table(config)
    for name in ("timesteps", "a", "b", "e", "c", "s", "x0_x", "x0_out", "eps_x", "eps_out"):
        column = getattr(made, name)
        assert column.shape == (100,)
        assert column.dtype == (np.int64 if name == "timesteps" else np.float64)
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    with pytest.raises(FrozenInstanceError):
        made.clip = None
    with pytest.raises(FrozenInstanceError):
        config.eta = 1.0


def test_the_shipped_checkpoint_is_understood():
    settings_of_pusht = {
        "type": "ddpm",
        "num_train_timesteps": 100,
        "num_inference_steps": 100,
        "beta_schedule": "squaredcos_cap_v2",
        "beta_start": 0.0001,
        "beta_end": 0.02,
        "variance_type": "fixed_small",
        "clip_sample": True,
        "prediction_type": "epsilon",
    }
    config = SamplerConfig.from_dict(settings_of_pusht)
    assert config == SamplerConfig("ddpm")
    assert settings_of_pusht.items() <= config.to_dict().items()
    assert table(config).clip == 1.0


def test_a_dict_holds_the_settings_of_its_type_in_json_types():
    config = SamplerConfig("ddim", num_inference_steps=16, eta=1, beta_start=np.float64(0.001))
    kept = config.to_dict()
    assert {type(value) for value in kept.values()} == {str, int, float, bool}
    assert "variance_type" not in kept
    assert "solver_order" not in kept
    assert SamplerConfig.from_dict(json.loads(json.dumps(kept))) == config
    assert len({config, SamplerConfig.from_dict(kept)}) == 1


def test_defaults_are_those_of_the_type():
    ddpm, solver = SamplerConfig("ddpm"), SamplerConfig("dpmsolver++", num_inference_steps=10)
    assert (ddpm.clip_sample, ddpm.timestep_spacing) == (True, "leading")
    assert (solver.clip_sample, solver.timestep_spacing) == (False, "linspace")
    assert table(solver).clip is None
    assert table(replace(ddpm, clip_sample=False)).clip is None
    assert table(replace(ddpm, clip_sample_range=2)).clip == 2.0
    with pytest.raises(SamplerError, match="clip_sample: expected False, as dpmsolver"):
        replace(ddpm, type="dpmsolver++", num_inference_steps=10)


LONG_TRAINING = {"beta_schedule": "linear", "num_train_timesteps": 100_000}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"type": "euler"}, r"type: expected one of 'ddpm', 'ddim', 'dpmsolver\+\+'; got 'euler'"),
        ({"type": None}, "type: .* got None"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule: .* got 'sigmoid'"),
        ({"prediction_type": "flow_prediction"}, "prediction_type: .* got 'flow_prediction'"),
        ({"variance_type": "learned_range"}, "variance_type: .* got 'learned_range'"),
        ({"variance_type": "fixed_large_log"}, "variance_type: .* got 'fixed_large_log'"),
        ({"clip_sample": 1}, "clip_sample: expected one of True, False; got 1"),
        ({"clip_sample_range": -1.0}, "clip_sample_range: .* got -1.0"),
        ({"clip_sample_range": math.inf}, "clip_sample_range: .* got inf"),
        ({"clip_sample_range": "1"}, "clip_sample_range: .* got '1'"),
        ({"timestep_spacing": "karras"}, "timestep_spacing: .* got 'karras'"),
        ({"steps_offset": -1}, "steps_offset: .* got -1"),
        (
            {"steps_offset": 1, "timestep_spacing": "linspace"},
            "steps_offset: expected 0, as 'linspace' .* got 1",
        ),
        ({"steps_offset": 1}, r"distinct timesteps in 0\.\.99 \('leading' spacing\); got 100"),
        ({"num_train_timesteps": 1}, "num_train_timesteps: expected an int from 2 to .* got 1"),
        ({"num_train_timesteps": 100.0}, "num_train_timesteps: .* got 100.0"),
        ({"num_inference_steps": 0}, "num_inference_steps: .* got 0"),
        ({"num_inference_steps": True}, "num_inference_steps: .* got True"),
        ({"num_inference_steps": 101}, "num_inference_steps: .* distinct timesteps .* got 101"),
        ({"num_inference_steps": 29, "timestep_spacing": "trailing"}, "distinct timesteps .* got 29"),
        ({"beta_start": math.nan}, "beta_start: expected a number from 0 to 1; got nan"),
        ({"beta_end": 1.5}, "beta_end: .* got 1.5"),
        ({"beta_schedule": "linear", "beta_start": 0.0}, "beta_schedule: .* got 'linear'"),
        ({"beta_schedule": "linear", "beta_end": 1.0}, "beta_schedule: .* got 'linear'"),
        (LONG_TRAINING, "beta_schedule: .* at each of 100000 timesteps, but never all"),
        ({"eta": 0.5}, "eta: expected 0.0, as ddpm has no such setting; got 0.5"),
        ({"set_alpha_to_one": False}, "set_alpha_to_one: .* ddpm has no such setting; got False"),
        ({"solver_order": 1}, "solver_order: .* ddpm has no such setting; got 1"),
        ({"lower_order_final": False}, "lower_order_final: .* ddpm has no such setting; got False"),
        (
            {"final_sigmas_type": "sigma_min"},
            "final_sigmas_type: .* ddpm has no such setting; got 'sigma_min'",
        ),
        ({"type": "ddim", "variance_type": "fixed_large"}, "variance_type: .* ddim has no such setting"),
        ({"type": "ddim", "eta": 1.1}, "eta: expected a number from 0 to 1; got 1.1"),
        ({"type": "ddim", "set_alpha_to_one": None}, "set_alpha_to_one: .* got None"),
        ({"type": "dpmsolver++"}, r"distinct timesteps .* \('linspace' spacing\); got 100"),
        (
            {"type": "dpmsolver++", "clip_sample": True},
            r"clip_sample: expected False, as dpmsolver\+\+ .* got True",
        ),
        ({"type": "dpmsolver++", "solver_order": 3}, "solver_order: expected one of 1, 2; got 3"),
        ({"type": "dpmsolver++", "solver_order": 2.0}, "solver_order: .* got 2.0"),
        ({"type": "dpmsolver++", "lower_order_final": 0}, "lower_order_final: .* got 0"),
        ({"type": "dpmsolver++", "final_sigmas_type": "one"}, "final_sigmas_type: .* got 'one'"),
    ],
)
def test_refused_settings(wrong, expected):
    with pytest.raises(SamplerError, match=expected):
        SamplerConfig.from_dict({"type": "ddpm", **wrong})


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"type": "dpmsolver++", "thresholding": True}, r"got unknown \['thresholding'\]"),
        ({"type": "dpmsolver++", "algorithm_type": "sde-dpmsolver++"}, r"unknown \['algorithm_type'\]"),
        ({"type": "ddim", "use_clipped_model_output": True, 3: 4}, "'use_clipped_model_output', '3'"),
        ({"num_train_timesteps": 100}, "at least a 'type'; got {'num_train"),
        (None, "at least a 'type'; got None"),
        (["type"], "at least a 'type'; got"),
    ],
)
def test_refused_dicts(wrong, expected):
    with pytest.raises(SamplerError, match=expected):
        SamplerConfig.from_dict(wrong)
