"""What follows a green check: the learner's own run, beside the course's."""

from typing import Any

from lessons.data_parallel import measures, pictures
from nanogpt.model import GPTConfig
from solutions import data_parallel as ours

CONFIG = GPTConfig(block_size=64, vocab_size=4096, n_layer=4, n_head=4, n_embd=128, bias=False)


def DataParallel(yours: Any) -> None:  # the name of its exercise
    """A step of two ranks with a wire of 1 Gbit/s between them."""
    print("Two ranks, and an imitated wire of 1 Gbit/s between them: the fastest of six steps each.")

    def way(wrapper: Any) -> Any:
        def make(model: Any, group: Any) -> tuple:
            wrapped = wrapper(model, group, 2**20)
            return wrapped, wrapped.finish_gradient_synchronization

        return make

    ways = {"yours": way(yours), "the course's": way(ours.DataParallel)}
    steps = measures.timed_steps(ways, [measures.SLOW], CONFIG)
    pictures.draw_timelines(steps)
    for (_, how), found in steps.items():
        sent = found[-1].sent
        print(f"{how:13} {len(sent)} all-reduces, {sum(entry['bytes'] for entry in sent) / 1e6:.2f} MB")
    print("Can you make the waiting after backward shorter than the course's, by more than it varies?")
