"""A process that is killed at any moment of a write: what was there stays, and nothing hidden is left for ever."""

import contextlib
import os
import signal
import threading

import pytest
import torch
from conftest import tiny_policy

import blockcache as bc
from blockcache import files
from blockcache.errors import BlockcacheError, FileError
from blockcache.samplers import DDIM

CALLS = (
    "open",
    "close",
    "dup",
    "fdopen",
    "fsync",
    "replace",
    "unlink",
    "rmdir",
    "mkdir",
)  # what changes the disk
OLD, NEW = tiny_policy(seed=1), tiny_policy(seed=2, n_emb=32, sampler=DDIM(num_inference_steps=3))
SAME_WEIGHTS = OLD.with_sampler(NEW.sampler)


class Killed(BaseException):
    """The process is gone: from here on it makes no call of the system."""


def killed_at(work, moment):
    """Runs `work` as a process that is killed at a moment: before its first call, its second and so on.

    In this process, as hundreds of real ones would take minutes: from that moment on every call fails, those that would
    clean up too, and what the process held open is closed for it. Whether it was killed, or was done before.
    """
    calls, dead, handles, opened = iter(range(10_000)), [], set(), []
    real = {name: getattr(os, name) for name in CALLS}

    def tick():
        if dead or next(calls) == moment:
            dead.append(True)
            raise Killed

    def counted(name):
        def call(*args, **kwargs):
            tick()
            found = real[name](*args, **kwargs)
            if name in ("open", "dup"):
                handles.add(found)
            elif name == "close":
                handles.discard(*args)
            elif name == "fdopen":
                handles.discard(*args[:1])
                opened.append(found)
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counted(name))
        with contextlib.suppress(Killed):
            work()
    for file in opened:
        file.close()
    for handle in handles:
        os.close(handle)
    return bool(dead)


