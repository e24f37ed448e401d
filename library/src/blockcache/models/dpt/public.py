"""Checkpoints of the public Diffusion Policy code, made into policies. Nothing of a checkpoint is run.

A checkpoint is what its `BaseWorkspace.save_checkpoint` wrote: the config of the run, the tensors of the model, of its
average and of the optimiser, and other pickles, which stay closed. Settings come from the config, since tensors do not tell
heads, sampler or clipping, and the tensors must be just those that the config calls for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from blockcache.cache import Cache, digest, source_hash
from blockcache.errors import ContentError, FileError, PolicyError, shortened
from blockcache.files import PathLike, opened
from blockcache.foreign.configs import Config
from blockcache.foreign.pickles import as_mapping
from blockcache.foreign.torch_file import StoredTensor, TorchFile
from blockcache.models.checkpoint import check_sizes, load, load_tensors, save
from blockcache.models.dpt.policy import DiffusionTransformerPolicy
from blockcache.models.dpt.public_config import HYBRID, architecture, camera_config, low_dim_config, uses_ema
from blockcache.models.policy_files import check_new
from blockcache.models.stored import naming, read_stored
from blockcache.progress import progress_bar

WHAT = "checkpoint"
_CONVERTED = Cache("a converted checkpoint", "policy")


def convert_checkpoint(source: PathLike, directory: PathLike) -> DiffusionTransformerPolicy:
    """Write the policy directory of a checkpoint, and return the policy.

    Args:
        source: a file that the public Diffusion Policy code wrote.
        directory: where the policy shall be; nothing may be there yet.
    """
    check_new(directory)
    policy = read_checkpoint(source)
    save(policy, directory)
    return policy


def load_checkpoint(source: PathLike) -> DiffusionTransformerPolicy:
    """The policy of a checkpoint; converted once, and kept in the cache by the file's content."""
    with opened(source, WHAT) as (file, size):
        sha256 = _sha256(file, size)
        key = digest(sha256, source_hash(__file__))
        policy = _CONVERTED.get(key, lambda directory: load(DiffusionTransformerPolicy, directory))
        if policy is None:
            policy = made = _converted(source, file, size, sha256)
            _CONVERTED.put(key, lambda directory: save(made, directory))
    return policy


def read_checkpoint(source: PathLike) -> DiffusionTransformerPolicy:
    """The policy of a checkpoint, in eval mode."""
    with opened(source, WHAT) as (file, size):
        return _converted(source, file, size, _sha256(file, size))


def _converted(source: PathLike, opened_file: BinaryIO, size: int, sha256: str) -> DiffusionTransformerPolicy:
    """The policy of an open checkpoint, which must hold the same bytes before and after it is read: those of its hash."""
    opened_file.seek(0)
    file = TorchFile(opened_file, size, WHAT, source)
    with naming(source, WHAT):
        content = as_mapping(file.content)
        if content is None or not {"cfg", "state_dicts"} <= content.keys():
            names = "" if content is None else shortened(", ".join(map(str, content)), 200)
            raise ContentError(
                "it is no checkpoint of Diffusion Policy: expected cfg and state_dicts in it, got "
                f"{names or type(file.content).__name__}"
            )
        config = Config(content["cfg"])
        kind = architecture(config)
        tensors = _tensors(file, content["state_dicts"], uses_ema(config))
        record = {"converted_from": shortened(Path(source).name, 200), "sha256": sha256}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        settings = camera_config(config, record, shapes) if kind == HYBRID else low_dim_config(config, record)
        storages = {tensor.storage for tensor in tensors.values()}
        check_sizes(settings, len(tensors), sum(storage.count for storage in storages))
        policy = DiffusionTransformerPolicy(settings)
        load_tensors(policy, _repeated(read_stored(file, tensors), policy))
    if _sha256(opened_file, size) != sha256:
        raise FileError(f"the {WHAT} {source} was changed while it was read; load it again once it is whole")
    return policy.eval()


def _tensors(file: TorchFile, states: Any, ema: bool) -> dict[str, StoredTensor]:
    """The weights that the config wants used, by name, still in the file."""
    held = as_mapping(states) or {}
    wanted = "ema_model" if ema else "model"
    state = as_mapping(held.get(wanted))
    if state is None:
        which = "the averaged weights (training.use_ema)" if ema else "weights that are not averaged"
        names = shortened(", ".join(map(str, held)), 200) or "nothing"
        raise PolicyError(
            f"the config wants {which}, but the checkpoint has no {wanted} (it holds {names}); take one that was saved "
            "with it"
        )
    found = {}
    for name, value in state.items():
        if not isinstance(name, str) or name.endswith("_dummy_variable"):
            continue
        try:
            found[name] = file.tensor(value)
        except ContentError as error:
            raise ContentError(f"{wanted} has {shortened(name, 80)}: {error}") from None
    return found


def _repeated(tensors: Mapping[str, Tensor], policy: DiffusionTransformerPolicy) -> dict[str, Tensor]:
    """The normaliser's tensors in full: the public code applies a shorter one, of an identity for example, over and over."""
    own = policy.state_dict()
    found = dict(tensors)
    for name, tensor in tensors.items():
        if name.startswith("normalizer.") and name in own and tensor.ndim == own[name].ndim == 1 and len(tensor):
            times, left = divmod(len(own[name]), len(tensor))
            found[name] = tensor if left else tensor.repeat(times)
    return found


def _sha256(file: BinaryIO, size: int) -> str:
    found = hashlib.sha256()
    file.seek(0)
    with progress_bar(desc="reading", total=size, unit="B", unit_scale=True, leave=False, delay=2.0) as bar:
        while part := file.read(2**22):
            found.update(part)
            bar.update(len(part))
    return found.hexdigest()
