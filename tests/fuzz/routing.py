"""route: the choice of experts, their weights, and the gradient of the logits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.moe.bounds import TINY, U32, Array, Near, Some
from tests.moe.case import Arrays, Case
from tests.moe.draws import Rng, one_of


def order_of(values: Array) -> Array:
    """What sorts float32 as `jax.lax.top_k` does: its bits, as integers of their order."""
    bits = np.asarray(values, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, np.int64(-(2**31)) - 1 - bits, bits)


def best(order: Array, count: int) -> Array:
    """The first `count` of each row, greatest first, the lowest index among equals."""
    return np.argsort(-order, axis=-1, kind="stable")[..., :count]


@dataclasses.dataclass
class Spec:
    """A router, and whether it has a bias."""

    experts: int
    top_k: int
    score: str
    normalize: bool | float
    scale: float
    groups: tuple[int, int, str] | None
    biased: bool

    @property
    def source(self) -> str:
        source = f"moe.Router({self.top_k}, score={self.score!r}, normalize={self.normalize}, "
        if self.groups:
            count, top, by = self.groups
            source += f"num_groups={count}, top_groups={top}, group_score={by!r}, "
        return f"{source}scale={self.scale}), " + "bias=bias, " * self.biased

    def logits(self, rng: Rng, tokens: int, dtype: Any = np.float32) -> Array:
        """Some with many equal ones, some with infinities."""
        kind = rng.integers(6)
        found = rng.standard_normal((tokens, self.experts), np.float32)
        found *= np.float32(one_of(rng, (0.01, 1, 5, 30)))
        if kind == 0:
            found = np.rint(found)
        elif kind == 1:
            found[...] = one_of(rng, (0.0, -0.0, 1.0))
        elif kind == 2 and self.score != "none":
            found[rng.random(found.shape) < 0.3] = -np.inf
            found[rng.integers(tokens)] = -np.inf
        if self.score == "none":  # scores, which are not negative
            found = np.minimum(abs(found), 1e3)
        return found.astype(dtype)

    def scores(self, x: Array) -> tuple[Array, Array]:
        """The scores of all logits, and how many units of float32 they may be off by."""
        most = np.max(x, axis=1, keepdims=True)
        units = 32 + 4 * np.where(np.isfinite(x), abs(x), 0) + x.shape[1]
        if self.score == "softmax":
            most = np.where(np.isfinite(most), most, 0)
            powers = np.exp(x - most)
            total = powers.sum(1, keepdims=True)
            return powers / np.where(total == 0, 1, total), units + 4 * abs(np.maximum(most, -200))
        if self.score == "sigmoid":
            return 1 / (1 + np.exp(-x)), units
        if self.score == "sqrtsoftplus":
            return np.sqrt(np.logaddexp(0, x)), units
        return x, 4 + 0 * units

    def choose(self, logits: Array, bias: Array | None) -> tuple[Array, Array]:
        """Experts, and of which tokens the choice is sure, whatever the last bits of scores."""
        logits = np.asarray(logits, np.float32)
        scores, units = self.scores(logits.astype(np.float64))
        by = scores + (0 if bias is None else bias.astype(np.float64))
        off = units * U32 * scores + 2 * U32 * abs(by) + TINY
        sure = np.ones(len(logits), bool)
        order = order_of(logits) if bias is None else by
        off_order = 0 * off if bias is None else off
        if self.groups:
            count, top, how = self.groups
            parts = np.sort(by.reshape(len(by), count, -1), 2)
            sums = parts[:, :, -(2 if how == "top2" else 1) :].sum(2)
            most_off = 2 * off.reshape(len(by), count, -1).max(2) + 2 * U32 * abs(sums)
            sure &= _apart(sums, most_off, top)
            kept = np.zeros((len(by), count), bool)
            np.put_along_axis(kept, best(sums, top), True, 1)
            kept = np.repeat(kept, self.experts // count, 1)
            order = np.where(kept, order, -(2**40) if bias is None else -np.inf)
        if bias is not None:
            sure &= _apart(order, off_order, self.top_k)
        return best(order, self.top_k).astype(np.int32), sure

    def wanted_experts(self, arrays: Arrays, found: Array) -> dict[str, Any]:
        """The experts; where their scores are too close, any that are different."""
        wanted, sure = self.choose(arrays["logits"], arrays.get("bias"))
        ordered = np.sort(found, 1)
        fine = (ordered[:, 1:] != ordered[:, :-1]).all(1) & (
            (found >= 0) & (found < self.experts)
        ).all(1)
        return {"experts": Some(wanted, (sure | ~fine)[:, None])}

    def weigh(self, logits: Array, experts: Array) -> tuple[Near, Callable[[Near], Near]]:
        """The weights of experts, and the gradient of the logits from theirs."""
        x = np.asarray(logits, np.float64)
        experts = np.clip(experts, 0, self.experts - 1)
        scores, units = self.scores(x)
        taken, off = (np.take_along_axis(a, experts, 1) for a in (scores, units))
        total = np.ones((len(x), 1))
        order = float(self.normalize)
        if self.normalize:
            most = taken.max(1, keepdims=True)
            most = np.where(most == 0, 1, most)
            total = ((taken / most) ** order).sum(1, keepdims=True) ** (1 / order) * most
            # As a softmax of logarithms: each is off by units of its size.
            off = off + off.max(1, keepdims=True) + 16 * self.top_k
            off = off + 8 * abs(np.log(np.maximum(taken, 1e-45))).max(1, keepdims=True)
            total = np.where(total == 0, 1, total)
        weights = taken / total * self.scale
        lost = TINY * (1 + abs(self.scale)) * (taken != 0)
        if order > 1:  # scores are first divided by their sum, which is up to top_k of their norms
            lost *= self.top_k
        result = Near(weights, off * U32 * abs(weights) + lost)
        # The derivative of each score's logarithm, but for the sum that softmax divides by.
        small = 1 / (1 + np.exp(x))
        slope = {
            "softmax": np.ones_like(x),
            "sigmoid": small,
            "sqrtsoftplus": 1 / (1 + np.exp(-x)) / (2 * np.maximum(scores**2, 1e-300)),
            "none": 1 / np.where(scores == 0, 1, scores),
        }[self.score]

        def gradient(d_weights: Near) -> Near:
            shares = weights / self.scale if self.scale else weights
            g, error = d_weights.value * self.scale, d_weights.error * abs(self.scale)
            if self.score == "none":
                ones = 1 / total
                mean = (g * shares).sum(1, keepdims=True) if self.normalize else 0
                size = (abs(g * shares)).sum(1, keepdims=True) if self.normalize else 0
                parts, sizes = (g - mean) * ones, (abs(g) + size) * ones
                errors = (error + (error * shares).sum(1, keepdims=True)) * ones
            else:
                parts, sizes, errors = g * shares, abs(g * shares), error * shares
                if self.normalize:
                    parts = parts - shares * (g * shares).sum(1, keepdims=True)
                    sizes = sizes + shares * abs(g * shares).sum(1, keepdims=True)
                    errors = errors + shares * (error * shares).sum(1, keepdims=True)
            full = [np.zeros_like(x) for _ in range(3)]
            for into, part in zip(full, (parts, sizes, errors), strict=True):
                np.put_along_axis(into, experts, part, 1)
            d, size, error = full
            if self.score == "softmax" and not self.normalize:
                d = d - scores * d.sum(1, keepdims=True)
                size = size + scores * size.sum(1, keepdims=True)
                error = error + scores * error.sum(1, keepdims=True)
            elif self.score != "none":
                d, size, error = d * slope, size * slope, error * slope
            # A NaN need not reach experts that no score is left for.
            never = np.isnan(d) & (scores == 0)
            d, error = np.where(never, 0, d), np.where(never, np.inf, error)
            most = (units + off.max(1, keepdims=True)) * U32
            # Each chosen score, and what it is multiplied by, may be taken for zero.
            lost = TINY * (4 + self.top_k) * (1 + abs(g).max(1, keepdims=True)) * (size != 0)
            return Near(
                d, np.where(size + error == 0, 0, 2 * most * size + error * (1 + most) + lost)
            )

        return result, gradient


def _apart(values: Array, off: Array, count: int) -> Array:
    """Whether the first so many of each row are apart by more than they may be off by."""
    index = np.argsort(-values, axis=1, kind="stable")[:, : count + 1]
    ordered, most = np.take_along_axis(values, index, 1), np.take_along_axis(off, index, 1)
    with np.errstate(invalid="ignore"):
        apart = ordered[:, :-1] - ordered[:, 1:] > most[:, :-1] + most[:, 1:]
    return np.asarray(apart.all(1))


def draw_spec(rng: Rng, experts: int, top_k: int, plain: bool = False) -> Spec:
    """`plain` ones choose by the logits alone."""
    score = str(one_of(rng, ("softmax", "softmax", "sigmoid", "sqrtsoftplus", "none")))
    normalize: bool | float = bool(rng.random() < 0.5)
    if not plain and score != "none" and rng.random() < 0.15:
        normalize = 2.0
    scale = one_of(rng, (1.0, 1.0, 2.5))
    groups = None
    if not plain and experts % 4 == 0 and experts >= 8 and rng.random() < 0.4:
        top = int(rng.integers(1, 4))
        if top * (experts // 4) >= top_k:
            groups = (4, top, str(one_of(rng, ("top2", "max"))))
    return Spec(experts, top_k, score, normalize, scale, groups, not plain and rng.random() < 0.4)


def draw_route(rng: Rng, path: str) -> Case:
    experts = one_of(rng, (1, 4, 8, 24) if path == "interpret" else (1, 2, 8, 24, 60, 128, 256))
    top_k = int(rng.integers(1, min(8, experts) + 1))
    tokens = int(rng.integers(1, 30 if path == "interpret" else 150))
    spec = draw_spec(rng, experts, top_k)
    return route(path, spec, tokens, np.dtype(one_of(rng, ("float32", "float32", "bfloat16"))))


def route(path: str, spec: Spec, tokens: int, dtype: np.dtype[Any]) -> Case:
    experts, top_k = spec.experts, spec.top_k
    call = f"moe.route(logits, {spec.source}implementation=how)"
    gradients = ("logits",) if spec.normalize in (True, False) else ()

    def draw(rng: Rng) -> Arrays:
        arrays = {"logits": spec.logits(rng, tokens, dtype)}
        if spec.biased:
            arrays["bias"] = rng.standard_normal(experts, np.float32)
        if gradients:
            arrays["g_weights"] = rng.standard_normal((tokens, top_k), np.float32)
        if rng.random() < 0.2:
            arrays["logits"][rng.integers(tokens), rng.integers(experts)] = np.nan
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        wanted = spec.wanted_experts(arrays, found["experts"])
        nans = np.isnan(arrays["logits"].astype(np.float32)).any(1)
        known = ~np.asarray(nans)[:, None]
        # A NaN is the greatest logit; what it makes of its own token's weights is not looked at.
        if spec.biased or spec.groups:
            wanted["experts"].where = wanted["experts"].where & known
        weights, gradient = spec.weigh(arrays["logits"].astype(np.float32), found["experts"])
        wanted["weights"] = Some(weights, known)
        if gradients:
            d_logits = gradient(Near(arrays["g_weights"].astype(np.float64)))
            d_logits.error = d_logits.error + abs(d_logits.value) * (
                U32 if dtype == np.float32 else 2**-8
            )
            wanted["d_logits"] = Some(d_logits, known)
        return wanted

    case = Case("route", path, call, ("weights", "experts"), draw, expect, gradients)
    case.widest = "float32"
    case.kernels = ("route", "route_grad")
    return case


OPS = (draw_route,)
_SPEC = Spec(12, 3, "sigmoid", True, 2.5, (3, 2, "top2"), biased=True)
NAMED = {"route": functools.partial(route, spec=_SPEC, tokens=6, dtype=np.dtype("float32"))}
