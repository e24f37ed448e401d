"""RDT: the contract in every engine, and what its exact savings and its masks promise."""

import pytest

from blockcache.testing import PolicyContract
from rdt_policies import rdt_observation, rdt_policy

pytestmark = pytest.mark.usefixtures("exports_stay_here")


class TestRDT(PolicyContract):
    def policy(self):
        return rdt_policy()

    def observation(self, batch):
        return rdt_observation(batch)


class TestRootMeanSquare(TestRDT):
    def policy(self):
        return rdt_policy(norm="rms", lang_adaptor="linear", state_adaptor="mlp2x_gelu")
