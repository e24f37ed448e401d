"""The physics of Block Pushing in PyBullet: an xArm with a rod at its end, two cubes on a plane, and marks where the zones
are. Knows nothing of seeds, scores and experts.

Sizes, masses and gains are those of the public task, and the rod's outline is rounded to micrometres as the public mesh is:
pushing with a rod is unstable, so that a difference in the last digit of a number is one of centimetres fifty steps later.
Hence parts are described as URDF too: PyBullet treats shapes from there a little differently from those made by calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from blockcache.tasks.base import Array

START = (0.3, -0.4)  # of the rod
BOUNDS = ((0.15, -0.5), (0.7, 0.5))  # least and largest target of the rod, in metres
_HEIGHT = 0.06  # of the flange above the plane
_DOWN = (0.0, 1.0, 0.0, math.cos(math.pi / 2))  # half a turn about y; the last number matters, for want of exact zeros
_JOINTS_AT_START = (
    *(-0.9254632489674508, 0.6990770671568564, -1.106629064060494),
    *(0.0006653351931553931, 0.3987969742311386, -4.063402065624296),
)  # rod down, one centimetre above START: an arm has several ways to be there
_FLANGE = 6  # the arm's link that the rod is fixed to
_TORQUE = 1200.0  # most of each joint
_PER_ACTION = 24  # steps of 1/240 s
_TO_REST = 100  # steps that settle a scene
_SIDES, _RADIUS, _LENGTH = 64, 5.0, 30.0  # of the rod, in millimetres
_CENTRE = (0.001425, 0.00143)  # of its outline, in millimetres
_COLOURS = ((0.2, 0.4, 0.9, 1), (0.6, 0.3, 0.8, 1), (1, 0.3, 0.3, 1), (0.3, 0.9, 0.3, 1))  # of zones and blocks


class Scene:
    """One simulator for one episode: one that has been used remembers contacts, even if its state is put back, and an
    episode would then depend on those before it. Making one takes some 50 ms.

    Args:
        blocks: x, y and angle of each.
        zones: x, y and angle of each.
    """

    def __init__(self, blocks: Sequence[Array], zones: Sequence[Array]) -> None:
        import pybullet
        import pybullet_data

        self._bullet: Any = pybullet
        self._client = pybullet.connect(pybullet.DIRECT)
        self._call("setPhysicsEngineParameter", enableFileCaching=0)
        self._call("setGravity", 0, 0, -9.8)
        data = Path(pybullet_data.getDataPath())
        self._call("loadURDF", str(data / "plane.urdf"), basePosition=[0, 0, -0.001])
        self._arm = self._call("loadURDF", str(data / "xarm" / "xarm6_robot.urdf"))
        kinds = [self._call("getJointInfo", self._arm, i)[2] for i in range(self._call("getNumJoints", self._arm))]
        self._joints = [i for i, kind in enumerate(kinds) if kind == pybullet.JOINT_REVOLUTE]
        for joint, angle in zip(self._joints, _JOINTS_AT_START, strict=True):
            self._call("changeDynamics", self._arm, joint, linearDamping=0, angularDamping=0)
            self._call("resetJointState", self._arm, joint, angle)
        with TemporaryDirectory() as folder:
            rod, zone, block = _write_parts(Path(folder))
            at, turned = self._call("getLinkState", self._arm, _FLANGE)[:2]
            self._fix(self._call("loadURDF", rod, at, turned))
            self._marks = [self._call("loadURDF", zone, useFixedBase=True) for _ in range(2)]
            self._blocks = [self._call("loadURDF", block) for _ in range(2)]
        for body, colour in zip((*self._marks, *self._blocks), _COLOURS, strict=True):
            self._call("changeVisualShape", body, -1, rgbaColor=colour)
        self._run(_TO_REST)
        saved = self._call("saveState")
        for _ in range(2):  # twice: what lies where solely in the first time has an effect, in the last digits
            self._call("restoreState", saved)
            self._aim(np.array(START))
            for body, pose in zip((*self._marks, *self._blocks), (*zones, *blocks), strict=True):
                self._put(body, *pose)  # blocks into the plane, which lifts them out
            self._run(_TO_REST)

    def move(self, shift: Array) -> None:
        """Move the rod's target, within BOUNDS, and let a tenth of a second pass."""
        self._aim(np.clip(self.target + shift, *BOUNDS))
        self._run(_PER_ACTION)

    def observe(self) -> Array:
        """(10,): x, y and angle, modulo half a turn, of both blocks; where the rod is; where it shall be."""
        found: list[float] = []
        for body in self._blocks:
            place, turned = self._call("getBasePositionAndOrientation", body)
            found += [*place[:2], self._bullet.getEulerFromQuaternion(turned)[2] % math.pi]
        return np.array([*found, *self._call("getLinkState", self._arm, _FLANGE)[0][:2], *self.target])

    def render(self, side: int) -> npt.NDArray[np.uint8]:
        view = self._bullet.computeViewMatrix((1.0, 0, 0.75), (0.35, 0, 0), (0, 0, 1))
        lens = self._bullet.computeProjectionMatrixFOV(50, 1.0, 0.1, 5.0)
        pixels = self._call("getCameraImage", side, side, view, lens, renderer=self._bullet.ER_TINY_RENDERER)[2]
        return np.asarray(pixels, dtype=np.uint8).reshape(side, side, 4)[..., :3].copy()

    def close(self) -> None:
        if self._client >= 0:
            self._call("disconnect")
            self._client = -1

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._bullet, name)(*args, **kwargs, physicsClientId=self._client)

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._call("stepSimulation")

    def _put(self, body: int, x: float, y: float, angle: float) -> None:
        turned = (0.0, 0.0, math.sin(angle / 2) / angle * angle, math.cos(angle / 2))  # rounded as scipy does it
        self._call("resetBasePositionAndOrientation", body, (x, y, 0.0), turned)

    def _fix(self, rod: int) -> None:
        none = (0.0, 0.0, 0.0)
        fixed = self._bullet.JOINT_FIXED
        joint = self._call("createConstraint", self._arm, _FLANGE, rod, -1, fixed, none, none, none)
        self._call("changeConstraint", joint, maxForce=50)

    def _aim(self, target: Array) -> None:
        """Ask the joints for angles that bring the rod there, nearest to those they have."""
        self.target = target
        now = [state[0] for state in self._call("getJointStates", self._arm, self._joints)]
        count = len(self._joints)
        angles = self._call(
            "calculateInverseKinematics",
            self._arm,
            _FLANGE,
            [*target, _HEIGHT],
            _DOWN,
            lowerLimits=[-17] * count,
            upperLimits=[17] * count,
            jointRanges=[17] * count,
            restPoses=[0, 0, *now[2:]],
            maxNumIterations=100,
            residualThreshold=1e-10,
        )
        position = self._bullet.POSITION_CONTROL
        forces = [_TORQUE] * count
        self._call(
            "setJointMotorControlArray", self._arm, self._joints, position, targetPositions=angles, forces=forces
        )


