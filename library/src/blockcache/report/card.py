"""A model card of an export, as model hubs read it: front matter, what the file is, the evidence, how to run it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from blockcache.report.document import Bullets, Document, Paragraph, Section, plain
from blockcache.report.markdown import render
from blockcache.report.tuning import evidence
from blockcache.results.tuning import Tuning
from blockcache_runtime.parity import Parity

RUNTIME = """It needs blockcache-runtime, which brings numpy and onnxruntime: `pip install ./runtime` in a clone of blockcache.

```python
from blockcache_runtime import History, open_export
policy, history = open_export("policy.onnx"), History({moments})  # history.reset() where an episode begins
actions = policy.predict_action(history.push(observation))["action"][0]
```"""
PHYSICALAI = """It needs Intel's physicalai, and nothing of blockcache. All moments of an observation go in at once, by name.

```python
from physicalai.inference import InferenceModel
policy = InferenceModel(".")
actions = policy.predict_action_chunk(observation)
```"""
LEROBOT = """It needs LeRobot, and beside it blockcache's plugin: `pip install ./runtime "./library[lerobot]" ./plugin` in a clone of blockcache.
The text encoder and LeRobot's processors lie beside the file.

```sh
lerobot-eval --policy.path={directory} --env.type=...
```"""


def export_card(
    name: str,
    header: Mapping[str, Any],
    inputs: Mapping[str, Sequence[int]],
    how: str,
    tuning: Tuning | None = None,
    parity: Parity | None = None,
    licence: str = "unknown",
    original: Parity | None = None,
) -> str:
    """The text of README.md.

    Args:
        name: Of the policy.
        header: What the export says of itself.
        inputs: What it observes: shapes by name, without the batch.
        how: What it needs and three lines of Python that run it, in the card's directory; `observation` is what the robot sees.
        tuning: Why this sampler and this schedule were chosen, where `tune` chose them.
        parity: How its actions compare with the policy's own, where that was measured.
        licence: Its identifier on the hub.
        original: How its actions compare with those of the policy as it was before it was tuned, in full precision.
    """
    bound = header["fingerprint"]
    sampler, steps, updates = bound["sampler"] or {}, bound["steps"], header["schedule"]
    computed, all_of = sum(map(len, updates.values())), steps * len(updates)
    reused = f"{computed} of {all_of} block evaluations are computed, the others reused"
    _, chunk, size = header["outputs"]["action"]
    taken = ", ".join(f"`{item}` ({' x '.join(map(str, shape))})" for item, shape in inputs.items())
    front = {
        "license": licence,
        "library_name": "blockcache",
        "pipeline_tag": "robotics",
        "tags": ["robotics", "diffusion-policy", "onnx", "blockcache"],
    }
    what = (
        f"Policy: {plain(name)}, family {plain(bound['family'])}, weights {str(bound['weights'] or 'unknown')[:16]}.",
        f"Sampler: {plain(str(sampler.get('type')))}, {steps} steps; all settings are in the file's header.",
        f"Schedule: {'every block is computed at every step' if computed == all_of else reused}.",
        f"Takes {taken}; gives {chunk} actions of {size} numbers. All are in robot units.",
        *(f"`{item}` is given from outside: {plain(said)}." for item, said in header.get("outside", {}).items()),
    )
    found = ["Not tuned: speed and loss beside the plain policy were not measured."]
    if tuning is not None:
        machine, kept = tuning.machine, tuning.chosen.distances.spread.mean
        timed = f"Timed on {plain(machine['processor'])}, {machine['cores']} cores."
        found = [
            evidence(tuning),
            f"{timed} Its actions for one observation have {kept:.0%} of the spread of the policy's own.",
        ]
    if parity is not None:
        found.append(f"The file {parity}.")
    if original is not None:
        found.append(
            f"Beside {original.beside}, in full precision and beginning with the same noise, actions differ by "
            f"{original.largest:.1e} at most and {original.typical:.1e} typically ({original.count} observations)."
        )
    blocks = (
        Bullets(what),
        Section("Evidence", (Bullets(tuple(found)),)),
        Section("How to run it", (Paragraph(how),)),
        Section("Licence", (Paragraph(f"{plain(licence)}, for the weights; the data they learnt from has its own."),)),
    )
    matter = "\n".join(f"{key}: {json.dumps(value)}" for key, value in front.items())
    return f"---\n{matter}\n---\n\n{render(Document(f'{plain(name)}, exported by blockcache', blocks))}"
