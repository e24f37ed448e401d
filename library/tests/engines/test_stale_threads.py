"""A handle that is lost, or disabled while another thread generates; a policy that is copied while it is accelerated."""

import copy
import gc
import threading
import time
import weakref
from importlib.metadata import EntryPoint

import pytest
import torch

import blockcache as bc
import foreign_policy
import toy_family
from blockcache.attach import patching
from blockcache.attach.patching import Replacement
from blockcache.engines import whole_loop
from blockcache.errors import PolicyError
from blockcache.models.registry import port_of
from blockcache.samplers import DDIM

pytestmark = pytest.mark.usefixtures("exports_stay_here")


@pytest.fixture(params=["patched", "loop", "onnx"])
def engine(request):
    return request.param


@pytest.fixture
def fast(policy, engine, random_updates, halfway):
    updates = random_updates([block.name for block in port_of(policy).adapter.blocks], 6, seed=2)
    fast = bc.accelerate(policy, bc.Schedule(6, updates), engine, threads=1)
    yield fast
    fast.disable()


@pytest.fixture
def halfway(policy, engine, monkeypatch):
    """What is put into it is called once, in the midst of the next generation."""
    todo, real = [], whole_loop.draw_all

    def draw_all(*args):
        call()
        return real(*args)

    def call(*args):
        if todo:
            todo.pop()()

    if engine == "patched":
        policy.model.head.register_forward_hook(call)
    else:
        monkeypatch.setattr(whole_loop, "draw_all", draw_all)
    return todo


def until(holds):
    """Nobody announces that he waits, so it is asked for; a busy machine is no failure."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.001)


class Caller(threading.Thread):
    """Keeps what a function returned, or raised."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self.function, self.outcome = function, None
        self.start()

    def run(self):
        try:
            self.outcome = self.function()
        except Exception as error:
            self.outcome = error

    def result(self):
        self.join(60)
        assert not self.is_alive()
        return self.outcome


# -- disabled by another thread


def test_disable_waits_for_a_generation_of_another_thread(policy, fast, halfway, observe, run):
    expected, seen = run(policy, observe()), []

    def disable_meanwhile():
        seen.append(Caller(fast.disable))
        until(lambda: fast._patches._removing.locked())
        seen.append(fast.enabled)

    halfway.append(disable_meanwhile)
    assert torch.equal(run(policy, observe()), expected)  # to its end as it began
    disabler, enabled_meanwhile = seen
    assert enabled_meanwhile
    assert disabler.result() is None
    assert not fast.enabled
    assert not torch.equal(run(policy, observe()), expected)


def test_who_calls_while_it_is_disabled_gets_the_policy_as_it_was(policy, fast, halfway, observe, run, monkeypatch):
    accelerated, callers = run(policy, observe()), []
    waiting, wait = set(), patching._wait
    monkeypatch.setattr(patching, "_wait", lambda: waiting.add(threading.get_ident()) or wait())

    def meanwhile():
        callers.append(Caller(fast.disable))
        until(lambda: len(waiting) == 1)
        callers.append(Caller(lambda: run(policy, observe())))
        until(lambda: len(waiting) == 2)

    halfway.append(meanwhile)
    assert torch.equal(run(policy, observe()), accelerated)
    disabler, caller = callers
    assert disabler.result() is None
    found = caller.result()
    assert torch.equal(found, run(policy, observe()))
    assert not torch.equal(found, accelerated)


def test_a_method_that_was_taken_before_is_the_policy_s_own_afterwards(policy, fast, observe):
    predict_action = policy.predict_action
    fast.disable()
    noise = policy.draw_noise(1)
    found, expected = (call(observe(), noise=noise)["action"] for call in (predict_action, policy.predict_action))
    assert torch.equal(found, expected)


def test_disabling_within_a_generation_is_refused(policy, fast, halfway, observe, run):
    expected = run(policy, observe())
    halfway.append(fast.disable)
    with pytest.raises(
        PolicyError, match=r"cannot be disabled from within a generation .* predict_action has returned"
    ):
        run(policy, observe())
    assert fast.enabled
    assert torch.equal(run(policy, observe()), expected)


def test_two_may_disable_at_once(policy, fast, halfway, observe, run):
    callers = []

    def disable_twice():
        callers.extend(Caller(fast.disable) for _ in range(2))
        until(fast._patches._removing.locked)
        time.sleep(0.05)  # one of them waits for the generation, and the other for that one

    halfway.append(disable_twice)
    run(policy, observe())
    assert [caller.result() for caller in callers] == [None, None]
    assert not fast.enabled


def test_a_disable_that_is_refused_lets_everybody_in_again(policy, fast, observe, run):
    expected, ours = run(policy, observe()), policy.predict_action
    policy.predict_action = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(PolicyError, match="patched again on top"):
        fast.disable()
    assert torch.equal(Caller(lambda: run(policy, observe())).result(), expected)
    vars(policy)["predict_action"] = ours


