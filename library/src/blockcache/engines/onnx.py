"""The onnx engine: a generation as one ONNX file, and an opened file that takes torch tensors.

Files carry what they were made for (schedule and fingerprint); one that was made for another policy is refused. Exports
are kept on disk by fingerprint, so that the wait comes once. How a file is run is the runtime's.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockcache.cache import Cache, source_hash
from blockcache.engines.build import Build
from blockcache.errors import ContentError, EngineError
from blockcache.extras import require
from blockcache.files import PathLike, digest, read, write_bytes
from blockcache.fingerprint import Fingerprint, fingerprint_differences
from blockcache.models.program import Program
from blockcache.models.sampling import draw
from blockcache.observations.tensors import Observation, as_tensor
from blockcache_runtime import ExportedPolicy
from blockcache_runtime.chunks import Previous
from blockcache_runtime.graph import check_model
from blockcache_runtime.guard import Guard
from blockcache_runtime.session import FORMAT, MINIMUM, MOST_BYTES, RATE_HZ, with_hash

ONNX_MINIMUM = (1, 18)
_EXPORTS = Cache("an export", "onnx")
_SINGLE = torch.empty(0, dtype=torch.float32)


def require_onnxruntime(also_onnx: bool = False) -> None:
    """Refuse a missing or an old library, naming what brings it. `also_onnx`: a file is to be written."""
    for package, minimum in (("onnxruntime", MINIMUM), ("onnx", ONNX_MINIMUM))[: 2 if also_onnx else 1]:
        require(package, None, "the onnx engine", error=EngineError, minimum=minimum)


def require_size(program: Program) -> None:
    """Refuse weights that no file can hold, before they are hashed and copied."""
    held = 4 * sum(tensor.numel() for tensor in program.weights.values())
    if held > MOST_BYTES:
        raise EngineError(
            f"the onnx engine writes one file of {MOST_BYTES / 1e9:.1f} GB at most, and these weights take "
            f'{held / 1e9:.1f} GB; use engine="loop"'
        )


def export(
    build: Build,
    fingerprint: Fingerprint,
    path: PathLike,
    unrolled: bool | None = None,
    guard: Guard | None = None,
    full: Build | None = None,
) -> None:
    """Write one ONNX file, atomically.

    Args:
        build: The program with its schedule and its sampler.
        fingerprint: The policy's, in full.
        path: The file to write.
        unrolled: Whether full precision is unrolled, see `build_graph`.
        guard: What the file judges observations by, if it has a guard.
        full: The program in full precision, for a guard that falls back to it.
    """
    held = {} if guard is None else {"guard": guard.to_dict()}
    write_bytes(path, _file(build, {**_content(build, fingerprint), **held}, path, unrolled, full))


def _file(
    build: Build, content: dict[str, Any], path: PathLike, unrolled: bool | None = None, full: Build | None = None
) -> bytes:
    """The content of a file: graph, header and hash, looked at as whoever opens it will do it."""
    require_onnxruntime(also_onnx=True)
    from blockcache.engines.onnx_graph import build_graph, declared, joined

    model = build_graph(build.program, build.plan, build.sampler, unrolled)
    if full is not None:
        joined(model, build_graph(full.program, full.plan, full.sampler))
    model.metadata_props.add(key=FORMAT.entry, value=FORMAT.text({**content, **declared(model)}, path))
    data = with_hash(model.SerializeToString())
    try:
        check_model(data)
    except ContentError as error:
        raise EngineError(f"the onnx engine cannot open what it would write for this policy ({error})") from error
    return data


def _content(build: Build, fingerprint: Fingerprint) -> dict[str, Any]:
    """What the file was made for."""
    program = build.program
    content = {
        "output": "chunk" if program.whole else "action",
        "executed": list(program.executed),
        "schedule": {name: list(steps) for name, steps in build.schedule.updates.items()},
        "origin": dict(build.schedule.origin),
        "fingerprint": fingerprint.to_dict(),
    }
    of_some = {"encoder": _encoder(program), "outside": dict(program.outside), "fixed": dict(program.fixed)}
    return content | {name: value for name, value in of_some.items() if value}


def _encoder(program: Program) -> dict[str, Any]:
    """What a reader must know of cameras that look at moments one by one; nothing of a program without."""
    if not program.cameras:
        return {}
    moments = program.inputs[program.cameras[0]][0]
    return {"cameras": list(program.cameras), "n_obs_steps": moments, "features": program.features}


def open_cached(build: Build, fingerprint: Fingerprint, threads: int | None, rate_hz: float = RATE_HZ) -> OnnxRunner:
    """A runner for just this policy, schedule and output, from the cache; made if there is none that is whole and right.

    Args:
        build: The program with its schedule and its sampler.
        fingerprint: The policy's, in full.
        threads: Cores of one generation; None to try one and all of them.
        rate_hz: Calls a second for which the number of threads is chosen.
    """
    key = _digest(build, fingerprint)
    content = {**_content(build, fingerprint), "build": key}
    runner = _EXPORTS.get(key, lambda path: _open_kept(path, content, threads, rate_hz))
    if runner is None:
        path = _EXPORTS.path(key)
        data = _file(build, content, path)
        runner = OnnxRunner(path, threads, data, rate_hz)
        _EXPORTS.put(key, lambda place: write_bytes(place, data))
    return runner


def _open_kept(path: Path, content: dict[str, Any], threads: int | None, rate_hz: float) -> OnnxRunner | None:
    runner = OnnxRunner(path, threads, rate_hz=rate_hz)
    expected = {key: read(FORMAT.keys[key], value) for key, value in content.items() if key != "origin"}
    same = all(runner.header.get(key) == value for key, value in expected.items())
    return runner if same else None  # otherwise an export of something else, under this name


def _digest(build: Build, fingerprint: Fingerprint) -> str:
    """One name for all that goes into a file: what the header says, every number of the program, and the code."""
    header = {**FORMAT.header, **_content(build, fingerprint)}
    del header["origin"]  # for the record only
    program = build.program
    numbers = hashlib.sha256()
    held = {**program.weights, **{f"{name} (table)": table.values for name, table in program.tables.items()}}
    for name, tensor in held.items():
        numbers.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        numbers.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    plain = {
        item.name: repr(getattr(program, item.name))
        for item in fields(program)
        if item.name not in ("weights", "tables")
    }
    shapes = {name: [table.shape, table.pads] for name, table in program.tables.items()}
    code = source_hash(inspect.getfile(type(program)))
    return digest([header, numbers.hexdigest(), plain, shapes, code])


class OnnxRunner:
    """`runner.predict_action(obs)` -> actions in robot units. Several threads may call it at once.

    obs (B, n_obs, obs) in robot units, noise (1 + draws, B, horizon, D): `sizes` gives the sizes, B is "batch".
    """

    def __init__(
        self, path: PathLike, threads: int | None = None, data: bytes | None = None, rate_hz: float = RATE_HZ
    ) -> None:
        """Open an export. The arguments are those of `blockcache_runtime.ExportedPolicy`."""
        # frames are looked at in every call: who times calls, or compares engines, asks about the same ones
        self.exported = ExportedPolicy(path, threads, data, remember=False, rate_hz=rate_hz)
        self.path, self.threads, self.sizes = self.exported.path, self.exported.threads, self.exported.sizes
        self.header, self.fingerprint = self.exported.header, self.exported.fingerprint

    def __call__(self, obs: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        """One generation of float32 tensors that were checked already."""
        observed = {name: value.detach().numpy() for name, value in obs.items()}
        return _to_torch(self.exported.run_checked(observed, noise.detach().numpy()))

    def predict_action(
        self,
        obs: Observation,
        *,
        generator: torch.Generator | None = None,
        noise: Tensor | None = None,
        previous: Previous | None = None,
    ) -> dict[str, Tensor]:
        """One generation, as the policy that was exported gives it for the same `generator`, `noise` and `previous`."""
        observed = self.exported.check_observation(_to_numpy(obs))
        if noise is None:
            noise = self.draw_noise(len(next(iter(observed.values()))), generator)
        return _to_torch(self.exported.run(observed, _to_numpy(noise, "noise"), previous))

    def features(self, obs: Observation) -> Any:
        """The encoder alone, of an export with cameras: (n_obs_steps, B, features)."""
        return self.exported.features(self.exported.check_observation(_to_numpy(obs)))

    def draw_noise(self, batch: int, generator: torch.Generator | None = None) -> Tensor:
        """(1 + draws, B, horizon, D), tensor by tensor as the policy draws them; torch's global generator without one."""
        count, _, *chunk = self.sizes["noise"]
        return torch.stack([draw((batch, *chunk), _SINGLE, generator) for _ in range(count)])

    def check_policy(self, actual: Fingerprint, executed: tuple[int, int]) -> None:
        """Refuse to stand for another policy than the file was made from."""
        differences = [*fingerprint_differences(self.fingerprint, actual)]
        start, stop = self.exported.executed
        if (start, stop) != executed:
            differences.append(f"executed actions {executed[0]} to {executed[1] - 1} instead of {start} to {stop - 1}")
        if differences:
            raise EngineError(
                f"{self.path} was made for another policy, this one has {'; '.join(differences)}; export it again with "
                "'blockcache export'"
            )


def _to_torch(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _to_numpy(value: Any, what: str = "the observation") -> Any:
    """Tensors of any kind as float32 arrays on the CPU; what is none stays as it is."""
    if isinstance(value, Mapping):
        return {name: _to_numpy(item, what) for name, item in value.items()}
    return as_tensor(value, what).detach().to(_SINGLE).numpy() if isinstance(value, Tensor) else value
