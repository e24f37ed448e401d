"""A directory as `tune` writes it, with no more of a tuning than what is read to use it."""

import json

import blockcache as bc
from blockcache.models.registry import port_of
from blockcache.samplers import ChosenSampler


def write_tuned(policy, directory, steps=3, replan=None):
    """Fewer steps, at the last of which every block's output is reused; and fewer actions executed of a chunk."""
    port = port_of(policy)
    few = type(port.sampler).from_dict({**port.sampler.to_dict(), "num_inference_steps": steps})
    blocks = [block.name for block in port.adapter.blocks]
    directory.mkdir(exist_ok=True)
    ChosenSampler(few, port.fingerprint).save(directory / "sampler.json")
    bc.Schedule(steps, dict.fromkeys(blocks, (0, 1)), port.with_sampler(few).fingerprint).save(
        directory / "schedule.json"
    )
    (directory / "tuning.json").write_text("{}" if replan is None else json.dumps({"setting": {"replan": replan}}))
    return few
