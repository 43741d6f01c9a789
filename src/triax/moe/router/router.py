"""`Router`: how a model chooses experts, as a constant; and the checks of its attributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import model_types
from triax.moe.router.configs import RouterSpec
from triax.moe.shared import arguments

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "none"]
GroupScore = Literal["top2", "max"]
SCORES: tuple[Score, ...] = get_args(Score)

_LARGEST_NORM = 1e30  # float32 also holds its inverse
_LARGEST = float(np.finfo(np.float32).max)
_GROUPS = "num_groups", "top_groups"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Router:
    """How a model chooses each token's experts and weighs them: a constant for `route`.

        DEEPSEEK_V3 = moe.Router(
            8, score="sigmoid", num_groups=8, top_groups=4, normalize=True, scale=2.5
        )

    A router holds no arrays, can be hashed, and is static under `jax.jit`, as an argument or closed
    over. `route` checks that it fits the logits.

    Attributes:
      top_k: experts per token, from 1 to all: those with the best scores, bias included.
      score: how logits become scores: "softmax" over all experts; or for each logit
        "sigmoid", "sqrtsoftplus", the square root of the softplus (DeepSeek-V4), or "none" for
        logits that are scores already.
      num_groups, top_groups: both or neither. The experts are split into `num_groups` equal groups
        of at least two, and a token chooses only from its `top_groups` best.
      group_score: a group's score: "top2", the sum of its two best scores, bias included
        (DeepSeek-V3), or "max", the best (DeepSeek-V2).
      normalize: whether the weights, the scores of the chosen experts, are divided by their sum.
        They sum to `scale` however small the scores are: the weights are the softmax of the scores'
        logarithms. With "softmax" that is the softmax of only the chosen logits (top-k first, then
        softmax). Or a Python number p of at least 1: weights are divided by their p-norm instead,
        ``sum(score**p)**(1/p)`` (DBRX); 1 is True.
      scale: a Python number that the weights are multiplied by.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: an argument is out of range, or `num_groups` or `top_groups` is missing.
    """

    top_k: int
    _: dataclasses.KW_ONLY
    score: Score = "softmax"
    num_groups: int | None = None
    top_groups: int | None = None
    group_score: GroupScore = "top2"
    normalize: bool | float = False
    scale: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **attributes: Any) -> Router:
        """Returns the router that a published model's own code has.

            router = moe.Router.from_config(moe.Checkpoint(folder).config)

        Its bias, expert scales and logits are arrays: pass them to `route` or `feed_forward`, as
        docs/models.md says for each model. Noise that a model adds in training is left out.

        Args:
          config: what `config.json` holds, a mapping. The router is that of its `model_type`, in
            `text_config` if that is there.
          attributes: attributes of `Router` that take the place of the configuration's keys.

        Raises:
          ArgumentTypeError: `config` is no mapping, or an attribute has the wrong type.
          ArgumentValueError: an attribute is out of range.
          CheckpointError: the model type is not known, a key is missing, unknown, or has a value
            that its code does not know, or no `Router` says what its code does.
        """
        return cls(**model_types.routing(config, attributes))

    def __post_init__(self) -> None:
        arguments.check_choice("score", self.score, SCORES)
        arguments.check_choice("group_score", self.group_score, get_args(GroupScore))
        if (self.num_groups is None) != (self.top_groups is None):
            present, missing = _GROUPS[:: 1 if self.top_groups is None else -1]
            raise ArgumentValueError(
                f"Argument `{present}` is given and `{missing}` is not. Give both, or neither to "
                "choose from all experts."
            )
        if self.num_groups is not None:
            groups = check_groups(self.num_groups, self.top_groups)
            vars(self).update(zip(_GROUPS, groups, strict=True))
        vars(self).update(
            top_k=arguments.integer("top_k", self.top_k, 1),
            normalize=_norm_order(self.normalize, self.score),
            scale=check_scale("scale", self.scale),
        )


def spec_of(router: Any, num_experts: int) -> RouterSpec:
    """Returns the spec of a router for logits of `num_experts` experts.

    A scale that is applied after a p-norm is not part of the spec.

    Raises:
      ArgumentTypeError: `router` is no `Router`.
      ArgumentValueError: the router chooses more experts than there are, or groups are not equal.
    """
    if not isinstance(router, Router):
        number = isinstance(router, (int, np.integer)) and not isinstance(router, bool)
        raise ArgumentTypeError(
            "Argument `router` must be a moe.Router, which says how experts are chosen; got "
            f"{messages.shown(router)}. Make one: `moe.Router({router if number else 'top_k'})`."
        )
    num_groups = top_groups = 1
    if router.num_groups is not None:
        names = "router.num_groups", "router.top_groups"
        num_groups, top_groups = check_groups(
            router.num_groups, router.top_groups, num_experts, names
        )
    most = num_experts // num_groups * top_groups
    return RouterSpec(
        top_k=check_top_k("router.top_k", router.top_k, most, num_groups > 1),
        score=router.score,
        normalize=bool(router.normalize),
        scale=router.scale if router.normalize <= 1 else 1.0,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=1 if router.group_score == "max" else 2,
    )


def check_logits(logits: Any, batched: bool = False) -> jax.Array:
    """Returns float logits [tokens, experts] with at least one expert.

    If `batched` they may have more leading dimensions.
    """
    axes = *["batch"] * (batched * (getattr(logits, "ndim", 0) - 2)), "tokens", "experts"
    logits = arguments.array("logits", logits, axes, jnp.floating)
    if logits.shape[-1] == 0:
        raise ArgumentValueError(
            f"Argument `logits` must have at least one expert; got shape {logits.shape}."
        )
    return logits


def check_of_experts(name: str, values: Any, num_experts: int) -> jax.Array | None:
    """Returns floats [experts], or None."""
    if values is None:
        return None
    sizes = {"experts": num_experts}
    return arguments.array(name, values, ("experts",), jnp.floating, sizes=sizes, of="`logits`")


def _norm_order(normalize: Any, score: Score) -> bool | float:
    """Returns the p of the norm that divides scores; 1, their sum, for True; False for none."""
    if isinstance(normalize, (bool, np.bool_)):
        return bool(normalize)
    if not isinstance(normalize, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(
            "Argument `normalize` must be a bool, or a Python number, the p of a norm; got "
            f"{messages.shown(normalize)}."
        )
    if not 1 <= normalize <= _LARGEST_NORM:
        raise ArgumentValueError(
            "Argument `normalize` must be a bool, or a finite p of at least 1 (the 1-norm of "
            f"scores is their sum); got {normalize!r}."
        )
    if normalize > 1 and score == "none":
        raise ArgumentValueError(
            f'Argument `normalize` must be a bool with score "none"; got {normalize!r}. Divide the '
            "weights by their norm yourself."
        )
    return float(normalize)


def check_groups(
    num_groups: Any,
    top_groups: Any,
    num_experts: int | None = None,
    names: tuple[str, str] = _GROUPS,
) -> tuple[int, int]:
    """Returns the number of groups, and how many of them are chosen.

    If `num_experts` is given, both must fit it, and are 1, 1 if all groups are chosen.
    """
    num_groups = arguments.integer(names[0], num_groups, 1)
    top_groups = arguments.integer(names[1], top_groups, 1)
    if top_groups > num_groups:
        raise ArgumentValueError(
            f"Argument `{names[1]}` must be at most `{names[0]}`, {num_groups}; got {top_groups}."
        )
    if num_experts is None:
        return num_groups, top_groups
    if num_experts % num_groups:
        raise ArgumentValueError(
            f"Argument `{names[0]}` must divide the {num_experts} experts of `logits` into equal "
            f"groups; got {num_groups}."
        )
    if top_groups == num_groups:
        return 1, 1
    if num_experts // num_groups < 2:
        raise ArgumentValueError(
            f"Argument `{names[0]}` must leave each group at least two of the {num_experts} "
            f"experts of `logits`, whose scores make the group's; got {num_groups}."
        )
    return num_groups, top_groups


def check_top_k(name: str, top_k: Any, most: int, grouped: bool = False) -> int:
    """Returns `top_k` if it is from 1 to `most`, or raises."""
    top_k = arguments.integer(name, top_k, 1)
    if top_k > most:
        there_are = f"{most} experts of the chosen groups" if grouped else f"{most} experts"
        raise ArgumentValueError(
            f"Argument `{name}` must be at most the {there_are} of `logits`; got {top_k}."
        )
    return top_k


def check_scale(name: str, scale: Any) -> float:
    """Returns `scale` if it is a finite Python number, or raises."""
    number = isinstance(scale, (int, float, np.integer, np.floating))
    if not number or isinstance(scale, (bool, np.bool_)):
        raise ArgumentTypeError(
            f"Argument `{name}` must be a Python number; got "
            f"{messages.shown(scale)}. Multiply the weights by an array yourself."
        )
    if not abs(scale) <= _LARGEST:
        raise ArgumentValueError(
            f"Argument `{name}` must be finite in float32; got {messages.short(scale)}."
        )
    return float(scale)
