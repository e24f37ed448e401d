"""What loop and onnx refuse, and which engine is taken instead."""

import pytest
import torch
from torch import nn

import blockcache as bc
from blockcache.errors import EngineError, PolicyError, ScheduleError
from blockcache.solvers.teacache import TeaCacheRule
from engine_comparison import BLOCKS, CLOSE, accelerate, act, difference, observe, schedule_for

pytestmark = pytest.mark.usefixtures("exports_stay_here")


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


def test_train_mode_is_refused(engine, make_policy):
    policy = make_policy(p_drop_emb=0.1)
    policy.train()
    with pytest.raises(PolicyError, match=r"train mode, as model.drop \(Dropout\) shows; call policy.eval\(\) first"):
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
    rule = TeaCacheRule((1.0, 0.0), 0.1, 6)
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


@pytest.mark.parametrize("engine", ["auto", "onnx", "loop", "patched"])
def test_no_threads_are_refused(policy, engine):
    with pytest.raises(EngineError, match="one thread at least, got 0"):
        bc.accelerate(policy, engine=engine, threads=0)


def test_patched_computes_the_whole_chunk(policy):
    with pytest.raises(EngineError, match='output="action" needs engine="loop" or "onnx"'):
        bc.accelerate(policy, engine="patched", output="action")


# -- which engine


def test_auto_takes_the_fastest_that_can(policy, monkeypatch, random_updates):
    expected = act(policy)["action_pred"]
    with bc.accelerate(policy) as fast:
        assert fast.engine == fast.stats().engine == "onnx"
        assert difference(policy, act(policy)["action_pred"], expected) < CLOSE
    with bc.accelerate(policy, output="action") as fast:
        assert fast.engine == "onnx"
    monkeypatch.setattr("blockcache.extras.installed_version", lambda package: None)
    with bc.accelerate(policy, schedule_for(policy, random_updates)) as fast:
        assert fast.engine == "loop"
        act(policy)
    with bc.accelerate(policy, output="action") as fast:
        assert fast.engine == fast.stats().engine == "loop"
    policy.model.decoder.layers[0].activation = nn.functional.relu
    with bc.accelerate(policy) as fast:
        assert fast.engine == fast.stats().engine == "patched"
        act(policy)


def test_auto_goes_on_without_room_for_the_export(policy, monkeypatch, caplog):
    def full(*args):
        raise OSError(28, "No space left on device")

    expected = act(policy)["action_pred"]
    monkeypatch.setattr("os.fsync", full)
    with bc.accelerate(policy) as fast:
        assert fast.engine == "onnx"
        assert difference(policy, act(policy)["action_pred"], expected) < CLOSE
    assert "cannot be kept for the next time" in caplog.text
    assert "No space left on device" in caplog.text
