"""What README and docs tell people to type: Python blocks and quick commands are run, every other command is parsed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest

import blockcache
import blockcache_runtime.__main__ as runtime
from blockcache.errors import FileError
from blockcache.models.loading import save_policy
from blockcache.schedule import Schedule
from blockcache_runtime.providers import CPU
from pages import FENCE, PAGES, fenced, lines, mentioned, parse, typed
from repository import ROOT
from served_toy import served

LANGUAGES = ("json", "python", "sh", "text", "toml")  # sh is typed, text is printed
QUICK = {"calibrate": ["--generations", "1"], "solve": [], "show": [], "export": []}  # the others take minutes


def everything(found):
    return [pytest.param(line, id=f"{page}: {line}") for page, text in PAGES.items() for line in found(text)]


def test_every_block_says_what_it_is():
    for page, text in PAGES.items():
        assert text.count("\n```") == 2 * len(FENCE.findall(text)), f"{page} has a fence that does not end"
        assert {language for language, _ in FENCE.findall(text)} <= set(LANGUAGES), page


@pytest.mark.parametrize("line", everything(typed))
def test_what_one_types_is_there(line, capsys):
    if line.startswith("blockcache "):
        parse(line, complete=True)
    elif line.startswith("make "):
        assert f"\n{line.split()[1]}:" in (ROOT / "Makefile").read_text()
    elif line.startswith("python -m blockcache_runtime "):
        with pytest.raises(FileError, match=r"policy\.onnx|reference\.npz"):  # all that is wrong is that it is not here
            _runtime(shlex.split(line)[3:])
    elif line.startswith("python "):
        assert (ROOT / line.split()[1]).exists()
    elif line.startswith("lerobot-eval "):  # plugin/tests run it
        assert "--policy.path=" in line
    else:
        program, verb, *words = shlex.split(line)
        assert program == "pip"
        assert verb in ("install", "wheel")
        for word in words:
            if word.startswith("./"):
                folder, _, extras = word.rstrip("]").partition("[")
                known = (ROOT / folder / "pyproject.toml").read_text()
                assert all(f"\n{extra} = [" in known for extra in extras.split(",") if extra), line


def _runtime(words):
    """The runtime's command line, its errors raised; a provider that is not on this machine is the CPU's here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runtime, "BlockcacheError", ())  # caught by nobody
        return runtime.main([CPU if word.endswith("ExecutionProvider") else word for word in words])


@pytest.mark.parametrize("line", everything(mentioned))
def test_what_is_mentioned_is_there(line, capsys):
    parse(line, complete=False)


@pytest.mark.parametrize(
    "line",
    [
        "blockcache nonsense",
        "blockcache show --no-such-option square_ph",
        "blockcache show",
        "blockcache show square_ph pusht",
        "blockcache solve recording.safetensors --updates ten",
        "blockcache eval pusht -m dppm-16",
    ],
)
def test_what_is_not_there_is_noticed(line, capsys):
    with pytest.raises((AssertionError, click.UsageError, blockcache.BlockcacheError)):
        parse(line, complete=True)


@pytest.fixture
def robot(make_policy, in_an_empty_directory, tmp_path, monkeypatch):
    """What a reader has at hand: a policy directory and a schedule for it, and observations of Push-T."""
    policy = make_policy()
    save_policy(policy, "my_policy")
    names = [f"layers.{index}.{kind}" for index in range(policy.config.n_layer) for kind in ("SA", "CA", "FFN")]
    Schedule.every_step(policy.num_inference_steps, names).save("schedule.json")
    np.savez("observations.npz", obs=512 * np.random.default_rng(0).random((2, 2, 20)))
    monkeypatch.syspath_prepend(tmp_path)
    yield {"__name__": "page", "observation": np.zeros(policy.obs_dim)}
    sys.modules.pop("my_robot", None)


OWN = ("docs/your-policy.md", "docs/adding-a-family.md", "CONTRIBUTING.md")  # these are run by tests of their own
ORDER = {"runtime/README.md": "docs/on-a-robot.md"}  # which page makes the file that this one opens


