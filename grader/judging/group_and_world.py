"""What is told where the world is taken for the group, or a rank of one for a rank of the other."""

NOT_PASSED_ON = (
    "the group is not passed on: without group=group (or, where you are given a mesh, without mesh=mesh) a "
    "call means the whole world"
)
A_GROUPS_FOR_A_WORLDS = (
    "a rank in the group stands where torch takes a rank of the world: src, dst and peer are of the "
    "world; group_src, group_dst and group_peer count in the group"
)
A_WORLDS_FOR_A_GROUPS = (
    "a rank of the world stands where torch takes a rank in the group: group.rank(), and group_src, "
    "group_dst and group_peer, count in the group"
)
ANY_OF_THEM = (
    "it is right where the group is the whole world: is the world taken for the group, a rank of the world "
    "for a rank in the group, or the other way round? Look for dist.get_rank() where group.rank() belongs, "
    "for dist.get_world_size() where group.size() does, for src, dst or peer (P2POp's third argument is "
    "one) where group_src, group_dst or group_peer does, for a call without group=group (or, where you are "
    "given a mesh, without mesh=mesh), for torch.distributed.nn, some of whose functions know the world "
    "alone"
)
"""Likely cause of what fails only in a layout whose group is part of the world."""


def narrowed(cause: str, help: str) -> tuple[str, str]:
    """Cause and next step of what is right where the group is the whole world: those found, if of that."""
    if cause in (NOT_PASSED_ON, A_GROUPS_FOR_A_WORLDS, A_WORLDS_FOR_A_GROUPS):
        return cause, help
    return ANY_OF_THEM, ""
