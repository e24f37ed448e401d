"""Patches as a whole: Ctrl-C, forks, and what is freed when they come off."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import blockcache as bc
import foreign_policy
from blockcache.attach.generation import Attached
from blockcache.attach.patching import Patches, Replacement
from blockcache.engines.loop import Loop
from blockcache.engines.onnx import OnnxRunner
from blockcache.engines.patched import ScheduledGeneration
from blockcache.errors import PolicyError
from image_policies import observed, strange
from repository import HELPERS

pytestmark = pytest.mark.usefixtures("exports_stay_here")


class Counter:
    def first(self):
        return 1

    def second(self):
        return 2


def test_they_are_planned_and_then_applied_as_a_whole():
    instance, patches = Counter(), Patches()
    patches.replace_entry(instance, "first", lambda own: lambda: own() + 10)
    patches.replace(instance, "second", lambda own: lambda: own() + 10)
    assert not patches
    assert vars(instance) == {}
    with patches:
        assert patches
        assert (instance.first(), instance.second()) == (11, 12)
    assert not patches
    assert vars(instance) == {}
    assert (instance.first(), instance.second()) == (1, 2)


def test_none_is_applied_where_one_cannot_be():
    instance, patches = Counter(), Patches()
    for name in ("first", "second"):
        patches.replace(instance, name, lambda own: lambda: 0)
    instance.second = lambda: 7
    with pytest.raises(PolicyError, match=r"Counter.second is already patched by something else"):
        patches.apply()
    assert not patches
    assert [*vars(instance)] == ["second"]


def test_signals_at_any_time_leave_all_or_none():
    """Real ones, while patches go on and off without a pause."""
    instance, seen = Counter(), []
    deadline = time.monotonic() + 60
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while len(seen) < 200 and time.monotonic() < deadline:
            patches = Patches()
            for name in ("first", "second"):
                patches.replace(instance, name, lambda own: lambda: 0)
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 1e-6 * (len(seen) % 50))
                for _ in range(1000):
                    with patches:
                        pass
                    for name in ("first", "second"):
                        patches.replace(instance, name, lambda own: lambda: 0)
            except KeyboardInterrupt:
                seen.append(sum(isinstance(value, Replacement) for value in vars(instance).values()))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            patches.remove()
            assert vars(instance) == {}
    finally:
        signal.signal(signal.SIGALRM, old)
    assert set(seen) <= {0, 3}  # both methods and what refuses copies
    assert len(seen) >= 100


FORKED = """
import os, sys, threading
import torch
torch.set_num_threads(1)
import blockcache as bc
import foreign_policy

policy = foreign_policy.Policy()
obs = {"obs": torch.zeros(1, foreign_policy.SEEN, foreign_policy.OBS)}
begun, go_on = threading.Event(), threading.Event()
def wait(*args):
    if threading.current_thread() is not threading.main_thread():
        begun.set()
        go_on.wait(60)
policy.model.head.register_forward_hook(wait)
policy.normalizer.register_forward_hook(wait)
fast = bc.accelerate(policy, None, sys.argv[1], threads=1, trust=True)
if sys.argv[1] == "loop":
    own = type(policy.noise_scheduler)
    from blockcache.engines import whole_loop
    real = whole_loop.draw_all
    whole_loop.draw_all = lambda *args: wait() or real(*args)
thread = threading.Thread(target=lambda: policy.predict_action(obs), daemon=True)
thread.start()
assert begun.wait(60)
child = os.fork()
if not child:
    policy.predict_action(obs)
    fast.disable()
    os._exit(0 if not fast.enabled and "predict_action" not in vars(policy) else 1)
_, status = os.waitpid(child, 0)
go_on.set()
thread.join(60)
fast.disable()
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("engine", ["patched", "loop"])
def test_a_fork_while_another_thread_generates_can_be_disabled(engine):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(HELPERS)])}
    ran = subprocess.run([sys.executable, "-c", FORKED, engine], env=environment, timeout=120, check=False)
    assert ran.returncode == 0


KINDS = {"loop": Loop, "onnx": OnnxRunner, "patched": ScheduledGeneration}


@pytest.mark.parametrize("make", ["own", "foreign", "behind an encoder"])
@pytest.mark.parametrize("engine", KINDS)
def test_disabling_frees_the_engine_without_the_collector_of_cycles(make, engine, make_policy, observe):
    policy, obs = {
        "own": (make_policy(), observe()),
        "foreign": (foreign_policy.Policy(), {"obs": torch.zeros(1, foreign_policy.SEEN, foreign_policy.OBS)}),
        "behind an encoder": (strange(), observed(dtype=torch.float32)),
    }[make]

    def living():
        return sum(type(item) in (KINDS[engine], Patches, Attached) for item in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = living()
        fast = bc.accelerate(policy, None, engine, threads=1)
        policy.predict_action(obs)
        fast.verify()
        assert living() > before
        fast.disable()
        assert living() == before + 1  # the patches, which the handle knows
        del fast
        assert living() == before
    finally:
        gc.enable()


def test_another_thread_may_wait_in_the_entry_while_patches_come_off():
    instance, patches, go_on = Counter(), Patches(), threading.Event()
    patches.replace_entry(instance, "first", lambda own: lambda: go_on.wait(60) and 5)
    patches.apply()
    found = []
    inside = threading.Thread(target=lambda: found.append(instance.first()))
    inside.start()
    removing = threading.Thread(target=patches.remove)
    removing.start()
    time.sleep(0.02)
    assert patches
    go_on.set()
    inside.join(60)
    removing.join(60)
    assert found == [5]
    assert not patches
