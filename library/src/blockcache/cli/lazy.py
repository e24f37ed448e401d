"""A group whose verbs are imported when they are called: help, and an error in what was typed, wait for nothing.

Other packages bring verbs by the entry point group `blockcache.verbs`: an entry is a mapping like `Verbs`, in which a name
of two words, such as "policy train", is a verb inside a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeAlias

import click

Verbs: TypeAlias = Mapping[str, tuple[str, str]]
"""By name: where the click command is, "module:name", and its line in the help."""

LABORATORY = ("paper", "analyse", "policy train", "policy pretrain", "policy demonstrate", "policy replay")
"""Verbs that blockcache-lab brings; without it they say so."""

WORDS = "blockcache.words"
"""What was typed, in the context of the command line."""


class LazyGroup(click.Group):
    """Verbs by name, imported at the call, and those that other packages bring into this group."""

    def __init__(
        self,
        *args: Any,
        verbs: Verbs,
        package: str = __package__,
        open_to_others: bool = False,
        **settings: Any,
    ) -> None:
        """
        Args:
            *args: Of click.Group.
            verbs: The group's own verbs.
            package: What a place that begins with a dot is relative to.
            open_to_others: Whether verbs of other packages are looked for.
            **settings: Of click.Group.
        """
        super().__init__(*args, **{**settings, "no_args_is_help": False})
        self.verbs, self.package, self.open_to_others = verbs, package, open_to_others

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta.setdefault(WORDS, list(args))
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.verbs, *self.commands, *self._brought(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.verbs:
            return _load(self.verbs[cmd_name][0], self.package)
        if cmd_name in self.commands or not self.open_to_others:
            return super().get_command(ctx, cmd_name)
        brought = self._brought(ctx)
        if cmd_name in brought:
            package, (place, _) = brought[cmd_name]
            try:
                return _load(place)
            except Exception as error:
                raise click.UsageError(f"the verb {cmd_name!r} of {package} cannot be loaded: {error}") from error
        typed = self._within(ctx) + cmd_name
        if typed in LABORATORY:
            from blockcache.extras import how_to_install

            raise click.UsageError(
                f"'blockcache {typed}' is in blockcache-lab, which is not installed; it comes with "
                f"{how_to_install('blockcache-lab')}"
            )
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = get_close_matches(args[0], self.list_commands(ctx), n=1)
            if near and "did you mean" not in error.message.lower():
                raise click.UsageError(f"{error.message} Did you mean {near[0]!r}?", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = [(name, group.get_short_help_str(limit=200)) for name, group in self.commands.items()]
        sections = {"Verbs": [(name, line) for name, (_, line) in self.verbs.items()], "Groups": groups}
        for name, (package, (_, line)) in self._brought(ctx).items():
            sections.setdefault(f"From {package}", []).append((name, line))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _within(self, ctx: click.Context) -> str:
        """What stands before this group's verbs in an entry's names."""
        return "" if ctx.parent is None else f"{self.name} "

    def _brought(self, ctx: click.Context) -> dict[str, tuple[str, tuple[str, str]]]:
        """By name within this group, the package that brings a verb, and the verb; none replaces one of this group."""
        if not self.open_to_others:
            return {}
        prefix, found = self._within(ctx), {}
        for typed, package, verb in _others():
            name = typed.removeprefix(prefix)
            if typed.startswith(prefix) and " " not in name and name not in {*self.verbs, *self.commands}:
                found[name] = package, verb
        return found


def _load(place: str, package: str | None = None) -> click.Command:
    module, _, name = place.partition(":")
    command = getattr(import_module(module, package), name)
    if not isinstance(command, click.Command):
        raise TypeError(f"{place} is a {type(command).__name__}, expected a click command")
    return command


def _others() -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Name, package and verb of all that is registered; a package whose entry is broken brings a verb that says so."""
    for point in sorted(entry_points(group="blockcache.verbs"), key=lambda point: point.name):
        try:
            verbs = {str(name): (str(place), str(line)) for name, (place, line) in dict(point.load()).items()}
        except Exception as error:
            verbs = {point.name: (point.value, f"Cannot be loaded: {type(error).__name__}: {error}")}
        yield from ((name, point.name, verb) for name, verb in verbs.items())
