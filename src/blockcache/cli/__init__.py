"""The command line: verbs and their errors. Everything heavy is imported inside the verb that needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from blockcache._version import __version__
from blockcache.errors import BlockcacheError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
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
      blockcache show schedule.json
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb. Errors end as one line and exit code 2, an interrupt with 130."""
    from blockcache.cli import bench, demo, evaluate, schedules, suite, training

    for verbs in (demo, schedules, bench, evaluate, suite, training):
        for command in verbs.COMMANDS:
            cli.add_command(command)
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        words = [item for item in arguments if item != "--debug"] or ["--help"]
        cli.main(words, prog_name="blockcache", standalone_mode=False)
    except BlockcacheError as error:
        if debug:
            raise
        _fail(str(error))
    except click.ClickException as error:
        if debug:
            raise
        _fail(error.format_message())
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe, such as `head`, went away
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        if debug:
            raise
        _fail(f"{type(error).__name__}: {error} (this should not happen; run again with --debug)")


def _fail(message: str) -> None:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(2)
