"""How fast a policy answers as a control loop asks it: now and then, behind other work, and not only back to back.

python examples/control_loop.py -o docs/generated/control-loop.md
python examples/control_loop.py robosuite-can-ph --sampler-file fitted-5.json -o can.md

In every round plain torch is called once, then the accelerated policy in each situation, with one thread and with all
cores, in an order drawn for each round. Back to back its weights lie in the core's cache and its threads are awake; a
control loop finds both elsewhere. Leave the machine alone meanwhile.
"""

import argparse
import os
import shlex
import sys
import time
from itertools import product
from statistics import median

import numpy as np
import torch

import blockcache as bc
from blockcache.cli.arguments import PolicySource
from blockcache.files import write_bytes
from blockcache.measure.machine import describe
from blockcache.observations import pick
from blockcache.progress import progress_bar
from blockcache.report.document import Document, Paragraph, plain, table
from blockcache.report.markdown import render

PLAIN = "plain torch"
PERIOD = 1 / 30  # seconds between two calls of a control loop
MEMORY = 2**26  # bytes that other work goes through, more than a processor's caches hold
WARM = 3  # calls before each that is timed, so that it does not follow what the one before it was prepared with


def situations(original):
    """What happens before a call, by name."""
    others = np.zeros(MEMORY, dtype=np.uint8)
    return {
        "back to back": lambda: None,
        f"{1e3 * PERIOD:.0f} ms after the last call": lambda: time.sleep(PERIOD),
        f"after {MEMORY >> 20} MB of other memory were read": others.max,
        f"after {PLAIN}": original,
    }


def seconds(call):
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(original, fast, before, rounds):
    """Seconds in each round, of plain torch and of the fast policies by name and situation."""
    order = np.random.default_rng(0)
    cases = list(product(fast, before))
    found = {(PLAIN, ""): []} | {case: [] for case in cases}
    for _ in progress_bar(range(rounds), "timing", unit="round"):
        found[PLAIN, ""].append(seconds(original))
        for place in order.permutation(len(cases)):
            name, situation = cases[place]
            for _ in range(WARM):
                fast[name]()
            before[situation]()
            found[name, situation].append(seconds(fast[name]))
    return found


def page(name, found, command):
    slow = found[PLAIN, ""]
    rows = [[PLAIN, "", f"{1e3 * median(slow):.1f}", "", "1"]]
    for (who, situation), taken in found.items():
        if who != PLAIN:
            times = median(one / other for one, other in zip(slow, taken, strict=True))
            late = 1e3 * float(np.percentile(taken, 95))
            rows.append([who, situation, f"{1e3 * median(taken):.2f}", f"{late:.2f}", f"{times:.0f}"])
    about = (
        f"`{plain(name)}` on {plain(describe()['processor'])}, batch 1, beside the policy's own sampler in plain "
        f"torch with one thread. Made by `{command}`: medians of {len(slow)} rounds, in which "
        "everything is called once, in an order drawn for each round."
    )
    return Document(
        "A tuned policy in a control loop",
        (Paragraph(about), table(["what", "called", "ms", "95 % below", "times plain torch"], rows, left=2)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", nargs="?", type=PolicySource, default="pusht")
    parser.add_argument("--tuned", default="pusht/tuned", help="What answers fast, of the same weights.")
    parser.add_argument("--sampler-file", help="In its place: the policy with this sampler, as 'policy fit' writes it.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("-o", "--output", default="control-loop.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = bc.load_policy(str(given.policy))
    obs = torch.as_tensor(pick(given.policy.observations(None), [0]))
    name = given.sampler_file or given.tuned
    cores = os.cpu_count() or 1
    fast = {}
    for threads in sorted({1, cores}):
        tuned = bc.load_policy(str(given.policy) if given.sampler_file else given.tuned)
        if given.sampler_file:
            tuned = tuned.with_sampler(bc.ChosenSampler.load(given.sampler_file).sampler)
        handle = bc.accelerate(tuned, engine="onnx", threads=threads, trust=True)
        fast[f"tuned, {threads} thread{'s' * (threads > 1)}"] = lambda handle=handle: handle.predict_action(obs)

    def original():
        policy.predict_action(obs)

    for call in (original, *fast.values()):
        for _ in range(3):
            call()
    found = measure(original, fast, situations(original), given.rounds)
    document = page(name, found, f"python {shlex.join(sys.argv)}")
    write_bytes(given.output, render(document).encode())


if __name__ == "__main__":
    main()
