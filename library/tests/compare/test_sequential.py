"""Rollouts that go on until verdicts are settled: a toy evaluation whose scores a backend makes up."""

import pytest

from blockcache.compare.paired import Group
from blockcache.compare.sequential import run_until_settled
from blockcache.results.rollouts import SETTLED, Results
from blockcache.results.summary import summarise
from toy_evaluation import ready

SAME, BAD, UNSURE = "uniform:S=3", "ddim-3", "uniform:S=2"
GROUP, MOST = 20, 200


def scored(name, seed):
    """No loss; two episodes of five lost; one of fifty."""
    return {SAME: 1.0, BAD: float(seed % 5 > 1), UNSURE: float(seed % 50 > 0)}.get(name, 1.0)


@pytest.fixture
def settle(make_policy, tmp_path):
    """Runs the evaluation, and gives the results with the groups that ran; `stop` is after how many of them."""
    evaluation = ready(make_policy(), tmp_path, methods=(SAME, BAD, UNSURE), rollouts=MOST, group=GROUP)
    names = {id(candidate): name for name, candidate in evaluation.candidates.items()}

    def run(stop=None):
        ran = []

        def backend(work, jobs):
            for place, job in enumerate(jobs):
                if not isinstance(job, Group):
                    yield place, work(job)
                    continue
                if len(ran) == stop:
                    raise KeyboardInterrupt
                ran.append((names[id(job.candidate)], job.seeds[0]))
                yield (
                    place,
                    {
                        "records": [
                            {"seed": seed, "score": (score := scored(ran[-1][0], seed)), "success": score == 1.0}
                            | {"steps": 9, "error": None, "jerk": 0.1, "jump": 0.1}
                            for seed in job.seeds
                        ],
                        "seconds": 0.1,
                    },
                )

        return run_until_settled(evaluation, backend, progress=False), ran

    return run


def test_time_goes_where_it_decides(settle, tmp_path):
    results, ran = settle()
    rows = {row.method.name: row for row in summarise(results)}
    counts = {name: row.count for name, row in rows.items()}
    assert counts[BAD] <= 40 < counts[SAME] < MOST == counts[UNSURE] == counts["full"] == results.setting["rollouts"]
    assert rows[SAME].difference.lossless
    assert rows[BAD].difference.high < 0
    assert not rows[UNSURE].difference.lossless
    assert rows[UNSURE].difference.high > 0
    assert len(ran) == len(results.records) // GROUP
    results.save(tmp_path / "settled.json")
    assert Results.load(tmp_path / "settled.json").setting[SETTLED] is True


def test_stopped_in_the_middle_of_a_group_nothing_is_lost(settle, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        settle(stop=6)  # two methods of the second group
    again, ran = settle()
    assert len(ran) == len(again.records) // GROUP - 6
    assert settle() == (again, [])
