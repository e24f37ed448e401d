"""Configs of OmegaConf without OmegaConf: values out of inert objects, interpolations, and sums that no code is run for."""

import pickle

import pytest

from blockcache.errors import ContentError
from blockcache.foreign.configs import Config, calculate
from blockcache.foreign.pickles import load_pickle
from public_policy import omegaconf, omegaconf_there

TREE = {
    "horizon": 16,
    "n_obs_steps": 2,
    "n_latency_steps": 0,
    "obs_as_cond": True,
    "rate": 0.5,
    "nothing": None,
    "plain": "text",
    "task": {"name": "pusht", "obs_dim": 20, "shape": {"obs": {"image": {"shape": [3, 96, 96]}}}},
    "shape": "${task.shape}",
    "copy": "${horizon}",
    "again": "${copy}",
    "joined": "${task.name}_${horizon}_x",
    "before": "${eval:'${n_obs_steps}-1+${n_latency_steps}'}",
    "chosen": "${eval:'${task.obs_dim} if ${obs_as_cond} else 0'}",
    "unquoted": "${eval: ${task.obs_dim}*${n_obs_steps} if ${obs_as_cond} else None}",
    "compared": '${eval:\'500 if "${task.name}" == "mh" else 400\'}',
    "which": "task",
    "nested": "${${which}.obs_dim}",
    "branch": {"near": "${.far}", "far": 7, "deep": {"up": "${..far}", "top": "${horizon}"}},
    "listed": [1, "${horizon}", {"a": "${rate}"}],
    "item": "${listed[1]}",
    "time": "${now:%Y}_${task.name}",
    "lost": "${nowhere.at.all}",
    "circle": "${circle}",
    "ring": {"a": "${ring.b}", "b": "${ring.a}"},
    "open": "${horizon",
    "branch_in_text": "x${task}",
    "code": '${eval:\'__import__("os").system("x")\'}',
}
FOUND = {
    "horizon": 16,
    "nothing": None,
    "plain": "text",
    "shape.obs.image.shape": [3, 96, 96],
    "shape.obs": {"image": {"shape": [3, 96, 96]}},
    "again": 16,
    "joined": "pusht_16_x",
    "before": 1,
    "chosen": 20,
    "unquoted": 40,
    "compared": 400,
    "nested": 20,
    "branch": {"near": 7, "far": 7, "deep": {"up": 7, "top": 16}},
    "listed": [1, 16, {"a": 0.5}],
    "listed.2.a": 0.5,
    "item": 16,
}
REFUSED = {
    "nowhere": "the config lacks nowhere",
    "task.nowhere": "the config lacks task.nowhere",
    "horizon.deeper": "the config lacks horizon.deeper",
    "listed.9": "the config lacks listed.9",
    "time": r"time in the config: it depends on \$\{now:...\}",
    "lost": "refers to 'nowhere.at.all', which the config lacks",
    "circle": "more than 40 levels",
    "ring": "more than 40 levels",
    "ring.a": "more than 40 levels",
    "open": "a brace that is not closed",
    "branch_in_text": "a whole branch of the config within a text",
    "code": "Call is no part of a sum",
}


def as_read(tree):
    """The tree as it comes out of a checkpoint."""
    with omegaconf_there() as modules:
        data = pickle.dumps(omegaconf(tree, modules), 2)
    return Config(load_pickle(data, "config", "a.pkl"))


@pytest.fixture(params=[Config, as_read], ids=["plain", "OmegaConf"])
def config(request):
    return request.param(TREE)


@pytest.mark.parametrize("path", FOUND)
def test_values_are_found(config, path):
    assert config.get(path) == FOUND[path]
    assert type(config.get(path)) is type(FOUND[path])


@pytest.mark.parametrize("path", REFUSED)
def test_what_cannot_be_told_is_refused_when_it_is_asked_for(config, path):
    with pytest.raises(ContentError, match=REFUSED[path]):
        config.get(path)


def test_a_default_is_for_what_is_not_there(config):
    assert config.get("nowhere.at.all", 3) == 3
    assert config.get("horizon", 3) == 16
    with pytest.raises(ContentError, match="depends on"):
        config.get("time", 3)


def test_what_is_no_plain_value_matters_only_to_who_asks():
    tree = {"good": 1, "odd": load_pickle(b"cpathlib\nPosixPath\n(S'/x'\ntR.", "x", "x"), "large": 10**500, 3: 4}
    config = Config(tree)
    assert config.get("good") == 1
    with pytest.raises(ContentError, match=r"odd in the config: it is a pathlib.PosixPath, expected a plain value"):
        config.get("odd")
    with pytest.raises(ContentError, match="number far too large"):
        config.get("large")


@pytest.mark.parametrize("value", [3, [1], None, load_pickle(b"ca\nb\n(tR.", "x", "x")])
def test_a_config_has_names(value):
    with pytest.raises(ContentError, match="expected a config with names"):
        Config(value)


def test_a_config_that_grows_without_end_is_refused():
    wide: dict = {"x": 1}
    for _ in range(30):
        wide = {"a": wide, "b": wide}  # shared, so small: and 2^30 values
    with pytest.raises(ContentError, match="more than 100,000 values"):
        Config(wide)
    circle: dict = {}
    circle["a"] = circle
    with pytest.raises(ContentError, match="more than 40 levels"):
        Config(circle)
    texts = {f"t{place}": f"${{t{place + 1}}}${{t{place + 1}}}" for place in range(30)} | {"t30": "x"}
    with pytest.raises(ContentError, match=r"more than 10,000 characters|more than 100,000 values"):
        Config(texts).get("t0")
    branches = {f"t{place}": [f"${{t{place + 1}}}"] * 8 for place in range(15)} | {"t15": "x"}
    with pytest.raises(ContentError, match="more than 100,000 values"):
        Config(branches).get("t0")


SUMS = {
    "1": 1,
    "-1": -1,
    "+2.5": 2.5,
    "2-1+0": 1,
    "2*3+4//3-7%4": 4,
    "3/2": 1.5,
    "(1+2)*3": 9,
    "20 if True else 0": 20,
    "1 if 2 > 3 else 'no'": "no",
    "True and 3": 3,
    "False or None": None,
    "0 or 5 or 7": 5,
    "not 0": True,
    "1 == 1.0": True,
    '"mh" == "ph"': False,
    "  7 ": 7,
}


@pytest.mark.parametrize("text", SUMS)
def test_sums_are_worked_out_as_python_does(text):
    assert calculate(text) == SUMS[text] == eval(text.strip())
    assert type(calculate(text)) is type(SUMS[text])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "open('x')",
        "__import__('os')",
        "().__class__",
        "[1][0]",
        "[1]",
        "{}",
        "lambda: 1",
        "(x := 1)",
        "f'{1}'",
        "2**9",
        "9**9**9",
        "1 << 9",
        "'a'*9",
        "'a'+'b'",
        "1e999",
        "10**3",
        "999999999999999999999",
        "1000000*1000000*10",
        "1/0",
        "1 if",
        "1; 2",
        "1 < 2 < 3",
        "1 in (1,)",
        "1j",
        "b'x'",
        "...",
        "1 < 'a'",
        "-'a'",
        "(" * 150 + ")" * 50,
        "1+" * 150 + "1",
        "\0",
    ],
)
def test_what_is_no_sum_is_refused(text):
    with pytest.raises(ContentError):
        calculate(text)
