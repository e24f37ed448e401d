"""The reference engine: what is computed, that the rest is reused exactly, and that it comes off without a trace."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import blockcache as bc
from blockcache.errors import ObservationError, PolicyError, StaleError
from engine_comparison import block_names, snapshot


def accelerate(policy, updates=None, **options):
    """The patched engine with update steps by block; None is every step."""
    schedule = None if updates is None else bc.Schedule(policy.num_inference_steps, updates)
    return bc.accelerate(policy, schedule, engine="patched", **options)


def same(before, after):
    return all(
        one is other and vars_one.keys() == vars_other.keys() and all(vars_one[k] is vars_other[k] for k in vars_one)
        for (one, vars_one), (other, vars_other) in zip(before, after, strict=True)
    )


class Spy:
    """Hears of every computation of a block, by forward hooks on a module that only this block runs."""

    def __init__(self, policy):
        self.step, self.heard, self.residual = -1, [], {}
        decoder = policy.model.decoder is not None
        layers = (policy.model.decoder if decoder else policy.model.encoder).layers
        policy.model.register_forward_pre_hook(lambda *args: setattr(self, "step", self.step + 1))
        for index, layer in enumerate(layers):
            modules = {"SA": layer.self_attn, "FFN": layer.linear2} | ({"CA": layer.multihead_attn} if decoder else {})
            for kind, module in modules.items():
                module.register_forward_hook(self._hook(f"layers.{index}.{kind}"))

    def _hook(self, name):
        def heard(module, args, out):
            self.heard.append((self.step, name))
            self.residual[self.step, name] = (out[0] if isinstance(out, tuple) else out).clone()

        return heard


# ------------------------------------------------------------------------------------------------- skipped or computed


def test_toy_arithmetic_tells_a_skip_from_a_compute(make_policy, observe):
    """The stream behind the stack reads as digits: how often FFN, CA and SA had been computed when it was added up."""
    policy = make_policy(n_layer=1)
    (layer,) = policy.model.decoder.layers
    for norm in (layer.norm1, layer.norm2, layer.norm3):
        nn.init.zeros_(norm.weight), nn.init.zeros_(norm.bias)  # the branches see nothing: only their biases come out
    nn.init.zeros_(policy.model.pos_emb), nn.init.zeros_(policy.model.input_emb.weight)
    nn.init.zeros_(policy.model.input_emb.bias)
    calls = {"SA": 0, "CA": 0, "FFN": 0}

    def count(kind, unit):
        def hook(module, args, out):
            calls[kind] += 1
            value = torch.full_like(out[0] if isinstance(out, tuple) else out, unit * calls[kind])
            return (value, None) if isinstance(out, tuple) else value

        return hook

    layer.self_attn.register_forward_hook(count("SA", 1.0))
    layer.multihead_attn.register_forward_hook(count("CA", 100.0))
    layer.linear2.register_forward_hook(count("FFN", 10000.0))
    streams = []
    policy.model.decoder.register_forward_hook(lambda module, args, out: streams.append(set(out.flatten().tolist())))
    updates = {"layers.0.SA": [0, 1, 2, 3, 4, 5], "layers.0.CA": [0, 4], "layers.0.FFN": [0, 2, 3]}
    with accelerate(policy, updates):
        policy.predict_action(observe(2))
    assert streams == [{10101.0}, {10102.0}, {20103.0}, {30104.0}, {30205.0}, {30206.0}]


@pytest.mark.parametrize("seed", range(4))
def test_just_the_schedule_is_computed(make_policy, observe, run, random_updates, form, seed):
    policy = make_policy(**form)
    updates = random_updates(block_names(policy), 6, seed)
    with accelerate(policy, updates) as fast:
        spy = Spy(policy)
        run(policy, observe(2))
    due = [(step, name) for step in range(6) for name in updates if step in updates[name]]
    assert spy.heard == due
    stats = fast.stats()
    assert stats.computed == {name: len(steps) for name, steps in updates.items()}
    assert stats.reused == {name: 6 - len(steps) for name, steps in updates.items()}


def test_with_the_last_step_in_every_block_it_is_what_the_released_code_does(make_policy, observe, run):
    """That code in a few lines: a branch is computed at its update steps and at the last, else its kept value is taken."""
    policy = make_policy()
    recording = bc.calibrate(policy, observe(3).split(1), progress=False)
    schedules = {last: bc.solve(recording, updates=2, union=2, last=last) for last in (False, True)}
    step = [-1]

    def cached(branch, updates):
        kept = []

        def run_branch(*args, **options):
            if step[0] in updates or step[0] == policy.num_inference_steps - 1:
                kept[:] = [branch(*args, **options)]
            return kept[0]

        return run_branch

    released = copy.deepcopy(policy)
    released.model.register_forward_pre_hook(lambda *args: step.__setitem__(0, step[0] + 1))
    for index, layer in enumerate(released.model.decoder.layers):
        for kind, name in (("SA", "_sa_block"), ("CA", "_mha_block"), ("FFN", "_ff_block")):
            setattr(layer, name, cached(getattr(layer, name), schedules[False].updates[f"layers.{index}.{kind}"]))
    obs = observe(3, seed=5)
    expected = run(released, obs)
    for last, same_bits in ((True, True), (False, False)):
        with bc.accelerate(policy, schedules[last], engine="patched"):
            assert torch.equal(run(policy, obs), expected) is same_bits


def test_the_cached_residual_is_reused_exactly(make_policy, observe, run, random_updates, form):
    """The stack's output at each step, added up by hand from the residuals that the spy saw computed."""
    policy = make_policy(**form)
    updates = random_updates(block_names(policy), 6, seed=1)
    stack = policy.model.decoder or policy.model.encoder
    streams = []
    stack.layers[0].register_forward_pre_hook(lambda module, args: streams.append([args[0].clone()]))
    stack.layers[-1].register_forward_hook(lambda module, args, out: streams[-1].append(out.clone()))
    with accelerate(policy, updates):
        spy = Spy(policy)
        run(policy, observe(3))
    for step, (x, out) in enumerate(streams):
        for name, steps in updates.items():
            x = x + spy.residual[max(s for s in steps if s <= step), name]
        assert torch.equal(x, out), step


