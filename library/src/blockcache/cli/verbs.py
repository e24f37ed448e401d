"""Which verbs there are. A verb's module is imported when the verb is called."""

from __future__ import annotations

import click

from blockcache._version import __version__
from blockcache.cli.lazy import LazyGroup

policy = LazyGroup(
    "policy",
    open_to_others=True,
    help="On the way to a policy: checkpoints of other code, observations, samplers of few steps; where blockcache-lab is "
    "installed, demonstrations and training too.",
    verbs={
        "convert": (".policies:convert", "Make a policy of a checkpoint of the public Diffusion Policy or RDT code."),
        "observe": (".policies:observe", "Let a policy do its task and keep what it saw, to calibrate on."),
        "place": (".policies:place", "Find where the few steps of a sampler lie best for a policy."),
        "fit": (".policies:fit", "Fit the constants of a sampler of few steps to a policy."),
    },
)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    commands=[policy],
    open_to_others=True,
    verbs={
        "demo": (".demo:demo", "The whole flow on a policy in a few minutes: what is gained, what it costs."),
        "calibrate": (".schedules:calibrate", "Watch a policy once, and record how its blocks' outputs change."),
        "solve": (".schedules:solve", "From a recording to a schedule: when each block is computed."),
        "show": (".schedules:show", "Draw a schedule in the terminal."),
        "export": (".engines:export", "Write a policy under a schedule as one ONNX file, for the robot."),
        "bench": (".engines:bench", "Time every engine beside what users run today."),
        "tune": (".tune:tune", "The best that fits a deadline or a loss, and why it may be trusted."),
        "check": (".evaluate:check", "One schedule or method judged without a simulator: how far its actions are off."),
        "eval": (".evaluate:evaluate", "Does the robot still do its job? Paired rollouts of several methods."),
        "report": (".report:report", "One page that opens offline: what is gained, what it costs, and why."),
        "serve": (".serve:serve", "Serve a policy or an export to robots: clients of openpi and vla-eval."),
    },
)
@click.version_option(__version__, prog_name="blockcache")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks (works in any place).")
def cli() -> None:
    """Make transformer diffusion policies fast without training them again.

    \b
    A first look, on the policy that ships with the package:
      blockcache demo
    \b
    With a policy of your own:
      blockcache calibrate my_policy/ --observations obs.npz -o recording.safetensors
      blockcache solve recording.safetensors --updates 10 --union 5 -o schedule.json
      blockcache export my_module:make_policy schedule.json -o policy.onnx
    """
