"""The adaLN DiT: gates, exact savings, files, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import blockcache as bc
from blockcache.errors import BlockcacheError, EngineError, PolicyError
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM, Euler
from blockcache.schedule import Schedule
from dit_policies import (
    ACTION,
    EXECUTED,
    SAMPLERS,
    STEPS,
    TOKENS,
    Block,
    LivePolicy,
    live_observation,
    tiny_dit,
    tiny_observation,
)

pytestmark = pytest.mark.usefixtures("exports_stay_here")
BLOCKS = [f"layers.{layer}.{kind}" for layer in range(2) for kind in ("SA", "FFN")]


def seeded(call, obs):
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(4)
        return call(obs)


@pytest.mark.parametrize("engine", ["patched", "loop", "onnx"])
def test_a_kept_block_follows_the_present_gate(engine):
    """By arithmetic: every block is computed at the first step alone, and then multiplied by each step's own gate."""
    policy, obs, kept = tiny_dit(), tiny_observation(2), {}
    vector = policy.encode(policy.check(obs))
    denoiser = policy.noise_predictor

    def denoised(x, timestep, condition):
        features = torch.cat([denoiser.time_mlp(timestep.expand(len(x))), condition], dim=-1)
        x = denoiser.input_proj(x)
        for index, layer in enumerate(denoiser.transformer_blocks):
            a, b, c, d, e, f = layer.adaLN_modulation(features)[:, None].chunk(6, dim=-1)
            h = layer.norm1(x) * (1 + b) + a
            x = x + c * kept.setdefault((index, "SA"), layer.attn(h))
            h = layer.norm2(x) * (1 + e) + d
            x = x + f * kept.setdefault((index, "FFN"), layer.mlp(h))
        return denoiser.output_proj(x)

    from blockcache.models.sampling import denoise

    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        sample = denoise(
            policy.sampler,
            lambda x, t: denoised(x, t, vector),
            (2, TOKENS, ACTION),
            vector,
            generator=generator,
        )
        expected = policy.normalizer.action.unnormalize(sample)
    with bc.accelerate(policy, Schedule(STEPS, {name: [0] for name in BLOCKS}), engine):
        found = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action_pred"]
    assert torch.allclose(found, expected, atol=2e-5)
    full = policy.predict_action(obs, generator=torch.Generator().manual_seed(0))["action_pred"]
    assert not torch.allclose(found, full, atol=1e-2)  # so that keeping made a difference


def test_fewer_steps_on_a_flow():
    policy = LivePolicy("euler")
    port = port_of(policy)
    before = seeded(policy._generate_actions, live_observation(1))
    other = port.with_sampler(Euler(num_inference_steps=2))
    calls = []
    hook = policy.noise_predictor.register_forward_hook(lambda *_: calls.append(1))
    found = seeded(other.policy._generate_actions, live_observation(1))
    hook.remove()
    assert len(calls) == 2
    with bc.accelerate(other.policy, None, "loop"):
        assert torch.allclose(seeded(other.policy._generate_actions, live_observation(1)), found, atol=1e-5)
    assert torch.equal(seeded(policy._generate_actions, live_observation(1)), before)


def test_a_live_policy_takes_any_sampler_of_its_diffusion():
    port = port_of(LivePolicy("ddpm"))
    placed = DDIM(timesteps=[15.5, 9, 2.25], num_train_timesteps=20, eta=0.5)
    other = port.with_sampler(placed)
    plain = seeded(other.policy._generate_actions, live_observation(1))
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(other.policy, None, engine):
            assert torch.allclose(seeded(other.policy._generate_actions, live_observation(1)), plain, atol=1e-5), engine


