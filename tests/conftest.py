"""Small random policies, so that a whole generation takes milliseconds; verbs and the toy task within this process."""

from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import blockcache.cli
import blockcache.tasks.base
from blockcache.policies import DiffusionTransformerPolicy, DPTConfig
from blockcache.samplers import SamplerConfig

torch.set_num_threads(1)
# a busy machine is no failure
settings.register_profile("blockcache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("blockcache")

SAMPLERS = {
    "ddpm": SamplerConfig("ddpm", num_inference_steps=6),
    "ddim": SamplerConfig("ddim", num_inference_steps=6),
    "ddim-eta": SamplerConfig("ddim", num_inference_steps=6, eta=0.7),
    "dpmsolver++": SamplerConfig("dpmsolver++", num_inference_steps=6),
}
FORMS = {
    "decoder": {},
    "transformer-condition": {"n_cond_layers": 2},
    "encoder-only": {"time_as_cond": False, "obs_as_cond": False},
}


def randomise(module, seed=0):
    """Weights large enough for each block to matter. torch's own start would make every residual almost nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm_gain = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if norm_gain else 0.3 * noise)
    return module


def tiny_config(**changes):
    settings = {
        "obs_dim": 5,
        "action_dim": 3,
        "horizon": 6,
        "n_obs_steps": 2,
        "n_action_steps": 4,
        "n_layer": 2,
        "n_head": 2,
        "n_emb": 16,
        "sampler": SAMPLERS["ddpm"],
    }
    return DPTConfig(**settings | changes)


def tiny_policy(seed=0, **changes):
    policy = randomise(DiffusionTransformerPolicy(tiny_config(**changes)), seed)
    generator = torch.Generator().manual_seed(seed)
    for field in (policy.normalizer.obs, policy.normalizer.action):
        field.scale.copy_(0.5 + torch.rand(field.scale.shape, generator=generator))
        field.offset.copy_(torch.randn(field.offset.shape, generator=generator))
    return policy.eval()


@pytest.fixture(scope="session")
def make_policy():
    """Makes a tiny random policy; keywords change its config, `seed` its weights."""
    return tiny_policy


@pytest.fixture
def policy():
    return tiny_policy()


@pytest.fixture(scope="session")
def samplers():
    return SAMPLERS


@pytest.fixture(params=SAMPLERS)
def sampler(request):
    return SAMPLERS[request.param]


@pytest.fixture(params=FORMS)
def form(request):
    """The config of each form of the denoiser."""
    return FORMS[request.param]


@pytest.fixture(scope="session")
def observe():
    """Makes an observation batch for the tiny policy."""
    return lambda batch=1, seed=0: torch.randn(batch, 2, 5, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def run():
    """One generation with a fixed seed; the whole chunk."""

    def generate(policy, obs, seed=0):
        return policy.predict_action(obs, generator=torch.Generator().manual_seed(seed))["action_pred"]

    return generate


@pytest.fixture(scope="session")
def random_updates():
    """Makes valid update steps: 0, and a random part of the others, for each block."""

    def make(names, steps, seed=0, share=0.4):
        rng = np.random.default_rng(seed)
        return {name: (0, *(step for step in range(1, steps) if rng.random() < share)) for name in names}

    return make


@pytest.fixture
def command(capsys):
    """Runs a verb in this process: exit code, output and errors."""

    def run(*words):
        try:
            blockcache.cli.main([str(word) for word in words])
            code = 0
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def toy_by_name(monkeypatch):
    """The toy task can be found by its name, as if another package brought it."""
    point = EntryPoint("toy", "toy_task:ENTRY", "blockcache.tasks")
    monkeypatch.setattr(blockcache.tasks.base, "entry_points", lambda group: [point])