# ---------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("cond_layers", [0, 2])
def test_every_step_an_update_is_bit_identical(make_policy, observe, run, sampler, batch, cond_layers):
    policy = make_policy(sampler=sampler, n_cond_layers=cond_layers)
    obs = observe(batch)
    plain = run(policy, obs)
    with accelerate(policy, {name: range(6) for name in block_names(policy)}) as fast:
        assert torch.equal(run(fast, obs), plain)
        assert torch.equal(run(policy, obs), plain)
    with accelerate(policy) as fast:
        assert torch.equal(run(fast, obs), plain)
        assert fast.stats().reused_share == 0.0
    assert torch.equal(run(policy, obs), plain)


@pytest.mark.parametrize("batch", [1, 7])
def test_every_step_an_update_in_the_encoder_only_form(make_policy, observe, run, sampler, batch):
    """torch's fused fast path is off there: within 1e-6, for weights that do not blow rounding up by themselves."""
    policy, obs = make_policy(sampler=sampler, time_as_cond=False, obs_as_cond=False), observe(batch)
    for scale, tolerance in ((1.0, 1e-5), (0.2, 1e-6)):
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(scale)
        plain = run(policy, obs)
        with accelerate(policy):
            assert (run(policy, obs) - plain).abs().max() < tolerance * plain.abs().max()
        assert torch.equal(run(policy, obs), plain)


def test_in_painting_with_cross_attention(make_policy, observe, run):
    policy = make_policy(obs_as_cond=False)
    plain = run(policy, observe(2))
    with accelerate(policy):
        assert torch.equal(run(policy, observe(2)), plain)


def test_skipping_changes_the_action(policy, observe, run):
    """Else none of the identities above would mean anything."""
    plain = run(policy, observe())
    for name in block_names(policy):
        with accelerate(policy, {other: [0] if other == name else range(6) for other in block_names(policy)}):
            assert not torch.equal(run(policy, observe()), plain), name


# ------------------------------------------------------------------------------------------------------ undone exactly


def test_disable_leaves_nothing_behind(make_policy, observe, run, random_updates, form):
    policy = make_policy(**form)
    plain, before = run(policy, observe(2)), snapshot(policy)
    fast = accelerate(policy, random_updates(block_names(policy), 6))
    run(policy, observe(2))
    assert not same(before, snapshot(policy))
    fast.disable()
    assert same(before, snapshot(policy))
    assert torch.equal(run(policy, observe(2)), plain)
    assert not fast.enabled
    fast.disable()  # again: nothing to do
    with pytest.raises(PolicyError, match="this acceleration was disabled"):
        fast.predict_action(observe())


def test_leaving_the_with_block_by_an_error_disables(policy):
    before = snapshot(policy)
    with pytest.raises(RuntimeError, match="mine"), accelerate(policy):
        raise RuntimeError("mine")
    assert same(before, snapshot(policy))


def test_enabling_twice_is_refused_and_again_after_disabling_works(policy, observe, run, random_updates):
    updates = random_updates(block_names(policy), 6)
    with accelerate(policy, updates):
        first, before = run(policy, observe()), snapshot(policy)
        with pytest.raises(PolicyError, match=r"accelerated already; call disable\(\) first"):
            accelerate(policy, updates)
        with pytest.raises(PolicyError, match=r"accelerated|patched"):
            bc.calibrate(policy, [observe()], progress=False)
        assert same(before, snapshot(policy))
        assert torch.equal(run(policy, observe()), first)
    with accelerate(policy, updates):
        assert torch.equal(run(policy, observe()), first)


