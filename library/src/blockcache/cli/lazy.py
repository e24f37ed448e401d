"""A group whose verbs are imported when they are called: help, and an error in what was typed, wait for nothing.

Other packages bring verbs by the entry point group `blockcache.verbs`: an entry `name` is a command or a group beside the
verbs here, `policy.name` one inside the group `policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

import click

LABORATORY = ("paper", "analyse", "policy.train", "policy.demonstrate")
"""Verbs that blockcache-lab brings; without it they say so."""


class LazyGroup(click.Group):
    """Verbs by name, imported at the call, and those that other packages bring."""

    def __init__(
        self,
        *args: Any,
        verbs: Mapping[str, tuple[str, str]],
        package: str = __package__,
        prefix: str = "",
        **settings: Any,
    ) -> None:
        """
        Args:
            *args: Of click.Group.
            verbs: For each name where its command is, "module:function" in the package, and its line in the help.
            package: Where those modules are.
            prefix: What entry points put before the name of a verb in this group, such as "policy.".
            **settings: Of click.Group.
        """
        super().__init__(*args, **{**settings, "no_args_is_help": False})
        self.verbs, self.package, self.prefix = verbs, package, prefix

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.verbs, *self.commands, *self._brought()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.verbs:
            module, _, function = self.verbs[cmd_name][0].partition(":")
            command: click.Command = getattr(import_module(f"{self.package}.{module}"), function)
            return command
        if (point := self._brought().get(cmd_name)) is not None:
            return cast(click.Command, point.load())
        if self.package == __package__ and self.prefix + cmd_name in LABORATORY:
            typed = f"{self.prefix}{cmd_name}".replace(".", " ")
            raise click.UsageError(
                f"'blockcache {typed}' is in blockcache-lab, which is not installed; docs/start.md says how to install it"
            )
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = [(name, group.get_short_help_str(limit=200)) for name, group in self.commands.items()]
        rows = [(name, line) for name, (_, line) in self.verbs.items()]
        for name, point in self._brought().items():
            command = point.load()
            (groups if isinstance(command, click.Group) else rows).append((name, command.get_short_help_str(limit=200)))
        for title, lines in (("Verbs", rows), ("Groups", groups)):
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)

    def _brought(self) -> dict[str, EntryPoint]:
        """By name within this group, what other packages registered; a verb of this package is not replaced."""
        if self.package != __package__:
            return {}
        points = entry_points(group="blockcache.verbs")
        names = {point.name.removeprefix(self.prefix): point for point in points if point.name.startswith(self.prefix)}
        return {name: point for name, point in sorted(names.items()) if "." not in name and name not in self.verbs}
