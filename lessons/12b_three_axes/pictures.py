"""The pictures of the lesson, a line each to call."""

from collections.abc import Callable, Mapping

import matplotlib.pyplot as plt

from grader import run_ranks
from lessons.page.look import BLUE, GREEN, GREY, ORANGE, figure
from lessons.three_axes import answers, measures
from lessons.three_axes.measures import sizes_of

AXES = {"data": GREEN, "context": ORANGE, "tensor": BLUE}
WHAT = {"data": "rows", "context": "tokens", "tensor": "heads"}


def draw_mesh() -> None:
    """Eight ranks as 2 × 2 × 2: who differs from whom, and in what."""
    _, axes = figure(figsize=(8, 4.6))
    spot = {
        4 * d + 2 * c + t: (4.6 * t + 1.9 * d, 1.05 * d - 2.6 * c)
        for d in (0, 1)
        for c in (0, 1)
        for t in (0, 1)
    }
    for step, axis in ((4, "data"), (2, "context"), (1, "tensor")):
        for rank, (x, y) in spot.items():
            if not rank // step % 2:
                u, v = spot[rank + step]
                style = {"arrowstyle": "-", "color": AXES[axis], "lw": 3}
                axes.annotate("", (u, v), (x, y), arrowprops=style, zorder=1)
    for rank, (x, y) in spot.items():
        place = {"data": rank // 4, "context": rank // 2 % 2, "tensor": rank % 2}
        axes.add_patch(plt.Circle((x, y), 0.6, facecolor="white", edgecolor="black", zorder=2))
        told = "\n".join(f"{WHAT[axis]} {place[axis]}" for axis in place)
        axes.text(x, y + 0.34, f"rank {rank}", ha="center", va="center", fontsize=9, weight="bold", zorder=3)
        axes.text(x, y - 0.1, told, ha="center", va="center", fontsize=8, zorder=3)
    told = {
        "tensor": "tensor: the residual stream, 4 times a layer",
        "context": "context: keys and values, and gradients",
        "data": "data: gradients, once a step",
    }
    handles = [plt.Line2D([], [], color=AXES[axis], lw=3) for axis in told]
    axes.legend(handles, told.values(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.06))
    axes.set(xlim=(-0.8, 7.3), ylim=(-3.7, 1.8), aspect="equal")
    axes.axis("off")
    plt.show()


def draw_axes(predict: Callable, assemble: Callable, techniques: Mapping, sharded: Mapping) -> None:
    """Bytes by axis for every pair of axes: predicted and recorded."""
    ways = {
        "data × tensor": (techniques, sizes_of(data=2, tensor=2), False),
        "ZeRO-3 × tensor": (sharded, sizes_of(data=2, tensor=2), True),
        "data × context": (techniques, sizes_of(data=2, context=2), False),
        "ZeRO-3 × context": (sharded, sizes_of(data=2, context=2), True),
        "context × tensor": (techniques, sizes_of(context=2, tensor=2), False),
    }
    found = measures.bytes_by_way(predict, assemble, ways)
    _, panel = figure(figsize=(8.5, 3.6))
    print(f"{'':18} axis      predicted MB   recorded MB   recorded beside predicted")
    for i, (told, (predicted, recorded)) in enumerate(found.items()):
        for j, (name, each) in enumerate((("predicted", predicted), ("recorded", recorded))):
            left = 0.0
            for axis, color in ((axis, color) for axis, color in AXES.items() if each[axis]):
                alpha = 0.45 if name == "predicted" else 1.0
                panel.barh(i + 0.38 * j, each[axis] / 1e6, 0.34, left=left / 1e6, color=color, alpha=alpha)
                left += each[axis]
        for axis in AXES:
            if predicted[axis]:
                more = recorded[axis] / predicted[axis] - 1
                numbers = f"{predicted[axis] / 1e6:12.3f} {recorded[axis] / 1e6:13.3f} {more:+23.1%}"
                print(f"{told:18} {axis:8} {numbers}")
    panel.set(
        yticks=[i + 0.19 for i in range(len(found))],
        yticklabels=list(found),
        xlabel="MB that a rank sends in a step",
    )
    panel.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in AXES.values()]
    handles += [plt.Rectangle((0, 0), 1, 1, color=GREY, alpha=0.45), plt.Rectangle((0, 0), 1, 1, color=GREY)]
    panel.legend(
        handles, [*AXES, "predicted", "recorded"], loc="lower center", ncols=5, bbox_to_anchor=(0.5, 1.0)
    )
    plt.tight_layout()
    plt.show()