def test_select_action_is_accelerated_through_its_queues():
    policy = LivePolicy("ddpm")
    obs = live_observation(1)
    policy._queues["observation.state"] = list(obs["observation.state"].unbind(1))
    words = {name: value for name, value in obs.items() if "language" in name}
    plain = seeded(policy.predict_action_chunk, words)
    assert torch.is_tensor(plain)
    assert plain.shape == (1, EXECUTED, ACTION)
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(policy, None, engine) as fast:
            assert torch.allclose(seeded(policy.predict_action_chunk, words), plain, atol=1e-5), engine
            assert fast.stats().computed["layers.1.FFN"] == STEPS, engine


def test_rk4_is_refused_by_whole_loops_in_a_sentence():
    for engine in ("loop", "onnx"):
        with pytest.raises(EngineError, match=r'flow matching by rk4, which .*; use engine="patched"'):
            bc.accelerate(LivePolicy("rk4"), None, engine)
    with bc.accelerate(LivePolicy("rk4"), None) as fast:
        assert fast.engine == "patched"
        seeded(fast.predict_action, live_observation(1))
        assert fast.stats().computed["layers.0.SA"] == 4 * STEPS


def test_half_precision_on_the_cpu():
    """Patched and loop compute in it; onnx says which precision it takes."""
    policy = tiny_dit(sampler=SAMPLERS["euler"])
    single = policy.predict_action(tiny_observation(1), generator=torch.Generator().manual_seed(0))["action"]
    policy = policy.to(torch.bfloat16)
    for engine in ("patched", "loop"):
        with bc.accelerate(policy, None, engine):
            found = policy.predict_action(tiny_observation(1), generator=torch.Generator().manual_seed(0))["action"]
        assert found.dtype == torch.bfloat16
        assert found.isfinite().all()
        assert found.shape == single.shape
    with pytest.raises(EngineError, match=r"the onnx engine runs float32 on the CPU, got torch\.bfloat16"):
        bc.accelerate(policy, None, "onnx")


# -- shapes that are none


class PostNorm(Block):
    def forward(self, x, features):
        a, b, c, d, e, f = self.adaLN_modulation(features)[:, None].chunk(6, dim=-1)
        x = self.norm1(x + c * self.attn(x * (1 + b) + a))
        return self.norm2(x + f * self.mlp(x * (1 + e) + d))


class MLPFirst(Block):
    def forward(self, x, features):
        a, b, c, d, e, f = self.adaLN_modulation(features)[:, None].chunk(6, dim=-1)
        x = x + f * self.mlp(self.norm2(x) * (1 + e) + d)
        return x + c * self.attn(self.norm1(x) * (1 + b) + a)


@pytest.mark.parametrize("block", [PostNorm, MLPFirst])
def test_an_unknown_order_is_refused_by_name(block):
    with pytest.raises(PolicyError, match=rf"transformer_blocks\.0 is a {block.__name__} whose forward is not"):
        port_of(LivePolicy("ddpm", block=block))


def test_what_misses_to_be_a_dit_is_said():
    policy = LivePolicy("ddpm")
    del policy.noise_predictor.transformer_blocks[1].adaLN_modulation
    with pytest.raises(
        PolicyError, match=r"dit: the noise_predictor Predictor has no adaLN_modulation in transformer_blocks\.1"
    ):
        port_of(policy)
    policy = LivePolicy("ddpm")
    policy.objective = nn.Identity()
    with pytest.raises(PolicyError, match="dit: its objective has neither noise_scheduler"):
        port_of(policy)
    policy = LivePolicy("ddpm")
    policy.noise_predictor.transformer_blocks[0].mlp.forward = lambda x: x
    with pytest.raises(PolicyError, match=r"transformer_blocks\.0\.mlp\.forward is already patched"):
        port_of(policy)


def test_parts_that_no_program_knows_have_the_patched_engine():
    policy = LivePolicy("ddpm")
    for layer in policy.noise_predictor.transformer_blocks:
        layer.mlp[1] = nn.GELU()
    with pytest.raises(EngineError, match="an MLP other than Linear, GELU"):
        bc.accelerate(policy, None, "loop")
    bc.accelerate(policy, None, "patched").disable()


