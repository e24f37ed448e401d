"""Whether a policy and a task fit: what is seen, and what is done. Knows nothing of rollouts."""

from __future__ import annotations

from typing import Any

from blockcache.errors import TaskError
from blockcache.models.port import Port
from blockcache.tasks import TaskSpec


def check_widths(port: Port, spec: TaskSpec) -> None:
    """The policy takes what the task shows, moment by moment, and does what the task lets it do.

    Args:
        port: The policy.
        spec: The task.
    """
    misfit = f"the policy does not fit task {spec.name}"
    needs = {name: (port.n_obs_steps, *shape) for name, shape in spec.shapes.items()}
    # a policy that sees one moment may have no axis for it
    has = {
        name: (1, *shape) if port.n_obs_steps == 1 and len(shape) + 1 == len(needs.get(name, ())) else shape
        for name, shape in port.inputs.items()
    }
    if len(needs) == len(has) == 1 and not spec.cameras:  # whatever one array is called
        ((_, *shown),), ((_, *taken),) = needs.values(), has.values()
        differing: list[tuple[str, Any, Any]] = [("observations", taken[-1], shown[-1])] if taken != shown else []
    elif set(has) != set(needs):
        gives = "one array" if spec.inputs is None else ", ".join(needs)
        raise TaskError(f"{misfit}: it takes {', '.join(has)}, the task gives {gives}")
    else:
        differing = [(f"{name!r} inputs", has[name][1:], needs[name][1:]) for name in has if has[name] != needs[name]]
    actions = ("actions", len(port.action_scale), spec.action_dim)
    for what, own, other in (*differing, *([actions] if actions[1] != actions[2] else ())):
        raise TaskError(
            f"{misfit}: its {what} have {own} numbers, the task's {other}; was it trained for another task?"
        )
