"""One process of a `jax.distributed` job: the layer on all devices of all processes, and backward.

Writes what its own devices hold: by the array's name and its first row.
"""

import pickle
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from triax.compat import peer_memory


def run():
    """By (name, first row)."""
    from tests.moe.expert_parallel import test_expert_parallel as cases  # which starts JAX

    mesh = Mesh(np.array(jax.devices()[:8]), ("expert",))
    sharding = NamedSharding(mesh, P("expert"))

    def spread(array):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    o, experts = jax.tree.map(spread, cases.operands("not routed", 8))
    function = cases.on_all(mesh, "expert")

    @jax.jit
    def both_ways(o, experts):
        y, pull = jax.vjp(lambda o: function(o, experts), o)
        return {"y": y, **pull(jax.numpy.sin(y))[0]}

    return {
        (name, shard.index[0].start): np.asarray(shard.data)
        for name, array in both_ways(o, experts).items()
        for shard in array.addressable_shards
    }


if __name__ == "__main__":
    address, index, target, *gpus = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    own = list(map(int, gpus)) or None
    jax.distributed.initialize(address, 2, int(index), local_device_ids=own)
    with open(target, "wb") as file:
        pickle.dump(run(), file)
    print(f"channels: {len(peer_memory._host._channels)}", file=sys.stderr)
