"""Policy directories: `config.json` + `model.safetensors`. Strict to load, atomic to save; no pickle anywhere."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from blockcache.errors import FileError, PolicyError
from blockcache.files import PathLike, make_directory, read_bytes, reading, write_bytes
from blockcache.models.dpt.policy import DiffusionTransformerPolicy, DPTConfig
from blockcache.models.places import CONFIG, FORMAT, WEIGHTS, policy_directory, read_config
from blockcache.models.weights import check_action_scale, check_mask, check_weight


def load_policy(source: PathLike) -> DiffusionTransformerPolicy:
    """A shipped policy by name, or a policy directory. It comes in eval mode, float32, on the CPU."""
    directory = policy_directory(source)
    with FORMAT.reading(directory / CONFIG):
        config = DPTConfig.from_dict(read_config(directory))
    data = read_bytes(directory / WEIGHTS, "policy weights")
    try:
        tensors = safetensors.torch.load(data)
    except SafetensorError as error:
        raise FileError(
            f"cannot read the weights {directory / WEIGHTS} ({error}); the file may be cut short"
        ) from error
    policy = DiffusionTransformerPolicy(config)
    with reading("policy weights", directory / WEIGHTS):
        load_tensors(policy, tensors)
    return policy.eval()


def save_policy(policy: DiffusionTransformerPolicy, directory: PathLike) -> None:
    """Write the policy's directory; an older one of the same name stays whole until the new one is complete.

    The old directory goes as a whole, so one that holds anything but a policy is refused.
    """
    if not isinstance(policy, DiffusionTransformerPolicy):
        raise PolicyError(
            f"only policies of ours can be saved as a directory, got {type(policy).__name__}; keep your own checkpoint, and "
            "name a function that makes the policy from it (module:function) where a verb asks for POLICY"
        )
    target = Path(directory).resolve()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()}
    try:
        check_replaceable(target)
        make_directory(target.parent)
        fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    try:
        write_bytes(fresh / WEIGHTS, safetensors.torch.save(tensors, metadata={"format": "pt"}))
        FORMAT.save(fresh / CONFIG, policy.config.to_dict())
        fresh.chmod(0o755)
        _swap(fresh, target)
    except (OSError, FileError) as error:  # either may name the temporary place, which says nothing to the user
        reason = error.__cause__ or error
        raise FileError(
            f"cannot write {target}: {getattr(reason, 'strerror', 0) or reason}; nothing was changed"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def load_tensors(policy: DiffusionTransformerPolicy, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors in by name, as a public checkpoint names them; a missing, unknown or misshapen one is refused.

    Left aside on both sides are tensors that take no part in an action: `_dummy_variable`s, and the statistics from
    which scales and offsets were once computed.
    """
    own = policy.state_dict()
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith("_dummy_variable")}
    missing = [name for name in own if name not in given and ".input_stats." not in name]
    unknown = [name for name in given if name not in own]
    if missing or unknown:
        misfits = _some("missing", missing) + _some("unknown", unknown)
        raise PolicyError(f"the weights do not fit the policy's config: {'; '.join(misfits)}")
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise PolicyError(
                f"the weights do not fit the policy's config: {name} has shape {tuple(tensor.shape)}, "
                f"expected {tuple(own[name].shape)}"
            )
        if name.endswith("input_stats.std"):
            continue  # for the record only
        if name.endswith("mask") and tensor.is_floating_point():
            check_mask(name, tensor)
        else:
            check_weight(name, tensor)
        if name.endswith("action.scale"):
            check_action_scale(tensor)
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _some(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return [f"{what} {', '.join(names[:3])}{more}"] if names else []


def _swap(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
    try:
        target.rename(old / target.name)
        try:
            fresh.rename(target)
        except OSError:
            (old / target.name).rename(target)
            raise
    except OSError:
        with contextlib.suppress(OSError):  # if even the way back failed, the old policy stays in there
            old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_replaceable(target: Path) -> None:
    """Refuse a place that a policy cannot be saved to."""
    if target.is_dir():
        others = sorted(item.name for item in target.iterdir() if item.name not in (CONFIG, WEIGHTS))
        if others:
            raise FileError(f"{target} holds {others[0]} besides a policy, which would be lost; give another place")
    elif target.exists():
        raise FileError(f"{target} is a file, a policy is a directory; give another place")
