"""FLOPs that remain in the whole-loop engines: the formula against counts of what really runs.

The loop is counted by torch, which counts matrix products and nothing else (no norms, activations, softmax or sums), as
the formula does; there is no fused attention in the loop, which on the CPU torch would not count. The ONNX graph is
counted here, node by node, from the shapes that flow through it.
"""

import math

import onnx
import pytest
import torch
from blockcache.engines.compiled import compile_policy
from onnx import numpy_helper, shape_inference
from torch.utils.flop_counter import FlopCounterMode

import blockcache as bc
from blockcache.engines.loop import Loop
from blockcache.models.dpt.flops import DPTShape, whole_loop
from blockcache.models.registry import port_of
from blockcache.samplers import SAMPLERS
from blockcache.schedule.cost import generation
from blockcache.schedule.plan import compile_plan
from blockcache.studies.savings import DiffusersLoop, EncodedMemory, ProjectedMemory

pytestmark = pytest.mark.usefixtures("exports_stay_here")

STEPS = 6
SHAPES = {
    "tiny": {},
    "one layer": {"n_layer": 1},
    "three observations, long chunk": {"n_obs_steps": 3, "horizon": 12, "n_layer": 3},
    "four heads": {"n_head": 4, "obs_dim": 9},
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def policy(request, make_policy):
    return make_policy(**request.param)


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
    return torch.randn(batch, policy.n_obs_steps, policy.obs_dim)


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def loop(policy, schedule=None, tokens=None, memory=None):
    matrices = compile_policy(port_of(policy), "loop")
    followed = schedule or bc.Schedule.every_step(STEPS, names(policy))
    return Loop(matrices if tokens is None else matrices.cut(tokens), compile_plan(followed), memory)


# -- the loop


def test_the_loop_at_full_precision_is_what_torch_counts(policy):
    runner, noise = loop(policy), policy.draw_noise(1)
    real = counted(lambda: runner(observe(policy), noise))
    assert real == whole_loop(shape_of(policy), STEPS)
    shape = shape_of(policy)
    assert real < generation(shape.blocks, shape.every_step, STEPS)


def test_the_loop_under_a_schedule_is_what_torch_counts(policy, random_updates):
    schedule = bc.Schedule(STEPS, random_updates(names(policy), STEPS))
    runner, noise = loop(policy, schedule), policy.draw_noise(1)
    assert counted(lambda: runner(observe(policy), noise)) == whole_loop(shape_of(policy), STEPS, schedule)


def test_the_loop_without_what_is_not_executed_is_what_torch_counts(policy, random_updates):
    stop = policy.config.executed.stop
    for schedule in (None, bc.Schedule(STEPS, random_updates(names(policy), STEPS))):
        runner, noise = loop(policy, schedule, stop), policy.draw_noise(1)
        real = counted(lambda runner=runner, noise=noise: runner(observe(policy), noise))
        assert real == whole_loop(shape_of(policy), STEPS, schedule, tokens=stop)


def test_a_batch_costs_as_many_times_more(policy):
    runner, noise = loop(policy), policy.draw_noise(3)
    assert counted(lambda: runner(observe(policy, 3), noise)) == 3 * whole_loop(shape_of(policy), STEPS)


def test_through_accelerate_it_is_the_same(policy, random_updates):
    schedule = bc.Schedule(STEPS, random_updates(names(policy), STEPS))
    with bc.accelerate(policy, schedule, engine="loop", output="action"):
        real = counted(lambda: policy.predict_action(observe(policy)))
    assert real == whole_loop(shape_of(policy), STEPS, schedule, tokens=policy.config.executed.stop)


def test_each_saving_saves(policy):
    """The lines of the benchmark, from what the plain policy does down to the loop engine."""
    shape, noise, obs = shape_of(policy), policy.draw_noise(1), observe(policy)
    plain, saved = generation(shape.blocks, shape.every_step, STEPS), whole_loop(shape, STEPS)
    runners = [
        DiffusersLoop(loop(policy, memory=EncodedMemory), policy.sampler),
        DiffusersLoop(loop(policy, memory=ProjectedMemory), policy.sampler),
        DiffusersLoop(loop(policy), policy.sampler),
        loop(policy),
        loop(policy, tokens=policy.config.executed.stop),
    ]
    costs = [counted(lambda runner=runner: runner(obs, noise)) for runner in runners]
    # the first embeds the observations once already, which the plain policy does at every step
    embedding = 2 * policy.n_obs_steps * policy.obs_dim * policy.config.n_emb
    assert costs[0] == plain - (STEPS - 1) * embedding
    assert costs[0] > costs[1] > costs[2] == costs[3] == saved > costs[4]


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
    for output, tokens in (("chunk", policy.horizon), ("action", policy.config.executed.stop)):
        bc.export_policy(policy, schedule, tmp_path / "policy.onnx", output)
        real = count_graph(onnx.load(tmp_path / "policy.onnx"), 1)
        blank = 2 * tokens * policy.action_dim * policy.config.n_emb
        formula = whole_loop(shape_of(policy), STEPS, schedule, tokens, folded_heads=policy.config.n_head)
        assert real - blank == formula


def test_folding_pays_where_keys_are_few():
    reference = DPTShape()
    assert whole_loop(reference, 100, folded_heads=4) < whole_loop(reference, 100)
    many = DPTShape(width=32, cond_tokens=33)
    assert whole_loop(many, 100, folded_heads=4) > whole_loop(many, 100)


def test_exact_savings_at_the_reference_shape():
    """Issue 3: without the tokens behind the executed slice 10 % at T = 10 and 44 % at T = 16, of the blocks' cost."""
    for tokens, share in ((10, 0.10), (16, 0.44)):
        shape = DPTShape(tokens=tokens)
        saved = 1 - whole_loop(shape, 100, tokens=9) / whole_loop(shape, 100)
        assert saved == pytest.approx(share, abs=0.005)


def test_fewer_steps_cost_less_in_proportion():
    shape = DPTShape()
    once = 2 * whole_loop(shape, 1) - whole_loop(shape, 2)
    assert whole_loop(shape, 100) - once == 100 * (whole_loop(shape, 1) - once)
    assert once > 0


def test_other_samplers_cost_the_same_per_step(make_policy):
    costs = set()
    for kind in ("ddpm", "ddim", "dpmsolver++"):
        policy = make_policy(sampler=SAMPLERS[kind](num_inference_steps=STEPS))
        runner, noise = loop(policy), policy.draw_noise(1)
        costs.add(counted(lambda runner=runner, policy=policy, noise=noise: runner(observe(policy), noise)))
    assert costs == {whole_loop(shape_of(policy), STEPS)}