def test_a_calibration_waits_too(policy, observe, run):
    """Whoever generates while it ends keeps what his generation needs."""
    plain, callers, begun, go_on = run(policy, observe()), [], threading.Event(), threading.Event()

    def wait_in_another_thread(*args):
        if callers and threading.current_thread() is callers[0] and not begun.is_set():
            begun.set()
            assert go_on.wait(60)

    def observations():
        yield observe()
        callers.append(Caller(lambda: run(policy, observe())))
        assert begun.wait(60)

    policy.model.head.register_forward_hook(wait_in_another_thread)
    calibration = Caller(lambda: bc.calibrate(policy, observations(), progress=False))
    assert begun.wait(60)
    running = vars(policy)["predict_action"].patches
    until(running._removing.locked)
    go_on.set()
    assert torch.equal(callers[0].result(), plain)
    assert calibration.result().generations == 1


# -- a handle that was lost


def test_a_lost_handle_is_found(policy, engine, observe, run):
    plain, held, port = run(policy, observe()), set(vars(policy)), port_of(policy)
    bc.accelerate(policy, engine=engine, threads=1)
    with pytest.raises(
        PolicyError, match=r"accelerated already; call disable\(\) first \(blockcache\.handle_of\(policy\)"
    ):
        bc.accelerate(policy)
    with pytest.raises(PolicyError, match=r"blockcache\.handle_of\(policy\)"):
        bc.calibrate(policy, [observe()], progress=False)
    fast = bc.handle_of(policy)
    assert (fast.engine, fast.policy, fast.enabled) == (engine, policy, True)
    assert bc.handle_of(port) is fast
    fast.disable()
    assert set(vars(policy)) == held
    assert torch.equal(run(policy, observe()), plain)


def test_a_handle_is_found_whatever_the_entry_is_called(monkeypatch):
    point = EntryPoint("toy-flow", "toy_family:claim", "blockcache.families")
    monkeypatch.setattr("blockcache.models.registry.entry_points", lambda group: [point])
    policy = toy_family.FlowPolicy()
    with bc.accelerate(policy, engine="loop") as fast:
        assert bc.handle_of(policy) is fast
        with pytest.raises(PolicyError, match="accelerated already"):
            bc.accelerate(policy)


def test_there_may_be_no_handle(policy, observe):
    bc.accelerate(policy, engine="loop").disable()
    with bc.accelerate(policy.with_sampler(DDIM(num_inference_steps=3)), engine="patched"):  # the same denoiser
        for asked in (policy, port_of(foreign_policy.Policy()), 5):
            with pytest.raises(PolicyError, match=f"this {type(asked).__name__} is not accelerated"):
                bc.handle_of(asked)
    policy.model.register_forward_hook(lambda *_: bc.handle_of(policy))
    with pytest.raises(PolicyError, match="is not accelerated"):
        bc.calibrate(policy, [observe()], progress=False)


def test_a_lost_policy_is_not_kept(make_policy, engine):
    policy = make_policy()
    bc.accelerate(policy, engine=engine, threads=1)
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None


# -- copies


@pytest.mark.parametrize("make", ["ours", "foreign"])
def test_a_shallow_copy_is_refused_while_accelerated(make, make_policy, engine):
    policy = make_policy() if make == "ours" else foreign_policy.Policy()
    before = set(vars(policy))
    with bc.accelerate(policy, engine=engine, threads=1), pytest.raises(PolicyError, match=r"call disable\(\) first"):
        copy.copy(policy)
    twin = copy.copy(policy)
    assert set(vars(twin)) == set(vars(policy)) == before
    with bc.accelerate(twin, engine="loop"):
        assert not any(isinstance(item, Replacement) for item in vars(policy).values())


def test_patched_modules_cannot_be_copied_either(policy):
    with bc.accelerate(policy, engine="patched"):
        for module in (policy.model, policy.model.decoder.layers[1]):
            with pytest.raises(PolicyError, match=r"call disable\(\) first"):
                copy.copy(module)
    assert not any("__getstate__" in vars(module) for module in policy.modules())


def test_another_sampler_for_an_accelerated_foreign_policy_is_refused(engine):
    """It would be a shallow copy, and run the engine of the policy that it was copied from."""
    policy = foreign_policy.Policy()
    port = port_of(policy)
    with bc.accelerate(policy, engine=engine, threads=1), pytest.raises(PolicyError, match=r"call disable\(\) first"):
        port.with_sampler(DDIM(num_inference_steps=3))
    assert len(port.with_sampler(DDIM(num_inference_steps=3)).timesteps) == 3
