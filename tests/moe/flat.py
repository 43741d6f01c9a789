"""The layer and the router by one table of options, as cases list them."""

import dataclasses

from triax import moe


def made(kind, options, *values):
    """A value of those options that are its fields, which are taken out."""
    names = [f.name for f in dataclasses.fields(kind) if f.init and f.name in options]
    return kind(*values, **{name: options.pop(name) for name in names})


def route(logits, top_k, **options):
    return moe.route(logits, made(moe.Router, options, top_k), **options)


def layer(x, logits, w_gate_up, w_down, top_k=None, **options):
    """`feed_forward` with a router and experts; without `top_k` of a routing."""
    router = () if top_k is None else (made(moe.Router, options, top_k),)
    experts = made(moe.Experts, options, w_gate_up, w_down)
    return moe.feed_forward(x, logits, experts, *router, **options)
