"""What is told where the world is taken for the group, or a rank of one for a rank of the other."""

NOT_PASSED_ON = (
    "the group is not passed on: without group=group (or, where you are given a mesh, without mesh=mesh) a "
    "call means the whole world, and so does dist.group.WORLD"
)
NOT_OF_THE_GROUP = (
    "torch was given a rank of the world that is not in the group: src, dst and peer are of the world; "
    "group_src, group_dst and group_peer count in the group"
)
NOT_IN_THE_GROUP = (
    "torch was given a rank in the group that the group has not: they count from 0, whatever ranks of the "
    "world these are"
)
NOT_OF_TORCHS_GROUP = (
    "torch's own code, called by no line of yours, took a rank in the group for one of the world: backwards "
    "of torch.distributed.nn do"
)
MADE_BY_SOME = (
    "a group is made by all ranks of the world together, also by those that are not in it: here some did "
    "not call new_group, or for other ranks"
)
"""Likely cause where ranks wait in new_group, in any layout."""
MADE_OF_RANKS_IN_THE_GROUP = (
    "it is right where the group is the whole world. dist.new_group waits for the ranks that it is given, "
    "and takes them for ranks of the world: some of these do not call it. Ranks in the group count from 0, "
    "whatever ranks of the world they are"
)
ANY_OF_THEM = (
    "it is right where the group is the whole world: is the world taken for the group, a rank of the world "
    "for a rank in the group, or the other way round?"
)
"""Likely cause of what fails only in a layout whose group is part of the world."""
WHERE_TO_LOOK = (
    "Look for dist.get_rank() (group.rank() is meant) and dist.get_world_size() (group.size()); for src, dst "
    "and peer, as P2POp's third argument is (group_src, group_dst, group_peer); for a call without "
    "group=group, or without mesh=mesh; for dist.new_group, whose ranks are the world's; and for "
    "torch.distributed.nn, some of whose functions know the world alone."
)


def narrowed(cause: str, help: str) -> tuple[str, str]:
    """Cause and next step of what is right where the group is the whole world: those found, if of that."""
    if cause in (NOT_PASSED_ON, NOT_OF_THE_GROUP, NOT_OF_TORCHS_GROUP, NOT_IN_THE_GROUP):
        return cause, help
    if cause == MADE_BY_SOME:
        step = "Give it dist.get_global_rank(group, r) for each rank r in the group."
        return MADE_OF_RANKS_IN_THE_GROUP, step
    return ANY_OF_THEM, WHERE_TO_LOOK
