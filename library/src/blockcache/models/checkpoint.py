"""Policy directories, `config.json` + `model.safetensors`: read strictly, written atomically, for every family.

A directory is written file by file, and at every instant its name loads as the whole old policy or as the whole new one:
first the new config, under a name that binds it to the new weights (`policy_files.PENDING`); then the weights, in one
rename, from which moment on that config counts; then the config takes the name `config.json`. That needs nothing of the file
system but a rename, and where nothing is killed there are never other files than these two.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import safetensors.torch
import torch
from torch import Tensor, nn

from blockcache.errors import BlockcacheError, ContentError, FileError, PolicyError, shortened
from blockcache.files import (
    PathLike,
    TensorInfo,
    make_directory,
    no_writer,
    only_writer,
    read_tensors,
    reading,
    write_bytes,
    writing,
)
from blockcache.foreign.torch_file import StoredTensor, TorchFile
from blockcache.models.modules import check_action_scale, check_mask, check_weight, refuse_overridden
from blockcache.models.own_policy import OwnPolicy, PolicyConfig
from blockcache.models.policy_files import (
    CONFIG,
    FORMAT,
    PENDING,
    WEIGHTS,
    config_file,
    pending_config,
    policy_directory,
    shared_file,
)
from blockcache.progress import progress_bar

WHAT, AGAIN = "policy weights", "save the policy again"
P = TypeVar("P", bound=OwnPolicy)


# -- reading


def load(policy_class: type[P], source: PathLike) -> P:
    """The policy of a directory, or a shipped one by name. It comes in eval mode, float32, on the CPU.

    Config and weights are never of two different saves.
    """
    directory = policy_directory(source)
    place = shared_file(directory, WEIGHTS)
    with no_writer(directory):
        with FORMAT.reading(directory / CONFIG):
            config = policy_class.CONFIG.from_dict(FORMAT.load(config_file(directory)))

        def check(infos: Mapping[str, TensorInfo]) -> None:
            check_sizes(config, len(infos), sum(math.prod(info.shape) for info in infos.values()))

        _, tensors = read_tensors(place, WHAT, AGAIN, safetensors.torch.load, check)
    with reading(WHAT, place):
        return policy_from(policy_class, config, tensors)


def check_sizes(config: PolicyConfig, tensors: int, held: int) -> None:
    """Refuse a config that would make a far larger network than its weights are, before that network is made.

    Bounds are enough here: which tensor differs is said once the network is there to compare with.

    Args:
        config: what the network would be made by.
        tensors: how many tensors there are.
        held: how many numbers they hold.
    """
    layers, of_each, least = config.least_weights
    if layers * of_each > 100 + 2 * tensors or least > 1_000_000 + 4 * held:
        raise PolicyError(
            f"the weights do not fit the policy's config: {tensors:,} tensors of {held:,} numbers, expected {layers:,} "
            f"layers of {least:,} numbers at least"
        )


def policy_from(policy_class: type[P], config: PolicyConfig, tensors: Mapping[str, Tensor]) -> P:
    """The policy of a config with these tensors, in eval mode; the sizes are checked already."""
    policy = policy_class.unfilled(config)
    load_tensors(policy.stored, tensors)
    return policy.eval()


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load tensors by name; a missing, unknown or misshapen one is refused, and one that no action can come of.

    Left aside on both sides are tensors that take no part in an action: the public code's `_dummy_variable`s, and the
    statistics from which scales and offsets were once computed. A tensor with several names, as an encoder's have them,
    needs one of these; where there are more, they must agree. A module on the meta device takes the tensors over, so that a
    large network is in memory once.
    """
    own = module.state_dict()
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith("_dummy_variable")}
    groups = [names for names, _ in _named_once(module)]
    missing = [names[0] for names in groups if given.keys().isdisjoint(names) and ".input_stats." not in names[0]]
    unknown = [name for name in given if name not in own]
    misshapen = [
        f"{shortened(name, 80)} has shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}"
        for name, tensor in given.items()
        if name in own and tensor.shape != own[name].shape
    ]
    if misfits := _some("missing ", missing) + _some("unknown ", unknown) + _some("", misshapen):
        raise PolicyError(f"the weights do not fit the policy's config: {'; '.join(misfits)}")
    for name, tensor in given.items():
        if name.endswith("input_stats.std"):
            continue  # for the record only
        if name.endswith("mask") and tensor.is_floating_point():
            check_mask(name, tensor)
        else:
            check_weight(name, tensor)
        if name.endswith((".action.scale", ".of_action.scale")):
            check_action_scale(tensor)
    for first, *others in ([name for name in names if name in given] for names in groups if len(names) > 1):
        if differing := [name for name in others if not torch.equal(given[name], given[first])]:
            raise PolicyError(
                f"the weights do not fit the policy's config: {first} and {differing[0]} are one tensor there, and differ "
                "here"
            )
    if all(tensor.is_meta for tensor in own.values()):
        single = {name: nn.Parameter(tensor.to(torch.float32)) for name, tensor in given.items()}
        module.load_state_dict(single, assign=True)
        return
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _named_once(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Every tensor once, with all of its names: a module that is part of two others has two."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def _some(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{what}{', '.join(shortened(name, 160) for name in names[:3])}{more}"] if names else []


