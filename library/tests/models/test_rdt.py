"""RDT: the contract in every engine, and what its exact savings and its masks promise."""

import pytest
import torch

import blockcache as bc
import rdt_runner
from blockcache.attach.recorder import calibrate
from blockcache.block import CROSS_ATTENTION
from blockcache.engines.onnx import require_size
from blockcache.errors import EngineError, ObservationError, PolicyError
from blockcache.models.rdt.runner import policy_of
from blockcache.models.registry import port_of
from blockcache.solvers import solve
from blockcache.testing import PolicyContract
from blockcache_runtime import open_export
from rdt_policies import rdt_config, rdt_observation, rdt_policy

pytestmark = pytest.mark.usefixtures("exports_stay_here")
ENGINES = ("patched", "loop", "onnx")


class TestRDT(PolicyContract):
    def policy(self):
        return rdt_policy()

    def observation(self, batch):
        return rdt_observation(batch)


class TestRootMeanSquare(TestRDT):
    def policy(self):
        return rdt_policy(norm="rms", lang_adaptor="linear", state_adaptor="mlp2x_gelu")


class TestLiveRunner(TestRDT):
    """An object of another project's code, found by its shape; its modules are used as they are."""

    def policy(self):
        return policy_of(rdt_runner.runner(rdt_config()), n_action_steps=3).with_lang_len(5)


def act(policy, obs, seed=0):
    return policy.predict_action(obs, generator=torch.Generator().manual_seed(seed))["action_pred"]


# -- exact savings


def blocks(policy):
    return [*enumerate(policy.denoiser.model.blocks)]