@pytest.mark.parametrize("part", ["input_proj", "output_proj"])
def test_a_projection_without_a_bias_is_named(part):
    policy = LivePolicy("ddpm")
    getattr(policy.noise_predictor, part).bias = None
    with pytest.raises(EngineError, match="does not support a Linear without a bias"):
        bc.accelerate(policy, None, "loop")


class OneForAll(LivePolicy):
    """The samples of a batch are not independent, which one alone does not show."""

    def _generate_actions(self, batch):
        found = super()._generate_actions(batch)
        return found.mean(0, keepdim=True).expand_as(found)


def test_behind_an_encoder_a_batch_of_two_is_compared_too():
    with (
        bc.accelerate(policy := OneForAll("ddpm"), None, "loop"),
        pytest.raises(EngineError, match="with the same noise with two observations at once"),
    ):
        policy._generate_actions(live_observation(1))


def test_a_missing_input_is_said_with_what_was_expected():
    policy = LivePolicy("ddpm")
    with (
        bc.accelerate(policy, None, "patched"),
        pytest.raises(BlockcacheError, match=r"observation\.state \(batch, 2, 5\).*got observation\.language\.tokens"),
    ):
        policy._generate_actions({"observation.language.tokens": torch.ones(1, 6, dtype=torch.int64)})


# -- files


def test_a_directory_is_saved_and_loaded(tmp_path):
    policy = tiny_dit(sampler=SAMPLERS["euler"], task="toy")
    bc.save_policy(policy, tmp_path / "policy")
    again = bc.load_policy(tmp_path / "policy")
    assert again.config == policy.config
    assert port_of(again).fingerprint == port_of(policy).fingerprint
    found, expected = (seeded(item.predict_action, tiny_observation(2))["action"] for item in (again, policy))
    assert torch.equal(found, expected)


def test_a_bare_array_is_the_one_input():
    policy = tiny_dit(vectors={})
    obs = tiny_observation(1)["state"]
    answers = [seeded(policy.predict_action, item)["action"] for item in (obs, {"state": obs}, {"obs": obs})]
    assert all(torch.equal(answer, answers[0]) for answer in answers)


@pytest.fixture
def directory(tmp_path):
    bc.save_policy(tiny_dit(), tmp_path / "policy")
    return tmp_path / "policy"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "format version 2, this blockcache reads version 1"),
        ({"family": "unet"}, "policies of family 'unet' are not known; known are dit, dp-t"),
        ({"width": 3}, "unknown policy settings width; known are action_dim"),
        ({"hidden_dim": 6, "num_heads": 2}, "an even number each"),
        ({"n_action_steps": 99}, "behind the horizon"),
        ({"timestep_embed_dim": 3}, "timestep_embed_dim must be even"),
        ({"num_layers": 1000}, "the weights do not fit"),
        ({"hidden_dim": 100_000}, "the weights do not fit"),
        ({"state": {}}, "a length of 1 or more"),
        ({"state": {"noise": 5}}, "cannot be called 'noise'"),
        ({"vectors": {"state": 3}}, "two inputs of the policy have one name"),
        ({"state": {"a.b": 5}, "vectors": {"a_b": 3}}, "differ in dots alone"),
        ({"use_rope": 1}, "true or false"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(directory, changes, sentence):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(BlockcacheError, match=sentence):
        bc.load_policy(directory)


def test_tensors_that_do_not_fit_are_listed(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    odd = {name: value for name, value in tensors.items() if not name.endswith("output_proj.bias")}
    save_file(odd | {"noise_predictor.guest": torch.ones(1)}, path)
    with pytest.raises(
        PolicyError, match=r"missing noise_predictor\.output_proj\.bias; unknown noise_predictor\.guest"
    ):
        bc.load_policy(directory)
    save_file(tensors | {"noise_predictor.output_proj.bias": torch.ones(9)}, path)
    with pytest.raises(PolicyError, match=r"output_proj\.bias has shape \(9,\), expected \(4,\)"):
        bc.load_policy(directory)
