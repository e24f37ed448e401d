"""How fast a policy answers as a control loop asks it: now and then, behind other work, and not only back to back.

python examples/control_loop.py -o docs/generated/control-loop.md

In every round plain torch is called once, then the accelerated policy in each situation, with one thread and with all cores.
Back to back its weights lie in the core's cache and its threads are awake; a control loop finds both elsewhere. Leave the
machine alone meanwhile.
"""

import argparse
import os
import shlex
import sys
import time
from statistics import median

import numpy as np
import torch

import blockcache as bc
from blockcache.files import write_bytes
from blockcache.measure.machine import describe
from blockcache.progress import progress_bar
from blockcache.report.document import Document, Paragraph, plain, table
from blockcache.report.markdown import render

PLAIN = "plain torch"
PERIOD = 1 / 30  # seconds between two calls of a control loop
MEMORY = 2**26  # bytes that other work goes through, more than a processor's caches hold


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
    found = {(PLAIN, ""): []} | {(name, situation): [] for name in fast for situation in before}
    for _ in progress_bar(range(rounds), "timing", unit="round"):
        found[PLAIN, ""].append(seconds(original))
        for name, call in fast.items():
            for situation, prepare in before.items():
                call()
                prepare()
                found[name, situation].append(seconds(call))
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
        f"`{plain(name)}` on {plain(describe()['processor'])}, batch 1, beside the policy's own 100 steps in plain "
        f"torch with one thread. Made by `{command}`: medians of {len(slow)} rounds, in which everything is called in turn."
    )
    return Document(
        "A tuned policy in a control loop",
        (Paragraph(about), table(["what", "called", "ms", "95 % below", "times plain torch"], rows, left=2)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("policy", nargs="?", default="pusht")
    parser.add_argument("--tuned", default="pusht/tuned", help="What answers fast, of the same weights.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("-o", "--output", default="control-loop.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    policy = bc.load_policy(given.policy)
    obs = 512 * torch.rand(1, policy.config.n_obs_steps, policy.config.obs_dim)
    cores = os.cpu_count() or 1
    fast = {}
    for threads in sorted({1, cores}):
        handle = bc.accelerate(bc.load_policy(given.tuned), engine="onnx", threads=threads, trust=True)
        fast[f"tuned, {threads} thread{'s' * (threads > 1)}"] = lambda handle=handle: handle.predict_action(obs)

    def original():
        policy.predict_action(obs)

    for call in (original, *fast.values()):
        for _ in range(3):
            call()
    found = measure(original, fast, situations(original), given.rounds)
    document = page(given.tuned, found, f"python {shlex.join(sys.argv)}")
    write_bytes(given.output, render(document).encode())


if __name__ == "__main__":
    main()
