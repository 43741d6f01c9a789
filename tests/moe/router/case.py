"""route: calls, hostile logits, the choice of experts, their weights, and the gradient."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.moe import draws
from tests.moe.bounds import TINY, U32, Array, Near, Some, rounded
from tests.moe.case import Arrays, Case, Sized
from tests.moe.draws import Rng, one_of


def order_of(values: Array) -> Array:
    """What sorts float32 as `jax.lax.top_k` does: its bits, as integers of their order."""
    bits = np.asarray(values, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, np.int64(-(2**31)) - 1 - bits, bits)


def best(order: Array, count: int) -> Array:
    """The first `count` of each row, greatest first, the lowest index among equals."""
    return np.argsort(-order, axis=-1, kind="stable")[..., :count]


def scores_of(x: Array, score: str) -> Array:
    """The scores of all logits, in float64."""
    x = np.asarray(x, np.float64)
    if score == "softmax":
        most = np.max(x, axis=1, keepdims=True)
        powers = np.exp(x - np.where(np.isfinite(most), most, 0))
        total = powers.sum(1, keepdims=True)
        return np.asarray(powers / np.where(total == 0, 1, total))
    if score == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-x)))
    if score == "sqrtsoftplus":
        return np.asarray(np.sqrt(np.logaddexp(0, x)))
    return np.where(x == -np.inf, 0, x)  # padding is -inf


def logarithms(x: Array, score: str) -> Array:
    """Of scores, also of those that are too small for a number; of a softmax but for a summand."""
    if score == "sigmoid":
        return -np.logaddexp(0, -x)
    if score == "sqrtsoftplus":
        return np.asarray(np.where(x < -40, x, np.log(np.logaddexp(0, np.maximum(x, -40)))) / 2)
    return x if score == "softmax" else np.log(np.where(x > 0, x, 1))


@dataclasses.dataclass
class Spec:
    """A router, and whether it has a bias.

    `groups` are how many there are, how many are kept, and by what: "top2" or "max", or a number of
    best scores that are added up, or of best logits with `by_logits`.
    """

    experts: int
    top_k: int
    score: str = "softmax"
    normalize: bool | float = False
    scale: float = 1.0
    groups: tuple[int, int, str | int] | None = None
    biased: bool = False
    by_logits: bool = False

    @property
    def source(self) -> str:
        source = f"moe.Router({self.top_k}, score={self.score!r}, normalize={self.normalize}, "
        if self.groups:
            count, top, by = self.groups
            source += f"num_groups={count}, top_groups={top}, group_score={by!r}, "
        return f"{source}scale={self.scale}), " + "bias=bias, " * self.biased

    def logits(self, rng: Rng, tokens: int, dtype: Any = np.float32) -> Array:
        """Of any size; tokens with equal ones, with some infinities, and with these alone."""
        found = rng.standard_normal((tokens, self.experts), np.float32)
        found *= rng.choice(np.array([0.01, 1, 5, 30], np.float32), (tokens, 1))
        kinds = rng.integers(10, size=tokens)
        found[kinds == 0] = np.rint(found[kinds == 0])
        found[kinds == 1] = one_of(rng, (0.0, -0.0, 1.0))
        if self.score != "none":
            found[(kinds == 2)[:, None] & (rng.random(found.shape) < 0.3)] = -np.inf
            found[kinds == 3] = -np.inf
        if self.score == "none":  # scores, which are not negative
            found = np.minimum(abs(found), 1e3)
        return found.astype(dtype)

    def scores(self, x: Array) -> tuple[Array, Array]:
        """The scores of all logits, and how many units of float32 they may be off by."""
        size = np.where(np.isfinite(x), abs(x), 0)
        units = 32 + 4 * size + x.shape[1]
        if self.score == "softmax":
            most = np.max(x, axis=1, keepdims=True)
            units = units + 4 * abs(np.maximum(np.where(np.isfinite(most), most, 0), -200))
        return scores_of(x, self.score), 4 + 0 * units if self.score == "none" else units

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
            added = {"top2": 2, "max": 1}.get(str(how)) or int(how)
            ranked = logits.astype(np.float64) if self.by_logits else by
            sums = np.sort(ranked.reshape(len(by), count, -1), 2)[:, :, -added:].sum(2)
            off_ranked = (0 if self.by_logits else off) + added * U32 * abs(ranked)
            most_off = added * off_ranked.reshape(len(by), count, -1).max(2)
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
        known = (experts >= 0) & (experts < self.experts)
        experts = np.where(known, experts, 0)
        take = functools.partial(np.take_along_axis, indices=experts, axis=1)
        scores, units = self.scores(x)
        taken, off = np.where(known, take(scores), 0), take(units)
        total = np.ones((len(x), 1))
        order = float(self.normalize)
        if self.normalize and self.score == "none":
            total = taken.sum(1, keepdims=True)
            off = off + off.max(1, keepdims=True) + 16 * self.top_k
            total = np.where(total == 0, 1, total)
        elif self.normalize:
            logs = np.where(known, take(logarithms(x, self.score)), -np.inf)
            most = logs.max(1, keepdims=True)
            below = logs - np.where(np.isfinite(most), most, 0)
            taken = np.exp(below)
            total = (taken**order).sum(1, keepdims=True) ** (1 / order)
            total = np.where(total == 0, 1, total)
            # As a softmax of logarithms: each is off by units of its size.
            if self.score == "softmax":
                units = 32 + 0 * units
                off = take(units)
            far = np.clip(np.where(np.isfinite(below), abs(below), 0), 0, 110)
            size = 0 if self.score == "softmax" else np.where(np.isfinite(logs), abs(logs), 0)
            off = off + off.max(1, keepdims=True) + 16 * self.top_k
            off = off + 8 * np.max(far + size, axis=1, keepdims=True)
        weights = taken / total * self.scale
        lost = TINY * (1 + abs(self.scale)) * (taken != 0)
        if order > 1:  # scores are first divided by their sum, which is up to top_k of their norms
            lost *= self.top_k
        result = Near(weights, off * U32 * abs(weights) + lost)
        off = off * max(order, 1)
        # The derivative of each score's logarithm, but for the sum that softmax divides by.
        small = 1 / (1 + np.exp(x))
        slope = {
            "softmax": np.ones_like(x),
            "sigmoid": small,
            "sqrtsoftplus": np.where(
                x < -40, 0.5, 1 / (1 + np.exp(-x)) / (2 * np.maximum(scores**2, 1e-30))
            ),
            "none": 1 / np.where(scores == 0, 1, scores),
        }[self.score]

        def gradient(d_weights: Near) -> Near:
            shares = weights / self.scale if self.scale else weights
            of_norm = shares**order  # of what each score has in it
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
                    parts = parts - of_norm * parts.sum(1, keepdims=True)
                    # A norm's gradient goes through that of the sum, which cancels.
                    sizes = sizes + np.maximum(of_norm, shares) * sizes.sum(1, keepdims=True)
                    errors = errors + of_norm * errors.sum(1, keepdims=True)
            full = [np.zeros_like(x) for _ in range(3)]
            for into, part in zip(full, (parts, sizes, errors), strict=True):
                np.add.at(into, (np.arange(len(x))[:, None], experts), np.where(known, part, 0))
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
        normalize = one_of(rng, (1.5, 2.0, 200.0))
    scale = one_of(rng, (1.0, 1.0, 2.5) if plain else (1.0, 1.0, 2.5, -3.0, 0.0))
    groups = None
    if not plain and experts % 4 == 0 and experts >= 8 and rng.random() < 0.4:
        top = int(rng.integers(1, 4))
        if top * (experts // 4) >= top_k:
            groups = (4, top, str(one_of(rng, ("top2", "max"))))
    return Spec(experts, top_k, score, normalize, scale, groups, not plain and rng.random() < 0.4)


LOW = {"low": (20, 60, 90), "lower": (120, 1e9)}
HARD = (*LOW, "far", "alike", "last", "hostile", "nan", "")
HOSTILE = np.array(
    [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0 + 2**-23, 1.0 - 2**-24, 1e-45, -1e-45],
    np.float32,
)


def harden(rng: Rng, logits: Array, spec: Spec, kind: str) -> None:
    """Makes logits far below zero, alike but for their last bits, or no numbers."""
    tokens, experts = logits.shape
    if kind in LOW and spec.score != "none":  # scores or their sums are below the smallest float
        logits -= np.asarray(one_of(rng, LOW[kind]), logits.dtype)
    elif kind == "far":  # sigmoids of zero and of one
        logits *= np.asarray(20, logits.dtype)
    elif kind in ("alike", "last"):  # in reverse order, anywhere, or only where the choice ends
        count, above = 2, spec.top_k - 1
        if kind == "alike":
            count, above = one_of(rng, (2, 12)), int(rng.integers(spec.top_k))
        count = min(experts, count)
        first = int(rng.integers(experts - count + 1))
        others = np.delete(np.arange(experts), np.arange(first, first + count))
        logits[:, others] = abs(rng.standard_normal((tokens, len(others)), np.float32)) / 9
        logits[:, others[:above]] += 6
        steps = np.float32(5) + np.arange(count, dtype=np.float32) * np.spacing(np.float32(5))
        logits[:, first : first + count] = steps
        if rng.random() < 0.3 and kind == "alike" and spec.score != "none":
            logits[...] = -logits[:, ::-1]
    elif kind == "hostile" and not (spec.biased or spec.groups or spec.score == "none"):
        logits[...] = rng.choice(HOSTILE, logits.shape)
    elif kind == "nan":
        logits[rng.integers(tokens), rng.integers(experts)] = np.nan


def draw_route(rng: Rng, path: str) -> Case:
    experts = one_of(rng, (1, 4, 8, 24) if path == "interpret" else (1, 2, 8, 24, 60, 128, 256))
    top_k = int(rng.integers(1, min(8, experts) + 1))
    tokens = int(rng.integers(1, 30 if path == "interpret" else 150))
    spec = draw_spec(rng, experts, top_k)
    dtype = one_of(rng, ("float32", "float32", "bfloat16", "float16"))
    return route(path, spec, tokens, dtype, is_given=rng.random() < 0.1)


def route(
    path: str,
    spec: Spec,
    tokens: int,
    dtype: Any = "float32",
    is_given: bool = False,
    kind: str = "",
) -> Case:
    """`is_given` is whether the experts are chosen already; some of them there are not. `kind` is
    one of `harden`, by default any."""
    dtype = np.dtype(dtype)
    experts, top_k = spec.experts, spec.top_k
    biased = spec.biased and not is_given
    spec = dataclasses.replace(spec, biased=biased)
    given = "experts=ids, " * is_given
    call = f"moe.route(logits, {spec.source}{given}implementation={None if is_given else 'how'})"

    def draw(rng: Rng) -> Arrays:
        arrays = {"logits": spec.logits(rng, tokens)}
        kinds = itertools.cycle(rng.permutation(HARD))
        for row, any_kind in zip(arrays["logits"], kinds, strict=False):
            harden(rng, row[None], spec, kind or any_kind)
        with np.errstate(over="ignore"):
            arrays["logits"] = arrays["logits"].astype(dtype)
        if biased:
            arrays["bias"] = rng.standard_normal(experts, np.float32)
        if is_given:
            ids = np.argsort(rng.random((tokens, experts)), 1)[:, :top_k].astype(np.int32)
            ids[:, top_k // 2 + 1 :] = one_of(rng, (-1, experts, 2**31 - 1))
            arrays["ids"] = ids
        arrays["g_weights"] = rng.standard_normal((tokens, top_k), np.float32)
        return arrays

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        logits = arrays["logits"].astype(np.float32)
        # A NaN is the greatest logit; what it makes of its own token's weights is not looked at.
        known = ~(np.isnan(logits) | (logits == np.inf)).any(1)[:, None]
        if is_given:
            wanted: dict[str, Any] = {"experts": arrays["ids"]}
        else:
            wanted = spec.wanted_experts(arrays, found["experts"])
            if biased or spec.groups:
                wanted["experts"].where = wanted["experts"].where & known
        weights, gradient = spec.weigh(logits, found["experts"])
        d_logits = gradient(Near(arrays["g_weights"].astype(np.float64)))
        narrow = {"float32": U32, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype.name]
        d_logits.error = d_logits.error + abs(d_logits.value) * narrow
        if dtype == np.float16:
            d_logits.error = d_logits.error + np.where(d_logits.value == 0, 0, 2.0**-24)
        wanted |= {"weights": Some(weights, known), "d_logits": Some(d_logits, known)}
        return wanted | ({"d_bias": np.zeros(experts, np.float32)} if biased else {})

    gradients = ("logits", *["bias"] * biased)
    case = Case("route", path, call, ("weights", "experts"), draw, expect, gradients)
    case.widest = "float32"
    case.kernels = ("route", "route_grad")
    return case


def losses(path: str, tokens: int, experts: int, score: str, dtype: Any = "float32") -> Case:
    """Of tokens of which some have tiny scores, or none."""
    call = f"moe.load_balancing_loss(logits, counts, score={score!r}), moe.router_z_loss(logits)"

    def draw(rng: Rng) -> Arrays:
        logits = (2 * rng.standard_normal((tokens, experts), np.float32)).astype(dtype)
        logits[rng.random(tokens) < 0.2] -= np.asarray(60, dtype)
        logits[rng.random(tokens) < 0.2] = -np.inf
        counts = rng.multinomial(3 * tokens, draws.shares(rng, experts)).astype(np.int32)
        cotangents = {f"g_{n}": rng.standard_normal((), np.float32) for n in ("balance", "size")}
        return {"logits": logits, "counts": counts, **cotangents}

    def expect(arrays: Arrays, found: Arrays) -> dict[str, Any]:
        x = arrays["logits"].astype(np.float64)
        kept = np.isfinite(x)
        logs = np.where(kept, x if score == "softmax" else -np.logaddexp(0, -x), -np.inf)

        def scores_and_size(logs: Array) -> tuple[Array, Array, Array]:
            most = np.max(np.where(kept, logs, -1e9), 1, keepdims=True)
            powers = np.where(kept, np.exp(logs - most), 0)
            total = powers.sum(1, keepdims=True) + ~kept.any(1, keepdims=True)
            far = np.where(kept, abs(logs) + abs(logs - most), 0)
            size = np.where(kept.any(1), most[:, 0] + np.log(total[:, 0]), 0)
            return powers / total, U32 * (64 + 2 * experts + 8 * far.max(1, keepdims=True)), size

        share = arrays["counts"] / max(arrays["counts"].sum(), 1)
        scores, off, _ = scores_and_size(logs)
        terms = experts / tokens * share * scores
        balance = Near(terms.sum(), ((off + tokens * U32) * terms).sum())
        slope = 1 if score == "softmax" else 1 / (1 + np.exp(np.where(kept, x, 0)))
        back = float(arrays["g_balance"]) * experts / tokens * scores * slope
        mean = (share * scores).sum(1, keepdims=True)
        parts = [Near(back * (share - mean), 3 * off * abs(back) * (share + mean))]

        scores, off, size = scores_and_size(x)
        each = U32 * (16 + experts + 4 * abs(size))
        squares = ((2 * abs(size) + each) * each + (tokens + 8) * U32 * size**2).sum() / tokens
        back = float(arrays["g_size"]) * 2 / tokens * scores
        error = abs(back) * (2 * off * abs(size[:, None]) + each[:, None]) + TINY * kept
        parts.append(Near(back * size[:, None], error))
        a, b = (rounded(part, dtype) for part in parts)
        total = Near((size**2).sum() / tokens, squares)
        return {"balance": balance, "size": total, "d_logits": rounded(a + b, dtype)}

    results = ("balance", "size")
    case = Case("losses", path, call, results, draw, expect, ("logits",))
    case.widest = "float32"
    return case


RANDOM = (draw_route,)
_SIGMOID: dict[str, Any] = {"score": "sigmoid", "normalize": True, "scale": 2.5}
_SPECS: dict[str, tuple[int, Spec]] = {
    "no tokens": (0, Spec(8, 2)),
    "one expert": (5, Spec(1, 1, normalize=True)),
    "all experts": (4, Spec(7, 7, normalize=True)),
    "softmax": (9, Spec(12, 3, scale=-3.0)),
    "softmax, normalised": (9, Spec(12, 3, normalize=True)),
    "sigmoid": (9, Spec(12, 3, "sigmoid")),
    "sigmoid, normalised": (9, Spec(12, 3, **_SIGMOID)),
    "sqrtsoftplus": (9, Spec(12, 3, "sqrtsoftplus", scale=1.5)),
    "sqrtsoftplus, normalised": (9, Spec(12, 3, "sqrtsoftplus", True)),
    "scores that are given": (9, Spec(12, 3, "none")),
    "scores that are given, normalised": (9, Spec(12, 3, "none", True, scale=0.0)),
    "a scale of zero": (9, Spec(12, 3, "sigmoid", scale=0.0)),
    "more choices than are unrolled": (5, Spec(100, 20)),
    "many choices": (2, Spec(64, 40, biased=True)),
    "groups of DeepSeek-V3": (5, Spec(256, 8, **_SIGMOID, groups=(8, 4, "top2"), biased=True)),
    "groups of 20": (3, Spec(160, 6, groups=(8, 3, "max"), biased=True)),
    "three groups of four": (6, Spec(12, 4, normalize=True, groups=(3, 2, "top2"))),
    "groups by their best": (9, Spec(24, 5, "sqrtsoftplus", groups=(6, 3, "max"))),
    "groups of two": (33, Spec(8, 2, "sigmoid", groups=(4, 1, "top2"))),
    "groups of given scores": (9, Spec(24, 5, "none", groups=(6, 3, "max"), biased=True)),
    "1,024 experts": (2, Spec(1024, 4, "sigmoid", groups=(16, 2, "top2"))),
    **{
        f"a norm of {order}, {score}": (9, Spec(12, 4, score, order, -2.5))
        for order, score in ((1.5, "softmax"), (2, "sigmoid"), (200.0, "sqrtsoftplus"))
    },
}
NAMED: dict[str, functools.partial[Case]] = (
    {
        "route": functools.partial(
            route, spec=Spec(12, 3, **_SIGMOID, groups=(3, 2, "top2"), biased=True), tokens=6
        )
    }
    | {
        f"route, {name}": functools.partial(route, spec=spec, tokens=tokens)
        for name, (tokens, spec) in _SPECS.items()
    }
    | {
        f"route, {kind}, {top_k} of {experts}": functools.partial(
            route, spec=Spec(experts, top_k), tokens=20, kind=kind
        )
        for kind, experts, top_k in (
            ("last", 100, 4),
            ("last", 100, 20),
            ("alike", 100, 20),
            ("hostile", 37, 6),
            ("hostile", 37, 37),
        )
    }
    | {
        f"route, {dtype}, {score}": functools.partial(
            route, spec=Spec(300, 8, score, score == "sigmoid"), tokens=20, dtype=dtype
        )
        for dtype in ("bfloat16", "float16")
        for score in ("softmax", "sigmoid")
    }
    | {
        f"losses, {score}, {dtype}": functools.partial(
            losses, tokens=50, experts=12, score=score, dtype=dtype
        )
        for score in ("softmax", "sigmoid")
        for dtype in ("float32", "bfloat16")
    }
    | {
        f"route, chosen already, {score}, {normalize}": functools.partial(
            route, spec=Spec(12, 4, score, normalize, 2.0), tokens=9, is_given=True, kind=kind
        )
        for score in ("softmax", "sigmoid", "sqrtsoftplus", "none")
        for normalize, kind in ((False, "far"), (True, "low"))
    }
)


def _sized(**settings: Any) -> Sized:
    return lambda path, of: route(path, Spec(of.experts, of.top_k, **settings), of.tokens)


def _losses(score: str) -> Sized:
    return lambda path, of: losses(path, of.tokens, of.experts, score, of.dtype)


SIZED: dict[str, Sized] = {
    "route": _sized(**_SIGMOID, biased=True),
    "route, softmax": _sized(),
    "route, groups": _sized(groups=(2, 1, "top2"), biased=True),
    **{f"losses, {score}": _losses(score) for score in ("softmax", "sigmoid")},
}
# Routers of models, and what is larger than they are.
LARGE: dict[str, functools.partial[Case]] = {
    f"route, {name}": functools.partial(route, spec=spec, tokens=tokens, dtype=dtype)
    for name, tokens, spec, dtype in (
        (
            "DeepSeek-V3",
            2048,
            Spec(256, 8, **_SIGMOID, groups=(8, 4, "top2"), biased=True),
            "float32",
        ),
        ("Kimi K2", 2048, Spec(384, 8, **_SIGMOID, biased=True), "float32"),
        ("Qwen3", 4096, Spec(128, 8, normalize=True), "float32"),
        ("Mixtral", 4096, Spec(8, 2, normalize=True), "bfloat16"),
        ("Llama 4", 2048, Spec(128, 1, "sigmoid"), "bfloat16"),
        ("OLMoE", 2048, Spec(64, 8), "float32"),
        ("softmax with all", 300, Spec(160, 6, groups=(8, 3, "top2"), biased=True), "float32"),
        ("half precision", 300, Spec(512, 10), "float16"),
        ("67 experts", 33, Spec(67, 67, normalize=True), "float32"),
        ("1,000 experts", 500, Spec(1000, 5), "bfloat16"),
        ("1,024 experts, all slots", 100, Spec(1024, 16, "sigmoid"), "float32"),
    )
}
