"""A group whose verbs are imported when they are called: help, and an error in what was typed, wait for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


class LazyGroup(click.Group):
    """`verbs`: for each name where its command is, "module:function" in this package, and its line in the help."""

    def __init__(self, *args: Any, verbs: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **{**settings, "no_args_is_help": False})
        self.verbs = verbs

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.verbs, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.verbs:
            return super().get_command(ctx, cmd_name)
        module, _, function = self.verbs[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"{__package__}.{module}"), function)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """A verb that has moved into a group says where it is now."""
        verb = "timing" if args[:2] == ["suite", "timing"] else args[0]
        for name, group in self.commands.items():
            if isinstance(group, LazyGroup) and verb in group.verbs:
                raise click.UsageError(
                    f"'blockcache {' '.join(args[: 1 + (verb != args[0])])}' is now 'blockcache {name} {verb}'; "
                    "its --help shows what it takes"
                )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = [(name, group.get_short_help_str(limit=200)) for name, group in self.commands.items()]
        for title, rows in (("Verbs", [(name, line) for name, (_, line) in self.verbs.items()]), ("Groups", groups)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
