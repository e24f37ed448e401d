"""Policy directories: `config.json` + `model.safetensors`. Strict to load, atomic to save; no pickle anywhere."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from blockcache.errors import FileError, PolicyError
from blockcache.files import PathLike, read_bytes, read_json, write_bytes, write_json
from blockcache.policies.dpt import DiffusionTransformerPolicy, DPTConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def shipped_policies() -> tuple[str, ...]:
    """Names that `load_policy` knows without a path."""
    return tuple(sorted(item.name for item in _shipped().iterdir() if item.joinpath(CONFIG).is_file()))


def load_policy(source: PathLike) -> DiffusionTransformerPolicy:
    """A shipped policy by name, or a policy directory. It comes in eval mode, float32, on the CPU."""
    directory = Path(source)
    if not directory.is_dir():
        name = os.fspath(source)
        if name not in shipped_policies():
            raise FileError(
                f"no policy {name!r}: it is neither a directory nor one of the shipped policies "
                f"({', '.join(shipped_policies())})"
            )
        with resources.as_file(_shipped() / name) as directory:
            return _load(directory)
    return _load(directory)


def save_policy(policy: DiffusionTransformerPolicy, directory: PathLike) -> None:
    """Write the policy's directory; an older one of the same name stays whole until the new one is complete."""
    target = Path(directory)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in policy.state_dict().items()}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    try:
        write_bytes(fresh / WEIGHTS, safetensors.torch.save(tensors, metadata={"format": "pt"}))
        write_json(fresh / CONFIG, policy.config.to_dict())
        fresh.chmod(0o755)
        _swap(fresh, target)
    except OSError as error:
        raise FileError(f"cannot write {target}: {error.strerror or error}; nothing was changed") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _load(directory: Path) -> DiffusionTransformerPolicy:
    config = DPTConfig.from_dict(read_json(directory / CONFIG, "policy config"))
    data = read_bytes(directory / WEIGHTS, "policy weights")
    try:
        tensors = safetensors.torch.load(data)
    except SafetensorError as error:
        raise FileError(
            f"the weights {directory / WEIGHTS} cannot be read ({error}); the file may be cut short"
        ) from error
    policy = DiffusionTransformerPolicy(config)
    load_tensors(policy, tensors)
    return policy.eval()


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
        raise PolicyError(
            f"the weights do not fit the policy's config: {_some('missing', missing)}{_some('unknown', unknown)}".rstrip(
                "; "
            )
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise PolicyError(
                f"the weights do not fit the policy's config: {name} has shape {tuple(tensor.shape)}, "
                f"expected {tuple(own[name].shape)}"
            )
        if name.endswith(("mask", "input_stats.std")):
            continue  # masks hold -inf by design and statistics are for the record
        if not bool(torch.isfinite(tensor).all()):
            raise PolicyError(f"the weights hold NaN or infinity in {name}")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor)


def _some(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(names[:3])}{more}; "


def _swap(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
    target.rename(old / target.name)
    try:
        fresh.rename(target)
    except OSError:
        (old / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _shipped() -> Path:
    return Path(str(resources.files("blockcache") / "assets" / "policies"))