def show_all_three(predict: Callable, assemble: Callable, techniques: Mapping) -> None:
    """One step on eight ranks, 2 × 2 × 2: the loss of one rank, and bytes by axis."""
    sizes = sizes_of(data=2, context=2, tensor=2)
    found = run_ranks(measures.one_step, assemble, techniques, sizes, ranks=8)[0]
    alone = run_ranks(measures.one_step, assemble, techniques, sizes_of(), ranks=1)[0]
    same = abs(found["loss"] - alone["loss"]) < 1e-5
    print(f"loss within 1e-5 of one rank's: {same}\n\naxis      predicted MB   recorded MB")
    for axis, predicted in predict(measures.CONFIG, measures.ROWS, sizes).items():
        print(f"{axis:8} {predicted / 1e6:13.3f} {found[axis] / 1e6:13.3f}")


def show_norms(norm: Callable, assemble: Callable, techniques: Mapping, sharded: Mapping) -> None:
    """The norm of the same gradient, by four programs."""
    whole = measures.norm_of_one_rank()
    cases = {
        "4 along data": (techniques, sizes_of(data=4), False),
        "data × tensor": (techniques, sizes_of(data=2, tensor=2), False),
        "context × tensor": (techniques, sizes_of(context=2, tensor=2), False),
        "ZeRO-3 × tensor": (sharded, sizes_of(data=2, tensor=2), True),
    }
    print(f"{'norm on one rank':18} {whole:.4f}\n")
    print(f"{'':18} {'rank 0 alone':>13} {'all squares':>12} {'yours':>8}")
    asked = [(norm, assemble, *case) for case in cases.values()]
    for told, found in zip(cases, run_ranks(measures.each, measures.norms, asked, ranks=4)[0], strict=True):
        print(f"{told:18} {found['own']:13.4f} {found['all']:12.4f} {found['yours']:8.4f}")


def draw_orders(predict: Callable, along: Callable) -> None:
    """Milliseconds on the wire of a step, for each order of the axes."""
    found = answers.orders(predict, along)
    _, panel = figure(figsize=(8.5, 3.2))
    for i, (order, _) in enumerate(found):
        left = 0.0
        for axis, (seconds, leaves) in answers.seconds_by_axis(order, predict, along).items():
            hatch = "//" if leaves else ""
            panel.barh(i, 1e3 * seconds, left=left, color=AXES[axis], edgecolor="white", hatch=hatch)
            left += 1e3 * seconds
        panel.text(left, i, f"  {left:,.0f} ms", va="center", fontsize=9)
    panel.set(yticks=range(len(found)), yticklabels=[" × ".join(order) for order, _ in found])
    panel.set(ylabel="outermost × … × innermost")
    panel.set(
        xlabel="milliseconds on the wire, one axis after the other", xlim=(0, 1.14 * 1e3 * found[-1][1])
    )
    panel.invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in AXES.values()]
    handles.append(plt.Rectangle((0, 0), 1, 1, facecolor=GREY, edgecolor="white", hatch="//"))
    panel.legend(
        handles, [*AXES, "leaves the machine"], loc="lower center", ncols=4, bbox_to_anchor=(0.45, 1.0)
    )
    plt.tight_layout()
    plt.show()


def show_weighed(weigh: Callable, norm: Callable, assemble: Callable, techniques: Mapping) -> None:
    """Loss and gradient norm of the same AdamW run, on several meshes."""
    meshes = {
        "one rank": sizes_of(),
        "4 along data": sizes_of(data=4),
        "data × tensor": sizes_of(data=2, tensor=2),
        "data × context": sizes_of(data=2, context=2),
    }
    print(f"{'':15} {'loss, step 1':>13} {'step 6':>9} {'gradient norm, step 1':>23} {'step 6':>9}")
    runs = [(weigh, norm, assemble, techniques, sizes, 6) for sizes in meshes.values()]
    found = run_ranks(measures.weighed_run, *runs[0], ranks=1)
    found += run_ranks(measures.each, measures.weighed_run, runs[1:], ranks=4)[0]
    for told, steps in zip(meshes, found, strict=True):
        (first, before), (last, after) = steps[0], steps[-1]
        print(f"{told:15} {first:13.3f} {last:9.3f} {before:23.3f} {after:9.3f}")


def show_pytorch() -> None:
    """What PyTorch's own makes of two axes."""
    found = run_ranks(measures.in_pytorch, ranks=4)[0]
    print(f"loss of 2 × 2 ranks within 1e-5 of one rank's: {found['difference'] < 1e-5}")
    for name, (whole, local, names) in found["weights"].items():
        print(f"{name:9} {whole!s:10} on the mesh of {' × '.join(names):13} a rank has {local}")
    print(f"clip_grad_norm_ refuses parameters of two meshes: {found['refused']}")
