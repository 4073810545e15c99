"""A star of `parallelize_on_mesh`: along one rank there is nothing that a technique would have to do."""

from grader.checks import Trial, check

from .assembly import MESHES, ORDER, telling_probe
from .meshes import told


@check("parallelize_on_mesh", world_sizes=(4, 2), optional=True)
def a_dimension_of_one_rank_may_lack_its_technique(trial: Trial) -> None:
    """A dimension of one rank without a technique is no error: the others get theirs."""
    sizes = MESHES[trial.num_ranks][0]
    needed = [name for name in ORDER if sizes.get(name, 1) > 1]
    for rank, (result,) in enumerate(trial.run(telling_probe, [(sizes, tuple(needed))])):
        trial.require(
            result["ended"] == "returned",
            f"on a mesh of {told(sizes)}, with techniques for {' and '.join(needed)}, it ended in "
            f"{result['ended']}",
            help="Ask for a technique where the dimension has more than one rank: mesh.shape has the sizes.",
            rank=rank,
        )
        names = [name for name, _, _ in result["log"]]
        trial.require(
            names == needed,
            f"on a mesh of {told(sizes)}, with techniques for {' and '.join(needed)}, these were applied: "
            f"{', '.join(names) or 'none'}",
            help="Leave out the dimension of one rank alone.",
            rank=rank,
        )
