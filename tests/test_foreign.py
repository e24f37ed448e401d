"""A policy that shares nothing with ours but the public interface: written from scratch, other names, other sizes."""

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    PNDMScheduler,
)
from torch import nn

import blockcache as bc
from blockcache.errors import EngineError, ObservationError, PolicyError, StepError
from blockcache.models.flops import feed_forward
from blockcache.models.pairing import generate
from blockcache.models.registry import port_of

WIDTH, HIDDEN, TOKENS, ACTION, SEEN, OBS = 24, 40, 5, 2, 3, 4
STEPS = 8


class Denoiser(nn.Module):
    """Places are an nn.Embedding, time goes through a table, conditions are one Linear: not a name of DP-T's."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(ACTION, WIDTH)
        self.pos_emb = nn.Embedding(TOKENS, WIDTH)  # a name of DP-T's after all, but a module
        self.clock = nn.Linear(1, WIDTH)
        self.watch = nn.Linear(OBS, WIDTH)
        layer = nn.TransformerDecoderLayer(WIDTH, 3, HIDDEN, 0.1, batch_first=True, norm_first=True)  # ReLU
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(WIDTH))
        self.leave = nn.Linear(WIDTH, ACTION)

    def forward(self, sample, timestep, cond=None, **kwargs):
        time = torch.as_tensor(timestep, dtype=torch.float32).reshape(-1, 1, 1).expand(len(sample), 1, 1) / 100
        memory = torch.cat([self.clock(time), self.watch(cond)], dim=1)
        return self.leave(self.decoder(self.enter(sample) + self.pos_emb.weight, memory))


class ByName(Denoiser):
    """Runs its layers itself and hands them everything by name."""

    def forward(self, sample, timestep, cond=None, **kwargs):
        x = self.enter(sample) + self.pos_emb.weight
        for layer in self.decoder.layers:
            x = layer(tgt=x, memory=self.watch(cond))
        return self.leave(x)


class Policy(nn.Module):
    """The loop of the public interface: global noise, one scheduler for all calls, a dict in and a dict out."""

    def __init__(self, scheduler=None, model=None, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.model = model or Denoiser()
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.noise_scheduler = scheduler or DDPMScheduler(STEPS * 5, beta_schedule="squaredcos_cap_v2")
        self.num_inference_steps = STEPS
        self.kwargs = kwargs
        self.active = self.most_active = 0
        self.eval()

    def predict_action(self, obs_dict):
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            with torch.no_grad():
                x = self.sample(obs_dict["obs"], obs_dict.get("start"))
        finally:
            self.active -= 1
        return {"action": x[:, 1:4], "action_pred": x}

    def sample(self, cond, start):
        x = torch.randn(len(cond), TOKENS, ACTION) if start is None else start
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x = self.noise_scheduler.step(self.denoise(x, t, cond), t, x, **self.kwargs).prev_sample
        return x

    def denoise(self, x, t, cond):
        return self.model(x, t, cond)


class Bare:
    """Not even a module: an object that holds one."""

    def __init__(self, inner):
        self.model, self.noise_scheduler = inner.model, inner.noise_scheduler
        self.num_inference_steps, self._inner = inner.num_inference_steps, inner

    def predict_action(self, obs_dict):
        return self._inner.predict_action(obs_dict)


SCHEDULERS = {
    "ddpm": (lambda: DDPMScheduler(STEPS * 5, beta_schedule="squaredcos_cap_v2"), {}),
    "ddim": (lambda: DDIMScheduler(STEPS * 5), {"eta": 0.5}),
    "dpmsolver++": (lambda: DPMSolverMultistepScheduler(STEPS * 5), {}),
    "repeats a timestep": (lambda: PNDMScheduler(STEPS * 5, skip_prk_steps=True), {}),
    "float timesteps": (lambda: FlowMatchEulerDiscreteScheduler(STEPS * 5), {}),
}


@pytest.fixture(params=SCHEDULERS)
def any_policy(request):
    make, kwargs = SCHEDULERS[request.param]
    return Policy(make(), **kwargs)


@pytest.fixture
def policy():
    return Policy()


def observe(batch=1, seed=0):
    return {"obs": torch.randn(batch, SEEN, OBS, generator=torch.Generator().manual_seed(seed))}


def act(policy, obs, seed=0):
    return generate(policy.predict_action, obs, seed)["action_pred"]


def test_seen_by_its_shape(policy):
    adapter = port_of(policy).adapter
    assert adapter.family == "dp-t"
    assert [block.name for block in adapter.blocks] == [f"layers.{i}.{k}" for i in (0, 1) for k in ("SA", "CA", "FFN")]
    assert adapter.widths == {"width": WIDTH, "heads": 3, "hidden": HIDDEN}
    assert {block.cost for block in adapter.blocks} == {0}, "its tokens are unknown, so no cost is claimed"


def test_a_known_number_of_tokens_gives_costs(policy):
    """With position embeddings of DP-T's kind the blocks are counted, hidden width included."""
    del policy.model.pos_emb
    policy.model.pos_emb = nn.Parameter(torch.zeros(1, TOKENS, WIDTH))
    policy.model.cond_pos_emb = nn.Parameter(torch.zeros(1, 1 + SEEN, WIDTH))
    adapter = port_of(policy).adapter
    assert {b.cost for b in adapter.blocks if b.kind == "FFN"} == {feed_forward(TOKENS, WIDTH, HIDDEN)}


