"""`export --lerobot`: a directory that LeRobot's own commands run, by the package lerobot_policy_blockcache."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockcache.models.port import Port
    from blockcache.schedule import Schedule
    from blockcache_runtime.parity import Parity

FILE, PARITY, ORIGINAL, CARD = "policy.onnx", "parity.json", "original.json", "README.md"


def write_directory(
    out: Path,
    port: Port,
    original: Port,
    schedule: Schedule | None,
    check: str = "strict",
    fixed: Any = None,
    tuned: Path | None = None,
    observations: Any = None,
    count: int = 16,
    licence: str = "unknown",
) -> tuple[tuple[str, ...], Parity, Parity]:
    """Write the directory, whole or not at all.

    Args:
        out: Where nothing is.
        port: The policy with the sampler that is used.
        original: The policy as it was read from LeRobot's directory.
        schedule: As for `export_policy`.
        check: As for `export_policy`.
        fixed: As for `export_policy`.
        tuned: A directory that `tune` wrote for the original: its evidence is taken along.
        observations: A batch for the comparisons; made-up ones without it.
        count: How many of them.
        licence: For the model card.

    Returns:
        Notes; how the file compares with the policy that it stands for; how it compares with the original.
    """
    from blockcache.compare.parity import check_export
    from blockcache.engines import export_policy
    from blockcache.engines.build import tuned_port
    from blockcache.errors import EngineError
    from blockcache.files import read_bytes, write_bytes
    from blockcache.models.dit.plugin import check_directory, plugin_config, plugin_processors, plugin_words
    from blockcache.models.policy_files import CONFIG, FORMAT, TUNING, WEIGHTS, check_new, place_of
    from blockcache.report.card import LEROBOT, export_card
    from blockcache.results.tuning import Tuning
    from blockcache_runtime import ExportedPolicy

    check_new(out)
    source = check_directory(place_of(original.policy))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.absolute().parent) as kept:
        made = Path(kept) / "new"  # renamed in the end
        made.mkdir()
        notes = export_policy(port, schedule, made / FILE, "chunk", check, rtc=True, fixed=fixed, tuned=tuned)
        if tuned is not None:
            port, schedule, original = tuned_port(tuned, port)
            write_bytes(made / TUNING, read_bytes(tuned / TUNING, "tuning"))
        rows = [] if schedule is None else [*schedule.updates.values()]
        said = {
            "directory": source.name,
            "weights": original.weights,
            "sampler": f"{port.sampling.settings['type']}, {len(port.timesteps)} steps",
            "blocks": f"computed at {sum(map(len, rows)) / len(rows):.1f} steps each"
            if rows
            else "computed at every step",
            "made_by": FORMAT.header["made_by"],
        }
        files = {CONFIG: json.dumps(plugin_config(source, original.policy, said), indent=2).encode()}
        files |= plugin_processors(source, {FILE, PARITY, ORIGINAL, CARD, CONFIG, WEIGHTS, TUNING})
        if not fixed:
            files[WEIGHTS] = plugin_words(original.policy)
        for name, data in files.items():
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(made / name, data)
        own = check_export(made / FILE, port, observations, count)
        if not own.agrees:
            raise EngineError(
                f"nothing was written, since the file {own}; 'blockcache check' looks at the policy itself"
            )
        first = check_export(made / FILE, port, observations, count, original=original)
        first = replace(first, beside="the original policy")
        own.save(made / PARITY)
        first.save(made / ORIGINAL)
        opened, how = ExportedPolicy(made / FILE, 1), LEROBOT.format(directory=out.name)
        found = None if tuned is None else Tuning.load(tuned / TUNING)
        card = export_card(source.name, opened.header, opened.inputs, how, found, own, licence, first)
        write_bytes(made / CARD, card.encode())
        os.rename(made, out)
    return notes[: len(notes) - len(opened.outside)], own, first  # the plugin makes what comes from outside