def in_a_child(work):
    """Runs `work` in a process of its own; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Nothing here depends on when bytes reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def same(policy, other):
    one, two = policy.state_dict(), other.state_dict()
    return policy.config == other.config and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("new", [NEW, SAME_WEIGHTS], ids=["other sizes", "the same weights, another sampler"])
def test_a_policy_is_the_old_or_the_new_one_whenever_the_save_is_killed(tmp_path, new):
    place, moment, seen = tmp_path / "p", 0, []
    while True:
        bc.save_policy(OLD, place)
        assert sorted(os.listdir(place)) == ["config.json", "model.safetensors"]  # swept what the kill before left
        if not killed_at(lambda: bc.save_policy(new, place), moment):
            break
        found = bc.load_policy(place)
        assert same(found, OLD) or same(found, new)
        seen.append(same(found, new))
        moment += 1
    assert seen == sorted(seen)  # one moment at which it becomes the new one
    assert {False, True} == set(seen)
    assert same(bc.load_policy(place), new)
    assert os.listdir(tmp_path) == ["p"]


def test_a_first_save_that_is_killed_is_no_policy_and_does_not_stand_in_the_way(tmp_path):
    place, moment = tmp_path / "p", 0
    while killed_at(lambda: bc.save_policy(NEW, place), moment):
        with contextlib.suppress(BlockcacheError):
            assert same(bc.load_policy(place), NEW)
        bc.save_policy(OLD, place)
        assert same(bc.load_policy(place), OLD)
        assert sorted(os.listdir(place)) == ["config.json", "model.safetensors"]
        for name in os.listdir(place):
            (place / name).unlink()
        place.rmdir()
        moment += 1
    assert moment > 15
    assert same(bc.load_policy(place), NEW)


def test_a_save_that_was_killed_before_its_end_counts_for_whoever_reads_the_config(tmp_path):
    from blockcache.models.policy_files import read_config

    bc.save_policy(OLD, tmp_path)
    for moment in range(1000):
        bc.save_policy(OLD, tmp_path)
        assert killed_at(lambda: bc.save_policy(NEW, tmp_path), moment)
        if read_config(tmp_path)["n_emb"] == 32:
            break
    assert "16" in (tmp_path / "config.json").read_text()  # the old one, which does not count any more
    (tmp_path / "model.safetensors").write_bytes(b"")  # now neither belongs to anything
    assert read_config(tmp_path)["n_emb"] == 16
    with pytest.raises(FileError, match="is empty"):
        bc.load_policy(tmp_path)


def test_an_edited_config_counts_after_a_save(tmp_path):
    for policy in (NEW, OLD):
        bc.save_policy(policy, tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"num_inference_steps": 6', '"num_inference_steps": 3'))
    assert bc.load_policy(tmp_path).sampler.num_inference_steps == 3


def test_whoever_loads_meanwhile_gets_the_old_or_the_new_policy(tmp_path):
    bc.save_policy(OLD, tmp_path)
    over = threading.Event()

    def save():
        while not over.is_set():
            for policy in (NEW, OLD):
                bc.save_policy(policy, tmp_path)
                over.wait(0.03)

    writer = threading.Thread(target=save)
    writer.start()
    try:
        for _ in range(20):
            found = bc.load_policy(tmp_path)
            assert same(found, OLD) or same(found, NEW)
    finally:
        over.set()
        writer.join()
    assert same(bc.load_policy(tmp_path), OLD)


def test_a_file_is_the_old_or_the_new_one_whenever_the_write_is_killed(tmp_path):
    path, moment = tmp_path / "x", 0
    while True:
        files.write_bytes(path, b"old")
        assert os.listdir(tmp_path) == ["x"]
        if not killed_at(lambda: files.write_bytes(path, b"new"), moment):
            break
        assert path.read_bytes() in (b"old", b"new")
        moment += 1
    assert moment > 5
    assert path.read_bytes() == b"new"


def test_a_process_that_is_really_killed(tmp_path, monkeypatch):
    """SIGKILL right before the new file takes its place."""

    def write():
        os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        files.write_bytes(tmp_path / "x", b"new")

    files.write_bytes(tmp_path / "x", b"old")
    assert in_a_child(write) == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert (tmp_path / "x").read_bytes() == b"old"
    files.write_bytes(tmp_path / "x", b"newer")
    assert os.listdir(tmp_path) == ["x"]


def test_a_living_writer_keeps_its_hidden_file(tmp_path, monkeypatch):
    """One writer in the middle of its work, others come and go; only what nobody holds is swept."""
    path, real, paused, go_on = tmp_path / "x", os.fsync, threading.Event(), threading.Event()
    first = threading.current_thread()

    def fsync(handle):
        if threading.current_thread() is not first and not paused.is_set():
            paused.set()
            assert go_on.wait(20)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    writer = threading.Thread(target=files.write_bytes, args=(path, b"slow"))
    writer.start()
    assert paused.wait(20)
    (tmp_path / ".x.0123456789abcdef").write_bytes(b"half of a dead writer's")
    (tmp_path / ".y.0123456789abcdef").write_bytes(b"another's")
    files.write_bytes(path, b"quick")
    assert in_a_child(lambda: files.write_bytes(path, b"another process")) == 0
    assert len(os.listdir(tmp_path)) == 3  # the file, what the slow one holds, and what is not ours
    go_on.set()
    writer.join()
    assert path.read_bytes() == b"slow"
    assert sorted(os.listdir(tmp_path)) == [".y.0123456789abcdef", "x"]


def test_a_new_hidden_file_that_a_sweep_takes_first_is_made_again(tmp_path, monkeypatch):
    import fcntl

    real, taken = fcntl.flock, []

    def flock(handle, how):
        if not taken:  # between opening and locking, another writer takes it for a dead one's
            (name,) = os.listdir(tmp_path)
            taken.append(name)
            os.unlink(tmp_path / name)
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    files.write_bytes(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]
    assert taken


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    target, link, dangling = tmp_path / "there" / "x", tmp_path / "link", tmp_path / "dangling"
    target.write_bytes(b"old")
    link.symlink_to("there/x")
    dangling.symlink_to("there/y")
    for path in (link, dangling):
        files.check_writable(path)
        files.write_bytes(path, b"new")
        assert path.is_symlink()
        assert path.read_bytes() == b"new"
    assert target.read_bytes() == b"new"
    assert sorted(os.listdir(tmp_path / "there")) == ["x", "y"]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(FileError, match=r"cannot write .*/loop: Too many levels"):
        files.write_bytes(tmp_path / "loop", b"new")


def test_a_failed_first_save_leaves_nothing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"cannot write .*/p: No space left on device; nothing was changed"):
        bc.save_policy(OLD, tmp_path / "p")
    assert os.listdir(tmp_path) == []


def test_a_policy_directory_in_use_is_waited_for_but_not_for_ever(tmp_path, monkeypatch):
    bc.save_policy(OLD, tmp_path)
    monkeypatch.setattr("blockcache_runtime.atomic.PATIENCE", 0.1)
    with (
        files.only_writer(tmp_path),
        pytest.raises(FileError, match=r"another process is writing to .*; wait for it, then try again"),
    ):
        bc.save_policy(NEW, tmp_path)
    assert same(bc.load_policy(tmp_path), OLD)
