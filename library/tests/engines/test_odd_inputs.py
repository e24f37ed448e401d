"""Observations, noise and generators of odd kinds: one clear sentence in every engine and on a robot, or the answer."""

import re

import numpy as np
import pytest
import torch

import blockcache as bc
from blockcache.errors import ObservationError
from blockcache_runtime import open_export
from foreign_policy import Policy

pytestmark = pytest.mark.usefixtures("exports_stay_here")
SHAPE = (2, 2, 5)
GOOD = torch.linspace(-1, 1, 20).reshape(SHAPE)


def nested():
    return torch.nested.nested_tensor([torch.zeros(2, 5), torch.zeros(2, 5)])


REFUSED = {
    "sparse": (GOOD.to_sparse(), "is a sparse tensor; call to_dense() first"),
    "compressed": (torch.eye(5).to_sparse_csr(), "is a sparse tensor; call to_dense() first"),
    "nested": (nested(), "is a nested tensor; give one tensor"),
    "meta": (torch.zeros(SHAPE, device="meta"), "is on the meta device, where tensors hold no numbers"),
    "complex tensor": (GOOD.to(torch.complex64), "is not an array of numbers: its type is torch.complex64"),
    "complex array": (GOOD.numpy().astype(complex), "is not an array of numbers: its type is"),
    "quantized": (torch.quantize_per_tensor(GOOD, 0.1, 0, torch.qint8), "is a quantized tensor; call dequantize() first"),
    "objects": (np.full(SHAPE, None), "is not an array of numbers: "),
    "texts": (np.full(SHAPE, "1.5"), "is not an array of numbers: "),
    "text": ("abc", "is not an array of numbers: "),
    "nothing": (None, "is not an array of numbers: "),
    "records": (np.zeros(SHAPE, dtype=[("a", "f4")]), "is not an array of numbers: "),
    "times": (np.zeros(SHAPE, dtype="M8[s]"), "is not an array of numbers: "),
    "ragged": ([[1.0], [1.0, 2.0]], "is not an array of numbers: "),
    "a number of 400 digits": ([[[10**400] * 5] * 2] * 2, "is not an array of numbers: "),
}  # fmt: skip
TAKEN = {
    "negative strides": lambda x: x[::-1, :, ::-1][::-1, :, ::-1],
    "one negative stride": lambda x: x[..., ::-1].copy()[..., ::-1],
    "big-endian": lambda x: x.astype(">f4"),
    "big-endian double": lambda x: x.astype(">f8"),
    "read-only": lambda x: np.broadcast_to(x, x.shape),
    "column order": np.asfortranarray,
    "lists": lambda x: x.tolist(),
    "half of every other": lambda x: np.repeat(x, 2, axis=2)[..., ::2],
}
RUNS = ("plain", "patched", "loop", "onnx", "export", "deploy")


@pytest.fixture(params=RUNS)
def act(request, policy, tmp_path):
    """One generation in every way that there is: (observation, noise or generator) -> the executed actions."""
    if request.param == "plain":
        yield lambda obs, **others: policy.predict_action(obs, **others)["action"]
    elif request.param in ("export", "deploy"):
        bc.export_policy(policy, None, tmp_path / "policy.onnx")
        opened = (bc.open_export if request.param == "export" else open_export)(tmp_path / "policy.onnx", threads=1)
        yield lambda obs, **others: torch.as_tensor(opened.predict_action(obs, **others)["action"])
    else:
        with bc.accelerate(policy, engine=request.param, threads=1) as fast:
            yield lambda obs, **others: fast.predict_action(obs, **others)["action"]


def noise_for(policy):
    return policy.draw_noise(2, torch.Generator().manual_seed(0))


def says(what, sentence, caught):
    """One line that names the thing; what is no tensor of torch's any more says only that it holds no numbers."""
    one_sentence(caught)
    return re.match(f"{what} ({re.escape(sentence)}|is not an array of numbers: )", str(caught.value))


def one_sentence(caught):
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_odd_observation_is_refused_in_one_sentence(act):
    for name, (value, sentence) in REFUSED.items():
        for obs in (value, {"obs": value}):
            with pytest.raises(ObservationError) as caught:
                act(obs)
            assert says("the observation", sentence, caught), name


def test_odd_noise_is_refused_in_one_sentence(act):
    for name, (value, sentence) in REFUSED.items():
        if value is not None:  # None asks for noise to be drawn
            with pytest.raises(ObservationError) as caught:
                act(GOOD, noise=value)
            assert says("noise", sentence, caught), name


@pytest.mark.parametrize(
    "generator", [5, "a", np.random.RandomState(0), [torch.Generator()]], ids=["int", "str", "numpy", "list"]
)
def test_what_is_no_generator_is_refused_in_one_sentence(act, policy, generator):
    with pytest.raises(ObservationError, match="generator"):
        act(GOOD, generator=generator)


def test_what_is_no_generator_is_refused_beside_noise_too(policy):
    with pytest.raises(ObservationError, match=r"drawn from a torch\.Generator, got int"):
        policy.predict_action(GOOD, generator=5, noise=noise_for(policy))
    with pytest.raises(ObservationError, match=r"drawn from a torch\.Generator, got int"):
        policy.draw_noise(1, 5)


def test_arrays_that_only_lie_oddly_in_memory_are_taken(act, policy):
    noise = noise_for(policy).numpy()
    expected = act(GOOD, noise=torch.as_tensor(noise))
    for name, laid in TAKEN.items():
        obs, same = laid(GOOD.numpy()), noise[:, ::-1].copy()[:, ::-1].astype(">f4")
        for given in (obs, {"obs": obs}):
            torch.testing.assert_close(act(given, noise=same), expected, rtol=0, atol=1e-6, msg=name)


def test_a_foreign_policy_says_the_same_of_odd_tensors():
    seen = torch.zeros(1, 2, 4)
    for engine in ("patched", "loop", "onnx"):
        with bc.accelerate(Policy().eval(), engine=engine, threads=1) as fast:
            fast.predict_action({"obs": seen})
            for value in (seen.to_sparse(), seen.to("meta"), torch.nested.nested_tensor([torch.zeros(2, 4)])):
                with pytest.raises(ObservationError, match=r"sparse|meta|nested") as caught:
                    fast.predict_action({"obs": value})
                one_sentence(caught)