def matrices(policy, monkeypatch):
    """Counts products with the weights of keys and values, whoever asks for them."""
    held = {block.cross_attn.kv.weight.data_ptr(): index for index, block in blocks(policy)}
    counts = [0] * len(held)
    plain = torch.nn.functional.linear

    def linear(x, weight, bias=None):
        if weight.data_ptr() in held:
            counts[held[weight.data_ptr()]] += 1
        return plain(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return counts


def test_patched_projects_keys_and_values_once_a_generation(monkeypatch):
    policy, obs = rdt_policy(), rdt_observation(2)
    plain = act(policy, obs)
    counts = matrices(policy, monkeypatch)
    act(policy, obs)
    assert counts == [6] * 4  # the plain policy: at every step
    with bc.accelerate(policy, engine="patched"):
        counts[:] = [0] * 4
        assert torch.equal(act(policy, obs), plain)
        assert counts == [1] * 4
        assert torch.equal(act(policy, obs), plain)
        assert counts == [2] * 4  # nothing is kept from one generation to the next
        other = rdt_observation(2, seed=7)
        counts[:] = [0] * 4
        assert not torch.equal(act(policy, other), plain)
    act(policy, obs)
    assert counts == [7] * 4


def test_what_is_kept_is_kept_for_the_same_numbers_only():
    """Conditions that are written into between two steps are seen, though the tensor is the same object."""
    policy, obs = rdt_policy(), rdt_observation(1)
    table = policy.denoiser.model.img_cond_pos_embed

    def shifted(module, args):
        with torch.no_grad():
            table.add_(0.1)

    def run():
        start = table.detach().clone()
        hook = policy.denoiser.register_forward_pre_hook(shifted)
        found = act(policy, obs)
        hook.remove()
        with torch.no_grad():
            table.copy_(start)
        return found

    expected, still = run(), act(policy, obs)
    assert not torch.allclose(expected, still)
    with bc.accelerate(policy, engine="patched"):
        assert torch.equal(run(), expected)


def test_inference_mode_and_gradients_keep_nothing():
    policy, obs = rdt_policy(), rdt_observation(1)
    plain = act(policy, obs)
    with bc.accelerate(policy, engine="patched"), torch.inference_mode():
        assert torch.equal(act(policy, obs), plain)


def test_the_loop_multiplies_by_the_policys_own_weights():
    """No matrix is copied: at 1.2 thousand million numbers that would be gigabytes."""
    port = port_of(rdt_policy())
    program = port.program()
    own = {tensor.untyped_storage().data_ptr() for tensor in port.module.parameters()}
    copied = {name for name, item in program.weights.items() if item.untyped_storage().data_ptr() not in own}
    large = {name for name in copied if program.weights[name].numel() > 8}  # 8 numbers in a head
    assert large == {"frequencies"}


def test_keys_and_values_are_most_of_the_cost():
    port = port_of(rdt_policy(img_cond_len=400))
    program = port.program()
    plain, folded = (
        sum(block.cost for block in item if block.kind == CROSS_ATTENTION)
        for item in (port.adapter.blocks, program.blocks)
    )
    seen = 2 * (5 + 400)
    assert plain - folded == 2 * seen * 32 * 64
    assert program.once - port.encoder_flops >= plain - folded


def test_real_size_by_formula():
    """The facts that the family is built on: about 86 % of a step's products are keys and values of conditions."""
    from blockcache.models.rdt.denoiser import RDTShape

    adaptors = ([4096, 2048], [1152, 2048], [256, 2048, 2048])
    shape = RDTShape(2048, 28, 67, 64, 128, (1024, 4374), adaptors)
    step = sum(block.cost for block in shape.blocks) + shape.every_step
    left = sum(block.cost for block in shape.folded_blocks) + shape.folded_every_step
    assert 1 - left / step == pytest.approx(0.88, abs=0.02)


def test_action_costs_know_the_mask():
    """What the mask takes out of an action, nothing that a block adds can change."""
    policy, obs = rdt_policy(), rdt_observation(2)
    recording = calibrate(policy, [obs], action_costs=True, progress=False)
    assert recording.action_costs.max() > 0
    schedule = solve(recording, method="action", budget=0.5)
    with bc.accelerate(policy, schedule, "loop") as fast:
        found = fast.predict_action(obs)["action"]
    assert found[..., :-1].any()
    assert not found[..., -1].any()
    nothing = {**obs, "action_mask": torch.zeros(2, 1, 4)}
    assert calibrate(policy, [nothing], action_costs=True, progress=False).action_costs.max() == 0


def test_weights_beyond_a_file_are_refused_in_time():
    program = port_of(rdt_policy()).program()
    huge = torch.empty(1).expand(2**29)
    with pytest.raises(
        EngineError, match=r"one file of 2\.1 GB at most, and these weights take 2\.1 GB; use engine=\"loop\""
    ):
        require_size(type(program)(**{**vars(program), "weights": {"huge": huge}}))


def test_an_export_runs_without_torch_on_the_same_observations(tmp_path):
    policy, obs = rdt_policy(), rdt_observation(2)
    bc.export_policy(policy, None, tmp_path / "rdt.onnx")
    opened = open_export(tmp_path / "rdt.onnx", threads=1)
    assert (opened.n_obs_steps, opened.n_action_steps, opened.horizon) == (1, 3, 6)
    observed = {name: value.numpy() for name, value in policy.check(obs).items()}
    noise = policy.draw_noise(2, torch.Generator().manual_seed(0))
    found = opened.predict_action(observed, noise=noise.numpy())["action_pred"]
    assert torch.allclose(torch.from_numpy(found), act(policy, obs), atol=1e-5)


# -- observations


@pytest.mark.parametrize("engine", [None, *ENGINES])
def test_an_instruction_of_fewer_tokens_is_filled_up(engine):
    policy = rdt_policy()
    obs = rdt_observation(1, tokens=3)
    longer = {**obs, "lang_tokens": torch.randn(1, 5, 7), "lang_attn_mask": torch.tensor([[True] * 3 + [False] * 2])}
    longer["lang_tokens"][:, :3] = obs["lang_tokens"]
    obs["lang_attn_mask"] = torch.ones(1, 3)
    handle = None if engine is None else bc.accelerate(policy, engine=engine, threads=1)
    short, padded = act(policy, obs), act(policy, longer)
    assert torch.allclose(short, padded, atol=1e-6)
    assert torch.allclose(short, act(policy.with_lang_len(3), obs), atol=1e-5)
    if handle:
        handle.disable()


def spoiled(**changes):
    obs = rdt_observation(2)
    return {name: value for name, value in {**obs, **changes}.items() if value is not Ellipsis}


BAD = {
    "mask of another length": (
        spoiled(lang_attn_mask=torch.ones(2, 4)),
        r"'lang_attn_mask' has shape \(2, 4\), expected one value for each .* tokens, which have shape \(2, 5, 7\)",
    ),
    "no language": (spoiled(lang_tokens=...), "the observation has no 'lang_tokens'"),
    "language is None": (spoiled(lang_tokens=None), "the observation has no 'lang_tokens'"),
    "no mask": (spoiled(lang_attn_mask=...), "the observation has no 'lang_attn_mask'"),
    "nothing to attend to": (spoiled(lang_attn_mask=torch.zeros(2, 5)), "hides all language tokens of a sample"),
    "no token at all": (
        spoiled(lang_tokens=torch.zeros(2, 0, 7), lang_attn_mask=torch.zeros(2, 0)),
        "hides all language tokens of a sample",
    ),
    "too many tokens": (
        spoiled(lang_tokens=torch.zeros(2, 6, 7), lang_attn_mask=torch.ones(2, 6)),
        "has 6 tokens, expected 5 at most",
    ),
    "mask of fractions": (spoiled(action_mask=torch.full((2, 1, 4), 0.5)), "'action_mask' is a mask"),
    "fewer image tokens": (
        spoiled(img_tokens=torch.zeros(2, 3, 9)),
        r"'img_tokens' has shape \(2, 3, 9\), expected \(batch, 10, 9\)",
    ),
    "no mapping": (torch.zeros(2, 3), "is a mapping of arrays"),
    "two batch sizes": (spoiled(ctrl_freqs=torch.ones(3)), "one batch size for all its inputs"),
}


@pytest.mark.parametrize("engine", [None, "patched", "loop"])
@pytest.mark.parametrize("name", BAD)
def test_a_wrong_observation_is_told_so(name, engine):
    policy, (obs, message) = rdt_policy(), BAD[name]
    handle = None if engine is None else bc.accelerate(policy, engine=engine)
    with pytest.raises(ObservationError, match=message):
        policy.predict_action(obs)
    if handle:
        handle.disable()


def test_frequencies_may_be_a_column():
    policy, obs = rdt_policy(), rdt_observation(2)
    assert torch.equal(act(policy, obs), act(policy, {**obs, "ctrl_freqs": obs["ctrl_freqs"][:, None]}))


# -- which policies


@pytest.mark.parametrize("engine", ENGINES)
def test_observations_of_a_rollout_have_one_step(engine):
    policy, obs = rdt_policy(), rdt_observation(3)
    wanted = act(policy, obs)
    with_step = {
        name: value if name in ("state_tokens", "action_mask") else value[:, None] for name, value in obs.items()
    }
    with bc.accelerate(policy, engine=engine) as fast:
        torch.testing.assert_close(act(fast, with_step), wanted, rtol=0, atol=1e-5)


def test_half_precision_runs_patched_and_is_refused_elsewhere():
    policy = rdt_policy().to(torch.bfloat16)
    obs = rdt_observation(1)
    plain = act(policy, obs)
    with bc.accelerate(policy, engine="patched"):
        assert torch.equal(act(policy, obs), plain)
    with pytest.raises(EngineError, match=r"does not support weights in torch\.bfloat16"):
        bc.accelerate(policy, engine="loop")
    with pytest.raises(EngineError, match="the onnx engine runs float32 on the CPU"):
        bc.accelerate(policy, engine="onnx")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (rdt_runner.PostNorm, r"blocks\.0 is post-norm"),
        (rdt_runner.OtherOrder, r"blocks\.0 runs cross_attn, attn, ffn, expected attn, cross_attn, ffn"),
        (rdt_runner.Parallel, r"blocks\.0 \(Parallel\) computes something else than three residual branches"),
    ],
)
def test_other_orders_of_blocks_are_refused_by_name(block, message):
    policy = policy_of(rdt_runner.runner(rdt_config(), block))
    with pytest.raises(PolicyError, match=message):
        bc.accelerate(policy, engine="patched")


def test_norms_of_another_kind_are_refused():
    runner = rdt_runner.runner(rdt_config())
    runner.model.blocks[1].norm2 = torch.nn.LayerNorm(32)
    with pytest.raises(PolicyError, match="do not all divide by the standard deviation"):
        policy_of(runner)


def test_a_runner_itself_is_told_how_it_becomes_a_policy():
    with pytest.raises(PolicyError, match=r"takes six arguments; blockcache\.models\.rdt\.runner\.policy_of"):
        bc.accelerate(rdt_runner.runner(rdt_config()))


def test_what_is_no_runner():
    with pytest.raises(PolicyError, match="is no RDT runner: it lacks lang_adaptor"):
        policy_of(type("Odd", (), {"model": 1})())
    runner = rdt_runner.runner(rdt_config())
    del runner.model.blocks[1].cross_attn
    with pytest.raises(PolicyError, match=r"its model has blocks\.1 without cross_attn"):
        policy_of(runner)
