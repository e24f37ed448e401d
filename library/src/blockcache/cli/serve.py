"""The verb `serve`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from blockcache.cli import arguments as arg
from blockcache_runtime.__main__ import FIXED, PROVIDER, TOLERANCE, check_libraries, serve_export
from blockcache_runtime.serve.settings import Settings, options

if TYPE_CHECKING:
    from blockcache.models.port import Port


def _settings(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Every field of `Settings` as an option."""
    for name, default, said in reversed(options()):
        kind = click.Choice(said["choices"]) if "choices" in said else str if default == () else type(default)
        several = default == ()
        verb = click.option(name, type=kind, default=default or None, multiple=several, help=said["help"])(verb)
    return verb


class ServedPort:
    """A policy behind its port, accelerated, for a server: one observation at a time."""

    batches = False

    def __init__(self, name: str, port: Port) -> None:
        self.name, self._port = name, port
        self.inputs, self.cameras = dict(port.inputs), frozenset(port.cameras)
        self.outside: Mapping[str, str] = {}
        self.n_obs_steps, self.n_action_steps = port.n_obs_steps, port.n_action_steps
        self.action_dim = len(port.action_scale)

    def predict(self, observations: Sequence[Any], generators: Sequence[np.random.Generator]) -> list[Any]:
        """See `ServedPolicy`: the noise of each has a seed that is drawn from the generator beside it."""
        import torch

        from blockcache.models.sampling import generate

        port, found = self._port, []
        for one, generator in zip(observations, generators, strict=True):
            seen = one["obs"] if set(self.inputs) == {"obs"} else dict(one)
            seed = int(generator.integers(2**62))
            with torch.no_grad():
                answer = generate(getattr(port.policy, port.entry), port.prepare_observation(seen), seed)
            found.append(np.asarray(port.action_of(answer)[0].detach().cpu(), dtype=np.float32))
        return found


@click.command()
@click.argument("policy", type=arg.POLICY_OR_EXPORT)
@click.argument("schedule", required=False)
@click.option("--engine", type=arg.ENGINE, default="auto", help="For a POLICY that is no export.")
@click.option("--threads", type=arg.CORES, help="Cores for one generation. Default: one or all, what is faster.")
@click.option("--provider", "providers", metavar="NAME", multiple=True, help=f"Of an export: {PROVIDER}.")
@click.option("--tolerance", type=click.FloatRange(0), default=1e-3, help=f"With --provider: {TOLERANCE}.")
@click.option("--fixed", metavar="FILE.npz", help=f"Of an export: {FIXED}.")
@_settings
def serve(
    policy: str | arg.PolicySource,
    schedule: str | None,
    engine: str,
    threads: int | None,
    providers: tuple[str, ...],
    tolerance: float,
    fixed: str | None,
    **asked: Any,
) -> None:
    """Serve POLICY to robots and simulators: clients of openpi and of vla-eval work as they are.

    POLICY is a file that 'export' wrote, which needs no torch, or anything that other verbs take; SCHEDULE as for 'export'.
    Clients on other machines need an API key (docs/on-a-robot.md).

    \b
    Examples:
      blockcache serve policy.onnx
      blockcache serve pusht/tuned --protocol vla-eval
      blockcache serve policy.onnx --record log/ --port 8001
      blockcache serve policy.onnx --provider CUDAExecutionProvider
    """
    check_libraries()
    settings = Settings(**{name: value for name, value in asked.items() if value is not None})

    if isinstance(policy, str):
        if schedule or engine != "auto":
            raise click.UsageError("an export has its schedule and its engine; name neither")
        serve_export(policy, threads, providers, tolerance, fixed, settings)
        return
    if providers or fixed:
        raise click.UsageError("--provider and --fixed are for an export; write one with 'blockcache export'")
    followed = policy.schedule() if schedule is None else arg.load_schedule(schedule)

    import torch

    from blockcache.engines import accelerate
    from blockcache_runtime.serve.server import serve as run

    torch.set_num_threads(threads or 1)
    with accelerate(policy.port, followed, engine, threads=threads):
        run(ServedPort(policy.name, policy.port), settings)
