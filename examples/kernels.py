"""Where the milliseconds of an exported program go: its kernels by kind, what lies between them, and its products alone.

python examples/kernels.py -o docs/generated/kernels.md
python examples/kernels.py pusht/tuned -o tuned.md

Full precision on the paper's shape, or a shipped policy of that family, is exported and run as the runtime runs it. ONNX
Runtime's profiler says, on one thread, which kernels take how long. The program's products (MatMul and Gemm) are also timed
alone, in rounds with it: the same shapes in the same order, without biases, none waiting for another; once each with
a weight of its own as in the program, once all of a shape with one weight, which then stays in the core's cache.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper

from blockcache.engines import export_policy
from blockcache.files import write_bytes
from blockcache.measure.machine import describe
from blockcache.models.dpt.policy import Shape
from blockcache.models.loading import load_policy
from blockcache.report.document import Document, Paragraph, plain, table
from blockcache.report.markdown import render

PRODUCTS = ("MatMul", "Gemm")
AROUND = ("Scan", "Loop", "If")
"""Kernels whose time is that of the nodes in them, which the profiler lists too."""
COPIES = 10
"""Of a step's products in one call of them alone, so that the call itself hardly counts."""


@dataclass(frozen=True)
class Profile:
    """Of one call: its microseconds, those of all kernels and their number, both by kind, and every product as (M, K, N)."""

    call: float
    microseconds: dict[str, float]
    counts: dict[str, int]
    products: list[tuple[int, int, int]]


