"""Weights that no action can come of are refused with one sentence: where a policy is read, and before it is accelerated."""

import math

import pytest
import safetensors.torch
import torch
from conftest import tiny_policy
from torch import nn

import blockcache as bc
import foreign_policy
import toy_family
from blockcache.errors import EngineError, PolicyError
from blockcache.models.modules import check_mask, check_program
from blockcache.models.program import StepTable, UnsupportedError
from blockcache.models.registry import port_of
from struck_program import struck

pytestmark = pytest.mark.usefixtures("exports_stay_here")
ENGINES = ("patched", "loop", "onnx", "auto")
HEAD, SCALE = "model.head.weight", "normalizer.params_dict.action.scale"


def blind(mask):
    return mask.index_fill(0, torch.tensor([2]), -math.inf)


CHANGES = {
    "NaN": (HEAD, lambda w: w.fill_(math.nan), "weights hold NaN or infinity in (model.)?head.weight"),
    "infinity": (HEAD, lambda w: w.fill_(-math.inf), "weights hold NaN or infinity in (model.)?head.weight"),
    "too large": (HEAD, lambda w: w.fill_(1e19), r"weights hold values beyond 1e\+18 in (model.)?head.weight"),
    "beyond float32": (HEAD, lambda w: w.double() * 1e300, r"values beyond 1e\+18 in (model.)?head.weight"),
    "whole numbers": (HEAD, lambda w: w.long(), "hold torch.int64 in (model.)?head.weight, expected floating point"),
    "complex": (HEAD, lambda w: w.cfloat(), "hold torch.complex64 in (model.)?head.weight, expected floating point"),
    "a blind token": ("model.mask", blind, "mask leaves token 2 nothing to attend to"),
    "a blind token's memory": ("model.memory_mask", blind, "memory_mask leaves token 2 nothing to attend to"),
    "a mask of +infinity": ("model.mask", lambda m: m.abs(), "weights hold NaN or infinity in .*mask"),
    "a scale of 0": (SCALE, lambda s: s.index_fill(0, torch.tensor([1]), 0.0), "scale is 0 for value 1 of an action"),
    "a scale that overflows": (SCALE, lambda s: s * 1e-40, "scale is .*e-4. for value 0 of an action"),
}


@pytest.fixture
def saved(policy_directory):
    return policy_directory


@pytest.mark.parametrize("name", CHANGES)
def test_a_policy_file_is_refused(name, saved):
    tensor, change, sentence = CHANGES[name]
    file = saved / "model.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    tensors[tensor] = change(tensors[tensor]).contiguous()
    file.write_bytes(safetensors.torch.save(tensors))
    with pytest.raises(PolicyError, match=sentence):
        bc.load_policy(saved)


def test_float64_weights_that_float32_can_hold_are_read(saved, observe, run):
    expected = run(bc.load_policy(saved), observe())
    file = saved / "model.safetensors"
    tensors = {name: tensor.double() for name, tensor in safetensors.torch.load(file.read_bytes()).items()}
    file.write_bytes(safetensors.torch.save(tensors))
    assert torch.equal(run(bc.load_policy(saved), observe()), expected)


@pytest.mark.parametrize("make", [tiny_policy, foreign_policy.Policy])
@pytest.mark.parametrize("name", CHANGES)
def test_a_policy_object_is_refused_by_every_engine(name, make, tmp_path):
    tensor, change, sentence = CHANGES[name]
    policy = make()
    place, _, leaf = tensor.rpartition(".")
    holder = policy
    for part in place.split("."):
        holder = holder[part] if isinstance(holder, nn.ParameterDict | nn.ModuleDict) else getattr(holder, part)
    old = holder[leaf] if isinstance(holder, nn.ParameterDict) else getattr(holder, leaf)
    new = change(old.detach().clone())
    new = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
    if isinstance(holder, nn.ParameterDict):
        holder[leaf] = new
    else:
        setattr(holder, leaf, new)
    for engine in ENGINES:
        with pytest.raises(PolicyError, match=sentence):
            bc.accelerate(policy, engine=engine)
    with pytest.raises(PolicyError, match=sentence):
        bc.export_policy(policy, None, tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()
    assert "predict_action" not in vars(policy)


def test_other_families_are_looked_at_too(monkeypatch):
    monkeypatch.setattr("blockcache.models.registry._families", lambda: [("toy-flow", lambda: toy_family.claim)])
    policy = toy_family.FlowPolicy()
    policy.net.stages[1].up.weight.data[0, 0] = math.nan
    for engine in ENGINES:
        with pytest.raises(PolicyError, match=r"weights hold NaN or infinity in stages\.1\.up\.weight"):
            bc.accelerate(policy, engine=engine)


class Packed(nn.Module):
    """As a library for quantised weights has it: whole numbers, and a scale that only its own code knows of."""

    def __init__(self, linear):
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.unit = float(linear.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((linear.weight / self.unit).round().to(torch.int8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.unit, self.bias)


def test_packed_weights_of_other_libraries_have_the_patched_engine(policy, observe, run, engine):
    policy.model.head = Packed(policy.model.head)
    expected = run(policy, observe())
    with bc.accelerate(policy, engine="patched"):
        assert torch.equal(run(policy, observe()), expected)
    with pytest.raises(
        EngineError, match=r"no floating point numbers \(model.head.weight is torch.int8\); use engine="
    ):
        bc.accelerate(policy, engine=engine)


@pytest.mark.parametrize("lowest", [-1e9, torch.finfo(torch.float32).min])
def test_a_mask_may_be_merely_very_negative(make_policy, observe, run, engine, lowest):
    policy = make_policy()
    expected = run(policy, observe())
    policy.model.mask.clamp_(min=lowest)
    policy.model.memory_mask.clamp_(min=lowest)
    with bc.accelerate(policy, engine=engine, threads=1):
        assert torch.allclose(run(policy, observe()), expected, atol=1e-5)


def test_booleans_say_what_is_hidden():
    check_mask("it", torch.tensor([[False, True], [True, False]]))
    check_mask("it", None)
    with pytest.raises(PolicyError, match="it leaves token 1 nothing to attend to"):
        check_mask("it", torch.tensor([[False, True], [True, True]]))


def test_a_programs_tables_and_masks_are_looked_at():
    """A family may make them in code, from weights that are all right."""
    program = struck("stream", 0, 1.0).program
    assert check_program(program) is program
    with pytest.raises(PolicyError, match="weights hold NaN or infinity in blow"):
        check_program(struck("stream", 0, math.nan).program)
    for name, tensor, kind, sentence in (
        ("seen", torch.full((1, 1, 2, 3), -math.inf), PolicyError, "seen leaves token 0 nothing to attend to"),
        ("half", torch.ones(2, dtype=torch.float16) * 65504 * 2, PolicyError, "NaN or infinity in half"),
        ("whole", torch.ones(2, dtype=torch.int64), UnsupportedError, "whole is torch.int64"),
    ):
        program.weights[name] = tensor
        with pytest.raises(kind, match=sentence):
            check_program(program)
        del program.weights[name]
    program.tables["empty"] = StepTable(torch.ones(30, 0, 1), (1, 1))
    assert check_program(program) is program


def test_folding_that_leaves_the_range_is_noticed(policy, engine):
    """Each weight is within the limit, their product is not."""
    with torch.no_grad():
        policy.model.ln_f.weight.fill_(1e10)
        policy.model.head.weight.fill_(1e10)
    assert port_of(policy).check_weights() is None
    with pytest.raises(PolicyError, match=r"weights hold values beyond 1e\+18 in head_w"):
        bc.accelerate(policy, engine=engine)
