"""One process of a `jax.distributed` job: the layer on all devices of all processes, and backward.

Writes what its own devices hold: by how it was exchanged, the array's name and its first row.
"""

import pickle
import sys
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def run():
    """By (way, name, first row)."""
    from tests.moe.expert_parallel import test_expert_parallel as cases  # which starts JAX

    mesh = Mesh(np.array(jax.devices()[:8]), ("expert",))
    sharding = NamedSharding(mesh, P("expert"))

    def spread(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    o, experts = jax.tree.map(spread, cases.operands("not routed", 8))
    found = {}
    for way in cases.WAYS:
        function = cases.on_all(mesh, "expert", **cases.WAYS[way])

        @jax.jit
        def both_ways(o, experts, function=function):
            y, pull = jax.vjp(lambda o: function(o, experts), o)
            return {"y": y, **pull(jax.numpy.sin(y))[0]}

        with mock.patch.object(cases.tokens, "_MIN_ROW_BYTES", 32):  # as in tests of one process
            cases.forget()
            results = both_ways(o, experts)
        for name, array in results.items():
            for shard in array.addressable_shards:
                found[way, name, shard.index[0].start] = np.asarray(shard.data)
    return found


if __name__ == "__main__":
    address, index, target = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, index)
    with open(target, "wb") as file:
        pickle.dump(run(), file)
