"""The coefficient tables against the diffusers schedulers, step by step along whole trajectories."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blockcache.errors import SamplerError
from blockcache.samplers import DDIM, DDPM, SAMPLERS, DPMSolver, SamplerConfig, SDEDPMSolver, step, table
from sampler_runs import EXACT, SEED, SHAPE, SINGLE, STOCHASTIC, THROUGH_LOG, NumpyArithmetic, assert_same_trajectory

# diffusers hands a tensor to np.array without the new copy argument.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

DIFFUSION = ["ddpm", "ddim", "dpmsolver++", "sde-dpmsolver++"]


PREDICTIONS = pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
CLIPS = pytest.mark.parametrize("clip", [{}, {"clip_sample_range": 0.4}, {"clip_sample": False}])


@PREDICTIONS
@CLIPS
@pytest.mark.parametrize("steps", [100, 25, 16, 10, 1])
@pytest.mark.parametrize("variance_type", ["fixed_small", "fixed_small_log", "fixed_large"])
def test_ddpm_follows_diffusers(variance_type, steps, clip, prediction_type):
    config = DDPM(
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
    config = DDIM(
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
@pytest.mark.parametrize(("solver", "tolerance"), [(DPMSolver, SINGLE), (SDEDPMSolver, STOCHASTIC)])
def test_solvers_follow_diffusers(
    solver, tolerance, solver_order, steps, lower_order_final, final_sigmas_type, prediction_type
):
    config = solver(
        num_inference_steps=steps,
        solver_order=solver_order,
        lower_order_final=lower_order_final,
        final_sigmas_type=final_sigmas_type,
        prediction_type=prediction_type,
    )
    assert_same_trajectory(config, tolerance)


@pytest.mark.parametrize("kind", DIFFUSION)
@pytest.mark.parametrize("beta_schedule", ["squaredcos_cap_v2", "linear", "scaled_linear"])
@pytest.mark.parametrize("betas", [{}, {"beta_start": 0.00085, "beta_end": 0.012}])
@pytest.mark.parametrize("train", [50, 101, 1000])
def test_beta_schedules_follow_diffusers(kind, beta_schedule, betas, train):
    config = SAMPLERS[kind](num_train_timesteps=train, num_inference_steps=10, beta_schedule=beta_schedule, **betas)
    assert_same_trajectory(config)


@pytest.mark.parametrize("kind", DIFFUSION)
@pytest.mark.parametrize(("spacing", "offset"), [("linspace", 0), ("trailing", 0), ("leading", 0), ("leading", 1)])
@pytest.mark.parametrize("steps", [98, 15, 7, 3])
def test_spacings_follow_diffusers(kind, spacing, offset, steps):
    config = SAMPLERS[kind](num_inference_steps=steps, timestep_spacing=spacing, steps_offset=offset)
    assert_same_trajectory(config)


@pytest.mark.parametrize(
    ("config", "tolerance"),
    [
        (DDPM(), 1e-5),
        (DDIM(num_inference_steps=16), 1e-5),
        # Here diffusers subtracts the square of a square root from a number close to it: an ulp becomes 1e-5.
        (DDIM(eta=1.0), 2e-4),
        (DPMSolver(num_inference_steps=20), 1e-5),
    ],
)
def test_diffusers_as_installed_differs_by_its_square_root_only(config, tolerance):
    """An ulp per coefficient (1.2e-7), carried through the loop by the denoiser."""
    assert_same_trajectory(config, tolerance, power=torch.Tensor.__pow__)


def test_a_solver_step_of_no_length_follows_diffusers():
    """All 100 of 100 steps, ending at the sigma of t = 0, where the last step already stands."""
    config = DPMSolver(timestep_spacing="trailing", final_sigmas_type="sigma_min")
    assert_same_trajectory(config, 5e-6)  # a hundred float32 roundings of x in diffusers
    assert table(config).a[-1] == 1
    assert table(config).c[-1] == 0


def test_rdt_settings_follow_diffusers():
    config = DPMSolver(num_train_timesteps=1000, num_inference_steps=5, prediction_type="sample")
    assert_same_trajectory(config, SINGLE)


@st.composite
def configs(draw):
    kind = draw(st.sampled_from(DIFFUSION))
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
    if kind in ("ddpm", "ddim"):
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
        return SAMPLERS[kind](**chosen)
    except SamplerError as refusal:
        assume("distinct timesteps" not in str(refusal))
        raise


@settings(deadline=None, max_examples=150)
@given(configs())
def test_any_accepted_config_follows_diffusers(config):
    assert_same_trajectory(config, {"dpmsolver++": 5e-6, "sde-dpmsolver++": 2e-5}.get(config.type, EXACT))
    assert SamplerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("kind", ["ddim", "dpmsolver++"])
def test_a_perfect_denoiser_is_followed_to_its_clean_sample(kind, prediction_type):
    """Without diffusers: x = signal*x0 + noise*eps stays on that line and ends at x0."""
    shared = {"num_inference_steps": 20, "clip_sample": False}
    levels = table(SAMPLERS[kind](prediction_type="v_prediction", **shared))
    coefficients = table(SAMPLERS[kind](prediction_type=prediction_type, **shared))
    rng = np.random.default_rng(SEED)
    clean, eps = rng.uniform(-1, 1, SHAPE), rng.normal(size=SHAPE)
    x, x0 = levels.x0_x[0] * clean + levels.eps_x[0] * eps, None
    for k in range(20):
        signal, noise = levels.x0_x[k], levels.eps_x[k]
        np.testing.assert_allclose(x, signal * clean + noise * eps, rtol=0, atol=2e-6)
        out = {"epsilon": eps, "sample": clean, "v_prediction": signal * eps - noise * clean}[prediction_type]
        x, x0 = step(NumpyArithmetic(), coefficients.at(k), signal * clean + noise * eps, out, x0, None)
        np.testing.assert_allclose(x0, clean, rtol=0, atol=2e-6)
    np.testing.assert_allclose(x, clean, rtol=0, atol=2e-6)


def test_values_and_statistics_need_neither_torch_nor_diffusers():
    rooms = (
        "samplers",
        "schedule",
        "solvers",
        "observations",
        "measure.statistics",
        "measure.latency",
        "measure.machine",
    )
    names = ", ".join(f"blockcache.{room}" for room in rooms)
    program = f"import sys, {names}; print(sorted({{'torch', 'diffusers'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
