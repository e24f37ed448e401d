"""The command line: which verbs there are, and how errors end. A verb's module is imported when the verb is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from blockcache._version import __version__
from blockcache.cli.lazy import LazyGroup
from blockcache.errors import BlockcacheError

policy = LazyGroup(
    "policy",
    open_to_others=True,
    help="On the way to a policy: demonstrations, training, checkpoints of other code, observations, samplers of few steps.",
    verbs={
        "convert": (
            "blockcache.cli.convert:convert",
            "Make a policy of a checkpoint of the public Diffusion Policy code.",
        ),
        "observe": (
            "blockcache.cli.observe:observe",
            "Let a policy do its task and keep what it saw, to calibrate on.",
        ),
        "place": (".samplers:place", "Find where the few steps of a sampler lie best for a policy."),
        "fit": (".samplers:fit", "Fit the constants of a sampler of few steps to a policy."),
    },
)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    commands=[policy],
    open_to_others=True,
    verbs={
        "demo": (
            "blockcache.cli.demo:demo",
            "The whole flow on a policy in a few minutes: what is gained, what it costs.",
        ),
        "calibrate": (
            "blockcache.cli.schedules:calibrate",
            "Watch a policy once, and record how its blocks' outputs change.",
        ),
        "solve": (".schedules:solve", "From a recording to a schedule: when each block is computed."),
        "show": (".schedules:show", "Draw a schedule in the terminal."),
        "export": (".engines:export", "Write a policy under a schedule as one ONNX file, for the robot."),
        "bench": (".engines:bench", "Time every engine beside what users run today."),
        "tune": (".tune:tune", "The best that fits a deadline or a loss, and why it may be trusted."),
        "check": (
            "blockcache.cli.check:check",
            "One schedule or method judged without a simulator: how far its actions are off.",
        ),
        "eval": (
            "blockcache.cli.evaluate:evaluate",
            "Does the robot still do its job? Paired rollouts of several methods.",
        ),
        "report": (
            "blockcache.cli.report:report",
            "One page that opens offline: what is gained, what it costs, and why.",
        ),
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


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb. Errors end as one line and exit code 2, an interrupt with 130."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        cli.main([item for item in arguments if item != "--debug"], prog_name="blockcache", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, went away
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        _fail(error)


def _fail(error: Exception) -> None:
    message = f"{type(error).__name__}: {error} (this should not happen; run again with --debug)"
    if isinstance(error, BlockcacheError):
        message = str(error)
    elif isinstance(error, click.ClickException):
        message = error.format_message()
    elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch has no class for it
        message = "this machine has not enough memory for that; ask for less"
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