@pytest.mark.parametrize("batch", [1, 7])
def test_every_step_an_update_is_bit_identical(any_policy, batch):
    plain = act(any_policy, observe(batch))
    with bc.accelerate(any_policy, engine="patched") as fast:
        assert torch.equal(act(any_policy, observe(batch)), plain)
        assert torch.equal(act(fast, observe(batch)), plain)
    assert torch.equal(act(any_policy, observe(batch)), plain)


def test_calibrate_solve_accelerate(any_policy, tmp_path):
    before = {id(module): set(vars(module)) for module in any_policy.modules()}
    plain = act(any_policy, observe(2))
    recording = bc.calibrate(any_policy, [observe(3), observe(2, seed=1)], progress=False)
    assert recording.samples == 5
    recording.save(tmp_path / "r.safetensors")
    schedule = bc.solve(bc.Recording.load(tmp_path / "r.safetensors"), updates=3, union=2)
    schedule.save(tmp_path / "s.json")
    calls = []
    with bc.accelerate(any_policy, bc.Schedule.load(tmp_path / "s.json"), engine="patched") as fast:
        hook = any_policy.model.decoder.layers[1].linear2.register_forward_hook(lambda *args: calls.append(1))
        assert not torch.equal(act(any_policy, observe(2)), plain)
        assert fast.stats().computed == {name: len(steps) for name, steps in schedule.updates.items()}
        assert len(calls) == len(schedule.updates["layers.1.FFN"])
        hook.remove()
    assert torch.equal(act(any_policy, observe(2)), plain)
    assert {id(module): set(vars(module)) for module in any_policy.modules()} == before


def test_an_object_that_is_no_module(policy):
    bare, plain = Bare(policy), act(policy, observe(2))
    recording = bc.calibrate(bare, [observe(2)], progress=False)
    with bc.accelerate(bare, bc.solve(recording, updates=STEPS), engine="patched"):
        assert torch.equal(act(bare, observe(2)), plain)
        assert torch.equal(act(policy, observe(2)), plain)  # the inner policy shares the denoiser and is left alone
    assert "predict_action" not in vars(bare)


def test_layers_called_by_name():
    policy = Policy(model=ByName())
    plain = act(policy, observe(2))
    recording = bc.calibrate(policy, [observe(2)], progress=False)
    with bc.accelerate(policy, engine="patched"):
        assert torch.equal(act(policy, observe(2)), plain)
    with bc.accelerate(policy, bc.fit_teacache(recording, 0.0)):
        assert torch.equal(act(policy, observe(2)), plain)


class WithGradients(Policy):
    """The public policies leave `torch.no_grad` to whoever calls them."""

    def predict_action(self, obs_dict):
        return {"action_pred": self.sample(obs_dict["obs"], None)}


def test_a_policy_that_keeps_gradients():
    """Calibration keeps no graph over all steps; acceleration leaves the caller's choice alone."""
    policy = WithGradients()
    plain, enabled = act(policy, observe(2)), []
    assert plain.requires_grad
    hook = policy.model.register_forward_hook(lambda *args: enabled.append(torch.is_grad_enabled()))
    bc.calibrate(policy, [observe(2)], progress=False)
    hook.remove()
    assert not any(enabled)
    with bc.accelerate(policy, engine="patched"):
        fast = act(policy, observe(2))
    assert fast.requires_grad
    assert torch.equal(fast, plain)


def test_pairing_through_the_global_generator(policy):
    before = torch.get_rng_state()
    assert torch.equal(act(policy, observe(), seed=1), act(policy, observe(), seed=1))
    assert not torch.equal(act(policy, observe(), seed=1), act(policy, observe(), seed=2))
    assert torch.equal(torch.get_rng_state(), before)
    with bc.accelerate(policy, engine="patched") as fast:
        paired = act(fast, observe(), seed=1)
    assert torch.equal(paired, act(policy, observe(), seed=1))


