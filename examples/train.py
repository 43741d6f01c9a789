"""Trains a small mixture of experts on scikit-learn's handwritten digits.

Every image is one token of 64 pixels. Two layers of `moe_layer.moe_stack` with eight experts, of
which each token goes to two, stand between a linear embedding and a linear classifier. Adam,
written out, minimises the cross-entropy plus a little of the load-balancing loss.
"""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from moe_layer import init_layer, moe_stack, normalise
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

NUM_CLASSES, NUM_PIXELS = 10, 64
WIDTH, HIDDEN, NUM_EXPERTS, TOP_K, NUM_LAYERS = 64, 128, 8, 2, 2
NUM_HELD_OUT, BATCH, EPOCHS = 360, 128, 40
LEARNING_RATE, BALANCE, NOISE = 2e-3, 0.05, 0.3


class History(NamedTuple):
    """What happened in training.

    Attributes:
      loss: [steps], the cross-entropy of each batch, in nats.
      held_out: the steps at which held-out images were looked at, and their cross-entropy.
      share: [steps, layers, experts], of the (token, choice) pairs, those each expert got.
      accuracy: of the held-out images, those classified right at the end.
    """

    loss: np.ndarray
    held_out: tuple[np.ndarray, np.ndarray]
    share: np.ndarray
    accuracy: float


def train(seed: int = 0, epochs: int = EPOCHS) -> History:
    """Trains the classifier, with a progress bar, and returns what happened."""
    images, labels, test_images, test_labels = digits()
    batches = len(images) // BATCH
    num_steps = epochs * batches
    rng = np.random.default_rng(seed)
    params = init(jax.random.key(seed))
    state = (params, jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    history, held_out_steps, held_out_losses = [], [], []
    # In a log every state of the bar stays visible, so it is updated less often.
    pause_s = 0.1 if sys.stdout.isatty() else 10
    with tqdm(
        total=num_steps,
        desc="training",
        unit="step",
        file=sys.stdout,
        ncols=88,
        mininterval=pause_s,
        maxinterval=pause_s,
    ) as bar:
        for epoch in range(epochs):
            order = rng.permutation(len(images))[: batches * BATCH].reshape(batches, BATCH)
            for batch in order:
                # Noise, so that the images are not memorised.
                noise = NOISE * rng.standard_normal((BATCH, NUM_PIXELS), np.float32)
                number = len(history)
                state, *told = step(state, number, num_steps, images[batch] + noise, labels[batch])
                history.append(told)
                bar.update()
            test_loss, correct = evaluate(state[0], test_images, test_labels)
            held_out_steps.append((epoch + 1) * batches)
            held_out_losses.append(float(test_loss))
            bar.set_postfix(held_out=f"{float(correct):.1%}", refresh=False)
    losses, loads = (np.array(jax.device_get(column)) for column in zip(*history, strict=True))
    return History(
        loss=losses,
        held_out=(np.array(held_out_steps), np.array(held_out_losses)),
        share=loads / loads.sum(-1, keepdims=True),
        accuracy=float(correct),
    )


def digits():
    """Images [n, 64] around zero and labels [n]: to train with, and held out."""
    data = load_digits()
    images = (data.data / 16 - 0.5).astype(np.float32)
    labels = data.target.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=NUM_HELD_OUT, stratify=labels, random_state=0
    )
    return images, labels, test_images, test_labels


def init(key):
    """All parameters, those of the layers stacked."""
    embed, layers, head = jax.random.split(key, 3)
    layer = functools.partial(init_layer, width=WIDTH, hidden=HIDDEN, num_experts=NUM_EXPERTS)
    return {
        "embed": jax.random.normal(embed, (NUM_PIXELS, WIDTH)) * NUM_PIXELS**-0.5,
        "layers": jax.vmap(layer)(jax.random.split(layers, NUM_LAYERS)),
        "head": jax.random.normal(head, (WIDTH, NUM_CLASSES)) * WIDTH**-0.5,
    }


def classify(params, images):
    """Logits [n, 10], and the `Usage` of every layer."""
    x, usage = moe_stack(params["layers"], images @ params["embed"], top_k=TOP_K)
    return normalise(x) @ params["head"], usage


def cross_entropy(logits, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(chosen)


@jax.jit
def evaluate(params, images, labels):
    """The loss, and the share of images that are classified right."""
    logits, _ = classify(params, images)
    return cross_entropy(logits, labels), jnp.mean(jnp.argmax(logits, axis=1) == labels)


@functools.partial(jax.jit, donate_argnums=0)
def step(state, number, num_steps, images, labels):
    """One step of Adam; returns its state, the batch's loss, and the load of every expert."""

    def loss(params):
        logits, usage = classify(params, images)
        told = cross_entropy(logits, labels)
        return told + BALANCE * jnp.sum(usage.balance_loss), (told, usage.load)

    params, mean, square = state
    (_, told), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, gradient)
    rate = LEARNING_RATE * 0.5 * (1 + jnp.cos(jnp.pi * number / num_steps))
    rate *= jnp.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
    update = lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8)
    return (jax.tree.map(update, params, mean, square), mean, square), *told
