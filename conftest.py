"""Small random policies, so that a whole generation takes milliseconds; verbs and the toy task within this process."""

import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import blockcache as bc
from blockcache import cli
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.loading import save_policy
from blockcache.models.registry import port_of
from blockcache.results.rollouts import Results
from blockcache.samplers import DDIM, DDPM, DPMSolver, Euler, Fitted, SDEDPMSolver
from cli_inputs import STEPS, run_benchmark
from engine_comparison import BLOCKS
from toy_evaluation import ready

TOYS = {"toy": "toy_task:ENTRY", "toy-rdt": "toy_rdt_task:ENTRY"}
torch.set_num_threads(1)
# a busy machine is no failure
settings.register_profile("blockcache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("blockcache")

SAMPLERS = {
    "ddpm": DDPM(num_inference_steps=6),
    "ddim": DDIM(num_inference_steps=6),
    "ddim-eta": DDIM(num_inference_steps=6, eta=0.7),
    "dpmsolver++": DPMSolver(num_inference_steps=6),
    "sde-dpmsolver++": SDEDPMSolver(num_inference_steps=6),
    "ddpm-placed": DDPM(timesteps=[80, 60.5, 40, 20.25, 8, 2]),
    "euler": Euler(num_inference_steps=6),
    "fitted": replace(
        Fitted.of(DDPM(timesteps=[80, 60, 40, 20, 8, 2])),
        timesteps=[81.25, 60.5, 40, 19.75, 8, 2],
        a=[0.5, 0.45, 0.4, 0.3, 0.2, 0.1],
        c=[0, 0.1, -0.05, 0.02, 0.05, -0.1],
    ),
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


@pytest.fixture
def port(policy):
    return port_of(policy)


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
def exports(tmp_path_factory):
    """The bytes of a tiny policy's exports, under a schedule and in full precision (with a Scan)."""
    directory = tmp_path_factory.mktemp("exports")
    schedule = bc.Schedule(6, dict.fromkeys(BLOCKS, (0, 2, 4)))
    for name, followed in (("schedule", schedule), ("full", None)):
        bc.export_policy(tiny_policy(), followed, directory / name)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


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


@pytest.fixture(scope="session")
def schedule(random_updates):
    """One that the tiny policy can follow."""
    return bc.Schedule(6, random_updates(BLOCKS, 6), origin={"method": "random"})


@pytest.fixture
def exported(policy, schedule, exports_stay_here, tmp_path):
    """The file of an export of the tiny policy under the schedule."""
    path = tmp_path / "policy.onnx"
    bc.export_policy(policy, schedule, path)
    return path


@pytest.fixture
def export(policy, tmp_path):
    """The file of an export of the tiny policy in full precision."""
    path = tmp_path / "policy.onnx"
    bc.export_policy(policy, None, path)
    return path


@pytest.fixture(scope="session")
def observed(observe):
    """Makes what a loop takes, for the tiny policy."""
    return lambda batch=1: {"obs": observe(batch)}


@pytest.fixture
def exports_stay_here(monkeypatch, tmp_path):
    """Where exports are kept during a test; nothing is written to the home directory."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(directory))
    return directory


@pytest.fixture(params=["loop", "onnx"])
def engine(request):
    return request.param


@pytest.fixture
def in_an_empty_directory(exports_stay_here, monkeypatch, tmp_path):
    """Defaults such as `schedule.json` are written here, and exports are kept here."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def policy_directory(make_policy, tmp_path):
    """A tiny policy directory with observations in it."""
    directory = tmp_path / "policy"
    save_policy(make_policy(sampler=DDPM(num_inference_steps=STEPS)), directory)
    observations = np.random.default_rng(0).standard_normal((8, 2, 5), dtype=np.float32)
    np.savez(directory / "observations.npz", obs=observations)
    return directory


@pytest.fixture
def command(capsys):
    """Runs a verb in this process: exit code, output and errors."""

    def run(*words):
        try:
            cli.main([str(word) for word in words])
            code = 0
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def blockcache(capsys):
    """Runs a verb in this process: its standard output."""

    def run(*words):
        capsys.readouterr()
        cli.main([str(word) for word in words])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a verb that must fail: the one line on standard error."""

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main([str(word) for word in words])
        assert caught.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        (line,) = [line for line in lines if not is_progress(line)]
        assert line.startswith("error: ")
        assert "Traceback" not in line
        return line.removeprefix("error: ")

    return run


def is_progress(line):
    return not line.strip() or "it/s" in line or "%|" in line


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """One small run of the whole benchmark; torch.compile is not available, and no other package brings rows."""
    return run_benchmark(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def no_library(monkeypatch):
    """The library's own script is large and not ours; a page without it is as good for these tests."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* the library */")


@pytest.fixture
def toy_by_name(monkeypatch):
    """The toy tasks can be found by their names, as if another package brought them."""
    points = [EntryPoint(name, place, "blockcache.tasks") for name, place in TOYS.items()]
    monkeypatch.setattr("blockcache.tasks.base.entry_points", lambda group: points)


@pytest.fixture(scope="session")
def reference(make_policy, tmp_path_factory):
    """The file of a toy evaluation that was never interrupted, by one process."""
    directory = tmp_path_factory.mktemp("reference")
    ready(make_policy(), directory / "state").run(progress=False).save(directory / "results.json")
    return (directory / "results.json").read_bytes()


@pytest.fixture
def results(reference, tmp_path):
    (tmp_path / "reference.json").write_bytes(reference)
    return Results.load(tmp_path / "reference.json")


@pytest.fixture
def clip(monkeypatch):
    """CLIP's encoders: those of transformers where it is installed, else ones that give the same."""
    if find_spec("transformers") is None:
        import small_clip

        monkeypatch.setitem(sys.modules, "transformers", small_clip.stand_in())