def test_pairing_uses_a_generator_where_there_is_one(make_policy):
    ours, obs = make_policy(), torch.zeros(1, 2, 5)
    right = ours.predict_action(obs, generator=torch.Generator().manual_seed(3))["action"]
    assert torch.equal(generate(ours.predict_action, obs, 3)["action"], right)
    with bc.accelerate(ours, engine="patched") as fast:
        assert torch.equal(generate(ours.predict_action, obs, 3)["action"], right)
        assert torch.equal(generate(fast.predict_action, obs, 3)["action"], right)


@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
def test_the_handle_has_the_policy_s_own_signature(make_policy, engine):
    """Pairing looks for `generator` in it: on a GPU the other way of seeding draws other noise."""
    ours = make_policy()
    expected = inspect.signature(ours.predict_action)
    with bc.accelerate(ours, engine=engine, threads=1) as fast:
        assert inspect.signature(fast.predict_action) == expected
    with pytest.raises(PolicyError, match="was disabled"):
        fast.predict_action(torch.zeros(1, 2, 5))


def test_threads_are_serialised():
    """One scheduler with a memory (DPM-Solver++): two generations at once would spoil each other."""
    policy = Policy(DPMSolverMultistepScheduler(STEPS * 5))
    schedule = bc.Schedule(STEPS, {block.name: [0, 2, 5] for block in port_of(policy).adapter.blocks})
    cases = [observe(1 + index % 3, seed=index) for index in range(6)]
    for case in cases:
        case["start"] = torch.randn(len(case["obs"]), TOKENS, ACTION)
    start = threading.Barrier(len(cases), timeout=30)

    def work(case):
        start.wait()
        return [policy.predict_action(case)["action_pred"] for _ in range(5)]

    with bc.accelerate(policy, schedule, engine="patched") as fast:
        expected = [policy.predict_action(case)["action_pred"] for case in cases]
        with ThreadPoolExecutor(len(cases)) as pool:
            results = list(pool.map(work, cases))
        assert fast.stats().generations == 36
    assert policy.most_active == 1
    for repeated, right in zip(results, expected, strict=True):
        assert all(torch.equal(result, right) for result in repeated)


def test_after_an_exception_the_lock_is_free(policy):
    with bc.accelerate(policy, engine="patched"):
        right = act(policy, observe())
        hook = policy.model.leave.register_forward_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            act(policy, observe(3))
        hook.remove()
        with ThreadPoolExecutor(1) as other:
            assert torch.equal(other.submit(act, policy, observe()).result(timeout=30), right)


# -------------------------------------------------------------------------------------------------------- fingerprints


def test_the_sampler_in_our_words():
    assert port_of(Policy()).sampler.type == "ddpm"
    ddim = port_of(Policy(DDIMScheduler(STEPS * 5), eta=0.5)).sampler
    assert (ddim.type, ddim.eta, ddim.beta_schedule) == ("ddim", 0.5, "linear")
    assert port_of(Policy(DPMSolverMultistepScheduler(STEPS * 5))).sampler.type == "dpmsolver++"


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Policy(PNDMScheduler(STEPS * 5)),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, solver_order=3)),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, solver_type="heun")),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, use_karras_sigmas=True)),
        lambda: Policy(DPMSolverMultistepScheduler(STEPS * 5, euler_at_final=True)),
        lambda: Policy(DDPMScheduler(STEPS * 5, variance_type="learned")),
        lambda: Policy(DDPMScheduler(STEPS * 5, thresholding=True)),
        lambda: Policy(DDPMScheduler(trained_betas=np.linspace(0.001, 0.02, STEPS * 5))),
        lambda: Policy(DDIMScheduler(STEPS * 5), use_clipped_model_output=True),
    ],
)
def test_samplers_that_we_have_no_words_for(policy, tmp_path):
    """They are told apart by their plain settings, and a schedule that is bound to them can still be written."""
    target = port_of(policy())
    assert target.sampler is None
    schedule = bc.Schedule.every_step(len(target.timesteps), target.fingerprint.blocks, target.fingerprint)
    schedule.save(tmp_path / "s.json")
    assert bc.Schedule.load(tmp_path / "s.json").fingerprint == target.fingerprint


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (lambda: Policy(DDIMScheduler(STEPS * 5), eta=0.5), lambda: Policy(DDIMScheduler(STEPS * 5)), "eta"),
        (lambda: Policy(), lambda: Policy(DDPMScheduler(STEPS * 5)), "beta_schedule"),
        (lambda: Policy(PNDMScheduler(STEPS * 5)), lambda: Policy(PNDMScheduler(STEPS * 5, 0.001)), "beta_start"),
        (
            lambda: Policy(DDIMScheduler(STEPS * 5), use_clipped_model_output=True),
            lambda: Policy(DDIMScheduler(STEPS * 5)),
            "use_clipped_model_output",
        ),
    ],
)
def test_two_samplers_differ(one, other, named):
    (difference,) = port_of(one()).fingerprint.differences(port_of(other()).fingerprint)
    assert named in difference