def session(model, threads=1, profile=None):
    """As the runtime makes them (`blockcache_runtime.providers`): the graph as it is written."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_reuse = False
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def caller(running):
    """Calls a session with numbers drawn once."""
    random = np.random.default_rng(0)
    shapes = {one.name: [size if isinstance(size, int) else 1 for size in one.shape] for one in running.get_inputs()}
    given = {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    return lambda: running.run(None, given)


def profiled(model, directory, calls):
    """The profile of the call in the middle of so many, by its time."""
    running = session(model, profile=directory / "profile")
    call = caller(running)
    for _ in range(calls):
        call()
    events = json.loads(Path(running.end_profiling()).read_text())
    found = []
    for run in [one for one in events if one["name"] == "model_run"]:
        microseconds, counts, products = defaultdict(float), defaultdict(int), []
        for one in events:
            kind = one.get("args", {}).get("op_name")
            inside = run["ts"] <= one["ts"] < run["ts"] + run["dur"]
            if not inside or kind is None or kind in AROUND or not one["name"].endswith("_kernel_time"):
                continue
            microseconds[kind] += one["dur"]
            counts[kind] += 1
            if kind in PRODUCTS:
                products.append(product(one["args"]))
        found.append(Profile(run["dur"], dict(microseconds), dict(counts), products))
    return sorted(found, key=lambda one: one.call)[len(found) // 2]


def product(arguments):
    """(M, K, N) of what the profiler says of a product; a weight that was packed before is not among its inputs."""
    (seen,), (made,) = (arguments[name][0].values() for name in ("input_type_shape", "output_type_shape"))
    return int(np.prod(made[:-1])), seen[-1], made[-1]


def alone(products, one_weight=False):
    """A graph of products, none of which waits for another; with `one_weight` all of a shape have the same."""
    random, nodes, weights, inputs = np.random.default_rng(0), [], {}, {}
    for place, (m, k, n) in enumerate(products):
        weight = f"weight {k} x {n}" if one_weight else f"weight {place}"
        inputs[f"{m} x {k}"] = helper.make_tensor_value_info(f"{m} x {k}", TensorProto.FLOAT, [m, k])
        if weight not in weights:
            weights[weight] = numpy_helper.from_array(random.standard_normal((k, n), dtype=np.float32), weight)
        nodes.append(helper.make_node("MatMul", [f"{m} x {k}", weight], [f"made {place}"]))
    again = [
        helper.make_node("MatMul", one.input, [f"{one.output[0]} {copy}"]) for copy in range(1, COPIES) for one in nodes
    ]
    last = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, [products[-1][0], products[-1][2]])
    graph = helper.make_graph([*again, *nodes], "products", list(inputs.values()), [last], list(weights.values()))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return made.SerializeToString()


def timed(calls, rounds):
    """The seconds of each call in every round, behind one that warms up."""
    seconds = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: np.array(found[1:]) for name, found in seconds.items()}


def page(shape, profile, seconds, command):
    """What was measured, and what limits it. `seconds` are by threads, then by what ran."""
    flops = 2 * sum(m * k * n for m, k, n in profile.products)
    rates = [
        [
            f"{name}, {threads} thread{'s' * (threads > 1)}",
            f"{np.median(spent) * 1e3:.1f}",
            f"{flops / np.median(spent) / 1e9:.1f}",
            f"{np.median(found['products alone, a weight each'] / spent):.0%}",
        ]
        for threads, found in seconds.items()
        for name, spent in found.items()
    ]
    others = {kind: spent for kind, spent in profile.microseconds.items() if kind not in PRODUCTS}
    rows = [
        [
            kind,
            f"{profile.counts[kind] / shape.steps:.1f}",
            f"{spent / 1e3:.1f}",
            f"{spent / sum(profile.microseconds.values()):.1%}",
            f"{spent / sum(others.values()):.1%}" if kind in others else "",
        ]
        for kind, spent in sorted(profile.microseconds.items(), key=lambda one: -one[1])
    ]
    between = (profile.call - sum(profile.microseconds.values())) / 1e3
    whole, own, cached = (float(np.median(spent)) for spent in seconds[1].values())
    about = (
        f"DP-T {shape.layers} x {shape.width}, T = {shape.horizon}, K = {shape.steps}, all computed, ONNX Runtime "
        f"{ort.__version__}, {plain(describe()['processor'])}. Made by `{command}`, which says how; medians of interleaved "
        "rounds, shares those of the rounds' own."
    )
    limits = (
        f"On one thread the program takes {(whole - own) * 1e3:.1f} ms more than its products alone, "
        f"{(whole - own) / whole:.0%} of its time: for all other kernels and for what lies between kernels. The products "
        f"themselves take {own / cached:.1f} times as long as with weights that stay in the core's cache: with so few rows "
        f"({shape.horizon}) they wait for weights, all of which every step reads again."
    )
    counted = (
        "By the profiler, on one thread. It writes down every kernel, which slows a call down, mostly between kernels and "
        f"around the short ones: the call took {profile.call / 1e3:.1f} ms, {between:.1f} of them between kernels, against "
        f"{whole * 1e3:.1f} without it. So what it says of products stands apart from the figures above."
    )
    return Document(
        "Kernels of a program",
        (
            Paragraph(about),
            table(["what", "ms", "GFLOP/s", "of products alone"], rates, left=1),
            Paragraph(limits),
            Paragraph(counted),
            table(["kernel", "a step", "ms", "of all kernels", "of all but products"], rows, left=1),
        ),
    )


def shape_of(policy):
    config = policy.config
    return Shape(config.n_emb, config.n_layer, horizon=config.horizon, steps=config.sampler.num_inference_steps)


def measure(shape, rounds, threads=(1, 2), policy=None):
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        export_policy(policy or shape.policy(), None, directory / "full.onnx")
        model = str(directory / "full.onnx")
        profile = profiled(model, directory, calls=5)
        a_step = profile.products[len(profile.products) // 2 :][: len(profile.products) // shape.steps]
        graphs = {
            "the program": model,
            "products alone, a weight each": alone(a_step),
            "products alone, one weight a shape": alone(a_step, one_weight=True),
        }
        seconds = {}
        for count in threads:
            found = timed({name: caller(session(graph, count)) for name, graph in graphs.items()}, rounds)
            parts = {name: 1 if graph is model else shape.steps / COPIES for name, graph in graphs.items()}
            seconds[count] = {name: spent * parts[name] for name, spent in found.items()}
    return profile, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "policy", nargs="?", type=load_policy, help="Shipped, or a directory. Default: the paper's shape."
    )
    parser.add_argument("-o", "--output", default="kernels.md")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = shape_of(given.policy) if given.policy else Shape()
    found = page(shape, *measure(shape, given.rounds, policy=given.policy), f"python {shlex.join(sys.argv)}")
    write_bytes(given.output, render(found).encode())


if __name__ == "__main__":
    main()
