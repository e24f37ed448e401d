"""Tasks of the laboratory: their facts, without any simulator. What needs one is named as "module:factory"."""

from __future__ import annotations

from blockcache.tasks import TaskEntry, TaskSpec

LABORATORY = "blockcache-lab"


def _metaworld(name: str) -> TaskEntry:
    spec = TaskSpec(name, obs_dim=39, action_dim=4, max_steps=300, success="the simulator's flag", extra="metaworld")
    module = "blockcache_lab.tasks.metaworld"
    return TaskEntry(spec, f"{module}:MetaWorld", f"{module}:expert", LABORATORY)


def _maniskill(name: str, max_steps: int) -> TaskEntry:
    """The inputs are RDT's, for one observation; see `blockcache_lab.tasks.maniskill`."""
    spec = TaskSpec(
        name,
        obs_dim=0,
        action_dim=8,
        max_steps=max_steps,
        success="the simulator's flag",
        extra="maniskill",
        inputs={
            "state_tokens": (8,),
            "lang_tokens": (1, 4),
            "lang_attn_mask": (1,),
            "img_tokens": (3, 15),
            "action_mask": (8,),
            "ctrl_freqs": (1,),
        },
    )
    module = "blockcache_lab.tasks.maniskill"
    return TaskEntry(spec, f"{module}:ManiSkill", f"{module}:expert", LABORATORY)


def _robosuite(
    name: str, obs_dim: int, action_dim: int = 7, max_steps: int = 400, expert: str = "experts", version: int = 1
) -> TaskEntry:
    """The name ends with who demonstrates it: "ph", one clean expert, or "mh", six of them from fast to clumsy."""
    spec = TaskSpec(
        name,
        obs_dim=obs_dim,
        action_dim=action_dim,
        max_steps=max_steps,
        success="the simulator's flag",
        extra="robosuite",
        version=version,
    )
    module = "blockcache_lab.tasks.robosuite"
    return TaskEntry(spec, f"{module}:Robosuite", f"{module}_{expert}:expert", LABORATORY)


BLOCK_PUSHING = TaskEntry(
    TaskSpec(
        "block-pushing",
        obs_dim=16,
        action_dim=2,
        max_steps=350,
        success="both blocks in zones of their own",
        extra="block-pushing",
    ),
    "blockcache_lab.tasks.block_pushing:BlockPushing",
    "blockcache_lab.tasks.block_pushing:expert",
    LABORATORY,
)
KITCHEN = TaskEntry(
    TaskSpec("kitchen", obs_dim=30, action_dim=9, max_steps=280, success="four of seven things done", extra="kitchen"),
    "blockcache_lab.tasks.kitchen:Kitchen",
    "blockcache_lab.tasks.kitchen_expert:expert",
    LABORATORY,
)
PUSHT_IMAGE = TaskEntry(
    TaskSpec(
        "pusht-image",
        obs_dim=0,
        action_dim=2,
        max_steps=300,
        success="coverage >= 0.95",
        extra="pusht",
        inputs={"image": (3, 96, 96), "agent_pos": (2,)},
        cameras=("image",),
    ),
    "blockcache_lab.tasks.pusht_image:PushTImage",
)
ASSEMBLY = _metaworld("metaworld-assembly")
PEG_INSERT_SIDE = _metaworld("metaworld-peg-insert-side")
PICK_PLACE = _metaworld("metaworld-pick-place")
PUSH_CUBE = _maniskill("maniskill-push-cube", max_steps=150)
PICK_CUBE = _maniskill("maniskill-pick-cube", max_steps=150)
STACK_CUBE = _maniskill("maniskill-stack-cube", max_steps=200)
PEG_INSERTION_SIDE = _maniskill("maniskill-peg-insertion-side", max_steps=300)
LIFT_PH = _robosuite("robosuite-lift-ph", obs_dim=19)
LIFT_MH = _robosuite("robosuite-lift-mh", obs_dim=19)
CAN_PH = _robosuite("robosuite-can-ph", obs_dim=23)
CAN_MH = _robosuite("robosuite-can-mh", obs_dim=23)
SQUARE_PH = _robosuite("robosuite-square-ph", obs_dim=23, expert="square", version=2)  # in 1 a quaternion's sign jumped
SQUARE_MH = _robosuite("robosuite-square-mh", obs_dim=23, version=2)
TOOL_HANG_PH = _robosuite("robosuite-tool-hang-ph", obs_dim=53, max_steps=700, expert="tool_hang")
TRANSPORT_PH = _robosuite("robosuite-transport-ph", obs_dim=59, action_dim=14, max_steps=700, expert="transport")
