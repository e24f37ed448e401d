"""What a schedule was made for, and how a difference is put into words."""

import json

import pytest

from blockcache.errors import ContentError
from blockcache.fingerprint import Fingerprint, fingerprint_differences

BOUND = Fingerprint(
    family="dp-t",
    blocks=("layers.0.SA", "layers.0.FFN"),
    widths={"width": 16, "tokens": 6},
    steps=10,
    sampler={"type": "ddpm", "num_inference_steps": 10},
    weights="0123456789abcdef",
)


def test_equal_fingerprints_do_not_differ():
    assert fingerprint_differences(BOUND, BOUND) == ()


def test_unbound_fields_bind_nothing():
    assert fingerprint_differences(Fingerprint(), BOUND) == ()
    assert fingerprint_differences(Fingerprint(steps=10), BOUND) == ()
    assert fingerprint_differences(Fingerprint(steps=11), BOUND) == ("steps 10 instead of 11",)


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"family": "rdt"}, 'family "rdt" instead of "dp-t"'),
        ({"blocks": ("layers.0.SA",)}, "1 blocks instead of 2 (no block layers.0.FFN)"),
        ({"blocks": (*BOUND.blocks, "layers.1.SA")}, "3 blocks instead of 2 (an extra block layers.1.SA)"),
        ({"blocks": BOUND.blocks[::-1]}, "the same blocks in another order"),
        ({"widths": {"width": 32, "tokens": 6}}, "width 32 instead of 16"),
        ({"widths": {"width": 16}}, "tokens null instead of 6"),
        ({"steps": 20}, "steps 20 instead of 10"),
        ({"sampler": {"type": "ddim", "num_inference_steps": 10}}, 'type "ddim" instead of "ddpm"'),
        ({"weights": "fedcba9876543210"}, "weights fedcba98 instead of 01234567"),
    ],
)
def test_each_difference_is_named(change, phrase):
    other = Fingerprint(**{**vars(BOUND), **change})
    assert fingerprint_differences(BOUND, other) == (phrase,)
    assert fingerprint_differences(BOUND, other, ignore=tuple(change)) == ()


def test_round_trip_through_json():
    assert Fingerprint.from_dict(json.loads(json.dumps(BOUND.to_dict()))) == BOUND
    assert Fingerprint.from_dict(json.loads(json.dumps(Fingerprint().to_dict()))) == Fingerprint()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {**BOUND.to_dict(), "colour": "red"},
        {key: value for key, value in BOUND.to_dict().items() if key != "steps"},
        {**BOUND.to_dict(), "steps": "10"},
        {**BOUND.to_dict(), "steps": True},
        {**BOUND.to_dict(), "steps": 10.0},
        {**BOUND.to_dict(), "blocks": "layers"},
        {**BOUND.to_dict(), "blocks": [["layers.0.SA"]]},
        {**BOUND.to_dict(), "weights": 3},
        {**BOUND.to_dict(), "sampler": "ddpm"},
    ],
)
def test_a_garbled_fingerprint_is_refused(value):
    with pytest.raises(ContentError, match="fingerprint"):
        Fingerprint.from_dict(value)