# -- writing


def save(policy: OwnPolicy, directory: PathLike) -> None:
    """Write a policy's directory; an older one of the same name stays whole until the new one is complete.

    A directory that holds anything but a policy is refused; where the name is a link, its target is written.
    """
    if not isinstance(policy, OwnPolicy):
        refuse_foreign(policy)
    refuse_overridden(policy.named_modules(), "saving it")
    tensors = {names[0]: tensor.detach().cpu().contiguous() for names, tensor in _named_once(policy.stored)}
    weights = safetensors.torch.save(tensors, metadata={"format": "pt"})
    with writing(directory):
        target = Path(os.path.realpath(directory))
        check_replaceable(target)
        new = not target.exists()
        make_directory(target)
        with only_writer(target):
            _finish(target)
            pending = target / pending_config(weights)
            try:
                FORMAT.save(pending, policy.config.to_dict())
                write_bytes(target / WEIGHTS, weights)
            except BaseException as error:
                pending.unlink(missing_ok=True)
                if new:
                    target.rmdir()
                if isinstance(error, FileError) and isinstance(error.__cause__, OSError):
                    raise error.__cause__ from error  # said of the directory, not of a file that the user did not name
                raise
            try:
                _finish(target)
            except OSError as error:
                raise FileError(
                    f"cannot write {target / CONFIG}: {error.strerror}; the new policy loads all the same, save it again "
                    "to put its files in order"
                ) from error


def _finish(target: Path) -> None:
    """Give the config of the weights that are there its name, and remove what else killed saves left.

    Only the one writer of a directory does this, so nobody is in the middle of a save.
    """
    current, config = config_file(target), target / CONFIG
    if current != config:
        os.replace(current, os.path.realpath(config))
    for name in os.listdir(target):
        if name != current.name and PENDING.match(name.removeprefix(".") if name.startswith("..") else name):
            (target / name).unlink()


def check_replaceable(target: Path, besides: Container[str] = ()) -> None:
    """Refuse a place that a policy cannot be saved to.

    Args:
        target: the directory that the policy would have; it need not exist.
        besides: names of files that may lie there, since whoever asks replaces them too.
    """
    if target.is_dir():
        names = (item.name for item in target.iterdir())
        others = sorted(name for name in names if not _of_a_policy(name) and name not in besides)
        if others:
            raise FileError(f"{target} holds {others[0]} besides a policy; give a place that holds nothing else")
    elif target.exists():
        raise FileError(f"{target} is a file, a policy is a directory; give another place")


def _of_a_policy(name: str) -> bool:
    """The two files, and what a killed save may have left: the next one sweeps it."""
    return name in (CONFIG, WEIGHTS) or re.match(r"\.(\.?config-|model\.safetensors\.)[0-9a-f]{16}", name) is not None


def refuse_foreign(policy: Any) -> NoReturn:
    """Of a policy that only its own code can save."""
    raise PolicyError(
        f"only this package's own policies can be saved as a directory, got {type(policy).__name__}; keep your own "
        "checkpoint, and name a function that makes the policy from it (module:function) where a verb asks for POLICY"
    )


# -- what converters of other projects' files share; `foreign` reads these, and nothing of them is run


def read_stored(file: TorchFile, tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """The tensors by name; those that share numbers in the file share them here too."""
    buffers: dict[str, bytearray] = {}
    found = {}
    total = sum(storage.bytes for storage in {tensor.storage for tensor in tensors.values()})
    with progress_bar(desc="converting", total=total, unit="B", unit_scale=True, leave=False, delay=2.0) as bar:
        for name, stored in tensors.items():
            dtype, storage = getattr(torch, stored.storage.dtype), stored.storage
            if not stored.count:
                found[name] = torch.empty(stored.shape, dtype=dtype)
                continue
            if storage.entry not in buffers:
                buffers[storage.entry] = file.read(storage)
                bar.update(storage.bytes)
            numbers = torch.frombuffer(buffers[storage.entry], dtype=dtype)
            values = numbers.as_strided(stored.shape, stored.stride, stored.offset)
            found[name] = values.neg() if stored.negative else values
    return found


@contextlib.contextmanager
def naming(source: PathLike, what: str) -> Iterator[None]:
    """Whatever is wrong inside is said of this file; a FileError names it already."""
    try:
        yield
    except FileError:
        raise
    except ContentError as error:
        raise FileError(f"the {what} {source} cannot be converted: {error}") from error
    except BlockcacheError as error:
        raise type(error)(f"{source}: {error}") from error
