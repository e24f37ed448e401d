"""A paired evaluation on the toy task, ready to run."""

from blockcache.compare.evaluation import prepare
from blockcache.compare.methods import parse_method
from blockcache.samplers import DDPM
from toy_task import Toy, observations

OWN = DDPM(num_inference_steps=24)  # enough for S = 20
METHODS = ("uniform:S=3", "ddim-3", "teacache:threshold=0.5")


def ready(policy, state, make=Toy, methods=METHODS, rollouts=6, group=2, **others):
    settings = {"first_seed": 0, "generations": 4, "engine": "loop", "progress": False, "source": "tiny"}
    return prepare(
        policy,
        "toy",
        [parse_method(method) for method in methods],
        observations(),
        state=state,
        rollouts=rollouts,
        group=group,
        make=make,
        **settings | others,
    )
