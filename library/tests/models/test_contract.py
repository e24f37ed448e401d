"""The contract over our forms of DP-T, a foreign policy of the public shape, and the toy family."""

from importlib.metadata import EntryPoint

import pytest
import torch
from conftest import FORMS, tiny_policy

import blockcache as bc
import foreign_policy
import toy_family
from blockcache.errors import PolicyError
from blockcache.models.registry import port_of
from blockcache.testing import PolicyContract

pytestmark = pytest.mark.usefixtures("exports_stay_here")


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class TestDecoder(PolicyContract):
    def policy(self):
        return tiny_policy()

    def observation(self, batch):
        return normal(batch, 2, 5)


class TestTransformerCondition(TestDecoder):
    engines = ("patched",)

    def policy(self):
        return tiny_policy(**FORMS["transformer-condition"])


class TestEncoderOnly(TestDecoder):
    engines = ("patched",)
    tolerance = 1e-5  # torch's fused encoder layer is off in ours only; test_patched has smaller weights and 1e-6

    def policy(self):
        return tiny_policy(**FORMS["encoder-only"])


class TestForeign(PolicyContract):
    def policy(self):
        return foreign_policy.Policy()

    def observation(self, batch):
        return {"obs": normal(batch, foreign_policy.SEEN, foreign_policy.OBS)}


@pytest.fixture
def toy_family_is_installed(monkeypatch):
    point = EntryPoint("toy-flow", "toy_family:claim", "blockcache.families")
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [point])


@pytest.mark.usefixtures("toy_family_is_installed")
class TestToyFlow(PolicyContract):
    def policy(self):
        return toy_family.FlowPolicy()

    def observation(self, batch):
        sizes = {"state": toy_family.STATE, "words": toy_family.WORDS, "pictures": toy_family.PICTURES}
        return {name: normal(batch, *shape) for name, shape in sizes.items()}

    def test_the_gate_is_the_present_one(self):
        """By arithmetic: with every residual skipped, what a step adds still follows the gates of that step."""
        policy = self.policy()
        port = port_of(policy)
        names = [block.name for block in port.adapter.blocks]
        schedule = bc.Schedule(toy_family.STEPS, {name: [0] for name in names})
        residuals = {}

        def keep(name, compute):
            return residuals.setdefault(name, compute())

        obs = self.observation(1)
        state, words, pictures = obs["state"], obs["words"], obs["pictures"]
        x = torch.randn(1, toy_family.TOKENS, toy_family.ACTION, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for step in range(toy_family.STEPS):
                time = policy.net.time(torch.tensor([step / toy_family.STEPS]))
                context = torch.cat([time, policy.net.sense(state[:, 0])], dim=-1)
                stream = policy.net.enter(x) + policy.net.places
                for index, stage in enumerate(policy.net.stages):
                    route = lambda kind, compute, index=index: keep((index, kind), compute)  # noqa: E731
                    stream = stage.routed(route, stream, context, (words, pictures)[index % 2])
                x = x + policy.net.leave(stream) / toy_family.STEPS
        for engine in self.engines:
            with bc.accelerate(policy, schedule, engine):
                found = policy.chunk(obs, generator=torch.Generator().manual_seed(0))["action_pred"]
            assert torch.allclose(found, x, atol=2e-5), engine


def test_a_family_without_feed_forward_blocks_is_told_so():
    class OneKind(TestDecoder):
        def policy(self):
            return tiny_policy()

    contract = OneKind()
    contract.union_has_nothing_to_do = True  # a lie
    with pytest.raises(AssertionError, match="leave the union with nothing to do"):
        contract.test_the_union_has_something_to_do()


def test_a_policy_that_says_what_it_observes_cannot_be_declared_not_to():
    class Silent(TestDecoder):
        declares_observations = False  # a lie

    with pytest.raises(AssertionError, match="the policy says what it observes after all"):
        Silent().test_synthetic_observations_are_taken()


def test_others_are_asked_first_and_a_refusal_says_what_each_missed(toy_family_is_installed):
    assert port_of(toy_family.FlowPolicy()).adapter.family == "toy-flow"
    assert port_of(tiny_policy()).adapter.family == "dp-t"
    with pytest.raises(PolicyError, match=r"toy-flow: it has no net of stages; dp-t: it lacks model, noise_scheduler"):
        port_of(object())
