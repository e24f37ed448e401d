"""Weights that are written around torch: every byte counts, and is read within a stated number of calls."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blockcache as bc
from blockcache.engines.staleness import PARTS, WeightsGuard
from blockcache.errors import StaleError, StaleWeightsError
from blockcache.models.modules import checksum, memory, tensors_of
from blockcache.models.registry import port_of
from engine_comparison import accelerate, act

pytestmark = pytest.mark.usefixtures("exports_stay_here")


def test_one_number_of_any_tensor_is_noticed_within_128_checks(policy):
    """Wherever it lies: torch is not told of these edits, and none of them changes a whole tensor."""
    tensors = [tensor for tensor in tensors_of(policy) if tensor.numel()]
    guard, rng = WeightsGuard(tensors), torch.Generator().manual_seed(0)
    assert PARTS == 128
    for tensor in tensors:
        flat = tensor.data.view(-1)
        place = int(torch.randint(len(flat), (1,), generator=rng))
        before = flat[place].clone()
        flat[place] += 1 if torch.isfinite(before) else -before  # a mask's -inf becomes NaN
        noticed = [_complains(guard) for _ in range(PARTS)]
        assert noticed == sorted(noticed)  # it says so from then on
        assert noticed[-1]
        flat[place] = before
        assert not any(_complains(guard) for _ in range(PARTS))


def _complains(guard):
    try:
        guard.check()
    except StaleWeightsError:
        return True
    return False


def test_each_call_reads_one_part_and_all_parts_are_all_the_bytes(policy):
    guard = WeightsGuard(tensors_of(policy))
    sizes = [sum(map(len, part)) for part in guard._parts]
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors_of(policy))
    assert max(sizes) == -(-sum(sizes) // PARTS)


def test_exchanged_numbers_are_noticed(policy):
    """A plain sum would not see them."""
    guard, weight = WeightsGuard(tensors_of(policy)), policy.model.decoder.layers[1].linear1.weight
    weight.data[[3, 7]] = weight.data[[7, 3]]
    assert any(_complains(guard) for _ in range(PARTS))


@pytest.mark.parametrize("by", ["data", "numpy"])
def test_one_number_is_noticed_within_128_calls(engine, policy, by):
    with accelerate(policy, None, engine) as fast:
        assert fast.noticed_within == 128
        act(policy)
        weight = policy.model.decoder.layers[0].linear2.weight
        if by == "data":
            weight.data[5, 3] += 1
        else:
            weight.detach().numpy()[5, 3] += 1
        with pytest.raises(StaleWeightsError, match="weights changed"):
            fast.verify()
        noticed = [_refuses(policy) for _ in range(fast.noticed_within)]
        assert noticed == sorted(noticed)  # by every call from then on
        assert noticed[-1]
        weight.data[5, 3] -= 1
    with accelerate(policy, None, engine) as again:
        again.verify()


def _refuses(policy):
    try:
        act(policy)
    except StaleError:
        return True
    return False


@settings(max_examples=60)
@given(st.data())
def test_every_byte_of_every_kind_of_tensor_counts(data):
    """Also of those that do not lie in one piece."""
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64]))
    whole = torch.zeros(6, 5, 4, dtype=dtype)
    tensor = data.draw(st.sampled_from([whole, whole.mT, whole[1:4, ::2], whole[:, 1], whole[2, 3, 1], whole[:0]]))
    before = checksum([memory(tensor)])
    if not tensor.numel():
        assert before == 0
        return
    place = tuple(data.draw(st.integers(0, size - 1)) for size in tensor.shape)
    tensor[place] = 1
    assert checksum([memory(tensor)]) != before


def test_a_held_port_does_not_keep_the_hash_of_other_bytes(make_policy, observe, run):
    """Else the export of older weights would be found on disk, and opened."""
    port, first = port_of(make_policy()), port_of(make_policy()).fingerprint
    with bc.accelerate(port, engine="onnx", threads=1):
        pass
    port.policy.model.head.weight.data[1, 2] += 1
    assert port.fingerprint == port_of(port.policy).fingerprint != first
    expected = run(port.policy, observe())
    with bc.accelerate(port, engine="onnx", threads=1):
        assert torch.allclose(run(port.policy, observe()), expected, atol=1e-4)
