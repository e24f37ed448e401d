"""What would `tune` choose, and `check` promise, on a task that losses were not learnt from?

python examples/unseen_task.py --without metaworld-pick-place tune metaworld-pick-place --loss 0.03 -o tuned-pick
blockcache eval metaworld-pick-place -m tuned:tuned-pick --first-seed 300000 --rollouts 250

The model is fitted anew to all tasks of the known losses but that one, then the verb runs as if that model had shipped. What
it promises can then be held against rollouts. `--model FILE.json` keeps the model; a file that is there already is taken.
"""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from blockcache.cli import main as run
from blockcache.errors import BlockcacheError
from blockcache.results.losses import LossModel
from blockcache_lab.studies.loss_data import LossDataError, known_losses, scene_of

USERS = ("blockcache.results.losses", "blockcache.report.check", "blockcache.report.tuning")
"""Modules that ask for the model that ships."""


def model_without(task: str) -> LossModel:
    """Learnt from all known losses but those on a task and its variants."""
    data = known_losses()
    rows = tuple(row for row in data.rows if scene_of(row.task) != scene_of(task))
    if len(rows) == len(data.rows):
        raise LossDataError(f"no losses on {task} are known, so nothing was learnt from it")
    return replace(data, rows=rows).model


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--without", metavar="TASK", required=True, help="Nothing is learnt from it.")
    parser.add_argument("--model", type=Path, help="The model; a file that is there already is taken as it is.")
    parser.add_argument("verb", nargs=argparse.REMAINDER, help="With its arguments, as behind `blockcache`.")
    given = parser.parse_args(argv)
    try:
        model = LossModel.load(given.model) if given.model and given.model.exists() else model_without(given.without)
        if given.model:
            model.save(given.model)
    except BlockcacheError as error:
        parser.error(str(error))
    print(f"losses are predicted by {model.about}", flush=True)
    with ExitStack() as stack:
        for name in USERS:
            stack.enter_context(patch(f"{name}.shipped_model", lambda: model))
        run(given.verb)


if __name__ == "__main__":
    main()