def test_state_dict_is_the_same_while_enabled(policy):
    before = policy.state_dict()
    keys, addresses = list(before), [tensor.data_ptr() for tensor in before.values()]
    with accelerate(policy):
        after = policy.state_dict()
        assert list(after) == keys
        assert [tensor.data_ptr() for tensor in after.values()] == addresses


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda policy: copy.deepcopy(policy.model),
        lambda policy: copy.deepcopy(policy.model.decoder.layers[0]),
        pickle.dumps,
        lambda policy: pickle.dumps(policy.model),
        lambda policy: torch.save(policy, io.BytesIO()),
    ],
    ids=["deepcopy", "deepcopy model", "deepcopy layer", "pickle", "pickle model", "torch.save"],
)
def test_copying_while_enabled_is_refused(policy, observe, run, clone):
    with accelerate(policy):
        with pytest.raises(PolicyError, match=r"cannot be (pickled or )?copied; call disable\(\) first"):
            clone(policy)
        run(policy, observe())
    clone(policy)


def test_a_copy_made_afterwards_is_independent(policy, observe, run, random_updates):
    with accelerate(policy):
        pass
    twin, plain = copy.deepcopy(policy), run(policy, observe())
    with accelerate(policy, random_updates(block_names(policy), 6)):
        assert torch.equal(run(twin, observe()), plain)
        assert not torch.equal(run(policy, observe()), plain)


def test_a_patch_on_top_of_ours_is_not_torn_off(policy, observe, run):
    layer = policy.model.decoder.layers[1]
    fast = accelerate(policy)
    ours, calls = vars(layer)["forward"], []

    def theirs(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    layer.forward = theirs
    with pytest.raises(PolicyError, match=r"TransformerDecoderLayer\.forward was patched again on top of blockcache"):
        fast.disable()
    assert fast.enabled
    assert vars(layer)["forward"] is theirs
    run(policy, observe())
    assert len(calls) == 6
    layer.forward = ours
    fast.disable()
    assert "forward" not in vars(layer)


def test_a_failed_enabling_leaves_nothing_behind(policy, observe, monkeypatch):
    before = snapshot(policy)
    vars(policy.model)["forward"] = policy.model.forward  # somebody else's, found after predict_action was replaced
    with pytest.raises(PolicyError, match=r"DiffusionTransformer\.forward is already patched by something else"):
        accelerate(policy)
    del vars(policy.model)["forward"]
    assert same(before, snapshot(policy))
    policy.predict_action(observe())


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_edited_after_enabling_are_used(policy, observe, run, random_updates):
    updates = random_updates(block_names(policy), 6)
    with accelerate(policy, updates):
        before = run(policy, observe())
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.1)
        edited = run(policy, observe())
    assert not torch.equal(edited, before)
    with accelerate(policy, updates):
        assert torch.equal(run(policy, observe()), edited)


def test_weights_loaded_after_enabling_are_used(policy, make_policy, observe, run, random_updates):
    updates, other = random_updates(block_names(policy), 6), make_policy(seed=3)
    with accelerate(other, updates):
        expected = run(other, observe())
    with accelerate(policy, updates):
        policy.load_state_dict(other.state_dict())
        assert torch.equal(run(policy, observe()), expected)


# --------------------------------------------------------------------------------------------------------------- stats


def test_stats_add_up_over_generations(policy, observe, run):
    updates = {name: [0, 3] for name in block_names(policy)}
    with accelerate(policy, updates) as fast:
        assert fast.engine == "patched"
        assert (fast.stats().generations, fast.stats().reused_share) == (0, 0.0)
        for batch in (1, 5, 2):
            run(fast, observe(batch))
        stats = fast.stats()
    assert stats.generations == 3
    assert list(stats.computed) == list(stats.reused) == block_names(policy)
    assert set(stats.computed.values()) == {6}
    assert set(stats.reused.values()) == {12}
    assert stats.reused_share == pytest.approx(2 / 3)
    assert fast.stats() == stats  # and they stay readable


def test_a_failed_generation_does_not_count(policy, observe):
    with accelerate(policy) as fast:
        with pytest.raises(ObservationError):
            policy.predict_action(torch.zeros(1, 1, 1))
        assert fast.stats().generations == 0
        policy.predict_action(observe())
        assert fast.stats().generations == 1


def test_another_entry_of_another_class_is_noticed(policy, observe, run):
    """The patch hides it: what runs is the method that was there when it was made."""

    class Other(type(policy)):
        def predict_action(self, obs, **kwargs):
            return {name: -value for name, value in super().predict_action(obs, **kwargs).items()}

    fast = bc.accelerate(policy, engine="patched")
    policy.__class__ = Other
    with pytest.raises(StaleError, match="has another predict_action than when it was patched"):
        run(policy, observe())
    fast.disable()
    run(policy, observe())
