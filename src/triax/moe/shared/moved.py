"""The keywords that 0.2 had, and how the same is written now.

The values of most are held by `Router`, `Experts` and `Routing`: `feed_forward` and `route` refuse
these keywords, and show the call as it is written now. The others, of `feed_forward` and
`dispatch`, are gone: the error says what to do instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from triax.errors import ArgumentTypeError

P = ParamSpec("P")
R = TypeVar("R")

_ROUTER = ("top_k", "score", "num_groups", "top_groups", "group_score", "normalize", "scale")
_EXPERTS = ("w_gate_up", "w_down", "b_gate_up", "b_down", "activation", "interleaved", "transposed")
# What holds a keyword's value now, and under which name.
MOVED = {
    **{name: ("moe.Router", name) for name in _ROUTER},
    **{name: ("moe.Experts", name) for name in _EXPERTS},
    "transpose_weights": ("moe.Experts", "transposed"),
    "routing": ("moe.Routing", ""),
    "logits": ("logits_or_routing", ""),
}
# What is gone, by function, and what to do instead.
GONE = {
    "dispatch": {"align_size": "Leave it out: `ragged_dot` needs no padded groups."},
    "feed_forward": {
        "align_size": "Leave it out: it changed no result.",
        "weights_on": 'Leave it out for "output". For "input" (Llama 4, one expert for each token) '
        "multiply the tokens: `routing = moe.route(logits, router)`, then `moe.feed_forward("
        "(x * routing.weights).astype(x.dtype), moe.Routing(jnp.ones_like(routing.weights), "
        "routing.experts), experts)`.",
    },
}


def refuses_moved_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function that had other keywords, which raise an `ArgumentTypeError` then."""
    own = inspect.signature(function).parameters
    gone = GONE.get(function.__name__, {})
    moved = MOVED.keys() - own.keys() if "router" in own else set()
    rest = [name for name, of in own.items() if of.kind is of.KEYWORD_ONLY]

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        what = function.__name__
        for name in kwargs:
            if name in gone:
                raise ArgumentTypeError(f"Argument `{name}` of `moe.{what}` is gone. {gone[name]}")
        if moved.isdisjoint(kwargs):
            return function(*args, **kwargs)
        name = next(name for name in kwargs if name in moved)
        kept = {name: value for name, value in kwargs.items() if name in rest}
        # 0.2 took `top_k` of `route` by position, too.
        first = zip(("logits", "top_k"), args, strict=False) if what == "route" else ()
        call = ", ".join([*_positional(what, {**dict(first), **kwargs}), *_named(kept)])
        raise ArgumentTypeError(
            f"Argument `{name}` of `moe.{what}` is in `{MOVED[name][0]}` now. "
            f"Write `moe.{what}({call})`."
        )

    return checked


def _positional(function: str, arguments: Mapping[str, Any]) -> list[str]:
    """The first arguments of the call as it is written now."""
    of: dict[str, dict[str, Any]] = {"moe.Router": {}, "moe.Experts": {}}
    for name, value in arguments.items():
        holder, new = MOVED.get(name, ("", ""))
        if holder in of:
            of[holder][new] = value
    top_k = _text("top_k", of["moe.Router"].pop("top_k", None))
    router = f"moe.Router({', '.join([top_k, *_named(of['moe.Router'])])})"
    if function == "route":
        return ["logits", router]
    arrays = ["w_gate_up", "w_down"]
    options = {name: value for name, value in of["moe.Experts"].items() if name not in arrays}
    experts = f"moe.Experts({', '.join([*arrays, *_named(options)])})"
    if "routing" in arguments:
        return ["x", "moe.Routing(weights, experts)", experts]
    return ["x", "logits", experts, router]


def _named(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_text(name, value)}" for name, value in values.items()]


def _text(name: str, value: Any) -> str:
    """Python's constants as they are written, and everything else by its name."""
    return repr(value) if isinstance(value, (bool, int, float, str)) else name
