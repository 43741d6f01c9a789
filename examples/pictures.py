"""The demo's pictures: where tokens go, and how a mixture of experts learns."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws into files, without a screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import PercentFormatter

COLORS = np.array(matplotlib.colormaps["tab10"].colors)  # one for each expert
plt.rcParams["svg.hashsalt"] = "triax"  # the same picture is the same bytes


def draw_chunks(path, before, after, sizes, indices, tokens_of_rank):
    """The tokens before and after, in their experts' colours, and where each chunk goes."""
    num_experts = len(sizes) // len(tokens_of_rank)
    expert_before = np.repeat(np.arange(len(sizes)) % num_experts, sizes)
    expert_after = np.sort(expert_before)
    total = len(before)

    figure, axes = plt.subplots(
        5, 1, figsize=(18, 10), sharex=True, height_ratios=[1, 3, 4, 3, 1], layout="constrained"
    )
    figure.get_layout_engine().set(hspace=0, h_pad=0.02)

    def paint(axis, rows, expert):
        # White where the pixel is off, the expert's colour where it is on.
        image = 1 - rows.T[:, :, None] / 16 * (1 - COLORS[expert])[None]
        axis.imshow(image, aspect="auto", extent=(0, total, 64, 0), interpolation="nearest")

    thumbnails(axes[0], before, expert_before, count=28)
    paint(axes[1], before, expert_before)
    paint(axes[3], after, expert_after)
    thumbnails(axes[4], after, expert_after, count=28)

    ribbons(axes[2], sizes, indices, num_experts)

    for axis in axes:
        axis.set(xlim=(0, total), xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    start = 0
    for rank, count in enumerate(tokens_of_rank):
        axes[0].text(start + count / 2, 1.15, f"rank {rank}: {count} tokens", ha="center", size=13)
        if start:
            axes[1].axvline(start, color="black", lw=1.5)
        start += count
    for expert in range(num_experts):
        middle = np.flatnonzero(expert_after == expert).mean()
        axes[4].text(middle, -0.15, f"expert {expert}", ha="center", va="top", size=13)
    axes[0].set_title(
        "Tokens as ranks sent them (above) and as experts want them (below); "
        "every column is a token, every ribbon a chunk",
        size=15,
        pad=32,
    )
    save(figure, path, dpi=100)


def draw_ribbons(path, before, after, sizes, indices, tokens_of_rank):
    """The picture at the top of the documentation: the ribbons, with some tokens at their ends.

    An SVG without a background, in colours for light and dark pages alike.
    """
    num_experts = len(sizes) // len(tokens_of_rank)
    expert_before = np.repeat(np.arange(len(sizes)) % num_experts, sizes)
    figure, axes = plt.subplots(
        3, 1, figsize=(10, 4.4), sharex=True, height_ratios=[1, 7, 1], layout="constrained"
    )
    figure.get_layout_engine().set(hspace=0, h_pad=0.02, w_pad=0)
    thumbnails(axes[0], before, expert_before, count=20)
    ribbons(axes[1], sizes, indices, num_experts)
    thumbnails(axes[2], after, np.sort(expert_before), count=20)
    for axis in axes:
        axis.set(xlim=(0, len(before)), xticks=[], yticks=[])
        axis.axis("off")
    starts = np.cumsum(tokens_of_rank) - tokens_of_rank
    for rank, (start, count) in enumerate(zip(starts, tokens_of_rank, strict=True)):
        text = f"device {rank}"
        axes[0].text(start + count / 2, 1.2, text, ha="center", size=17, color="#808080")
    save(figure, path, transparent=True, metadata={"Date": None})


def thumbnails(axis, rows, expert, count):
    """Some of the tokens as images, transparent where a pixel is off."""
    width = len(rows) / count
    for i in range(count):
        token = int((i + 0.5) * width)
        image = np.empty((8, 8, 4))
        image[..., :3], image[..., 3] = COLORS[expert[token]], rows[token].reshape(8, 8) / 16
        extent = (i * width, (i + 0.92) * width, 0, 1)
        axis.imshow(image, extent=extent, aspect="auto", interpolation="none")
    axis.set(ylim=(0, 1))


def ribbons(axis, sizes, indices, num_experts):
    """Where each chunk goes, from the order by (rank, expert) to that by (expert, rank)."""
    ends, ends_after = np.cumsum(sizes), np.cumsum(sizes[indices])
    for j, i in enumerate(indices):
        top = ends[i] - sizes[i], ends[i]
        bottom = ends_after[j] - sizes[i], ends_after[j]
        points = [(top[0], 1), (top[0], 0.5), (bottom[0], 0.5), (bottom[0], 0)]
        points += [(bottom[1], 0), (bottom[1], 0.5), (top[1], 0.5), (top[1], 1)]
        curve = [Curve.CURVE4] * 3
        codes = [Curve.MOVETO, *curve, Curve.LINETO, *curve]
        color = COLORS[i % num_experts]
        axis.add_patch(PathPatch(Curve(points, codes), facecolor=color, alpha=0.6, lw=0))
    axis.set(ylim=(0, 1))


def draw_training(path, history):
    """The loss, and each expert's share of the tokens in every layer, over training."""
    steps = np.arange(1, len(history.loss) + 1)
    num_layers, num_experts = history.share.shape[1:]
    figure, axes = plt.subplots(
        1, 1 + num_layers, figsize=(5.2 * (1 + num_layers), 4.4), layout="constrained"
    )
    figure.suptitle(
        f"An MoE classifier learns the digits: {history.accuracy:.1%} of the held-out images right",
        size=14,
    )

    loss, *loads = axes
    loss.plot(
        steps, history.loss, color="tab:blue", alpha=0.3, lw=1, label="training (noisy images)"
    )
    # Smoothed in the logarithm, as it is drawn: a single bad batch would else look like fifteen.
    smoothed = np.exp(smooth(np.log(history.loss)))
    loss.plot(steps, smoothed, color="tab:blue", lw=2, label="training, smoothed")
    loss.plot(*history.held_out, color="tab:orange", lw=2, label="held-out images")
    loss.set(title="Loss", xlabel="training step", ylabel="cross-entropy per image (nats)")
    loss.set(yscale="log", xlim=(0, len(steps)))
    loss.legend(frameon=False)

    for layer, axis in enumerate(loads):
        # From the top down expert 0, 1, …, as the names beside it stand.
        shares = [smooth(share) for share in history.share[:, layer].T[::-1]]
        axis.stackplot(steps, shares, colors=COLORS[:num_experts][::-1], edgecolor="white", lw=0.8)
        for expert in range(num_experts):
            axis.annotate(
                f"expert {expert}",
                (1.02, 1 - (expert + 0.5) / num_experts),
                xycoords="axes fraction",
                va="center",
                color=COLORS[expert],
            )
        for even in np.arange(1, num_experts) / num_experts:
            axis.axhline(even, color="black", lw=0.7, ls=(0, (1, 3)))
        axis.set(
            title=f"Experts of layer {layer + 1} (dotted: even shares)", xlabel="training step"
        )
        axis.set(ylabel="share of routed tokens", xlim=(1, len(steps)), ylim=(0, 1))
        axis.yaxis.set_major_formatter(PercentFormatter(1))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, path, dpi=120)


def smooth(values, width=15):
    """The running mean over the last `width` steps, fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def save(figure, path: Path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **options)
    plt.close(figure)
