"""The paper's claims on analyses whose answers are known, each of them once held and once not."""

from dataclasses import replace

import numpy as np
import pytest

from blockcache_lab.analysis.claims import claims
from blockcache_lab.analysis.recorded import error_surge
from blockcache_lab.analysis.sections import (
    Caching,
    Correlation,
    Homogeneity,
    Response,
    Similarity,
    Stability,
    WeakerPolicy,
    WeightNorms,
)
from toy_analysis import BLOCKS, STEPS, caching, toy_analysis


def found(analysis, name):
    (claim,) = [item for item in claims(analysis) if item.name == name]
    return claim


def changed(kind, **changes):
    """The toy with another section of that kind."""
    toy = toy_analysis()
    return replace(toy, sections={**toy.sections, kind.name: replace(toy.get(kind), **changes)})


def test_the_toy_is_as_the_paper_says():
    assert {claim.name: claim.holds for claim in claims(toy_analysis())} == {
        "non-uniform": True,
        "block-specific": True,
        "surge": True,
        "update-induced": True,
        "union": True,
        "correlation": True,
        "beta": True,
        "proposition": True,
        "norms": True,
        "homogeneity": True,
        "divergence": False,  # it grows evenly
        "once": True,
        "weak": True,
    }


def test_figures_stand_in_the_sentences():
    toy = toy_analysis()
    assert found(toy, "correlation").figure == "1.0000"
    assert found(toy, "norms").figure == "3.0x, 1.5x per element"
    assert "so 2.0 comes of their size alone" in found(toy, "norms").sentence
    assert found(toy, "proposition").figure == "2.00"
    assert found(toy, "surge").figure == "2 of 2 FFNs"
    assert found(toy, "weak").figure == "1.00 / 0.50"
    assert found(toy, "homogeneity").paper == "0.93, min 0.29 (Push-T)"
    assert "A schedule of 4 generations leaves 3.0% more dissimilarity" in found(toy, "once").sentence
    assert "one of 1 generation leaves 15.0% more" in found(toy, "once").sentence
    assert "and 2 a larger jump" in found(toy, "surge").sentence


EVEN = np.exp(-0.01 * np.abs(np.subtract.outer(np.arange(STEPS), np.arange(STEPS))))


@pytest.mark.parametrize(
    ("name", "kind", "changes"),
    [
        ("non-uniform", Similarity, {"cosine": np.stack([EVEN] * 6)}),
        ("block-specific", Similarity, {"cosine": np.stack([toy_analysis().get(Similarity).cosine[2]] * 6)}),
        ("surge", Caching, {"errors": np.stack([caching().errors[0]] * 4)}),
        ("update-induced", Caching, {"errors": np.where(caching().updates, 0.0, 1.0)}),
        ("union", Caching, {"errors": caching().errors[[1, 1, 2, 3]], "updates": caching().updates[[1, 1, 2, 3]]}),
        ("correlation", Correlation, {"downstream_errors": np.arange(STEPS - 1) % 2}),
        ("beta", Correlation, {"beta_downstream": np.array([0, 1, 0, 1, 0])}),
        ("proposition", Response, {"remainders": toy_analysis().get(Response).scales}),
        ("norms", WeightNorms, {"norms": np.ones((3, 3))}),
        ("homogeneity", Homogeneity, {"mean": np.full((6, 3), 0.5)}),
        ("once", Stability, {"excess": np.full((2, 2), 0.1)}),
        ("weak", WeakerPolicy, {"errors": np.array([0.3, 0.3])}),
    ],
)
def test_each_claim_can_fail(name, kind, changes):
    assert found(changed(kind, **changes), name).holds is False


def test_what_fails_on_the_toy_can_hold():
    late = np.ones((6, STEPS))
    late[:, -1] = 0.5
    assert found(changed(Homogeneity, every_step=late), "divergence").holds is True


def test_what_is_missing_names_the_command_and_what_cannot_be_says_why():
    toy = toy_analysis(without=("weaker", "response"), absent={"response": "The policy's FFN is of another form."})
    weak, response = found(toy, "weak"), found(toy, "proposition")
    assert weak.holds is None
    assert weak.sentence == "Not measured; `blockcache analyse toy --only weaker --weaker POLICY` does it."
    assert (response.holds, response.sentence, response.figure) == (None, "The policy's FFN is of another form.", "")


def test_what_cannot_be_told_is_neither():
    flat = changed(Correlation, downstream_errors=np.ones(STEPS - 1))
    assert found(flat, "correlation").holds is None
    without = Caching(("bac",), caching().errors[:1], caching().updates[:1])
    toy = toy_analysis()
    toy = replace(toy, sections={**toy.sections, "caching": without})
    assert [found(toy, name).holds for name in ("surge", "update-induced", "union")] == [None] * 3


def test_a_surge_is_a_rise_at_an_update():
    errors, updates = np.zeros((1, 6, 4)), np.zeros((1, 6, 4), dtype=bool)
    errors[0, 1] = [0, 0.1, 0.5, 0.2]  # the first FFN rises at its update at step 2
    errors[0, 3] = [0, 0.4, 0.1, 0.3]  # the second falls there, and rises where it is reused
    updates[:, :, [0, 2]] = True
    surge = error_surge(Caching(("one",), errors, updates), BLOCKS)
    assert surge.ffns == ("layers.0.FFN", "layers.1.FFN", "layers.2.FFN")
    jumps, surges = surge.of("one")
    np.testing.assert_allclose(jumps, [0.4, 0, 0], atol=1e-6)
    assert surges.tolist() == [1, 0, 0]
    np.testing.assert_allclose(surge.updated("one"), [0.5, 0.1, 0], atol=1e-6)
