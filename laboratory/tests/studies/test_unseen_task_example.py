"""examples/unseen_task.py: a verb runs as if the model that ships had never seen a task."""

from dataclasses import replace

import pytest

from blockcache.results.losses import LossModel, shipped_model
from blockcache_lab.studies import loss_data
from blockcache_lab.studies.loss_data import known_losses
from repository import load_example


@pytest.fixture(scope="module")
def example():
    return load_example("unseen_task")


@pytest.fixture(autouse=True)
def few_sums(monkeypatch):
    monkeypatch.setattr(loss_data, "MOST_TERMS", 1)  # all that takes time is to try every sum


def test_nothing_is_learnt_from_the_task(example):
    model, tasks = example.model_without("metaworld-assembly"), list(known_losses().told)
    assert "metaworld-assembly" not in model.about
    left = [task for task in tasks if not task.startswith("metaworld-assembly")]
    assert all(task in model.about for task in left)
    assert len(left) == len(tasks) - 1
    assert replace(model, about="") == replace(loss_data.fit_model(known_losses(), left), about="")


def test_a_verb_predicts_by_it_and_afterwards_by_the_one_that_ships(example, policy_directory, tmp_path, capsys):
    kept = tmp_path / "model.json"
    told = [
        "--without",
        "pusht",
        "--model",
        kept,
        "check",
        policy_directory,
        "ddpm-3",
        "--generations",
        2,
        "--count",
        4,
    ]
    example.main([str(word) for word in told])
    said, about = capsys.readouterr().out, LossModel.load(kept).about
    assert f"losses are predicted by {about}" in said
    assert said.count("metaworld-peg-insert-side") == 2  # once more in what check says
    assert "pusht" not in said.replace(str(policy_directory), "")
    assert "pusht" in shipped_model().about


def test_a_model_that_is_there_is_taken_and_an_unknown_task_is_refused(example, tmp_path, capsys):
    kept = tmp_path / "model.json"
    shipped_model().save(kept)
    example.main(["--without", "anything", "--model", str(kept), "policy", "--help"])
    assert shipped_model().about in capsys.readouterr().out
    with pytest.raises(SystemExit):
        example.main(["--without", "anything", "policy", "--help"])
    assert "no losses on anything are known" in capsys.readouterr().err