def run(text, names, blockcache):
    """The Python blocks and quick commands of a text. They build on one another, as they do for who reads it."""
    for language, code in FENCE.findall(text):
        if language == "python":
            if file := re.match(r"# (\w+\.py)\n", code):
                Path(file[1]).write_text(code)
            exec(compile(code, "page", "exec"), names)
        for line in lines(code) if language == "sh" else ():
            words = shlex.split(line)
            if words[:3] == ["python", "-m", "blockcache_runtime"]:
                assert words[3] == "serve" or _runtime(words[3:]) == 0
            elif words[0] == "python" and "browser" not in words[1]:
                subprocess.run([sys.executable, ROOT / words[1], *words[2:]], check=True, capture_output=True)
            elif words[0] == "blockcache" and words[1] in QUICK and "tuned" not in words:  # that takes a tuning
                assert blockcache(*words[1:], *QUICK[words[1]])


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if page not in OWN and fenced(text, "python")])
def test_a_page_works_from_top_to_bottom(page, robot, blockcache):
    if page in ORDER:
        run(PAGES[ORDER[page]], robot, blockcache)
    run(PAGES[page], robot, blockcache)


def test_the_first_run_works(robot, blockcache):
    run(PAGES["docs/start.md"], robot, blockcache)
    assert Path("policy.onnx").exists()


def test_the_control_loop_and_the_client_of_the_page_work(robot, blockcache):
    pytest.importorskip("websockets", reason="websockets is not installed")
    run(PAGES["docs/on-a-robot.md"], robot, blockcache)
    executed = []

    class Robot:
        def observation(self):
            return robot["observation"]

        def execute(self, action):
            executed.append(action)

    counters = robot["control"](Robot(), ticks=40, rate_hz=20)
    assert counters["ticks"] == 40
    assert len(executed) == 40 - counters["waiting"] > 10
    client = robot["Client"]
    with served() as server:
        address = f"ws://127.0.0.1:{server.port}"
        one = client(address)
        state = np.array([5, 0], dtype=np.float32)
        assert one.infer(state=state, observe_only=True) is None
        assert one.infer(state=state)[0, :2].tolist() == [5, 5]
        assert one.metadata["n_obs_steps"] == 2
        with pytest.raises(ValueError, match="has no 'state'"):
            one.infer(other=state)
    with pytest.raises(Exception, match=r"1001|refused|close"):
        one.infer(state=state)
    assert one.socket is None
    with served(port=server.port):
        assert one.infer(state=state)[0, :2].tolist() == [5, 5], (
            "it does not go on with a server that was started again"
        )


def anchors(text):
    """The names that headings have in links, as the usual renderers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)]+)\)", FENCE.sub("", text)):
            if link.startswith("https://"):
                continue
            target, _, anchor = link.partition("#")
            found = (ROOT / page).parent / target if target else ROOT / page
            assert found.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(found.read_text()), f"{page} links to {link}"


def test_every_page_is_reached_from_the_readme():
    links = set(re.findall(r"\]\((docs/[^)#]+)", PAGES["README.md"]))
    assert {page for page in PAGES if page.startswith("docs/")} <= links


@pytest.mark.parametrize("page", ["docs/shipped-policies.md", "docs/your-policy.md"])
def test_every_policy_that_ships_is_named(page):
    shipped = {directory.name for directory in ROOT.glob("*/src/*/assets/policies/*") if directory.is_dir()}
    assert {"pusht", "robosuite-can-ph-dropout"} <= shipped
    assert {name for name in shipped if f"`{name}`" not in PAGES[page]} == set()


def test_the_readme_is_short():
    assert len(re.sub(r"<!--.*?-->", "", PAGES["README.md"]).split()) <= 1000


def test_the_pages_written_by_hand_stay_few_and_short():
    by_hand = {page: FENCE.sub("", text) for page, text in PAGES.items() if not page.startswith("docs/generated/")}
    assert len([page for page in by_hand if page.startswith("docs/")]) <= 12
    words = [word for text in by_hand.values() for word in re.sub(r"<!--.*?-->", "", text).split()]
    prose = [word for word in words if re.search(r"[a-zA-Z]", word)]  # figures and lines of tables are none
    assert len(prose) < 20_500