def _write_parts(folder: Path) -> tuple[str, str, str]:
    """URDF files of the rod, with a thinner tip, of a zone, which nothing touches, and of a block."""
    rod, zone, block = (folder / f"{name}.urdf" for name in ("rod", "zone", "block"))
    (folder / "rod.obj").write_text(_prism())
    shaft = _link("shaft", 0.1, '<mesh filename="rod.obj" scale="0.001 0.001 0.001"/>')
    tip = _link("tip", 0.1, '<cylinder length="0.028" radius="0.001"/>')
    joined = '<parent link="shaft"/><child link="tip"/><origin xyz="0 0 0.029"/>'
    rod.write_text(f'<robot name="rod">{shaft}{tip}<joint name="joint" type="fixed">{joined}</joint></robot>')
    mark = _link("mark", 0.1, '<box size="0.12 0.12 0.001"/>', solid=False)
    zone.write_text(f'<robot name="zone">{mark}</robot>')
    cube = _link("cube", 0.01, '<box size="0.04 0.04 0.04"/>')
    block.write_text(f'<robot name="block">{cube}</robot>')
    return str(rod), str(zone), str(block)


def _link(name: str, mass: float, shape: str, *, solid: bool = True) -> str:
    """PyBullet takes moments of inertia from the shape and multiplies them by the scaling; those written are not used."""
    contact = '<lateral_friction value="1"/><rolling_friction value="0.0001"/><inertia_scaling value="3"/>'
    inertia = f'<mass value="{mass}"/><inertia ixx="1" ixy="0" ixz="0" iyy="1" iyz="0" izz="1"/>'
    seen, touched = (f"<{kind}><geometry>{shape}</geometry></{kind}>" for kind in ("visual", "collision"))
    parts = f"<contact>{contact}</contact><inertial>{inertia}</inertial>{seen}{touched if solid else ''}"
    return f'<link name="{name}">{parts}</link>'


def _prism() -> str:
    """The rod's outline at both its ends and the faces between them, as an OBJ file in millimetres."""
    angles = np.arange(_SIDES) * 2 * np.pi / _SIDES
    outline = np.stack([np.sin(angles), np.cos(angles)], axis=1) * _RADIUS + _CENTRE
    corners = [f"v {x:.3f} {y:.3f} {z:g}" for z in (0, _LENGTH) for x, y in outline]
    sides = [(i, i % _SIDES + 1) for i in range(1, _SIDES + 1)]
    faces = [f"f {i} {j} {j + _SIDES} {i + _SIDES}" for i, j in sides]
    return "\n".join([*corners, *faces, ""])
