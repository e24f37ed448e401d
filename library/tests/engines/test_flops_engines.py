"""FLOPs that remain in the whole-loop engines: the formula against counts of what really runs.

The loop is counted by torch, which counts matrix products and nothing else (no norms, activations, softmax or sums), as
the formula does; there is no fused attention in the loop, which on the CPU torch would not count. The ONNX graph is
counted here, node by node, from the shapes that flow through it.
"""

import math
from dataclasses import replace

import onnx
import pytest
import torch
from onnx import numpy_helper, shape_inference

import blockcache as bc
from blockcache.engines.build import build
from blockcache.models.flops import DPTShape, attention, folded_blocks, folded_every_step, folded_once, linear
from blockcache.models.registry import port_of
from blockcache.samplers import SAMPLERS
from blockcache.schedule import generation_flops
from loops import SHAPES, STEPS, counted, formula, loop_of, policies

pytestmark = pytest.mark.usefixtures("exports_stay_here")

policy = policies(SHAPES)


def shape_of(policy):
    config = policy.config
    return DPTShape(
        width=config.n_emb,
        layers=config.n_layer,
        tokens=config.horizon,
        cond_tokens=1 + config.n_obs_steps,
        cond_dim=config.obs_dim,
        input_dim=config.action_dim,
        output_dim=config.action_dim,
    )


def names(policy):
    return [block.name for block in shape_of(policy).blocks]


def observe(policy, batch=1):
    return {"obs": torch.randn(batch, policy.n_obs_steps, policy.obs_dim)}


def built(policy, schedule=None):
    return build(port_of(policy), schedule or bc.Schedule.every_step(STEPS, names(policy)), "loop")


def by_sizes(shape, heads, steps, tokens=None):
    """The formula behind it, at full precision: tokens behind the executed slice cost nothing of the loop."""
    cut = shape if tokens is None else replace(shape, tokens=tokens)
    return folded_once(shape) + generation_flops(folded_blocks(cut, heads), folded_every_step(cut), steps)


# -- the loop


def test_the_loop_at_full_precision_is_what_torch_counts(policy):
    made, noise, shape = built(policy), policy.draw_noise(1), shape_of(policy)
    real = counted(lambda: loop_of(made)(observe(policy), noise))
    assert real == formula(made) == by_sizes(shape, policy.config.n_head, STEPS)
    assert real < generation_flops(shape.blocks, shape.every_step, STEPS)


def test_the_loop_under_a_schedule_is_what_torch_counts(policy, random_updates):
    schedule = bc.Schedule(STEPS, random_updates(names(policy), STEPS))
    made, noise = built(policy, schedule), policy.draw_noise(1)
    assert counted(lambda: loop_of(made)(observe(policy), noise)) == formula(made, schedule) < formula(made)


def test_the_loop_without_what_is_not_executed_is_what_torch_counts(policy, random_updates):
    for schedule in (None, bc.Schedule(STEPS, random_updates(names(policy), STEPS))):
        whole, noise = built(policy, schedule), policy.draw_noise(1)
        made = whole.actions_only()
        real = counted(lambda made=made, noise=noise: loop_of(made)(observe(policy), noise))
        assert real == formula(made, schedule) < formula(whole, schedule)


def test_a_batch_costs_as_many_times_more(policy):
    made, noise = built(policy), policy.draw_noise(3)
    assert counted(lambda: loop_of(made)(observe(policy, 3), noise)) == 3 * formula(made)


def test_through_accelerate_it_is_the_same(policy, random_updates):
    schedule = bc.Schedule(STEPS, random_updates(names(policy), STEPS))
    with bc.accelerate(policy, schedule, engine="loop", output="action"):
        real = counted(lambda: policy.predict_action(observe(policy)))
    assert real == formula(built(policy, schedule).actions_only(), schedule)


# -- the ONNX graph


def count_graph(model, feeds):
    """FLOPs of the matrix products of a graph, by running shape inference with the batch filled in."""
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.ClearField("dim_param")
                dim.dim_value = feeds
    inferred = shape_inference.infer_shapes(model, data_prop=True, strict_mode=True).graph
    shapes = {item.name: list(numpy_helper.to_array(item).shape) for item in inferred.initializer}
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        shapes[value.name] = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    return sum(cost(node, shapes) for node in inferred.node)


def cost(node, shapes):
    sizes = [shapes[name] for name in node.input]
    if "identity" in node.input:
        return 0  # a sum of the sampler's, which is no work of the policy's
    if node.op_type in ("Gemm", "MatMul"):
        out = shapes[node.output[0]]
        assert 0 not in out
        return 2 * math.prod(out) * sizes[0][-1]
    if node.op_type == "Attention":
        (batch, queries, width), keys = sizes[0], sizes[1][1]
        return 2 * 2 * batch * queries * keys * width
    assert node.op_type not in ("Conv", "Einsum", "Scan", "If", "Loop")
    return 0


def test_the_unrolled_graph_is_what_its_nodes_say(policy, random_updates, tmp_path):
    """`blank`, a product with zeros that carries the batch size, is counted off: it is no work of the policy's."""
    schedule = bc.Schedule(STEPS, random_updates(names(policy), STEPS))
    whole = built(policy, schedule)
    for output, made in (("chunk", whole), ("action", whole.actions_only())):
        bc.export_policy(policy, schedule, tmp_path / "policy.onnx", output)
        real = count_graph(onnx.load(tmp_path / "policy.onnx"), 1)
        blank = 2 * made.program.tokens * policy.action_dim * policy.config.n_emb
        assert real - blank == formula(made, schedule)


def test_folding_pays_where_keys_are_few():
    for shape, pays in ((DPTShape(), True), (DPTShape(width=32, cond_tokens=33), False)):
        folded = next(block.cost for block in folded_blocks(shape, heads=4) if block.kind == "CA")
        # keys and values are projected once either way
        once = linear(shape.cond_tokens, shape.width, 2 * shape.width)
        assert (folded < attention(shape.tokens, shape.cond_tokens, shape.width) - once) is pays


def test_exact_savings_at_the_reference_shape():
    """Issue 3: without the tokens behind the executed slice 10 % at T = 10 and 44 % at T = 16, of the blocks' cost."""
    for tokens, share in ((10, 0.10), (16, 0.44)):
        shape = DPTShape(tokens=tokens)
        saved = 1 - by_sizes(shape, 4, 100, tokens=9) / by_sizes(shape, 4, 100)
        assert saved == pytest.approx(share, abs=0.005)


def test_fewer_steps_cost_less_in_proportion():
    costs = {steps: by_sizes(DPTShape(), 4, steps) for steps in (1, 2, 100)}
    once = 2 * costs[1] - costs[2]
    assert costs[100] - once == 100 * (costs[1] - once)
    assert once == folded_once(DPTShape()) > 0


def test_other_samplers_cost_the_same_per_step(make_policy):
    costs = set()
    for kind in ("ddpm", "ddim", "dpmsolver++"):
        policy = make_policy(sampler=SAMPLERS[kind](num_inference_steps=STEPS))
        made, noise = built(policy), policy.draw_noise(1)
        costs.add(counted(lambda made=made, policy=policy, noise=noise: loop_of(made)(observe(policy), noise)))
    assert costs == {formula(made)}
