"""The paper's protocol: best and mean of the last checkpoints, by arithmetic and by its verb."""

from dataclasses import replace

import numpy as np
import pytest

from blockcache.errors import FileError
from blockcache.models.loading import save_policy
from blockcache.results.rollouts import Results
from blockcache_lab.studies.checkpoints import protocol
from blockcache_lab.training.loop import checkpoints_of
from toy_task import observations


def scored(results, score):
    """The same file, every episode with that score."""
    return replace(results, records=tuple(replace(record, score=score) for record in results.records))


def test_the_best_and_the_mean_are_of_each_run_then_of_all(results):
    runs = {
        "seed0": [scored(results, 0.25), scored(results, 0.75)],
        "seed1": [scored(results, 0.5), scored(results, 0.5)],
    }
    for row in protocol(runs):
        assert row.scores == {"seed0": (0.25, 0.75), "seed1": (0.5, 0.5)}
        assert row.best == pytest.approx((0.75 + 0.5) / 2)
        assert row.mean == pytest.approx((0.5 + 0.5) / 2)
    other = replace(results, records=tuple(record for record in results.records if record.seed % 2))
    with pytest.raises(FileError, match="2 results files have 2 kinds of them"):
        protocol({"seed0": [results], "seed1": [other]})


def test_the_verb_meets_every_checkpoint(
    make_policy, blockcache, refused, toy_by_name, in_an_empty_directory, tmp_path
):
    for seed in (0, 1):
        run = tmp_path / f"seed{seed}"
        for epoch in ("0008", "0009"):
            save_policy(make_policy(seed=seed + int(epoch), task="toy"), checkpoints_of(run) / epoch)
        run.mkdir()
        np.savez(run / "observations.npz", obs=observations().numpy())
    words = ["paper", "checkpoints", str(tmp_path / "seed0"), str(tmp_path / "seed1"), "-o", str(tmp_path / "out")]
    words += ["-m", "bac:S=3,n=1", "--rollouts", "2", "--generations", "3", "--workers", "1"]
    said = blockcache(*words)
    for seed in (0, 1):
        for epoch in ("0008", "0009"):
            found = Results.load(tmp_path / "out" / f"seed{seed}" / f"{epoch}.json")
            assert [method.name for method in found.methods] == ["full", "bac:S=3,n=1"]
    rows = protocol(
        {
            f"seed{seed}": [
                Results.load(tmp_path / "out" / f"seed{seed}" / f"{epoch}.json") for epoch in ("0008", "0009")
            ]
            for seed in (0, 1)
        }
    )
    assert f"{rows[1].best:.3f} / {rows[1].mean:.3f}" in said
    assert blockcache(*words) == said  # nothing is run again
    (tmp_path / "bare").mkdir()
    assert "train it with 'policy train --keep-last 10'" in refused("paper", "checkpoints", str(tmp_path / "bare"))
