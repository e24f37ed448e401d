"""What LeRobot's commands need around an export of one of its policies: config, processors, text encoder. Knows no engine.

The package `lerobot_policy_blockcache` reads the directory. An export takes and gives robot units, so the processors keep
their steps and statistics, and what normalises in them is switched off.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch

from blockcache.errors import PolicyError, short
from blockcache.files import PathLike, TensorInfo, read_bytes, read_tensors, reading
from blockcache.models.checkpoint import load_tensors
from blockcache.models.dit.clip import ClipConfig, ClipEncoder, canonical
from blockcache.models.dit.lerobot import TYPE, shape_of, tower_of
from blockcache.models.dit.policy import DiTPolicy
from blockcache.models.dit.processors import PROCESSOR, PROCESSORS
from blockcache.models.policy_files import read_config

WHAT, AGAIN = "text encoder", "export the policy again with --lerobot"
_ENCODER = "observation_encoder."
_TEXT = f"{_ENCODER}text_encoder."


def check_directory(place: Path | None) -> Path:
    """The directory that a policy was loaded from, if LeRobot wrote it; the processors lie there.

    Args:
        place: That directory; None if the policy came from elsewhere, which is refused.
    """
    if place is None or read_config(place).get("type") != TYPE:
        raise PolicyError(
            f"a directory for LeRobot's commands is made of one that LeRobot wrote, of type {TYPE!r}, whose processors it "
            f"takes over; {'this policy was loaded from none' if place is None else f'{place} is none'}: name that "
            "directory, and what 'tune' wrote for it with --tuned"
        )
    return place


def plugin_config(directory: Path, policy: DiTPolicy, made_from: Mapping[str, str]) -> dict[str, Any]:
    """What `config.json` says, by the names of LeRobot's configs.

    Args:
        directory: Of the original.
        policy: What was read from there.
        made_from: What the export was made from, for people to read.
    """
    original = read_config(directory)
    return {
        "type": "blockcache",
        **{name: getattr(policy.config, name) for name in ("n_obs_steps", "horizon", "n_action_steps")},
        **{name: original[name] for name in ("input_features", "output_features")},
        "device": "cpu",
        "made_from": dict(made_from),
    }


def plugin_processors(directory: Path, taken: Collection[str] = ()) -> dict[str, bytes]:
    """The files of a directory's processors by name; steps that normalise leave everything as it is.

    Args:
        directory: Of the original, whose steps were found to be known ones when it was opened.
        taken: Names of files that the new directory has already.
    """
    files: dict[str, bytes] = {}  # by path within the directory
    for name in PROCESSORS:
        whole = PROCESSOR.load(directory / name)
        for step in whole["steps"]:
            # statistics; and such as a tokenizer, which newer versions save with it
            for said in filter(None, (step.get("state_file"), *(step.get("artifacts") or {}).values())):
                for path in _beside(directory / name, said, {*taken, *PROCESSORS}):
                    files[path.relative_to(directory).as_posix()] = read_bytes(path, "part of a processor")
            if norms := step.get("config", {}).get("norm_map"):
                step["config"]["norm_map"] = dict.fromkeys(norms, "IDENTITY")
        files[name] = json.dumps(whole, indent=2).encode()
    return files


def _beside(processor: Path, said: str, taken: Collection[str]) -> list[Path]:
    """The file that a processor names, or all files of the directory that it names."""
    place = Path(said)
    inside = place.parts and not place.is_absolute() and ".." not in place.parts and place.parts[0] not in taken
    own = processor.parent / place
    found = [path for path in (own, *own.rglob("*")) if path.is_file()] if inside else []
    if not found:
        raise PolicyError(
            f"{processor} names {short(said)}, which is not beside it or has another use there; {PROCESSOR.again}"
        )
    return found


def plugin_words(policy: DiTPolicy) -> bytes:
    """The text encoder's tensors under LeRobot's names, as a safetensors file.

    Args:
        policy: One with a text encoder.
    """
    assert policy.observation_encoder is not None
    text = policy.observation_encoder.text_encoder.state_dict()
    return safetensors.torch.save({f"{_TEXT}{name}": tensor.contiguous() for name, tensor in text.items()})


def load_words(path: PathLike) -> ClipEncoder:
    """A text encoder alone, whose `say` makes of token ids what an export takes; sizes are those of its tensors.

    Args:
        path: A file of `plugin_words`.
    """
    found: list[tuple[ClipConfig, int]] = []

    def check(infos: Mapping[str, TensorInfo]) -> None:
        shapes = {canonical(name): tuple(info.shape) for name, info in infos.items()}
        tower = tower_of(shapes, f"{_TEXT}text_encoder")
        words, _ = shape_of(shapes, f"{_TEXT}text_encoder.embeddings.token_embedding.weight", 2)
        features, _ = shape_of(shapes, f"{_TEXT}projection.weight", 2)
        found.append((ClipConfig((), None, None, None, True, 1, None, tower, words, tower.places), features))

    _, tensors = read_tensors(path, WHAT, AGAIN, safetensors.torch.load, check)
    with reading(WHAT, path, AGAIN):
        encoder = ClipEncoder(*found[0])
        load_tensors(encoder, {str(canonical(name)).removeprefix(_ENCODER): own for name, own in tensors.items()})
    return encoder.eval()
