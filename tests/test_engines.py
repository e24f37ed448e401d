"""One contract for both whole-loop engines: what loop and onnx promise, checked against the patched engine."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch
from torch import nn

import blockcache as bc
from blockcache.errors import EngineError, ObservationError, PolicyError, ScheduleError, StaleWeightsError
from blockcache.samplers import SamplerConfig
from blockcache.teacache import Rule

CLOSE = 1e-5  # normalised units; the promise is 1e-4
BLOCKS = tuple(f"layers.{index}.{kind}" for index in (0, 1) for kind in ("SA", "CA", "FFN"))


def sampler(kind, steps=6, **settings):
    if kind == "dpmsolver++":  # does not clip: from the cosine schedule's end everything would drown in large numbers
        settings = {"beta_schedule": "linear", **settings}
    return SamplerConfig(kind, num_inference_steps=steps, **settings)


SAMPLERS = {
    "ddpm": sampler("ddpm"),
    "ddpm, fixed_large": sampler("ddpm", variance_type="fixed_large"),
    "ddpm, no clipping": sampler("ddpm", clip_sample=False),
    "ddpm, clipped at 2": sampler("ddpm", clip_sample_range=2.0),
    "ddpm, sample": sampler("ddpm", prediction_type="sample"),
    "ddpm, v": sampler("ddpm", prediction_type="v_prediction"),
    "ddpm, trailing": sampler("ddpm", timestep_spacing="trailing", steps=5),  # draws at its last step too
    "ddpm, one step": sampler("ddpm", steps=1),
    "ddim": sampler("ddim"),
    "ddim, eta 0.7": sampler("ddim", eta=0.7),
    "ddim, eta 0.7, no clipping": sampler("ddim", eta=0.7, clip_sample=False),
    "ddim, sample": sampler("ddim", prediction_type="sample"),
    "ddim, v, eta 0.7": sampler("ddim", prediction_type="v_prediction", eta=0.7),
    "ddim, one step": sampler("ddim", steps=1),
    "dpmsolver++, order 1": sampler("dpmsolver++", solver_order=1),
    "dpmsolver++, order 2": sampler("dpmsolver++"),
    "dpmsolver++, order 2 to the end": sampler("dpmsolver++", lower_order_final=False, final_sigmas_type="sigma_min"),
    "dpmsolver++, sample": sampler("dpmsolver++", prediction_type="sample"),
    "dpmsolver++, v": sampler("dpmsolver++", prediction_type="v_prediction"),
    "dpmsolver++, one step": sampler("dpmsolver++", steps=1),
}
SHAPES = {
    "one layer": {"n_layer": 1},
    "one head": {"n_head": 1},
    "four heads": {"n_head": 4, "n_layer": 3},
    "not causal": {"causal_attn": False},
    "one observation": {"n_obs_steps": 1},
    "as many observations as actions": {"n_obs_steps": 6, "n_action_steps": 1},
    "one action": {"horizon": 2, "n_action_steps": 1},
    "one number": {"action_dim": 1, "obs_dim": 1},
}


@pytest.fixture(autouse=True)
def exports_stay_here(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKCACHE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["loop", "onnx"])
def engine(request):
    return request.param


def accelerate(policy, schedule=None, engine="loop", **settings):
    return bc.accelerate(policy, schedule, engine=engine, threads=1, **settings)


def observe(policy, batch=1, seed=0):
    return torch.randn(batch, policy.n_obs_steps, policy.obs_dim, generator=generator(seed))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def act(policy, batch=1, seed=0):
    """All that comes out for a random observation."""
    return policy.predict_action(observe(policy, batch, seed), generator=generator(seed))


def difference(policy, found, expected):
    """The largest one in normalised units, as a share of the largest value where that is above 1 (no clipping)."""
    assert found.shape == expected.shape
    scale = policy.normalizer.action.scale
    size = max(1.0, float((expected * scale).abs().max()))
    return float(((found - expected) * scale).abs().max()) / size


def names(policy):
    return [f"layers.{index}.{kind}" for index in range(policy.config.n_layer) for kind in ("SA", "CA", "FFN")]


def schedule_for(policy, random_updates, seed=0):
    steps = policy.num_inference_steps
    return bc.Schedule(steps, random_updates(names(policy), steps, seed))


def assert_equal_to_patched(policy, schedule, engine):
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = {batch: act(policy, batch)["action_pred"] for batch in (1, 3)}
    with accelerate(policy, schedule, engine) as fast:
        for batch in (1, 3, 1):  # the batch may change from call to call
            found = act(fast.policy, batch)
            assert difference(policy, found["action_pred"], expected[batch]) < CLOSE
            assert torch.equal(found["action"], found["action_pred"][:, policy.config.executed])
    return expected[1]


# -- the same actions


@pytest.mark.parametrize("setting", SAMPLERS.values(), ids=SAMPLERS)
def test_a_schedule_gives_what_the_patched_engine_gives(engine, make_policy, random_updates, setting):
    policy = make_policy(sampler=setting)
    schedule = schedule_for(policy, random_updates)
    full, skipped = act(policy)["action_pred"], assert_equal_to_patched(policy, schedule, engine)
    if setting.num_inference_steps > 1:
        assert difference(policy, skipped, full) > 1e-3, "or the comparison means little"


@pytest.mark.parametrize("setting", SAMPLERS.values(), ids=SAMPLERS)
def test_full_precision_gives_what_the_plain_policy_gives(engine, make_policy, setting):
    policy = make_policy(sampler=setting)
    expected = {batch: act(policy, batch)["action_pred"] for batch in (1, 3)}
    with accelerate(policy, None, engine) as fast:
        for batch in (1, 3, 1):
            assert difference(policy, act(fast.policy, batch)["action_pred"], expected[batch]) < CLOSE


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
def test_other_shapes(engine, make_policy, random_updates, changes, full):
    policy = make_policy(**changes)
    assert_equal_to_patched(policy, None if full else schedule_for(policy, random_updates), engine)


@pytest.mark.parametrize("seed", range(4))
def test_long_random_schedules(engine, make_policy, random_updates, seed):
    policy = make_policy(seed, n_layer=3, sampler=sampler("ddpm", steps=25))
    schedule = bc.Schedule(25, random_updates(names(policy), 25, seed, share=(0.05, 0.2, 0.5, 0.9)[seed]))
    assert_equal_to_patched(policy, schedule, engine)


def test_a_schedule_with_hardly_anything_to_compute(engine, make_policy):
    policy = make_policy()
    assert_equal_to_patched(policy, bc.Schedule(6, dict.fromkeys(BLOCKS, (0,))), engine)


def test_skipping_changes_the_action(engine, policy):
    """The other tests could not fail if nothing depended on the schedule."""
    full = act(policy)["action_pred"]
    for name in BLOCKS:
        updates = {block: (0,) if block == name else range(6) for block in BLOCKS}
        with accelerate(policy, bc.Schedule(6, updates), engine) as fast:
            assert difference(policy, act(fast.policy)["action_pred"], full) > 1e-3, name


# -- noise and observations


@pytest.mark.parametrize("setting", ["ddpm", "ddim, eta 0.7", "ddpm, trailing", "dpmsolver++, order 2"])
def test_noise_from_a_generator_a_tensor_or_torch_itself(engine, make_policy, setting):
    policy = make_policy(sampler=SAMPLERS[setting])
    obs = observe(policy, 3)
    expected = policy.predict_action(obs, generator=generator(5))["action_pred"]
    noise = policy.draw_noise(3, generator(5))
    after = generator(5)
    policy.predict_action(obs, generator=after)
    with accelerate(policy, None, engine, output="action") as fast:
        own = generator(5)
        slices = [fast.predict_action(obs, generator=own)["action"], fast.predict_action(obs, noise=noise)["action"]]
        torch.manual_seed(5)
        slices.append(fast.predict_action(obs)["action"])
    for found in slices:
        assert difference(policy, found, expected[:, policy.config.executed]) < CLOSE
    assert torch.equal(own.get_state(), after.get_state()), "as much noise is drawn, in the same order"


def test_noise_of_another_shape_is_refused(engine, policy):
    noise = policy.draw_noise(1)
    with accelerate(policy, None, engine) as fast:
        for wrong in (noise[:-1], noise[:, :, :-1], policy.draw_noise(2)):
            with pytest.raises(ObservationError, match="noise has shape"):
                fast.predict_action(observe(policy), noise=wrong)


def test_observations_come_in_many_forms(engine, policy):
    obs = observe(policy, 2)
    expected = policy.predict_action(obs, generator=generator())["action"]
    forms = [
        {"obs": obs},
        obs.numpy(),
        obs.double(),
        obs.clone().requires_grad_(),
        obs.transpose(0, 2).contiguous().transpose(0, 2),  # not contiguous
        {"obs": np.asarray(obs, dtype=np.float64), "also": "ignored"},
    ]
    with accelerate(policy, None, engine) as fast:
        for form in forms:
            found = fast.predict_action(form, generator=generator())["action"]
            assert not found.requires_grad
            assert difference(policy, found, expected) < CLOSE


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (torch.zeros(1, 3, 5), r"shape \(1, 3, 5\), expected \(batch, 2, 5\)"),
        (torch.zeros(1, 2, 4), r"shape \(1, 2, 4\), expected \(batch, 2, 5\)"),
        (torch.zeros(2, 5), r"expected \(batch, 2, 5\)"),
        (torch.zeros(0, 2, 5), r"expected \(batch, 2, 5\)"),
        (torch.full((1, 2, 5), torch.nan), "NaN or infinity"),
        (torch.full((1, 2, 5), -torch.inf), "NaN or infinity"),
        (torch.full((1, 2, 5), 1e300, dtype=torch.float64), "NaN or infinity"),  # infinite in single precision
        ({"image": torch.zeros(1, 2, 5)}, "no key 'obs'"),
        ("nothing", "not an array"),
    ],
)
def test_observations_that_are_refused(engine, policy, wrong, sentence):
    expected = act(policy)["action"]
    with accelerate(policy, None, engine) as fast:
        with pytest.raises(ObservationError, match=sentence):
            fast.predict_action(wrong)
        assert fast.stats().generations == 0
        assert difference(policy, act(fast.policy)["action"], expected) < CLOSE  # the next one is right


# -- output="action"


@pytest.mark.parametrize("n_action_steps", [1, 4, 5])  # 5 reaches the end of the horizon
@pytest.mark.parametrize("full", [False, True], ids=["schedule", "full"])
def test_executed_actions_only(engine, make_policy, random_updates, n_action_steps, full):
    policy = make_policy(n_action_steps=n_action_steps)
    schedule = None if full else schedule_for(policy, random_updates)
    with bc.accelerate(policy, schedule, engine="patched"):
        expected = {batch: act(policy, batch)["action"] for batch in (1, 3)}
    with accelerate(policy, schedule, engine, output="action") as fast:
        for batch in (1, 3):
            found = act(fast.policy, batch)
            assert list(found) == ["action"]
            assert difference(policy, found["action"], expected[batch]) < CLOSE


@pytest.mark.parametrize("chosen", ["loop", "onnx", "auto"])
def test_executed_actions_only_needs_causal_attention(make_policy, chosen):
    policy = make_policy(causal_attn=False)
    with pytest.raises(EngineError, match="needs causal attention, which this policy lacks"):
        accelerate(policy, None, chosen, output="action")
    assert "predict_action" not in vars(policy)


def test_a_mask_that_hides_more_than_the_future_is_obeyed(engine, make_policy, random_updates):
    """Causal, but with a window: not what ONNX calls causal, and not to be cut short."""
    policy = make_policy()
    with torch.no_grad():
        policy.model.mask.copy_(policy.model.mask + torch.full((6, 6), -torch.inf).tril(diagonal=-3))
    assert_equal_to_patched(policy, schedule_for(policy, random_updates), engine)
    with pytest.raises(EngineError, match="causal"):
        accelerate(policy, None, engine, output="action")


# -- attached and detached


def test_two_threads_at_once(engine, make_policy, random_updates):
    policy = make_policy()
    with accelerate(policy, schedule_for(policy, random_updates), engine) as fast:
        alone = [act(policy, 1 + seed % 3, seed)["action"] for seed in range(12)]
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(lambda seed: act(policy, 1 + seed % 3, seed)["action"], range(12)))
        assert fast.stats().generations == 24
    assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(alone, together, strict=True))


def test_disable_leaves_nothing_behind(engine, policy, random_updates):
    before, attributes = act(policy)["action_pred"], set(vars(policy))
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    fast = accelerate(policy, schedule_for(policy, random_updates), engine)
    act(policy)
    assert list(policy.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items())
    fast.disable()
    fast.disable()
    assert set(vars(policy)) == attributes
    assert torch.equal(act(policy)["action_pred"], before)
    with pytest.raises(PolicyError, match="was disabled"):
        fast.predict_action(observe(policy))
    with accelerate(policy, None, engine) as again:  # and once more
        assert difference(policy, act(again.policy)["action_pred"], before) < CLOSE


@pytest.mark.parametrize("second", ["loop", "onnx", "patched", "auto"])
def test_enabling_twice_is_refused(engine, policy, second):
    with accelerate(policy, None, engine):
        with pytest.raises(PolicyError, match=r"accelerated already; call disable\(\) first"):
            accelerate(policy, None, second)
        act(policy)


@pytest.mark.parametrize("clone", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_copying_while_enabled_is_refused(engine, policy, clone):
    with accelerate(policy, None, engine), pytest.raises(PolicyError, match="cannot be"):
        clone(policy)
    clone(policy)


def test_another_policy_with_the_same_denoiser_is_not_touched(engine, policy, random_updates):
    other = policy.with_sampler(SAMPLERS["ddim"])
    before = act(other)["action_pred"]
    with accelerate(policy, schedule_for(policy, random_updates), engine):
        assert torch.equal(act(other)["action_pred"], before)
        with accelerate(other, None, engine):
            assert difference(policy, act(other)["action_pred"], before) < CLOSE


def test_stats_count_finished_generations(engine, policy):
    updates = {name: (0, 2) if name.endswith("SA") else (0,) for name in BLOCKS}
    with accelerate(policy, bc.Schedule(6, updates), engine) as fast:
        assert fast.stats().generations == 0
        act(policy, batch=3)
        act(policy)
        stats = fast.stats()
    assert (stats.engine, stats.generations) == (engine, 2)
    assert list(stats.computed) == list(BLOCKS)
    assert {stats.computed["layers.0.SA"], stats.computed["layers.1.FFN"]} == {4, 2}
    assert {stats.reused["layers.0.SA"], stats.reused["layers.1.FFN"]} == {8, 10}
    assert stats.notes == ("the schedule was made for no weights in particular",)


def test_full_precision_reuses_nothing(engine, policy):
    with accelerate(policy, None, engine) as fast:
        act(policy)
    assert fast.stats().reused_share == 0
    assert set(fast.stats().computed.values()) == {6}


# -- weights that change


def _edit(policy, other):
    with torch.no_grad():
        policy.model.decoder.layers[1].linear2.bias[3] += 1


def _load(policy, other):
    policy.load_state_dict(other.state_dict())


def _write_around_torch(policy, other):
    for own, new in zip(policy.parameters(), other.parameters(), strict=True):
        own.data.copy_(new)


def _write_one_around_torch(policy, other):
    policy.model.decoder.layers[0].self_attn.in_proj_weight.data.copy_(
        other.model.decoder.layers[0].self_attn.in_proj_weight
    )


def _new_storage(policy, other):
    policy.model.head.weight.data = policy.model.head.weight.data.clone()


def _new_parameter(policy, other):
    policy.model.pos_emb = nn.Parameter(other.model.pos_emb.detach().clone())


def _new_module(policy, other):
    policy.model.decoder.layers[0].linear1 = other.model.decoder.layers[0].linear1


def _new_denoiser(policy, other):
    policy.model = other.model


def _normaliser(policy, other):
    policy.normalizer.action.scale.mul_(2)


def _mask_gone(policy, other):
    policy.model.mask = None


def _double(policy, other):
    policy.double()


EDITS = [
    _edit, _load, _write_around_torch, _write_one_around_torch, _new_storage, _new_parameter, _new_module, _new_denoiser,
    _normaliser, _mask_gone, _double,
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=[edit.__name__.strip("_") for edit in EDITS])
def test_changed_weights_are_noticed(engine, make_policy, edit):
    policy = make_policy()
    fast = accelerate(policy, None, engine)
    act(policy)
    edit(policy, make_policy(seed=1))
    for _ in range(2):
        with pytest.raises(StaleWeightsError, match=r"weights changed .* disable\(\) and accelerate again"):
            act(policy)
    fast.disable()
    expected = act(policy)["action_pred"]
    with bc.accelerate(policy, None, engine="loop") as fast:
        assert difference(policy, act(fast.policy)["action_pred"], expected) < CLOSE


def test_what_is_no_change_is_not_taken_for_one(engine, make_policy):
    with torch.inference_mode():  # whose tensors have no version counter
        policy = make_policy()
        policy.normalizer.obs.input_stats.get_buffer("std").fill_(torch.nan)  # never equal to itself, and never used
    policy.register_buffer("nothing", torch.empty(0))
    expected = act(policy)["action"]
    with accelerate(policy, None, engine) as fast:
        policy.requires_grad_(False)
        with torch.inference_mode():
            act(policy)
        assert difference(policy, act(fast.policy)["action"], expected) < CLOSE


def test_another_sampler_is_noticed(engine, policy):
    with accelerate(policy, None, engine):
        policy.config = replace(policy.config, sampler=SAMPLERS["ddim"])
        with pytest.raises(EngineError, match=r"sampler or sizes changed .* disable\(\) and accelerate again"):
            act(policy)


# -- what is refused


def _relu(policy):
    policy.model.decoder.layers[1].activation = nn.functional.relu


def _tanh_gelu(policy):
    policy.model.decoder.layers[0].activation = nn.GELU(approximate="tanh")


def _encoder_relu(policy):
    policy.model.encoder[1] = nn.ReLU()


def _encoder_longer(policy):
    policy.model.encoder.append(nn.Mish())


def _eps(policy):
    policy.model.ln_f.eps = 0.5


def _rms(policy):
    policy.model.decoder.layers[1].norm2 = nn.RMSNorm(16)


def _final_norm(policy):
    policy.model.decoder.norm = nn.LayerNorm(16)


def _zero_attention(policy):
    policy.model.decoder.layers[0].multihead_attn.add_zero_attn = True


def _no_bias(policy):
    layer = nn.TransformerDecoderLayer(16, 2, 64, 0.0, "gelu", batch_first=True, norm_first=True, bias=False)
    policy.model.decoder.layers[1] = layer


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n_cond_layers": 1}, "a transformer condition encoder"),
        ({"time_as_cond": False, "obs_as_cond": False}, "the encoder-only form"),
        ({"obs_as_cond": False}, "in-painted observations"),
        (_relu, "an activation other than GELU"),
        (_tanh_gelu, "an activation other than GELU"),
        (_encoder_relu, "a condition encoder other than Linear, Mish, Linear"),
        (_encoder_longer, "a condition encoder other than Linear, Mish, Linear"),
        (_eps, "norms with different eps"),
        (_rms, "norms other than LayerNorm"),
        (_final_norm, "a decoder with a final norm of its own"),
        (_zero_attention, "attention of another kind"),
        (_no_bias, "a policy without the tensor model.decoder.layers.1"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_forms_that_only_the_patched_engine_runs(engine, make_policy, change, sentence):
    policy = make_policy() if callable(change) else make_policy(**change)
    if callable(change):
        change(policy)
        policy.eval()
    expected = act(policy)["action_pred"]
    with pytest.raises(EngineError) as caught:
        accelerate(policy, None, engine)
    assert str(caught.value).startswith(f"the {engine} engine does not support {sentence}")
    assert str(caught.value).endswith('; use engine="patched"')
    assert "predict_action" not in vars(policy)
    with bc.accelerate(policy) as fast:  # auto
        assert fast.engine == "patched"
        assert torch.allclose(act(policy)["action_pred"], expected, rtol=0, atol=1e-6)


def test_train_mode_is_refused(engine, policy):
    policy.train()
    with pytest.raises(PolicyError, match=r"train mode; call policy.eval\(\) first"):
        accelerate(policy, None, engine)
    policy.eval()
    with accelerate(policy, None, engine):
        policy.train()
        with pytest.raises(PolicyError, match="train mode"):
            act(policy)


def test_other_arguments_are_refused(engine, policy):
    obs = observe(policy)
    with accelerate(policy, None, engine):
        policy.predict_action(obs=obs)
        for given, named in (
            ([], {}),
            ([obs, obs], {}),
            ([obs], {"obs": obs}),
            ([], {"other": obs}),
            ([obs], {"x": 1}),
        ):
            with pytest.raises(TypeError, match=r"takes one observation \(obs\)"):
                policy.predict_action(*given, **named)


def test_teacache_is_refused(engine, policy):
    rule = Rule((1.0, 0.0), 0.1, 6)
    with pytest.raises(EngineError, match=r'TeaCache decides while it runs: it needs engine="patched"'):
        accelerate(policy, rule, engine)
    with bc.accelerate(policy, rule) as fast:
        assert fast.engine == "patched"


def test_a_schedule_for_another_policy_is_refused(engine, policy):
    with pytest.raises(ScheduleError, match="steps 6 instead of 5"):
        accelerate(policy, bc.Schedule.every_step(5, BLOCKS), engine)
    for schedule in ("schedule.json", {}):
        with pytest.raises(ScheduleError, match="needs a Schedule"):
            accelerate(policy, schedule, engine)


@pytest.mark.parametrize("choice", [{"engine": "cuda"}, {"output": "all"}, {"check": "none"}])
def test_unknown_choices_are_refused(policy, choice):
    with pytest.raises(EngineError, match=r"unknown .*, known are"):
        bc.accelerate(policy, **choice)


def test_patched_computes_the_whole_chunk(policy):
    with pytest.raises(EngineError, match='output="action" needs engine="loop" or "onnx"'):
        bc.accelerate(policy, engine="patched", output="action")


# -- which engine


def _missing(package):
    raise PackageNotFoundError(package)


def test_auto_takes_the_fastest_that_can(policy, monkeypatch, random_updates):
    expected = act(policy)["action_pred"]
    with bc.accelerate(policy) as fast:
        assert fast.engine == fast.stats().engine == "onnx"
        assert difference(policy, act(policy)["action_pred"], expected) < CLOSE
    with bc.accelerate(policy, output="action") as fast:
        assert fast.engine == "onnx"
    monkeypatch.setattr("blockcache.engines.onnx.version", _missing)
    with bc.accelerate(policy, schedule_for(policy, random_updates)) as fast:
        assert fast.engine == "loop"
        act(policy)
    with bc.accelerate(policy, output="action") as fast:
        assert fast.engine == fast.stats().engine == "loop"
    policy.model.decoder.layers[0].activation = nn.functional.relu
    with bc.accelerate(policy) as fast:
        assert fast.engine == fast.stats().engine == "patched"
        act(policy)


def test_auto_goes_on_without_room_for_the_export(policy, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blockcache.files.os.fsync", full)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "loop"
