"""The formula against METHOD.md's figures and against torch's own count on the real modules."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import blockcache as bc
from blockcache.errors import ScheduleError
from blockcache.models.flops import DPTShape
from blockcache.models.registry import port_of
from blockcache.schedule import generation_flops

GIGA = 1e9
REFERENCE = DPTShape()
PH = ("can_ph", "lift_ph", "square_ph", "transport_ph", "tool_hang_ph", "pusht")
MH = ("can_mh", "lift_mh", "square_mh", "transport_mh")
MULTI_STAGE = ("block_pushing", "kitchen")


def counted(call):
    """FLOPs as torch counts them. Its counter cannot see into fused attention, so that is off."""
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def reference(schedule=None):
    return generation_flops(REFERENCE.blocks, REFERENCE.every_step, 100, schedule) / GIGA


def test_full_precision_at_the_reference_shape():
    assert reference() == pytest.approx(15.74, rel=0.005)


@pytest.mark.parametrize(("tasks", "expected"), [(PH, 2.66), (MH, 2.59), (MULTI_STAGE, 2.42)])
def test_means_over_the_printed_schedules(tasks, expected):
    mean = sum(reference(bc.published_schedule(task)) for task in tasks) / len(tasks)
    assert mean == pytest.approx(expected, rel=0.005)


def test_the_three_groups_are_all_printed_schedules():
    assert sorted(PH + MH + MULTI_STAGE) == sorted(bc.published_names())


SHAPES = (
    {},
    {"n_cond_layers": 1},
    {"n_cond_layers": 3, "n_emb": 24},
    {"time_as_cond": False, "obs_as_cond": False},
    {"n_layer": 3, "horizon": 9, "n_obs_steps": 4, "obs_dim": 7, "action_dim": 2},
    {"obs_as_cond": False},  # in-painted, with the time as the only condition
)


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_one_step_is_what_torch_counts(make_policy, changes):
    policy = make_policy(**changes)
    config, adapter = policy.config, port_of(policy).adapter
    sample = torch.randn(1, config.horizon, config.sample_dim)
    cond = torch.randn(1, config.n_obs_steps, config.obs_dim) if config.obs_as_cond else None
    expected = adapter.every_step + sum(block.cost for block in adapter.blocks)
    assert counted(lambda: policy.model(sample, 3, cond)) == expected


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_each_block_is_what_torch_counts(make_policy, changes):
    adapter = port_of(make_policy(**changes)).adapter
    costs = {}

    def route(name, compute):
        costs[name] = counted(compute)
        return compute()

    tokens, width = adapter.widths["tokens"], adapter.widths["width"]
    for layer in adapter.layers:
        memory = [torch.randn(1, adapter.widths["cond_tokens"], width)] if len(layer.blocks) == 3 else []
        layer.forward(route, torch.randn(1, tokens, width), *memory)
    assert costs == {block.name: block.cost for block in adapter.blocks}
    assert [block.order for block in adapter.blocks] == list(range(len(costs)))


def test_a_whole_accelerated_generation_is_what_torch_counts(policy, observe, random_updates):
    adapter = port_of(policy).adapter
    schedule = bc.Schedule(6, random_updates([block.name for block in adapter.blocks], 6))
    with bc.accelerate(policy, schedule, engine="patched"):
        real = counted(lambda: policy.predict_action(observe()))
    assert real == generation_flops(adapter.blocks, adapter.every_step, 6, schedule)
    assert real < counted(lambda: policy.predict_action(observe()))
    assert counted(lambda: policy.predict_action(observe())) == generation_flops(adapter.blocks, adapter.every_step, 6)


def test_a_hidden_width_of_its_own_is_counted():
    usual, narrow = DPTShape(width=16), DPTShape(width=16, hidden=32)
    costs = [{block.kind: block.cost for block in shape.blocks} for shape in (usual, narrow)]
    assert costs[0]["FFN"] == 2 * costs[1]["FFN"] == 2 * 10 * 16 * 64 * 2
    assert costs[0]["SA"] == costs[1]["SA"]


def test_every_step_an_update_costs_as_much_as_no_schedule():
    full = bc.Schedule.every_step(100, [block.name for block in REFERENCE.blocks])
    assert reference(full) == reference()


@pytest.mark.parametrize(
    ("schedule", "sentence"),
    [
        (
            bc.Schedule.every_step(50, [block.name for block in REFERENCE.blocks]),
            "for 50 steps, the generation has 100",
        ),
        (bc.Schedule.every_step(100, ["layers.0.SA"]), "1 blocks are not the 24"),
    ],
)
def test_a_schedule_of_another_shape_is_refused(schedule, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        reference(schedule)