def test_dummies_of_the_public_code_are_no_weights(policy):
    before = port_of(policy).fingerprint
    policy.register_parameter("_dummy_variable", nn.Parameter(torch.zeros(0)))
    policy.model.register_parameter("_dummy_variable", nn.Parameter(torch.zeros(0)))
    assert port_of(policy).fingerprint == before


# ------------------------------------------------------------------------------------------------------------- refused


def test_nan_anywhere_in_the_observation_is_refused(policy):
    bad = torch.full((1, 2), float("nan"))
    for extra in ({"image": bad}, {"nested": {"deep": [1.0, bad]}}, {"image": bad.numpy()}):
        with bc.accelerate(policy, engine="patched"), pytest.raises(ObservationError, match="NaN or infinity"):
            act(policy, observe() | extra)


def test_more_calls_than_steps(policy):
    class Guided(Policy):
        def denoise(self, x, t, cond):
            return 2 * self.model(x, t, cond) - self.model(x, t, torch.zeros_like(cond))

    guided = Guided()
    plain = act(guided, observe())
    with bc.accelerate(guided, engine="patched"), pytest.raises(StepError, match=r"step 1: .* got timestep 35"):
        act(guided, observe())
    assert torch.equal(act(guided, observe()), plain)


def test_one_timestep_per_sample_must_be_the_same(policy):
    class Mixed(Policy):
        def denoise(self, x, t, cond):
            return self.model(x, torch.arange(len(x)) * self.shift + t, cond)

    mixed = Mixed()
    mixed.shift = 0
    plain = act(mixed, observe(3))
    with bc.accelerate(mixed, engine="patched"):
        assert torch.equal(act(mixed, observe(3)), plain)
        mixed.shift = 1
        with pytest.raises(StepError, match="different timesteps for the samples"):
            act(mixed, observe(3))


def test_the_number_of_steps_changed_after_enabling(policy):
    with bc.accelerate(policy, engine="patched"):
        policy.num_inference_steps = STEPS // 2
        with pytest.raises(StepError, match="after enabling"):
            act(policy, observe())
        policy.num_inference_steps = STEPS
        act(policy, observe())


def test_the_whole_loop_engines_say_what_they_lack(policy):
    with pytest.raises(EngineError, match=r"loop engine does not support .*patched"):
        bc.accelerate(policy, engine="loop")
    assert "predict_action" not in vars(policy)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "patched"


def test_enabling_twice(policy):
    with bc.accelerate(policy, engine="patched"), pytest.raises(PolicyError, match="accelerated already"):
        bc.accelerate(policy, engine="patched")


def test_a_broken_family_of_another_package_harms_only_who_needs_it(policy, make_policy, monkeypatch):
    linear = Bare(policy)
    linear.model = nn.Linear(2, 2)
    missed = "dp-t: the denoiser Linear has no decoder.layers of TransformerDecoderLayer"
    for entry, error in (
        ("no_such_package:find", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{__name__}:raises", "ZeroDivisionError: division by zero"),
        (f"{__name__}:STEPS", "TypeError: 'int' object is not callable"),
    ):
        broken = EntryPoint("theirs", entry, "blockcache.families")
        monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group, broken=broken: [broken])
        assert port_of(policy).adapter.family == port_of(make_policy()).adapter.family == "dp-t"
        with pytest.raises(PolicyError) as caught:
            port_of(linear)
        assert f"(theirs: the family itself is broken ({error}); {missed}" in str(caught.value)
        policy.model.train()  # what our own family has to say of the policy is not hidden by somebody's missing package
        with pytest.raises(PolicyError, match="in train mode"):
            port_of(policy)
        policy.model.eval()
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [])
    with pytest.raises(PolicyError) as caught:
        port_of(linear)
    assert f"Bare is no diffusion policy that we know ({missed}" in str(caught.value)


def raises(policy):
    return 1 / 0
